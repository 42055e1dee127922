"""Arrows point downwards only, and the command can refuse bad input before torch is imported."""

import graphlib
import subprocess
import sys

import pytest
from own_imports import PACKAGE, imports_of, of_others, own_imports

import composer_replication

HEAVY = ("torch", "torchft", "composer", "torchmetrics")

MAY_IMPORT = {
    "diloco": set(),
    "replica": {"diloco", "simulation"},
    "coordinator": {"diloco", "replica"},
    "data": {"coordinator", "diloco", "replica"},
    "group": {"coordinator", "data", "diloco", "replica"},
    "callback": {"coordinator", "data", "diloco", "group", "replica"},
    "simulation": set(),
    "training": {
        "callback",
        "coordinator",
        "data",
        "diloco",
        "group",
        "replica",
        "simulation",
    },
    "launch": {"coordinator", "data", "diloco", "group", "plan", "replica", "training"},
}
"""For each package the others of ours that it may import. The plan is a module below them."""

BELOW = ("arguments", "settings", "options")
"""Modules below all packages: each may import those before it."""

CLIENT = {"client", "membership", "wire_types"}
"""The modules of the coordinator that a replica group uses; the others are the service."""


def modules_of(package):
    return sorted((PACKAGE / package).rglob("*.py"))


def test_every_package_has_a_row():
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert packages == MAY_IMPORT.keys()


def test_beside_the_packages_are_the_command_the_plan_a_host_and_what_a_user_sets():
    modules = {path.name for path in PACKAGE.glob("*.py")}
    below = {f"{name}.py" for name in BELOW}
    assert modules == {"__init__.py", "__main__.py", "cli.py", "hf.py", "plan.py", *below}


def test_hugging_face_s_trainer_is_a_host_like_composer_s():
    allowed = MAY_IMPORT["callback"] | {*BELOW}
    found = {name.split(".")[1] for name in own_imports(PACKAGE / "hf.py") if "." in name}
    assert found <= allowed


@pytest.mark.parametrize("name", BELOW)
def test_settings_and_options_import_nothing_of_ours_but_each_other(name):
    above = {f"composer_replication.{each}" for each in BELOW[: BELOW.index(name)]}
    assert own_imports(PACKAGE / f"{name}.py") <= above


def test_the_plan_imports_nothing_of_ours_but_the_algorithms_settings_and_sizes():
    assert own_imports(PACKAGE / "plan.py") == {
        "composer_replication.diloco.averaging.wire_sizes",
        "composer_replication.settings",
    }


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_a_package_imports_those_below_it_alone(package):
    allowed = MAY_IMPORT[package] | {package, "__version__", *BELOW}
    for path in modules_of(package):
        found = {name.split(".")[1] for name in own_imports(path) if "." in name}
        assert found <= allowed, path


@pytest.mark.parametrize("package", ["data", "group", "callback", "training"])
def test_groups_know_the_client_of_the_coordinator_and_not_the_service(package):
    for path in modules_of(package):
        service = {
            name for name in own_imports(path)
            if name.startswith("composer_replication.coordinator.")
            and name.split(".")[2] not in CLIENT
        }  # fmt: skip
        assert not service, path


def test_the_client_of_the_coordinator_knows_nothing_of_the_service():
    for name in CLIENT:
        path = PACKAGE / "coordinator" / f"{name}.py"
        own = {
            n.split(".")[2] for n in own_imports(path) if n.count(".") > 1 and ".coordinator." in n
        }
        assert own <= CLIENT, path


@pytest.mark.parametrize(
    "package", ["diloco", "replica", "simulation", "coordinator", "data", "group"]
)
def test_composer_is_unknown_to(package):
    for path in modules_of(package):
        assert not {n for n in imports_of(path) if n.split(".")[0] in ("composer", "omegaconf")}


def test_no_module_imports_itself_by_way_of_others():
    modules = {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path
        for path in PACKAGE.rglob("*.py")
    }
    graph = {name: own_imports(path) & modules.keys() for name, path in modules.items()}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


def test_omegaconf_is_known_to_those_that_read_yaml_alone():
    users = [p.name for p in PACKAGE.rglob("*.py") if any("omegaconf" in n for n in imports_of(p))]
    assert sorted(users) == ["config.py"]


def test_hydra_is_known_in_one_place():
    users = [p.name for p in PACKAGE.rglob("*.py") if any("hydra" in n for n in imports_of(p))]
    assert users == ["building.py"]


AT_ONCE = (
    "training.config training.components settings options replica.lighthouse group.run_folder "
    "training.text_files plan cli"
).split()


def test_what_answers_at_once_imports_nothing_heavy():
    program = (
        "import importlib, sys\n"
        f"for name in {AT_ONCE}:\n"
        "    importlib.import_module(f'composer_replication.{name}')\n"
        f"    found = [m for m in {HEAVY} if m in sys.modules]\n"
        "    assert not found, (name, found)"
    )
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert output.returncode == 0, output.stderr


def test_the_package_lists_its_public_names():
    assert all(getattr(composer_replication, name) for name in composer_replication.__all__)
    names = (
        "DiLoCo DiLoCoCallback DiLoCoSettings DivergenceError ReplicaDataLoader SyncError "
        "SyncReport make_manager read_run simulate"
    )
    assert sorted(composer_replication.__all__) == names.split()


# Composer brings some of these along, so what is looked at is what our own modules import, all the
# way down.


@pytest.mark.parametrize(
    "module", ["diloco/algorithm.py", "callback/callback.py", "data/loader.py"]
)
def test_training_needs_nothing_that_only_the_service_or_the_config_need(module):
    found = of_others(PACKAGE / module)
    assert "torch" in found and not found & {"fastapi", "uvicorn", "pydantic", "omegaconf"}
