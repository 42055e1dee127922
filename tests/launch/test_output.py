"""What a command writes: log lines, errors, and what a full disk takes from it.

Run: pytest tests/launch/test_output.py.

Real: processes, one of which writes into a file that may not grow (``RLIMIT_FSIZE``).
"""

import subprocess
import sys

import pytest
from forked_commands import ForkedCommand, run

from composer_replication.config_file import ConfigError
from composer_replication.coordinator.database import StorageError
from composer_replication.diloco.algorithm import SyncError
from composer_replication.group.run_folder import EVENTS
from composer_replication.launch.output import report_error
from composer_replication.launch.run_record import open_run
from composer_replication.options import DuplicateIdError
from composer_replication.settings import SettingsMismatch
from composer_replication.simulation.simulation import SimulationError


def reported(error, capsys):
    try:
        raise error
    except Exception as raised:
        status = report_error(raised)
    return status, capsys.readouterr().err


OF_A_REPLICA, UNKNOWN = SimulationError("replica 1 raised SyncError: x"), SimulationError("y")
OF_A_REPLICA.__cause__, UNKNOWN.__cause__ = SyncError("x"), ZeroDivisionError("y")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (SettingsMismatch("sync_every: 5 here, 10 there"), 2),
        (FileNotFoundError("no such checkpoint"), 2),
        (SyncError("did not commit in 4 attempts"), 1),
        (StorageError("coordinator.sqlite: The disk is full: free some space"), 1),
        (ConfigError("no such key"), 2),
        (TimeoutError("1 of 2 replica groups came"), 1),
        (OF_A_REPLICA, 1),
    ],
)
def test_an_error_whose_cause_is_known_is_its_message(error, status, capsys):
    assert reported(error, capsys) == (status, f"Error: {error}\n")


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("0"), ValueError("shapes"), TimeoutError(), UNKNOWN]
)
def test_an_error_that_says_little_keeps_its_traceback(error, capsys):
    # A ValueError that was not raised by this package, a TimeoutError without a message.
    status, said = reported(error, capsys)
    assert status == 1 and "Traceback (most recent call last)" in said


def test_a_file_that_cannot_be_read_is_named_in_one_line(tmp_path, capsys):
    events = tmp_path / "replica_0" / EVENTS
    events.mkdir(parents=True)
    with pytest.raises(IsADirectoryError) as caught:
        open_run(tmp_path)
    assert report_error(caught.value) == 1
    assert capsys.readouterr().err == f"Error: [Errno 21] Is a directory: '{events}'\n"


def test_a_name_that_another_group_has_may_be_free_the_next_time(capsys):
    assert reported(DuplicateIdError("replica_id='a' is taken"), capsys)[0] == 1


RANK = """
import os, sys, time
time.sleep(0.0 if os.environ["RANK"] == "1" else 3.0)  # rank 1 is faster
sys.argv = ["composer-replication", "train", "/nowhere.yaml"]
from composer_replication.cli import main
main()
"""


@pytest.mark.integration
def test_bad_input_of_several_ranks_is_bad_input_of_their_launcher(tmp_path):
    """Composer's launcher ends rank 0 by a signal as soon as another rank has ended."""
    (tmp_path / "rank.py").write_text(RANK)
    launcher = [sys.executable, "-m", "composer.cli.launcher", "--nproc", "2", "rank.py"]
    ended = run(ForkedCommand, launcher, cwd=tmp_path, timeout=240)
    assert ended.returncode == 2, ended.stderr
    assert "there is no config at /nowhere.yaml" in ended.stderr


PROGRAM = """
import resource, sys
from composer_replication.launch.output import ignore_output_errors
if sys.argv[1] == "lossy":
    ignore_output_errors()
print("before", "\\u2713", flush=True)
resource.setrlimit(resource.RLIMIT_FSIZE, (12, resource.RLIM_INFINITY))
for stream in (sys.stdout, sys.stderr):
    print("lost" * 1000, file=stream, flush=True)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print("after")
"""


@pytest.mark.integration
@pytest.mark.parametrize(("how", "status"), [("lossy", 0), ("as it is", 1)])
def test_a_print_that_fails_does_not_end_the_process(tmp_path, how, status):
    command = [sys.executable, "-X", "utf8", "-c", PROGRAM, how]
    with (tmp_path / "log.txt").open("ab") as output:
        ended = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT)
    assert ended.returncode == status
    said = (tmp_path / "log.txt").read_text(errors="replace")
    assert said.startswith("before \u2713\n") and said.endswith("after\n") == (how == "lossy")


@pytest.mark.integration
@pytest.mark.parametrize("stdout", [">&-", "| true", ">/dev/full"])
def test_a_command_ends_well_without_its_output(stdout):
    code = (
        "import sys, time; sys.argv = ['composer-replication', '--version'];"
        "from composer_replication.cli import main; time.sleep(0.2); main()"
    )
    shell = f'"$0" -c "$1" {stdout}; exit ${{PIPESTATUS[0]}}'
    command = ["bash", "-c", shell, sys.executable, code]
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
