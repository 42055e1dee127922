"""The wheel: what is in it, and that it imports from where it is installed."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.together]

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", folder, ROOT]
    # Build isolation would install what it is built with once more, which takes most of a minute.
    subprocess.run([*command, "--no-build-isolation"], check=True)
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_has_the_package_its_types_and_its_entry_points(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        assert "composer_replication/py.typed" in names
        assert "composer_replication/diloco/algorithm.py" in names
        assert not [name for name in names if name.startswith(("tests/", "spikes/"))]
        entry_points = next(name for name in names if name.endswith("entry_points.txt"))
        text = archive.read(entry_points).decode()
    assert "composer-replication = composer_replication.__main__:main" in text
    assert "[llmfoundry_callbacks]\ndiloco = composer_replication.callback:DiLoCoCallback" in text


def test_an_index_shows_a_readme_without_dead_links(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("dist-info/METADATA"))
        shown = archive.read(name).decode()
    assert "<!--" not in shown and "![" not in shown
    targets = re.findall(r"\]\(([^)]*)\)", shown)
    assert targets and all(target.startswith("https://") for target in targets)
    assert "average what they have learnt (DiLoCo)" in shown


def test_the_wheel_installs_and_imports(wheel, tmp_path):
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    subprocess.run([*command, tmp_path, wheel], check=True)
    program = "import composer_replication as c; assert c.DiLoCo and c.simulate; print(c.__file__)"
    found = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(found.stdout.strip()).is_relative_to(tmp_path)
