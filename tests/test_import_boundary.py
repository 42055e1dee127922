"""Arrows point downwards only, and the command can refuse bad input before torch is imported."""

import graphlib

import pytest
from own_imports import PACKAGE, imports_of, modules_of, of_others, own_imports

import composer_replication

MAY_IMPORT = {
    "util": "",
    "diloco": "",
    "replica": "diloco",
    "coordinator": "diloco replica",
    "data": "coordinator diloco replica",
    "group": "coordinator data diloco replica",
    "callback": "coordinator data diloco group replica",
    "hf.py": "coordinator data diloco group hf_job replica",
    "hf_job.py": "diloco group replica",
    "lightning.py": "data diloco group",
    "simulation": "replica",
    "config_file.py": "replica",
    "training.py": "callback config_file coordinator data diloco group replica simulation",
    "launch": "config_file coordinator data diloco group plan replica training",
}
"""For each package, and the host that is a module, the others of ours that it may import."""

BELOW = ("arguments", "settings", "options")
"""Modules below all packages: each may import those before it."""

BESIDE = {"__init__", "__main__", "cli", "plan", *BELOW}
"""Modules of no package: the public names, the command, the plan below all, and what users set."""

CLIENT = {"client", "membership", "wire_types"}
"""The modules of the coordinator that a replica group uses; the others are the service."""


def own_parts(path):
    """The names that a file imports of ours, in parts: package, module."""
    return [name.split(".")[1:] for name in own_imports(path) if "." in name]


def test_every_package_and_every_module_beside_them_has_a_row():
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    modules = {path.name for path in PACKAGE.glob("*.py")} - {f"{name}.py" for name in BESIDE}
    assert packages | modules == MAY_IMPORT.keys()


@pytest.mark.parametrize("name", BELOW)
def test_settings_and_options_import_nothing_of_ours_but_each_other(name):
    above = [[each] for each in BELOW[: BELOW.index(name)]]
    assert all(parts in above for parts in own_parts(PACKAGE / f"{name}.py"))


def test_the_plan_imports_nothing_of_ours_but_the_algorithms_settings_and_sizes():
    allowed = [["diloco", "averaging", "wire_sizes"], ["settings"]]
    assert sorted(own_parts(PACKAGE / "plan.py")) == allowed


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_a_package_imports_those_below_it_alone(package):
    allowed = {package, "__version__", "util", *BELOW, *MAY_IMPORT[package].split()}
    for path in modules_of(package):
        assert {parts[0] for parts in own_parts(path)} <= allowed, path


@pytest.mark.parametrize(
    "package",
    [
        "data",
        "group",
        "callback",
        "training.py",
        "hf.py",
        "hf_job.py",
        "lightning.py",
        *sorted(CLIENT),
    ],
)
def test_groups_and_the_client_of_the_coordinator_know_nothing_of_the_service(package):
    own = package if package not in CLIENT else f"coordinator/{package}.py"
    for path in modules_of(own):
        asked = [parts[1] for parts in own_parts(path) if parts[0] == "coordinator" and parts[1:]]
        assert {*asked} <= CLIENT, path


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


@pytest.mark.parametrize(("library", "users"), [
    ("omegaconf", ["config_file.py", "training.py"]), ("hydra", ["training.py"]),
])  # fmt: skip
def test_a_library_is_known_in_one_place(library, users):
    found = [p.name for p in PACKAGE.rglob("*.py") if any(library in n for n in imports_of(p))]
    assert sorted(found) == users


def test_the_package_lists_its_public_names():
    assert all(getattr(composer_replication, name) for name in composer_replication.__all__)
    names = (
        "DiLoCo DiLoCoCallback DiLoCoSettings DivergenceError ReplicaDataLoader SyncError "
        "SyncReport make_manager read_run replica_shard simulate"
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
