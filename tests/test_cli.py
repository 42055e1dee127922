"""What the command answers, and how fast. Run: pytest tests/test_cli.py.

Real commands in processes of their own.
"""

import subprocess
import sys
from pathlib import Path

import forked_commands
import pytest
from forked_commands import ForkedCommand
from text_config import TINY

from composer_replication import __version__

pytestmark = pytest.mark.integration


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    return path


# What is said "at once" is said in less than 10 s, which ``run`` measures.
at_once = pytest.mark.alone


def run(*arguments, seconds=10):
    """Run the command in a process of its own, within a time."""
    command = [sys.executable, "-m", "composer_replication", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds)


@at_once
def test_the_version_is_printed():
    assert run("--version").stdout == f"composer-replication {__version__}\n"


@at_once
def test_the_commands_are_there_without_docstrings():
    """As under PYTHONOPTIMIZE=2, and their help is then empty."""
    said = subprocess.run([sys.executable, "-OO", "-m", "composer_replication", "-h"])
    assert said.returncode == 0


@at_once
@pytest.mark.parametrize("command", ["train", "launch", "simulate"])
def test_bad_input_is_answered_at_once(config, command):
    answer = run(command, config, "callbacks.diloco.sync_evry=5")
    assert answer.returncode == 2 and "did you mean 'sync_every'" in answer.stderr


@pytest.mark.parametrize(
    ("command", "heavy"),
    [
        ("train {} model._target_=null max_duration=9", "{'torch', 'composer'}"),
        ("plan --params 7B --step-time 1 --groups 2", "{'torch', 'composer', 'numpy'}"),
    ],
)
def test_nothing_heavy_is_imported_before_the_input_is_known_good(config, command, heavy):
    check = (
        "import sys\n"
        "from composer_replication.cli import app\n"
        "if sys.argv[1] == 'train': import composer_replication.launch.launcher\n"
        "try: app(sys.argv[1:], standalone_mode=False)\n"
        "except ValueError: pass\n"
        f"sys.exit(bool({heavy} & sys.modules.keys()))"
    )
    words = command.format(config).split()
    assert subprocess.run([sys.executable, "-c", check, *words]).returncode == 0


@at_once
def test_the_process_ends_after_an_error_though_a_thread_still_waits(config):
    # As torchft's do, for a quorum of up to an hour.
    code = (
        "import sys, threading, time\n"
        "threading.Thread(target=time.sleep, args=[60]).start()\n"
        f"sys.argv = ['composer-replication', 'train', {str(config)!r}, 'max_duration=1']\n"
        "from composer_replication.cli import main\n"
        "main()"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=10
    )
    assert answer.returncode == 2 and "max_duration=1: write" in answer.stderr


def test_a_simulation_leaves_the_same_files_as_a_launch(tmp_path):
    small = ["model.d_model=16", "max_duration=5ba", "callbacks.diloco.sync_every=2"]
    lengths = [
        f"{part}.max_seq_len=16" for part in ("model", "train_dataloader", "eval_dataloader")
    ]
    folder = tmp_path / "run"
    overrides = [*small, *lengths, "eval_subset_num_batches=1", f"run_dir={folder}"]
    config = Path(__file__).parent.parent / "configs" / "quickstart.yaml"
    command = [sys.executable, "-m", "composer_replication", "simulate", str(config), *overrides]
    answer = forked_commands.run(ForkedCommand, [*command, "--replicas", "3"], timeout=100)
    assert answer.returncode == 0, answer.stderr
    assert "equal in 3 groups after 3 outer steps" in answer.stdout  # the last one mid-round
    for name in ("config.yaml", "summary.json", "report.html", "replica_2/events.jsonl"):
        assert (folder / name).exists()
