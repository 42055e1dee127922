"""Every operation on a file of a run fails once, in turn.

Run: pytest tests/integration/test_io_errors.py.

Real: Composer's Trainer on the CPU, and the run's folder. Faked: the network, and the one
operation that fails, as it would on a full disk (ENOSPC) or a broken one (EIO). What torch does in
C++ is not seen.
"""

import io
import json

import pytest
from failing_disk import Disk, each_failure
from harness.trainers import fit_alone
from rich.console import Console
from run_events import events_of, result_of, syncs_of
from scripted_groups import supervise, write
from text_config import TINY

from composer_replication.config_file import save_config
from composer_replication.group import reports, run_folder
from composer_replication.group.run_folder import CONFIG, ReplicaFolder, make_run_folder
from composer_replication.launch import supervision
from composer_replication.launch.display import Display, LiveRun
from composer_replication.launch.run_record import describe, open_run, write_summary
from composer_replication.simulation.simulation import SimulationError
from composer_replication.training import load_config
from composer_replication.util import fence

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def disk(tmp_path, monkeypatch):
    return Disk(tmp_path, monkeypatch)


@pytest.fixture
def folders(tmp_path):
    numbers = iter(range(10_000))
    return lambda: tmp_path / f"run{next(numbers)}"


def names_the_file(error, failed):
    name = failed.split()[1].lstrip(".").removesuffix(".part")
    return isinstance(error, OSError) and name in str(error)


@pytest.mark.slow
def test_training_survives_each_failure_and_loses_no_line(disk, folders, monkeypatch, caplog):
    monkeypatch.setattr(run_folder, "STATUS_EVERY_S", 0.0)
    monkeypatch.setattr(reports, "REPORT_EVERY_S", 0.0)
    monkeypatch.setattr(fence, "_logged", set())  # of other tests of this process

    def train(run_dir):
        try:
            fit_alone(diloco={"run_dir": str(run_dir)})
        except SimulationError as error:
            raise error.__cause__ from None

    def judge(run_dir, failed, error):
        folder = run_dir / "replica_0"
        syncs = syncs_of(folder)
        if error is not None and not syncs:
            # Before the group knows of others, and they of it.
            assert names_the_file(error, failed)
            return
        assert error is None and [sync["diloco/outer_step"] for sync in syncs] == [1, 2]
        if events_of(folder, "end"):
            assert result_of(folder)["outer_steps"] == 2
        else:
            without_result.append(failed)

    without_result = []
    operations = each_failure(disk, folders, train, judge)
    # The last thing that a group does: the log says that it could not.
    assert set(without_result) <= {"stat replica_0", "open events.jsonl", "write events.jsonl"}
    assert "Cannot show the result of this group" in caplog.text
    assert {"mkdir replica_0", "write events.jsonl", "replace .status.json.part"} < set(operations)
    assert {"fsync events.jsonl", "stat STOP"} < set(operations)


def test_a_group_goes_on_where_it_was_at_each_failure(disk, folders):
    def prepare():
        run_dir = folders()
        folder = ReplicaFolder(run_dir, 0)
        folder.append("sync", {"diloco/outer_step": 3, "batch": 7})
        folder.write_status("training", batch=8)
        return run_dir

    def start(run_dir):
        folder = ReplicaFolder(run_dir, 0)
        folder.reached()
        folder.append("resume", {"batch": 6})
        folder.append("sync", {"diloco/outer_step": 4})
        folder.write_status("joining")
        folder.write_status("training")

    def judge(run_dir, failed, error):
        assert error is None
        folder = run_dir / "replica_0"
        assert [sync["diloco/outer_step"] for sync in syncs_of(folder)] == [3, 4]
        assert [resume["batch"] for resume in events_of(folder, "resume")] == [6]

    assert "read events.jsonl" in each_failure(disk, prepare, start, judge)


def prepared_run(folders):
    run_dir = folders()
    for replica_id in range(2):
        folder = ReplicaFolder(run_dir, replica_id)
        line = {"diloco/outer_step": 1, "diloco/num_participants": 2, "diloco/bytes_sent": 8}
        line |= {"diloco/fragment": 0, "diloco/bytes_float32": 8, "inner_steps": 2, "batch": 2}
        folder.append("sync", line)
        folder.write_status("training", batch=2)
        folder.write_end({"outer_steps": 1, "global_digest": "ab", "eval": {}})
    return run_dir


@pytest.mark.slow
def test_a_start_works_or_ends_with_the_error_that_names_the_file(disk, folders, tmp_path):
    (tmp_path / "given.yaml").write_text(TINY)
    config = load_config(tmp_path / "given.yaml")

    def start(run_dir):
        made = make_run_folder({"run_dir": str(run_dir), "autoresume": True}, "given.yaml")
        save_config(config, made / CONFIG)

    def judge(run_dir, failed, error):
        if error is None:
            assert load_config(run_dir / CONFIG) == config
        else:
            assert names_the_file(error, failed)

    each_failure(disk, lambda: prepared_run(folders), start, judge)


@pytest.mark.slow
def test_the_launcher_survives_each_failure_while_groups_train(disk, folders, monkeypatch):
    monkeypatch.setattr(supervision, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(supervision, "POLL_S", 0.0)

    def prepare():
        run_dir = folders()
        run_dir.mkdir()
        line = {"diloco/outer_step": 1, "diloco/num_participants": 2}
        for replica_id in range(2):
            write(run_dir, replica_id, syncs=0)
            ReplicaFolder(run_dir, replica_id).append("sync", line)
        return run_dir

    def watch(run_dir):
        display = Display(Console(file=io.StringIO()), LiveRun(run_dir, range(2)))

        def show(groups, looks):
            display.refresh(is_last=True)
            if groups.started:
                groups.lives[0][0] = groups.lives[1][0] = 0

        failed, _, groups = supervise(run_dir, {0: [None], 1: [-9, None]}, on_look=show)
        assert failed == {} and groups.started == [1]

    def judge(run_dir, failed, error):
        assert error is None

    each_failure(disk, prepare, watch, judge)


def test_a_report_is_made_or_ends_with_the_error_that_names_the_file(disk, folders):
    def report(run_dir):
        run = open_run(run_dir)
        describe(run)
        write_summary(run, {})

    def judge(run_dir, failed, error):
        if error is None:
            assert json.loads((run_dir / "summary.json").read_text())["outer_steps"] == 1
        else:
            assert names_the_file(error, failed)

    each_failure(disk, lambda: prepared_run(folders), report, judge)
