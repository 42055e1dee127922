"""Arrows point downwards only, and the command can refuse bad input before torch is imported."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "composer_replication"
HEAVY = ("torch", "torchft", "composer", "matplotlib", "torchmetrics")


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def own_imports(path):
    return {name for name in imports_of(path) if name.startswith("composer_replication")}


@pytest.mark.parametrize("path", sorted((PACKAGE / "diloco").glob("*.py")), ids=lambda p: p.stem)
def test_the_algorithm_imports_nothing_of_ours_but_itself(path):
    foreign = {n for n in own_imports(path) if not n.startswith("composer_replication.diloco")}
    assert not foreign
    assert not {n for n in imports_of(path) if n.split(".")[0] in ("composer", "omegaconf")}


@pytest.mark.parametrize(("module", "may_not_import"), [
    ("replica.py", ("callback", "training", "config", "launch", "cli", "simulation")),
    ("callback.py", ("training", "config", "launch", "cli", "simulation", "report", "data")),
    ("shared_buffer.py", ("simulation", "simulated_manager", "diloco", "replica", "callback")),
    ("simulation.py", ("callback", "training", "config", "launch", "cli", "replica", "diloco")),
    ("progress.py", ("callback", "training", "config", "launch", "cli", "display", "report")),
    ("training.py", ("launch", "cli", "report")),
    ("data.py", ("callback", "training", "launch", "cli", "diloco")),
    ("report.py", ("callback", "training", "launch", "cli", "diloco")),
    ("plan.py", ("plan_calibration", "plan_table", "cli")),
    ("plan_calibration.py", ("plan_table", "cli")),
])  # fmt: skip
def test_no_module_imports_one_above_it(module, may_not_import):
    above = {f"composer_replication.{name}" for name in may_not_import}
    assert not {n for n in own_imports(PACKAGE / module) if ".".join(n.split(".")[:2]) in above}


def test_omegaconf_is_known_in_one_place():
    users = [p.name for p in PACKAGE.rglob("*.py") if any("omegaconf" in n for n in imports_of(p))]
    assert users == ["config.py"]


@pytest.mark.parametrize(
    "module",
    "config components options lighthouse run_folder text_files plan plan_table cli".split(),
)
def test_what_answers_at_once_imports_nothing_heavy(module):
    program = (
        f"import sys, composer_replication.{module}; "
        f"print([m for m in {HEAVY} if m in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert output.stdout.strip() == "[]", output.stderr


def test_the_package_itself_is_light_and_lists_its_public_names():
    program = (
        "import sys, composer_replication as c; assert 'torch' not in sys.modules; "
        "assert all(getattr(c, name) for name in c.__all__); print(sorted(c.__all__))"
    )
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    names = "['DiLoCo', 'DiLoCoCallback', 'DiLoCoSettings', 'ReplicaDataLoader', 'simulate']"
    assert output.stdout.strip() == names


# Composer brings some of these along (torchmetrics imports matplotlib where there is one), so what
# is looked at is what our own modules import, all the way down.


@pytest.mark.parametrize("module", ["diloco/algorithm.py", "callback.py", "replica_loader.py"])
def test_training_needs_nothing_that_only_the_service_the_config_or_the_pictures_need(module):
    seen, todo = set(), [PACKAGE / module]
    while todo:
        path = todo.pop()
        seen.add(path)
        found = {name.split(".")[0] for name in imports_of(path)}
        assert not found & {"fastapi", "uvicorn", "pydantic", "omegaconf", "matplotlib"}, path
        own = {PACKAGE.parent / (name.replace(".", "/") + ".py") for name in own_imports(path)}
        todo += [path for path in own - seen if path.exists()]
    assert len(seen) > 1


def test_the_algorithm_is_imported_without_them():
    program = (
        "import sys; sys.modules |= dict.fromkeys(['fastapi', 'omegaconf', 'matplotlib', 'rich']); "
        "import composer_replication.diloco.algorithm"
    )
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert output.returncode == 0, output.stderr
