"""Which groups are started again, when, and which are not.

Run: pytest tests/launch/test_supervision.py.

Stood in for: the processes, by exit statuses; the clock's pauses, by shorter ones.
"""

import json
import time

import pytest
from failing_disk import no_file_above
from run_events import write_events
from scripted_groups import Groups, supervise, write

from composer_replication.launch import supervision


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(supervision, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(supervision, "POLL_S", 0.001)


def finish_after(restarts):
    """Both groups finish when a group has been started again so often."""

    def look(groups, looks):
        if len(groups.started) == restarts:
            groups.lives[0][0] = groups.lives[1][0] = 0

    return look


@pytest.mark.parametrize(
    ("phase", "lives", "options"),
    [
        ("training", [-9, None], {}),
        ("training", [1, None], {}),
        (None, [-9, None], {}),
        ("joining", [-9, None], {}),
        ("joining", [143, None], {}),
        ("joining", [247, None], {}),
        (None, [1, 1, None], {"start_retries": 2}),
        (None, [1, -9, 1, None], {"start_retries": 2}),
    ],
)
def test_a_group_that_dies_is_started_again_and_the_run_goes_on(tmp_path, phase, lives, options):
    write(tmp_path, 0)
    if phase is not None:
        write(tmp_path, 1, phase=phase, syncs=int(phase == "training"))
    restarts = len(lives) - 1
    failed, supervisor, groups = supervise(
        tmp_path, {0: [None], 1: lives}, on_look=finish_after(restarts), **options
    )
    assert failed == {} and supervisor.restarts == {"0": 0, "1": restarts}
    assert groups.started == [1] * restarts
    # Its other ranks and workers end before it starts again.
    assert groups.ended == [1] * restarts + [0, 1]


def test_a_restart_for_which_there_is_no_process_is_tried_again(tmp_path, monkeypatch):
    failures = [BlockingIOError(11, "no process")] * 2
    start = Groups.start

    def start_in_vain(groups, replica_id):
        if failures:
            raise failures.pop()
        start(groups, replica_id)

    monkeypatch.setattr(Groups, "start", start_in_vain)
    write(tmp_path, 0, 1)
    lives = {0: [None], 1: [-9, None]}
    failed, supervisor, groups = supervise(tmp_path, lives, on_look=finish_after(1))
    assert failed == {} and groups.started == [1] and supervisor.restarts == {"0": 0, "1": 3}
    assert supervisor.said[1] == "group 1 cannot be started: [Errno 11] no process"


def test_who_fails_to_start_after_another_was_killed_is_started_again(tmp_path):
    # Its two attempts to start have failed, since the other died in them.
    write(tmp_path, 0, phase="joining", syncs=0)
    lives = {1: [-9, None], 0: [1, None]}
    failed, supervisor, _ = supervise(tmp_path, lives, on_look=finish_after(2))
    assert failed == {} and supervisor.restarts == {"0": 1, "1": 1}


@pytest.mark.parametrize(
    ("phase", "lives", "options", "failed"),
    [
        pytest.param("training", [2], {}, 2, id="bad input"),
        pytest.param("training", [2], {"start_retries": 3}, 2, id="bad input, whatever is asked"),
        pytest.param("rejected", [1], {}, 2, id="what the callback has rejected"),
        pytest.param("rejected", [1], {"start_retries": 3}, 2, id="whatever is asked for"),
        pytest.param(None, [1], {}, 1, id="an error of its own before it joined"),
        pytest.param("starting", [1], {}, 1, id="before its callback has said anything"),
        pytest.param("joining", [1], {}, 1, id="while it joins"),
        pytest.param("starting", [1, 1, 1], {"start_retries": 1}, 1, id="too often"),
        pytest.param("training", [-9], {"max_restarts": 0}, -9, id="no restarts are allowed"),
    ],
)
def test_what_is_not_tried_again_ends_the_run(tmp_path, phase, lives, options, failed):
    write(tmp_path, 0, phase="joining", syncs=0)
    if phase is not None:
        write(tmp_path, 1, phase=phase, syncs=int(phase == "training"))
    again = len(lives) > 1
    found, supervisor, groups = supervise(tmp_path, {0: [None], 1: lives}, **options)
    assert found == {1: failed} and groups.started == [1] * again
    assert supervisor.records[1].deaths == [lives[0]] * (1 + again)


@pytest.mark.parametrize("lives", [[1, 1, 1, 7], [1, 2]], ids=["restarts used up", "bad input"])
def test_a_group_that_cannot_be_kept_running_is_left_out_and_the_others_go_on(tmp_path, lives):
    write(tmp_path, 0, 1)

    def finish_when_left_out(groups, looks):
        if looks[-1][1] is not None:
            groups.lives[0][0] = 0

    failed, supervisor, groups = supervise(
        tmp_path, {0: [None], 1: lives}, on_look=finish_when_left_out
    )
    assert failed == {} and supervisor.records[1].end == supervision.LEFT_OUT
    assert groups.started == [1] * (len(lives) - 1) and supervisor.records[0].status == 0
    last = f"group 1 ended with exit status {lives[-1]}; the others go on without it"
    assert supervisor.said[-1] == last


def test_the_last_group_in_training_that_cannot_be_kept_running_ends_the_run(tmp_path):
    write(tmp_path, 0, 1, phase="joining")
    failed, supervisor, groups = supervise(tmp_path, {0: [None], 1: [-9, -9, -9, -40]})
    assert failed == {1: -40}
    assert groups.started == [1, 1, 1]
    assert supervisor.said[-1] == "group 1 was ended by signal 40, and is not started again"


def test_a_group_alone_that_dies_in_training_again_and_again_has_failed(tmp_path):
    write(tmp_path, 0)

    def train(groups, looks):
        write(tmp_path, 0)

    failed, supervisor, _ = supervise(tmp_path, {0: [-9] * 4}, on_look=train)
    assert failed == {0: -9}
    assert supervisor.said[-1] == "group 0 was ended by SIGKILL, and is not started again"


def test_a_sync_in_between_starts_the_count_anew(tmp_path):
    write(tmp_path, 0, 1)

    def commit(groups, looks):
        write_events(tmp_path / "replica_1", "sync", {"time": time.time()})
        if len(groups.started) == 6:
            groups.lives[0][0] = groups.lives[1][0] = 0

    failed, supervisor, _ = supervise(
        tmp_path, {0: [None], 1: [1] * 7}, max_restarts=2, on_look=commit
    )
    assert failed == {} and supervisor.restarts["1"] == 6


@pytest.mark.parametrize(("lives", "failed"), [([2, 1, None], {}), ([1, 1, 1, 1], {1: 2})])
def test_what_was_accepted_once_is_tried_again_when_it_is_rejected(tmp_path, lives, failed):
    write(tmp_path, 0), write(tmp_path, 1, phase="rejected")

    def finish_when_back(groups, looks):
        if looks[-1][1] is None:
            write(tmp_path, 1, phase="rejected")
        if groups.lives[1][0] is None:
            groups.lives[1][0] = 0
        if looks[-1][1] is not None:
            groups.lives[0][0] = 0

    seen, supervisor, _ = supervise(tmp_path, {0: [None], 1: lives}, on_look=finish_when_back)
    left_out = {id: r.status for id, r in supervisor.records.items() if r.status}
    assert seen | left_out == failed and supervisor.restarts["1"] == len(lives) - 1


@pytest.mark.parametrize(
    ("others", "started", "status"),
    [
        pytest.param([1], [], 2, id="in the program: no group can start"),
        pytest.param([None], [1], 1, id="of one group alone: its reason may be outside"),
        pytest.param([-9, None], [0, 1], 1, id="another one was killed"),
    ],
)
def test_an_error_before_any_group_has_joined_is_tried_again_unless_all_had_one(
    tmp_path, others, started, status
):
    for replica_id in (0, 1):
        write(tmp_path, replica_id, phase="starting", syncs=0)
        (tmp_path / f"replica_{replica_id}" / "log.txt").write_text("TypeError: no x\n")
    seen, supervisor, groups = supervise(
        tmp_path, {0: others, 1: [1, 1]}, start_retries=1, max_restarts=1
    )
    assert groups.started == started and seen[1] == status
    assert supervisor.records[1].error == ("" if -9 in others else "TypeError: no x")


NOBODYS = {"diloco/contribution": 0.0, "diloco/total_contribution": 0.0}
OTHERS = NOBODYS | {"diloco/total_contribution": 4.0}
NOT_SOUND = {"type": "SyncError", "error": "SyncError: this pseudo-gradient was not sound in 9"}


def write_syncs(folder, replica_id, syncs, error=None):
    write(folder, replica_id, syncs=0)
    lines = ({"time": time.time() + number} | sync for number, sync in enumerate(syncs))
    write_events(folder / f"replica_{replica_id}", "sync", *lines)
    if error:
        write_events(folder / f"replica_{replica_id}", "error", {"time": time.time() + 60} | error)


def test_a_group_that_leaves_a_run_in_which_nobody_learns_ends_it(tmp_path):
    write_syncs(tmp_path, 0, [NOBODYS] * 9), write_syncs(tmp_path, 1, [NOBODYS] * 8, NOT_SOUND)
    failed, supervisor, groups = supervise(tmp_path, {0: [None], 1: [1]})
    assert failed == {1: 1} and groups.started == []
    assert supervisor.records[1].error.startswith("this run has learned nothing: in its last 9 ")


@pytest.mark.parametrize(("syncs", "status"), [(OTHERS, 1), (NOBODYS, -9)])
def test_syncs_to_which_a_group_does_not_contribute_are_no_progress(tmp_path, syncs, status):
    def sync(groups, looks):
        write_syncs(tmp_path, 1, [syncs] * (1 + len(groups.started)), NOT_SOUND)
        if looks[-1][1] is not None:
            groups.lives[0][0] = 0

    write_syncs(tmp_path, 0, [{}]), write_syncs(tmp_path, 1, [syncs])
    _, supervisor, groups = supervise(tmp_path, {0: [None], 1: [status] * 4}, on_look=sync)
    assert supervisor.records[1].end == supervision.LEFT_OUT and groups.started == [1, 1, 1]


def test_a_group_that_has_ended_and_says_itself_that_it_learned_nothing_has_finished(tmp_path):
    for replica_id in (0, 1):
        write_syncs(tmp_path, replica_id, [NOBODYS] * 2)
        end = {"outer_steps": 0, "inner_steps": 8, "global_digest": "ab" * 32}
        write_events(tmp_path / f"replica_{replica_id}", "end", end)
    failed, supervisor, groups = supervise(tmp_path, {0: [1], 1: [1]})
    assert failed == {} and groups.started == []
    assert {record.end for record in supervisor.records.values()} == {supervision.FINISHED}


def test_a_group_that_had_trained_to_the_end_before_is_not_started_again_and_again(tmp_path):
    # Such as a Composer job that is run once more: its fit has nothing left to train.
    write(tmp_path, 0, phase="starting", syncs=1)
    end = {"outer_steps": 1, "inner_steps": 8, "global_digest": "ab" * 32}
    write_events(tmp_path / "replica_0", "end", end)
    lives = [1] * (1 + supervision.START_RETRIES)  # its coordinator may not be there yet
    failed, supervisor, groups = supervise(tmp_path, {0: lives}, start_retries=99)
    assert failed == {0: 1} and groups.started == [0] * supervision.START_RETRIES
    assert supervisor.said[-1].endswith("is not started again: it had trained to the end before")


def test_a_script_that_loads_no_checkpoint_is_not_started_again(tmp_path):
    error = {"type": "NothingToContinueFromError", "error": "none may begin the run"}
    for replica_id in (0, 1):
        write(tmp_path, replica_id, phase="rejected", syncs=3)  # of before the run was stopped
        rejection = {"time": time.time() + 60} | error
        write_events(tmp_path / f"replica_{replica_id}", "rejection", rejection)
    failed, supervisor, groups = supervise(tmp_path, {0: [1], 1: [1]})
    assert failed == {0: 2, 1: 2} and groups.started == []
    assert supervisor.records[0].error == error["error"]


def test_the_phase_of_a_group_that_is_started_again_is_never_half_written(tmp_path):
    write(tmp_path, 0, 1)
    status = tmp_path / "replica_1" / "status.json"
    (tmp_path / "before").hardlink_to(status)
    supervise(tmp_path, {0: [None], 1: [-9, None]}, on_look=finish_after(1))
    restart_at = pytest.approx(time.time(), abs=900)
    assert json.loads(status.read_text()) == {"phase": "finished", "restart_at": restart_at}
    assert not status.samefile(tmp_path / "before")  # replaced, not overwritten


def test_a_group_that_dies_when_all_others_have_finished_is_given_up(tmp_path):
    write(tmp_path, 0, 1)
    failed, supervisor, groups = supervise(tmp_path, {0: [0], 1: [-9]})
    assert failed == {} and groups.started == []
    assert supervisor.records[1].end == supervision.NOT_BACK
    (said,) = supervisor.said
    assert said == "group 1 was ended by SIGKILL; it is too late to join the others again"


def test_groups_that_come_back_too_late_do_not_wait_for_each_other_for_ever(tmp_path):
    write(tmp_path, 0, 1, 2)

    def the_first_finishes_while_they_start(groups, looks):
        if sorted(groups.started) == [1, 2]:
            write(tmp_path, 1, 2, phase="joining")
            groups.lives[0][0] = 0

    failed, supervisor, groups = supervise(
        tmp_path,
        {0: [None], 1: [-9, None], 2: [-9, None]},
        on_look=the_first_finishes_while_they_start,
    )
    assert failed == {}
    assert {supervisor.records[id].end for id in (1, 2)} == {supervision.NOT_BACK}


@pytest.mark.parametrize("status", [b"", b'{"phase": "tr', bytes(40), b"[]"])
def test_neither_a_full_disk_nor_a_damaged_status_ends_the_watch(tmp_path, caplog, status):
    write(tmp_path, 0, 1)
    (tmp_path / "replica_1" / "status.json").write_bytes(status)

    with no_file_above(0):
        failed, supervisor, _ = supervise(
            tmp_path, {0: [None], 1: [-9, None]}, on_look=finish_after(1)
        )
    assert failed == {} and supervisor.restarts == {"0": 0, "1": 1}
    assert f"Cannot use {tmp_path}/replica_1 ([Errno 27] File too large" in caplog.text


def test_each_end_is_said_once_with_the_restart_that_follows(tmp_path):
    write(tmp_path, 0, 1)

    _, supervisor, _ = supervise(
        tmp_path, {0: [None], 1: [-9, 1, None]}, on_look=finish_after(2), first_pause_s=0.1
    )
    line = "group 1 was ended by SIGKILL, starts again in 0 s (restart 1 of 3)"
    again = "group 1 ended with exit status 1, starts again in 0 s (restart 2 of 3)"
    assert supervisor.said == [line, again] and len(line) < 80


def test_a_group_that_waits_for_its_restart_is_stopped_with_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(supervision, "FIRST_PAUSE_S", 60.0)
    write(tmp_path, 0, 1)
    failed, _, _ = supervise(tmp_path, {0: [-9], 1: [2]})
    phases = [
        json.loads((tmp_path / f"replica_{i}" / "status.json").read_text())["phase"] for i in (0, 1)
    ]
    assert failed == {1: 2} and phases == ["stopped", "failed"]
