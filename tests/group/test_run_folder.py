"""Making a run's folder, and what a group leaves in it.

Run: pytest tests/group/test_run_folder.py.

Real: files in ``tmp_path``. Faked: the clock. ``no_file_above`` is a full disk.
"""

import json
import socket
import subprocess
import sys
import weakref

import pytest
import torch
from failing_disk import no_file_above
from run_events import events_of, syncs_of

from composer_replication import SyncError
from composer_replication.group.run_folder import (
    STATUS_EVERY_S,
    ReplicaFolder,
    last_outer_step,
    make_run_folder,
)


def status(tmp_path):
    return json.loads((tmp_path / "replica_a" / "status.json").read_text())


def test_every_sync_is_one_more_line_also_after_a_restart(tmp_path):
    folder = ReplicaFolder(tmp_path, 0)
    folder.append("sync", {"outer_step": 1, "loss": None})
    folder.append("sync", {"outer_step": 2, "loss": 0.5})
    ReplicaFolder(tmp_path, 0).append("sync", {"outer_step": 3})
    syncs = syncs_of(tmp_path / "replica_0")
    assert [sync["outer_step"] for sync in syncs] == [1, 2, 3]
    assert syncs[0]["loss"] is None and syncs[0]["time"] <= syncs[1]["time"]


def test_status_is_replaced_at_once_in_a_new_phase_and_else_twice_a_second(tmp_path, clock):
    folder = ReplicaFolder(tmp_path, "a")
    folder.write_status("training", batch=1)
    clock.now += STATUS_EVERY_S - 0.01
    folder.write_status("training", batch=2)
    assert status(tmp_path) == {"phase": "training", "batch": 1}
    clock.now += 0.01
    folder.write_status("training", batch=3)
    assert status(tmp_path) == {"phase": "training", "batch": 3}
    folder.write_status("evaluating", batch=3, loss=None)
    assert status(tmp_path) == {"phase": "evaluating", "batch": 3, "loss": None}


def test_without_a_run_dir_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = ReplicaFolder(None, 0)
    folder.append("sync", {"outer_step": 1})
    folder.write_status("training")
    folder.write_end({})
    assert list(tmp_path.iterdir()) == []


def test_the_run_folder_is_named_after_the_config_unless_it_has_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    named = make_run_folder({}, "configs/tiny.yaml")
    assert named.parent == tmp_path / "runs" and named.name.startswith("tiny-20")
    assert make_run_folder({"run_dir": "here"}, "tiny.yaml") == tmp_path / "here"


def test_two_runs_that_start_in_the_same_second_have_a_folder_each(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = {make_run_folder({}, "tiny.yaml") for _ in range(5)}
    assert len(folders) == 5 and all(folder.is_dir() for folder in folders)


HOLD = """
import sys
from composer_replication.group.run_folder import make_run_folder
try:
    make_run_folder({"run_dir": sys.argv[1], "autoresume": True}, "tiny.yaml")
    print("started", flush=True)
    sys.stdin.read()
except ValueError as error:
    print(error)
"""


def hold(folder):
    return subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdin=-1, stdout=-1, stderr=-1, text=True
    )


@pytest.mark.integration
def test_a_folder_in_which_another_process_runs_is_refused_before_anything_changes(tmp_path):
    (tmp_path / "replica_0").mkdir()
    with hold(tmp_path) as first:
        assert first.stdout.readline() == "started\n"
        (tmp_path / "STOP").touch()
        said, _ = hold(tmp_path).communicate()
        owner = f"{first.pid} on {socket.gethostname()}"
        assert f"{tmp_path} is in use by process {owner}: wait for its end, end it, or" in said
        assert (tmp_path / "STOP").exists()
        with pytest.raises(ValueError, match=r"or give another run_dir=\.\.\."):
            make_run_folder({"run_dir": str(tmp_path)}, "tiny.yaml")
        first.kill()
    with hold(tmp_path) as third:
        assert third.stdout.readline() == "started\n"
        third.stdin.close()


def test_a_process_may_run_twice_in_its_folder(tmp_path):
    for _ in range(2):
        assert make_run_folder({"run_dir": str(tmp_path)}, "tiny.yaml") == tmp_path


@pytest.mark.parametrize("kind", ["summary", "sync", "end"])
def test_a_folder_that_holds_a_run_is_refused(tmp_path, kind):
    if kind == "summary":
        (tmp_path / "summary.json").touch()
    else:
        ReplicaFolder(tmp_path, 0).append(kind, {})
    with pytest.raises(
        ValueError,
        match=r"holds a run already: continue it \(autoresume=true with a save_folder\), give ",
    ):
        make_run_folder({"run_dir": str(tmp_path)}, "tiny.yaml")


def test_the_folder_of_a_start_that_failed_is_used_again_without_its_record(tmp_path):
    folder = ReplicaFolder(tmp_path, 0)
    folder.append("start", {})
    folder.write_rejection(ValueError("sync_every=3"))
    make_run_folder({"run_dir": str(tmp_path)}, "tiny.yaml")
    assert list((tmp_path / "replica_0").iterdir()) == []


def test_the_time_until_a_run_is_continued_is_no_time_of_the_run(tmp_path):
    ReplicaFolder(tmp_path, "a").write_status("training", batch=3, trained_at=5.0)
    make_run_folder({"run_dir": str(tmp_path), "autoresume": True}, "x.yaml")
    assert status(tmp_path) == {"phase": "starting", "batch": 3}


def test_a_run_that_is_continued_keeps_its_events_and_says_so(tmp_path):
    ReplicaFolder(tmp_path, "a").append("sync", {"diloco/outer_step": 1})
    make_run_folder({"run_dir": str(tmp_path), "autoresume": True}, "x.yaml")
    kinds = [event["event"] for event in events_of(tmp_path / "replica_a", "sync", "continued")]
    assert kinds == ["sync", "continued"]


@pytest.mark.parametrize("below", ["file", "file/run"])
def test_a_run_folder_that_cannot_be_made_is_refused(below, tmp_path):
    (tmp_path / "file").touch()
    message = f"run_dir='{tmp_path / below}' cannot be made .*: name a folder that this user can"
    with pytest.raises(ValueError, match=message):
        make_run_folder({"run_dir": str(tmp_path / below)}, "tiny.yaml")


def lines_of(tmp_path, kind="sync"):
    return [event["diloco/outer_step"] for event in events_of(tmp_path / "replica_a", kind)]


def test_a_full_disk_ends_nothing_and_no_line_is_lost(tmp_path, clock, caplog):
    folder = ReplicaFolder(tmp_path, "a")
    folder.append("sync", {"diloco/outer_step": 1})
    folder.write_status("training", batch=1)
    with no_file_above(80):
        for step in range(2, 6):
            clock.now += STATUS_EVERY_S
            folder.append("sync", {"diloco/outer_step": step})
            folder.append("resume", {"diloco/outer_step": step})
            folder.write_status("training", batch=step, text="x" * 80)
        assert status(tmp_path) == {"phase": "training", "batch": 1}
        assert lines_of(tmp_path) == [1]
    clock.now += STATUS_EVERY_S
    folder.write_status("training", batch=6)
    assert status(tmp_path)["batch"] == 6
    assert lines_of(tmp_path) == [1, 2, 3, 4, 5]
    assert lines_of(tmp_path, "resume") == [2, 3, 4, 5]
    assert caplog.text.count("Training continues; 1 lines wait in memory until there is space") == 1


def test_a_disk_that_stays_full_is_a_warning_once_a_minute(tmp_path, clock, caplog):
    folder = ReplicaFolder(tmp_path, "a")
    with no_file_above(0):
        for _ in range(300):
            clock.now += 1.0
            folder.append("sync", {"diloco/outer_step": 1})
    assert len(caplog.records) == 5 and "File too large" in caplog.text


def test_a_folder_that_is_removed_in_mid_run_is_made_again(tmp_path, clock):
    folder = ReplicaFolder(tmp_path, "a")
    (tmp_path / "replica_a").rmdir()
    folder.append("sync", {"diloco/outer_step": 1})
    folder.write_status("training", batch=1)
    assert lines_of(tmp_path) == [1] and status(tmp_path)["batch"] == 1


def test_a_file_in_place_of_the_run_folder_is_an_error_before_training(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        ReplicaFolder(tmp_path / "file", "a")


@pytest.mark.parametrize(
    "damage", [b"", b'{"diloco/outer', b'{"diloco/outer\n', bytes(64) + b"\n", b"\n"]
)
def test_what_a_power_cut_leaves_does_not_keep_a_group_from_starting(tmp_path, damage):
    folder = tmp_path / "replica_a"
    folder.mkdir()
    line = b'{"event": "sync", "diloco/outer_step": 7.0, "batch": 3}\n'
    (folder / "events.jsonl").write_bytes(line + damage)
    (folder / "status.json").write_bytes(damage)
    assert last_outer_step(tmp_path) == 7
    assert ReplicaFolder(tmp_path, "a").reached() == {"batch": 3, "outer_step": 7}
    make_run_folder({"run_dir": str(tmp_path), "autoresume": True}, "x.yaml")
    assert status(tmp_path) == {"phase": "starting"}


def test_an_error_is_written_once_and_not_kept_with_all_that_its_frames_hold(tmp_path):
    def fail():
        batches = torch.ones(3)
        held.append(weakref.ref(batches))
        raise SyncError("it was not sound")

    folder, held = ReplicaFolder(tmp_path, "a"), []
    try:
        fail()
    except SyncError as error:
        folder.write_error(error)
        folder.write_error(error)  # another place sees it too
    assert held[0]() is None
    folder.write_error(KeyError("no"))
    folder.write_rejection(rejection := ValueError("sync_every=3"))
    folder.write_error(rejection)  # as the Trainer closes
    events = events_of(tmp_path / "replica_a", "error", "rejection")
    assert [(event["type"], event["error"]) for event in events] == [
        ("SyncError", "SyncError: it was not sound"),
        ("KeyError", "KeyError: 'no'"),
        ("ValueError", "sync_every=3"),
    ]
