"""The commands of the pages that are in no other test, run as they stand.

Run: pytest tests/test_page_commands.py. Real: everything. What a page leaves open, such as CONFIG,
is a file of that name in the folder in which the commands run.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from page_blocks import ROOT, block
from typer.testing import CliRunner

from composer_replication.cli import app

PROGRAMS = Path(sys.executable).parent
ENVIRON = os.environ | {"PATH": f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}"}
SMALL = [
    *("model.d_model=16", "eval_subset_num_batches=1", "max_duration=4ba"),
    *(f"{section}.max_seq_len=16" for section in ("model", "train_loader", "eval_loader")),
    "callbacks.diloco.sync_every=2",
    "callbacks.diloco.schedule=null",
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty one, in which the commands run, with a config of that name."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "configs" / "quickstart.yaml", tmp_path / "CONFIG")
    return tmp_path


def invoke(line):
    """A line with our command, in this process."""
    program, *words = shlex.split(line, comments=True)
    assert program == "composer-replication"
    answer = CliRunner().invoke(app, words)
    assert answer.exit_code == 0, answer.output
    return answer.output


@contextmanager
def shell(commands):
    """Commands in bash, of which the last is a coordinator; gives its address once it serves."""
    with subprocess.Popen(
        ["bash", "-ec", commands], env=ENVIRON, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            found = (re.match(r"COMPOSER_REPLICATION_COORDINATOR=(\S+)", x) for x in process.stdout)
            yield next(match[1] for match in found if match)
        finally:
            process.terminate()


@pytest.mark.integration
def test_make_train_trains_two_groups(tmp_path):
    on_pages = {block("README.md", "make train"), block("docs/quickstart.md", "make train")}
    lines = [[shlex.split(x, comments=True) for x in text.splitlines()] for text in on_pages]
    assert lines[0] == lines[-1] == [["make", "train"], ["make", "test"]]  # which runs this test
    # The environment is there, and training is short.
    here = ["--old-file", ".venv/.installed", f"BIN={PROGRAMS}"]
    command = [*lines[0][0], *here, f"ARGS={' '.join(SMALL)} run_dir={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRON, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal in 2 groups after 2 outer steps" in done.stdout
    assert json.loads((tmp_path / "summary.json").read_text())["outer_steps"] == 2


@pytest.mark.slow
def test_the_doctor_examines_the_machine_and_a_config(folder):
    machine, config = block("docs/doctor.md", "composer-replication doctor").splitlines()
    assert " versions " in invoke(machine)
    assert " settings " in invoke(config)


@pytest.mark.integration
def test_the_report_of_the_study_writes_the_page(tmp_path):
    shutil.copytree(ROOT / "spikes" / "009-learning", tmp_path / "spikes" / "009-learning")
    (tmp_path / "docs").mkdir()
    page = ROOT / "docs" / "learning.md"
    begun = re.sub(r"^(\| .*groups.*\| )\d\.\d+( \|.*)$", r"\g<1>?\2", page.read_text(), flags=re.M)
    assert begun != page.read_text()
    (tmp_path / "docs" / page.name).write_text(begun)
    line = block("docs/learning.md", "python spikes/009-learning/report.py")
    subprocess.run(["bash", "-ec", line], cwd=tmp_path, env=ENVIRON, check=True)
    assert (tmp_path / "docs" / page.name).read_text() == page.read_text()
    assert (tmp_path / "docs" / "learning.png").stat().st_size > 10_000


@pytest.mark.integration
@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_a_coordinator_takes_the_token_of_the_file(folder):
    commands = block("docs/security.md", "(umask 077; openssl").rstrip()
    with shell(f"{commands} --bind 127.0.0.1:0") as address:
        token = (folder / "token").read_text().strip()
        assert len(token) == 32 and (folder / "token").stat().st_mode & 0o077 == 0
        answers = [
            httpx.get(f"{address}/v1/status", headers={"Authorization": f"Bearer {each}"})
            for each in ("another", token)
        ]
    assert [answer.status_code for answer in answers] == [401, 200]
