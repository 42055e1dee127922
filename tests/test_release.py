"""The check before a release, as far as it reads files. `make release-check` does the rest."""

import importlib.util
import re
import shutil
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
FILES = ["pyproject.toml", "CHANGELOG.md", "CITATION.cff", "composer_replication/__init__.py"]


@pytest.fixture(scope="module")
def check():
    """The script, which lies in a folder that cannot be imported from."""
    spec = importlib.util.spec_from_file_location("check", ROOT / ".ci/release_check.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def copy(tmp_path):
    """The files that the check reads, to be changed."""
    for name in FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def replace(path, old, new):
    text = path.read_text()
    assert re.search(old, text, re.MULTILINE)
    path.write_text(re.sub(old, new, text, flags=re.MULTILINE))


def test_this_version_can_be_released(check):
    assert check.errors(ROOT) == []


@pytest.mark.parametrize(("old", "new", "said"), [
    (r"^## \[\d.*", "## [0.0.9] - 2026-11-01", "its newest is 0.0.9. Fix: put '## [{version}] - "),
    (r"^## \[(\d.*)\] - .*", r"## [\1]", "without a date"),
    (r"^- .*\n", "", "is empty"),
    (r"^## \[Unreleased\]\n", "", "no '## [Unreleased]' above"),
])  # fmt: skip
def test_what_a_version_s_section_may_lack_is_an_error_with_the_fix(check, copy, old, new, said):
    replace(copy / "CHANGELOG.md", old, new)
    (error,) = check.errors(copy)
    assert said.format(version=check.project_version(copy)) in error and "Fix: " in error


@pytest.mark.parametrize("name", ["composer_replication/__init__.py", "CITATION.cff"])
def test_a_file_that_names_another_version_is_an_error_with_both(check, copy, name):
    version = check.project_version(copy)
    replace(copy / name, rf"(version.*){re.escape(version)}", r"\g<1>0.0.9")
    (error,) = check.errors(copy)
    assert error == f"{name} says 0.0.9, pyproject.toml {version}. Fix: make them equal"


def test_an_error_ends_the_check_before_anything_is_built(check, copy, monkeypatch):
    replace(copy / "CHANGELOG.md", r"^## \[\d.*\n", "")
    monkeypatch.setattr(check, "ROOT", copy)
    with pytest.raises(SystemExit, match="Error: CHANGELOG.md has no section"):
        check.main()
    assert not (copy / "dist").exists()


def test_the_oldest_torch_of_the_check_is_that_of_the_project(check):
    project = (ROOT / "pyproject.toml").read_text()
    (oldest,) = re.findall(r'"torch>=([\d.]+)",', project)
    assert f"torch=={oldest}.*" in check.TORCHES


def test_the_citation_has_the_date_of_the_section(check):
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    heading = f"## [{check.project_version(ROOT)}] - {citation['date-released']}\n"
    assert heading in (ROOT / "CHANGELOG.md").read_text()
