"""The pages, run as they stand: from the first block to the last, in a folder like a clone.

Run: make test-pages. Real: everything. What a page leaves to its readers is in ``tests/pages``: see
``page_blocks.py``. Without the mark ``pages``: what is looked at without a run.
"""

import inspect
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hydra.utils import get_object
from omegaconf import OmegaConf
from page_blocks import PAGES, ROOT, blocks, script
from page_marks import marked
from run_events import result_of

from composer_replication.config_file import SECTION, TARGET, diloco_section, read_diloco, read_yaml
from composer_replication.training import OURS

CLONE = ("configs", "deploy", "docs", "examples", "spikes", "Makefile", "pyproject.toml")
"""What the pages use of a clone. The package is installed."""

PORT = "29512"
"""Pages that name it are run one after the other."""


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def is_for_llmfoundry(page: Path) -> bool:
    return "<!-- needs: " in marked(page)


def params() -> Iterator[Any]:
    for page in PAGES:
        if any(each.language in ("bash", "python") and not each.reason for each in blocks(page)):
            marks = [pytest.mark.llmfoundry] if is_for_llmfoundry(page) else []
            marks += [pytest.mark.xdist_group("port")] if PORT in page.read_text() else []
            yield pytest.param(page, id=name_of(page), marks=marks)


def make_clone(folder: Path) -> None:
    """Make a folder with what a clone has, and with an environment in ``.venv``."""
    for name in CLONE:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    (folder / ".venv").mkdir()
    for name in ("bin", "lib", "pyvenv.cfg"):  # .venv/bin/python is that of an environment
        (folder / ".venv" / name).symlink_to(Path(sys.prefix) / name)
    (folder / ".venv" / ".installed").touch()


def environment() -> dict[str, str]:
    """That of a shell in which the environment is active, without what other tests set."""
    own = {name: value for name, value in os.environ.items() if "COMPOSER_REPLICATION" not in name}
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    path = f"{Path(sys.executable).parent}{os.pathsep}{own['PATH']}"
    return own | offline | {"PATH": path, "COLUMNS": "100", "TESTS": str(ROOT / "tests")}


@pytest.mark.pages
@pytest.mark.integration
@pytest.mark.parametrize("page", params())
def test_a_page_works_as_it_stands(page, tmp_path):
    make_clone(tmp_path)
    (tmp_path / "page.sh").write_text(script(page))
    output = tmp_path / "output.txt"
    with output.open("w") as out:
        shell = subprocess.Popen(
            ["bash", "page.sh"],
            cwd=tmp_path,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        status = shell.wait(timeout=800)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGTERM if shell.returncode is None else signal.SIGKILL)
    said = output.read_text().replace(f"{tmp_path}/", "")
    assert status == 0, said[-6000:]
    for each in blocks(page):
        if not each.language and not each.reason:
            for line in each.text.splitlines():  # the numbers are of another run
                assert re.split(r"\d", line)[0].rstrip() in said, line
    for run in tmp_path.glob("runs/*"):
        ends = [result_of(events.parent) for events in run.glob("replica_*/events.jsonl")]
        assert len({end["global_digest"] for end in ends}) <= 1, run


# ---- without a run ------------------------------------------------------------------------------

YAML = {
    f"{name_of(page)}:{each.line}": each
    for page in PAGES
    for each in blocks(page)
    if each.language == "yaml"
}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_each_block_is_run_or_says_why_not(page):
    run = script(page)
    for each in blocks(page):
        is_known = each.language in ("bash", "python", "yaml", "")
        assert len(each.reason) > 10 if each.reason else is_known, each.line
        if each.language in ("bash", "python"):
            assert (each.text in run) == (not each.reason), each.line


@pytest.mark.parametrize("each", YAML.values(), ids=YAML)
def test_the_keys_of_a_block_of_yaml_are_read(each, tmp_path, monkeypatch):
    from composer import Trainer

    if each.reason:
        pytest.skip(each.reason)
    monkeypatch.chdir(ROOT)  # where a config finds the examples' modules
    (tmp_path / "block.yaml").write_text(each.text)
    config = read_yaml(tmp_path / "block.yaml")
    if OmegaConf.select(config, SECTION):
        read_diloco(diloco_section(config))
    assert {*config} <= {*inspect.signature(Trainer).parameters, *OURS}
    for target, arguments in named_in(OmegaConf.to_container(config)):
        inspect.signature(get_object(target)).bind_partial(**arguments)


def named_in(value: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """What a config names by ``_target_``, and the arguments beside it."""
    for each in value.values() if isinstance(value, dict) else value:
        if isinstance(each, dict | list):
            yield from named_in(each)
    if isinstance(value, dict) and TARGET in value:
        yield value[TARGET], {k: v for k, v in value.items() if not k.startswith("_")}
