"""One replica group on its own, and where its id is from.

Run: pytest tests/launch/test_run_command.py.

Real: processes and signals. Stood in for: a group's training, by scripts.
"""

import json
import os
import re
import signal
import sys
import threading

import psutil
import pytest
from typer.testing import CliRunner
from waiting import wait_until

from composer_replication import cli
from composer_replication.config_file import ConfigError
from composer_replication.launch.launcher import ENGINES, replica_id_from, run_group

ARGUMENTS = {"restarts": 3, "backoff_s": 0.01, "hang_timeout_s": 15.0}


@pytest.fixture(autouse=True)
def place(monkeypatch, tmp_path):
    for name in (*ENGINES, "COMPOSER_REPLICATION_RUN_DIR", "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("REPLICA_GROUP_ID", "site-a")
    monkeypatch.setenv("COMPOSER_REPLICATION_RUN_DIR", str(tmp_path / "run"))


# Each life ends with the next status of the list.
LIVES = """
import json, os, pathlib, signal, sys, time
folder = pathlib.Path(os.environ["COMPOSER_REPLICATION_RUN_DIR"]) / "replica_site-a"
lives = folder / "lives"
lives.write_text(lives.read_text() + "x" if lives.exists() else "x")
(folder / "environ.json").write_text(json.dumps(dict(os.environ)))
print("life", len(lives.read_text()), *sys.argv[2:], flush=True)
status = json.loads(sys.argv[1])[len(lives.read_text()) - 1]
os.kill(os.getpid(), -status) if status < 0 else sys.exit(status)
"""


def run_lives(tmp_path, statuses, *arguments, **options):
    script = tmp_path / "group.py"
    script.write_text(LIVES)
    command = [sys.executable, str(script), json.dumps(statuses), *arguments]
    return run_group(command, **ARGUMENTS | options)


def num_lives(tmp_path):
    return len((tmp_path / "run" / "replica_site-a" / "lives").read_text())


LEARNS_NOTHING = """
import json, os, pathlib, sys, time
folder = pathlib.Path(os.environ["COMPOSER_REPLICATION_RUN_DIR"]) / "replica_site-a"
end = {"inner_steps": 40, "outer_steps": 0, "global_digest": "ab" * 32}
with (folder / "events.jsonl").open("a") as file:
    file.write(json.dumps({"time": time.time(), "event": "end", **end}) + chr(10))
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.integration
@pytest.mark.parametrize("status", [0, 1])  # of a script, and of our own `train`
def test_a_group_that_has_learned_nothing_is_no_success(tmp_path, capfd, status):
    script = tmp_path / "group.py"
    script.write_text(LEARNS_NOTHING)
    assert run_group([sys.executable, str(script), str(status)], **ARGUMENTS) == 1
    assert capfd.readouterr().err.startswith("Error: this run has learned nothing: its 40 inner st")


@pytest.mark.integration
def test_a_group_that_dies_is_started_again_and_its_output_is_ours(
    tmp_path, capfd, caplog, monkeypatch
):
    monkeypatch.setenv("RANK", "0")
    assert run_lives(tmp_path, [1, -9, 0], "{run_dir}/{replica_id}") == 0
    assert num_lives(tmp_path) == 3
    out = capfd.readouterr().out
    assert out.splitlines() == [f"life {n} {tmp_path}/run/site-a" for n in (1, 2, 3)]
    said = caplog.text
    assert re.search(r"group site-a ended with exit status 1, starts .*1 of 3\)", said)
    assert re.search(r"group site-a was ended by SIGKILL, starts .*2 of 3\)", said)
    given = json.loads((tmp_path / "run" / "replica_site-a" / "environ.json").read_text())
    assert given["COMPOSER_REPLICATION_HANG_TIMEOUT_S"] == "15"
    assert given["RANK"] == "0"  # an engine's: the command may be one node of several


@pytest.mark.integration
@pytest.mark.parametrize("command", ["run", "launch"])
@pytest.mark.parametrize(
    ("option", "variable", "limit"),
    [(["--hang-timeout-s", "30"], "7200", 30), ([], "7200", 7200), ([], "", 600)],
)
def test_the_time_until_a_hang_is_the_option_then_the_variable(
    monkeypatch, command, option, variable, limit
):
    monkeypatch.setattr(cli, "launch_groups", lambda job, options: options.hang_timeout_s != limit)
    monkeypatch.setenv("COMPOSER_REPLICATION_HANG_TIMEOUT_S", variable)
    never = "--restarts" if command == "run" else "--max-restarts"
    script = f"test $COMPOSER_REPLICATION_HANG_TIMEOUT_S = {limit}"
    words = [command, never, "0", *option, "--", "sh", "-c", script]
    assert CliRunner().invoke(cli.app, words).exit_code == 0


@pytest.mark.integration
@pytest.mark.parametrize(
    ("lives", "status", "count"),
    [
        pytest.param([2, 0], 2, 1, id="bad input"),
        pytest.param([1, 1, 1, -15], 143, 4, id="restarts used up"),
    ],
)
def test_when_it_gives_up_and_with_which_status(tmp_path, lives, status, count):
    assert run_lives(tmp_path, lives) == status
    assert num_lives(tmp_path) == count


@pytest.mark.integration
def test_an_error_of_the_program_is_said_at_each_start(tmp_path, capfd, caplog):
    (tmp_path / "group.py").write_text("print('began')\nlen(3)")
    assert run_group([sys.executable, str(tmp_path / "group.py")], **ARGUMENTS) == 1
    said = capfd.readouterr()
    assert said.out == "began\n" * 4 and said.err.count("Traceback (most recent call last)") == 4
    assert said.err.endswith("TypeError: object of type 'int' has no len()\n")
    assert "site-a ended with exit status 1, and is not started again" in caplog.text


@pytest.mark.integration
def test_what_an_earlier_process_said_about_itself_is_forgotten(tmp_path):
    folder = tmp_path / "run" / "replica_site-a"
    folder.mkdir(parents=True)
    (folder / "status.json").write_text('{"phase": "rejected", "batch": 7}')
    assert run_lives(tmp_path, [1, 0]) == 0 and num_lives(tmp_path) == 2
    assert json.loads((folder / "status.json").read_text())["batch"] == 7


@pytest.mark.integration
def test_sigterm_ends_the_group_and_leaves_nothing(tmp_path):
    pids = tmp_path / "pid"
    waits = f"import os, time; open({str(pids)!r}, 'w').write(str(os.getpid())); time.sleep(60)"

    def terminate():
        wait_until(lambda: pids.exists() and pids.read_text(), 60)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=terminate)
    thread.start()
    assert run_group([sys.executable, "-c", waits], **ARGUMENTS) == 130
    thread.join()
    assert not psutil.pid_exists(int(pids.read_text()))


@pytest.mark.integration
def test_without_a_run_folder_it_says_where_the_metrics_are(monkeypatch, caplog):
    monkeypatch.delenv("COMPOSER_REPLICATION_RUN_DIR")
    assert run_group(["ls", "{run_dir}/replica_site-a"], **ARGUMENTS) == 0
    assert "No run folder is named" in caplog.text


@pytest.mark.parametrize(
    ("environ", "replica_id"),
    [
        ({"REPLICA_GROUP_ID": "b", "SLURM_ARRAY_TASK_ID": "3"}, "b"),
        ({"SLURM_ARRAY_TASK_ID": "3"}, "3"),
        ({"JOB_COMPLETION_INDEX": "0"}, "0"),
        ({"TORCHX_REPLICA_IDX": "1"}, "1"),
        ({"SLURM_ARRAY_TASK_ID": "3", "TORCHX_REPLICA_IDX": "3"}, "3"),
    ],
)
def test_the_id_is_ours_or_the_engines(environ, replica_id):
    assert replica_id_from(environ) == replica_id


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({}, "which replica group is this"),
        ({"REPLICA_GROUP_ID": ""}, "Set REPLICA_GROUP_ID to 0, 1, ..., different in each"),
        (
            {"SLURM_ARRAY_TASK_ID": "3", "TORCHX_REPLICA_IDX": "0"},
            "SLURM_ARRAY_TASK_ID=3, TORCHX_REPLICA_IDX=0: which of them",
        ),
        ({"REPLICA_GROUP_ID": "a/b"}, "give each replica group a name of its own"),
    ],
)
def test_an_id_is_not_guessed(environ, message):
    with pytest.raises(ValueError, match=message):
        replica_id_from(environ)


def test_a_command_that_does_not_exist_is_bad_input():
    with pytest.raises(ConfigError, match="no command 'no-such-program'"):
        run_group(["no-such-program"], **ARGUMENTS)
