"""What ``launch`` says of a job of each host that diverges, has one bad batch, or is interrupted.

Run: pytest tests/hosts/test_launched.py. Real: the command, a coordinator, groups as processes.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from forked_commands import ForkedCommand
from run_events import events_of, syncs_of
from text_config import TINY
from waiting import wait_until

import composer_replication

pytestmark = [pytest.mark.integration, pytest.mark.slow]

SCRIPT = Path(__file__).with_name("launched.py")
HOSTS = [
    pytest.param(name, marks=pytest.mark.skipif(not installed, reason=f"{name} is not installed"))
    for name, installed in (
        ("composer", find_spec("composer")),
        ("transformers", find_spec("transformers")),
        ("lightning", find_spec("lightning")),
        ("plain", True),
    )
]


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    """Start a command of ours in a folder, as a fork. What it says goes into files there."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "80"}
    with (folder / "stdout").open("w") as out, (folder / "stderr").open("w") as errors:
        command = [sys.executable, "-m", "composer_replication", *words]
        return ForkedCommand(command, cwd=folder, env=environ, stdout=out, stderr=errors, text=True)


def said(folder: Path) -> str:
    return (folder / "stdout").read_text()


def launch(*words: str, script: Path = SCRIPT) -> list[str]:
    """The words that launch a job of two groups."""
    options = ["--replicas", "2", "--set", "sync_every=10", "--run-dir", "run"]
    return ["launch", *options, "--", sys.executable, str(script), *words]


def page_of(folder: Path) -> dict[str, Any]:
    html = (folder / "run" / "report.html").read_text()
    [text] = re.findall(r'id="embedded" type="application/json">(.*?)</script>', html, re.S)
    return json.loads(text)


@pytest.mark.parametrize("host", HOSTS)
def test_a_learning_rate_with_which_nothing_is_learned_is_an_error_in_one_sentence(host, tmp_path):
    assert start(tmp_path, *launch(host, "1e9", "0")).wait(240) == 1
    [error] = (tmp_path / "stderr").read_text().splitlines()
    assert error.startswith("Error: this run has learned nothing: in its last ")
    assert "lower the learning rate, or find the batch whose loss is not finite" in error
    assert "starts again" not in said(tmp_path)
    page, run = page_of(tmp_path), composer_replication.read_run(tmp_path / "run")
    assert page["failure"] == run.failure and run.failure in error
    assert all(group.steps_lost >= 30 for group in run.groups)


@pytest.mark.skipif(not find_spec("composer"), reason="composer is not installed")
@pytest.mark.parametrize(
    ("command", "run_dir"), [("simulate", "null"), ("train", "run"), ("train", "null")]
)
def test_the_commands_without_a_coordinator_say_it_too(command, run_dir, tmp_path):
    (tmp_path / "tiny.yaml").write_text(TINY)
    words = ["optimizers.lr=1e30", f"run_dir={run_dir}"]
    if command == "train":
        words += ["callbacks.diloco.num_replicas=1", "callbacks.diloco.replica_id=0"]
    assert start(tmp_path, command, "tiny.yaml", *words).wait(240) == 1
    error = (tmp_path / "stderr").read_text().splitlines()[-1]
    assert error.startswith("Error: this run has learned nothing: in its last ")


@pytest.mark.parametrize("host", HOSTS)
def test_one_bad_batch_costs_a_round_of_one_group_and_is_reported(host, tmp_path):
    assert start(tmp_path, *launch(host, "0.1", "0", "15")).wait(240) == 0
    assert (tmp_path / "stderr").read_text() == ""
    assert re.search(r"(?m)^thrown away +group 1 10 inner steps$", said(tmp_path))
    assert "group 1: 10 inner steps thrown away, pseudo-gradient not finite\n" in said(tmp_path)
    summary, page = json.loads((tmp_path / "run" / "summary.json").read_text()), page_of(tmp_path)
    assert [replica["steps_lost"] for replica in summary["replicas"]] == [0, 10]
    assert summary["failure"] is None and page["failure"] == ""
    assert ["thrown away", "group 1 10 inner steps"] in page["result"]


def interrupt(folder: Path, command: subprocess.Popen[str], is_time) -> None:
    """Press Ctrl-C once ``is_time()`` is true, and wait for the end of the command."""
    wait_until(lambda: is_time() or command.poll() is not None, 240, said=lambda: said(folder))
    command.send_signal(signal.SIGINT)
    assert command.wait(60) == 130, said(folder)


def words_to_go_on(folder: Path) -> list[str]:
    """The words after ``composer-replication`` in the printed line ``To go on:``."""
    [line] = re.findall(r"(?m)^To go on: composer-replication (.+)$", said(folder))
    return shlex.split(line)


def go_on(folder: Path) -> None:
    """Run the line as it was printed, to the end of the run."""
    words = words_to_go_on(folder)
    assert sum(word.lstrip("-").startswith(("run-dir", "run_dir")) for word in words) == 1
    assert start(folder, *words).wait(240) == 0, said(folder) + (folder / "stderr").read_text()
    assert re.findall(r"(?m)^resumed +group (\d) at batch [1-9]\d*,", said(folder)) == ["0", "1"]
    assert "error" not in said(folder)
    for group in "01":
        steps = [sync["inner_steps"] for sync in syncs_of(folder / "run" / f"replica_{group}")]
        assert steps[-1] == events_of(folder / "run" / f"replica_{group}", "end")[-1]["inner_steps"]


@pytest.mark.parametrize("host", HOSTS)
def test_the_line_that_is_printed_after_ctrl_c_goes_on(host, tmp_path):
    saved = {
        "composer": ["saved_0/ep0-ba10-rank0.pt", "saved_1/ep0-ba10-rank0.pt"],
        "transformers": [f"saved_{group}/checkpoint-10/scheduler.pt" for group in "01"],
        "lightning": [f"saved_{group}/step=10.ckpt" for group in "01"],
        "plain": ["saved_0.pt", "saved_1.pt"],
    }[host]
    fix = {
        "composer": "load a checkpoint (load_path, or autoresume: true with a save_folder)",
        "transformers": "continue from a checkpoint (trainer.train(resume_from_checkpoint=...))",
        "lightning": "continue from a checkpoint (trainer.fit(model, ckpt_path='last'))",
        "plain": "load what it has saved (diloco.load_state_dict, before `with diloco`)",
    }[host]
    command = start(tmp_path, *launch(host, "0.1", "0.2"))
    are_saved = [*map(tmp_path.joinpath, saved)]
    interrupt(tmp_path, command, lambda: all(path.exists() for path in are_saved))
    found = re.search(r"(?m)^Saved: (.+)$", said(tmp_path))[1]
    if host == "plain":
        assert re.fullmatch(r"by group 0 at step [1-3]0, by group 1 at step [1-3]0", found)
    else:
        assert re.findall(r"/saved_(\d)/\S*[1-3]0", found) == ["0", "1"]
    assert f"\nThe script itself has to {fix}\n" in said(tmp_path)
    go_on(tmp_path)


@pytest.mark.parametrize("host", HOSTS)
def test_before_anything_is_saved_the_hosts_own_arguments_are_named(host, tmp_path):
    command = start(tmp_path, *launch(host, "0.1", "1"))
    folders = [tmp_path / "run" / f"replica_{group}" for group in "01"]
    interrupt(tmp_path, command, lambda: all(events_of(folder, "start") for folder in folders))
    how = {
        "composer": "a save_folder and save_interval",
        "transformers": "save_steps in the TrainingArguments",
        "lightning": "a ModelCheckpoint with save_last=True among the Trainer's callbacks",
        "plain": "torch.save of diloco.state_dict(), beside the model's and the optimizer's",
    }[host]
    assert f"No checkpoint was saved. For a run that can go on: {how}\n" in said(tmp_path)
    assert "To go on" not in said(tmp_path)


@pytest.mark.skipif(not find_spec("composer"), reason="composer is not installed")
def test_the_line_that_is_printed_for_a_config_goes_on(tmp_path):
    (tmp_path / "tiny.yaml").write_text(TINY)
    words = ["max_duration=400ba", "save_interval=10ba", "run_dir=run"]
    command = start(tmp_path, "launch", "tiny.yaml", "--replicas", "2", *words)
    links = [tmp_path / f"run/replica_{group}/checkpoints/latest-rank0.pt" for group in "01"]
    interrupt(tmp_path, command, lambda: all(link.exists() for link in links))
    assert "The script" not in said(tmp_path)
    go_on(tmp_path)


@pytest.mark.skipif(not find_spec("transformers"), reason="transformers is not installed")
def test_a_script_that_does_not_load_its_checkpoint_ends_with_one_line_for_a_group(tmp_path):
    script = tmp_path / "forgets.py"
    script.write_text(SCRIPT.read_text().replace("resume_from_checkpoint=newest", ""))
    command = start(tmp_path, *launch("transformers", "0.1", "0.2", script=script))
    saved = tmp_path / "saved_1" / "checkpoint-10" / "scheduler.pt"
    interrupt(tmp_path, command, saved.exists)
    assert start(tmp_path, *words_to_go_on(tmp_path)).wait(240) == 2
    errors = (tmp_path / "stderr").read_text().splitlines()
    assert 1 <= len(errors) <= 2  # the second group may have failed before the first one's end
    for error in errors:
        assert error.startswith("Error: ") and "none of them has the run's state" in error
        assert re.search(r"\(resume_from_checkpoint=\S+/saved_\d/checkpoint-[1-3]0\)", error)
    assert "starts again" not in said(tmp_path)
