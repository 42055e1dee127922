"""The patches for torchft apply to the pinned version, as far as its sources are in the wheel."""

import inspect
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torchft.manager

PATCHES = sorted((Path(__file__).parents[2] / "deploy" / "upstream").glob("*.patch"))


@pytest.mark.slow
def test_the_patches_of_python_files_apply_and_their_own_tests_pass(tmp_path):
    installed = Path(inspect.getfile(torchft.manager)).parent
    shutil.copytree(installed, tmp_path / "torchft", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    subprocess.run(["git", "apply", *PATCHES[:2]], cwd=tmp_path, check=True)
    found = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            *("torchft/manager_test.py", "-k", "server_args or request_quorum"),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "2 passed" in found.stdout, found.stdout + found.stderr


def test_the_patch_of_rust_files_adds_lines_and_takes_none():
    found = subprocess.run(
        ["git", "apply", "--numstat", PATCHES[2]], capture_output=True, text=True, check=True
    )
    files = [line.split("\t") for line in found.stdout.splitlines()]
    assert [file[1:] for file in files] == [["0", "Cargo.toml"], ["0", "src/lighthouse.rs"]]
