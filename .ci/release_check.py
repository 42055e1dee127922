"""Check that this version can be released, and build it. Run: make release-check

The files that name the version agree, and CHANGELOG.md has a section for it. sdist and wheel are
built into dist/, and twine accepts both. The wheel is installed into empty environments, one with
the newest torch and one with 2.7. In each, spike 008 runs without extras, and then, with the
command's extra, the first run of somebody who has the wheel and a script, but no clone.
"""

import re
import shutil
import subprocess
import sys
import tomllib
import venv
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parent.parent
SPIKE = ROOT / "spikes" / "008-diloco"
SCRIPT = ROOT / "examples" / "plain_loop.py"

TORCHES = ("torch", "torch==2.7.*")
"""The newest one, and the oldest that pyproject.toml allows."""

NAMED_IN = {
    "composer_replication/__init__.py": r'^__version__ = "(.*)"$',
    "CITATION.cff": r"^version: (.*)$",
}
"""Where else the version stands, and in which line."""


def project_version(root: Path) -> str:
    """Read the project's version from pyproject.toml, which the other files have to agree with."""
    return tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]


def version_errors(root: Path, version: str) -> list[str]:
    """What the files that name the version say instead of it."""
    errors = []
    for name, pattern in NAMED_IN.items():
        found = re.findall(pattern, (root / name).read_text(), re.MULTILINE)
        if found != [version]:
            said = " and ".join(found) or "no version"
            errors.append(f"{name} says {said}, pyproject.toml {version}. Fix: make them equal")
    return errors


def changelog_errors(root: Path, version: str) -> list[str]:
    """What is wrong with the version's section of CHANGELOG.md."""
    text = (root / "CHANGELOG.md").read_text()
    found = re.search(rf"^## \[{re.escape(version)}\](.*)\n((?:(?!## ).*\n?)*)", text, re.MULTILINE)
    heading = f"## [{version}] - {date.today()}"
    if not found:
        newest = re.findall(r"^## \[(\d.*?)\]", text, re.MULTILINE)[:1] or ["none"]
        return [
            f"CHANGELOG.md has no section of version {version}, which pyproject.toml has; its "
            f"newest is {newest[0]}. Fix: put {heading!r} below '## [Unreleased]'"
        ]
    errors = []
    if not re.fullmatch(r" - \d{4}-\d{2}-\d{2}", found[1]):
        said = found[0].splitlines()[0]
        errors.append(f"CHANGELOG.md has {said!r}, without a date. Fix: {heading!r}")
    if not re.search(r"^- ", found[2], re.MULTILINE):
        errors.append(f"The section of {version} in CHANGELOG.md is empty. Fix: say what changed")
    if "## [Unreleased]" not in text[: found.start()]:
        errors.append(f"CHANGELOG.md has no '## [Unreleased]' above {version}. Fix: add the line")
    return errors


def errors(root: Path) -> list[str]:
    """What keeps this version from being released, as far as the files tell."""
    version = project_version(root)
    return [*version_errors(root, version), *changelog_errors(root, version)]


def run(*command: object, cwd: Path = ROOT) -> None:
    """Run a command; if it fails, so does the check."""
    print("$", *command, flush=True)
    subprocess.run([str(part) for part in command], cwd=cwd, check=True)


def build() -> Path:
    """Build sdist and wheel, the wheel from the sdist, and return the wheel."""
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", "dist")
    run(sys.executable, "-m", "twine", "check", "--strict", *(ROOT / "dist").iterdir())
    (wheel,) = (ROOT / "dist").glob("*.whl")
    return wheel


def try_wheel(wheel: Path, torch: str) -> None:
    """Use the wheel in an environment that has it, a torch and pytest; then with the command."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        venv.create(folder / "venv", with_pip=True)
        python = folder / "venv" / "bin" / "python"
        run(python, "-m", "pip", "install", "--quiet", wheel, torch, "pytest", cwd=folder)
        shutil.copytree(SPIKE, folder / "spike")
        run(python, "-I", "-m", "pytest", "-q", "-c", "/dev/null", "spike", cwd=folder)
        run(python, "-m", "pip", "install", "--quiet", f"{wheel}[coordinator]", torch, cwd=folder)
        shutil.copy(SCRIPT, folder)
        launch = (python.with_name("composer-replication"), "launch", "--replicas", "2", "--")
        run(*launch, python, SCRIPT.name, cwd=folder)


def main() -> None:
    found = errors(ROOT)
    if found:
        sys.exit("\n".join(f"Error: {error}" for error in found))
    run("cffconvert", "--validate", "--infile", "CITATION.cff")
    wheel = build()
    for torch in TORCHES:
        try_wheel(wheel, torch)
    print(f"{wheel.name} can be released. To upload it: twine upload dist/*")


if __name__ == "__main__":
    main()
