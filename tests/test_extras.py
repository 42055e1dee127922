"""What an installation without extras can do, and what it says about the rest.

Processes of their own, in which the modules that the extras bring cannot be found.
"""

import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import requires

import pytest
from own_imports import PACKAGE, ROOT, imports_of, modules_of, of_others
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from composer_replication.util.lazy import EXTRA_OF, named_extra

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

CORE = [
    PACKAGE / f"{name}.py"
    for name in "diloco/algorithm settings replica/factory replica/process_group "
    "simulation/simulation".split()
]
"""Where the public names that need no extra come from."""

DISTRIBUTION = {
    "composer": "mosaicml",
    "hydra": "hydra-core",
    "pytorch_lightning": "lightning",  # either will do
    "starlette": "fastapi",
    "torchft": "torchft-nightly",
    "yaml": "pyyaml",
}
"""What brings a module, where it has another name."""

OF_THE_CALLER = {"datasets"}
"""What is imported only where a caller has passed an object of it."""

HIDE = """
import sys
from importlib.machinery import PathFinder

class Finder(PathFinder):
    # torch asks find_spec which of the packages that it knows are there, and expects no error.
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] not in {hidden}:
            return super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
"""


def run(program, *arguments, hidden, **environment):
    """Run a program in a process in which these modules are missing."""
    return subprocess.run(
        [sys.executable, "-c", HIDE.format(hidden=set(hidden)) + program, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


def distributions(requirements):
    names = {re.split(r"[<>=\[; ]", line)[0] for line in requirements}
    return {name.lower() for name in names}


def brought_by(extra):
    """The distributions that an extra lists, and those of the extras that it includes."""
    lines = PROJECT["optional-dependencies"][extra]
    parts = re.findall(r"composer-replication\[([\w,-]+)\]", " ".join(lines))
    nested = [brought_by(name) for part in parts for name in part.split(",")]
    return distributions(lines).union(*nested) - {"composer-replication"}


def test_the_core_depends_on_what_it_imports_and_on_no_more():
    found = {DISTRIBUTION.get(name, name) for name in of_others(*CORE)}
    assert found == distributions(PROJECT["dependencies"])


@pytest.mark.slow
def test_every_other_module_is_brought_by_the_extra_that_is_named():
    beyond_core = of_others(*PACKAGE.rglob("*.py")) - of_others(*CORE) - OF_THE_CALLER
    assert beyond_core == EXTRA_OF.keys()
    for module, extra in EXTRA_OF.items():
        assert DISTRIBUTION.get(module, module) in brought_by(extra), module


@pytest.mark.parametrize(("package", "extra"), [
    ("callback", "composer"), ("data", "composer"), ("training.py", "composer"),
    ("config_file.py", "launch"), ("coordinator", "coordinator"), ("launch", "launch"),
])  # fmt: skip
def test_an_extra_brings_what_its_package_imports(package, extra):
    own = {name for path in modules_of(package) for name in imports_of(path)}
    others = {name.partition(".")[0] for name in own} - sys.stdlib_module_names
    needed = {DISTRIBUTION.get(top, top) for top in others - {"composer_replication"}}
    brought = brought_by(extra) | distributions(PROJECT["dependencies"])
    assert needed - OF_THE_CALLER <= brought


def test_everything_but_the_tools_is_in_all():
    others = ("composer", "coordinator", "launch")
    assert brought_by("all") == set().union(*map(brought_by, others))
    assert brought_by("dev") == brought_by("all") | brought_by("test")


def test_composer_s_own_dependencies_are_listed_but_for_torch_and_torchvision():
    lines = [Requirement(line) for line in requires("mosaicml") or []]
    theirs = {canonicalize_name(r.name): r.specifier for r in lines if not r.marker}
    del theirs["torch"], theirs["torchvision"]
    lines = [Requirement(line) for line in PROJECT["optional-dependencies"]["composer-side"]]
    ours = {canonicalize_name(r.name): r.specifier for r in lines}
    for name, allowed in theirs.items():
        assert {(s.operator, Version(s.version)) for s in allowed} <= {
            (s.operator, Version(s.version)) for s in ours[name]
        }, name


def test_one_newer_torch_is_meant_everywhere():
    installed = (ROOT / "tests/torch_new/requirements.txt").read_text()
    page = (ROOT / "docs/newer-torch.md").read_text()
    for name in ("torch", "torchvision"):
        (version,) = re.findall(rf"^{name}===(\S+)$", installed, re.MULTILINE)
        assert set(re.findall(rf"\b{name}==([\d.]+)", page)) == {version}
    assert "--no-deps mosaicml==0.32.1" in page
    assert "--no-deps mosaicml==0.32.1" in (ROOT / "Makefile").read_text()


@pytest.mark.integration
def test_the_spike_passes_without_extras():
    program = "import pytest; sys.exit(pytest.main(sys.argv[1:]))"
    arguments = ["-q", "-p", "pytest_timeout", "-p", "no:cacheprovider", "spikes/008-diloco"]
    # Plugins of other packages may need what is hidden here.
    result = run(program, *arguments, hidden=EXTRA_OF, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "2 passed" in result.stdout


USE_THE_CORE = """
import composer_replication
from composer_replication import DiLoCo, DiLoCoSettings, simulate
from composer_replication.replica import backend_for, host_store, make_manager

for module, name in [
    ("composer_replication", "DiLoCoCallback"),
    ("composer_replication.callback", "DiLoCoCallback"),
    ("composer_replication.hf", "DiLoCoTrainerCallback"),
]:
    try:
        exec(f"from {module} import {name}")
    except ImportError as error:
        print(error)
"""


@pytest.mark.integration
def test_what_needs_an_extra_says_which_and_the_rest_is_there():
    result = run(USE_THE_CORE, hidden=EXTRA_OF)
    assert [line.partition(" in a clone of")[0] for line in result.stdout.splitlines()] == [
        "DiLoCoCallback needs Composer: run pip install '.[composer]'",
        "DiLoCoCallback needs Composer: run pip install '.[composer]'",
        "DiLoCoTrainerCallback needs transformers: run pip install '.[transformers]'",
    ], result.stderr


@pytest.mark.parametrize(("command", "hidden", "subject", "extra"), [
    ("--help", EXTRA_OF, "The command composer-replication needs typer", "launch"),
    pytest.param("coordinator configs/quickstart.yaml --state-dir {tmp}/state", {"fastapi"},
                 "composer-replication coordinator needs fastapi", "coordinator",
                 marks=pytest.mark.slow),
    pytest.param("doctor --coordinator http://127.0.0.1:1", {"httpx"},
                 "composer-replication doctor needs httpx", "launch", marks=pytest.mark.slow),
], ids=["command", "coordinator", "doctor"])  # fmt: skip
def test_a_command_without_its_extra_says_which(tmp_path, command, hidden, subject, extra):
    program = "from composer_replication.__main__ import main; main()"
    result = run(program, *command.format(tmp=tmp_path).split(), hidden=hidden)
    line = f"run pip install '.[{extra}]' in a clone of this package"
    assert (result.stderr, result.returncode) == (f"Error: {subject}: {line}\n", 2)


def test_a_module_that_no_extra_brings_is_named_by_python():
    # Composer's own, for example: installing the extra again would not bring it.
    error = ModuleNotFoundError("No module named 'torchvision'", name="torchvision")
    assert named_extra("DiLoCoCallback", error) is error
