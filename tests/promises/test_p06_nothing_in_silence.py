"""P6: a sync that fails is logged with its cause, tried again, and raised in the end."""

from types import SimpleNamespace

import pytest
from common import Constant
from harness.groups import Group, attempt, run, traces

from composer_replication import simulate
from composer_replication.diloco.retry import (
    StartBarrier,
    StartPostponed,
    SyncError,
    SyncRetries,
)
from composer_replication.options import ReplicaOptions
from composer_replication.simulation.manager import SimulatedManager
from composer_replication.simulation.simulation import Fault, SimulationError


@pytest.mark.slow
def test_retries_end_with_an_error_that_says_why(caplog):
    faults = [Fault("fail_commit", replica_id=0, step=1)] * 3
    with pytest.raises(SimulationError, match="replica 0 raised SyncError") as caught:
        traces(1, (-1.0,), 2, *faults, sync_every=2, max_sync_retries=2)
    assert isinstance(caught.value.__cause__, SyncError)
    assert "did not commit in 3 attempts" in str(caught.value)
    assert "scripted fault: fail_commit" in str(caught.value)
    assert [r.message[-21:] for r in caplog.records if "did not commit" in r.message] == [
        "trying again in 0.1 s", "trying again in 0.2 s", "trying again in 0.4 s",
    ]  # fmt: skip


def test_who_trains_on_after_a_last_sync_that_failed_has_more_to_send():
    rows = []

    def replica(sim):
        with Group(sim, Constant(w=(1,)), sync_every=2, max_sync_retries=0) as group:
            group.step(-1.0)
            with pytest.raises(SyncError):
                group.diloco.final_sync()
            row = group.diloco._outer._row
            group.diloco._outer._row = lambda *sent: rows.append(row(*sent)) or rows[-1]
            group.step(-1.0, -1.0, -1.0)

    simulate(replica, num_replicas=1, faults=[Fault("fail_commit", replica_id=0, step=1)])
    assert [row.has_more for row in rows] == [True, True]


def test_a_wait_for_others_is_told_to_the_watch_for_hangs(monkeypatch):
    told = []
    monkeypatch.setattr(SimulatedManager, "watch_waits", lambda manager, note: told.append(note))

    def replica(sim):
        with Group(sim, Constant(w=(1,)), sync_every=2) as group:
            assert told == [group.diloco.hang_watch.note_progress]

    simulate(replica, num_replicas=1)


@pytest.mark.parametrize("counted", ["samples", "tokens"])
def test_weighting_by_what_nobody_counted_is_refused(counted):
    with pytest.raises(SimulationError, match=rf"no {counted} were counted: call count_{counted}"):
        traces(1, (-1.0,), 2, sync_every=2, weight_by=counted)


def test_a_delay_with_alpha_0_throws_the_overlapped_steps_away_and_says_so():
    settings = {"fragment_sync_delay": 2, "fragment_update_alpha": 0}
    with pytest.warns(UserWarning, match="fragment_update_alpha=0 throws away the 2 inner steps"):
        (seen,) = traces(1, (-1.0,), 8, sync_every=4, **settings)
    assert seen[-1] == (6.0, 6.0)


def test_a_vote_that_fails_in_the_last_sync_ends_with_a_warning(caplog):
    def replica(group):
        moves = [-1.0 - group.id] * 3
        group.step(*moves)
        group.diloco.expect_last_step()
        group.step(moves[0])
        group.end()
        return group.diloco.global_digest()

    fault = Fault("fail_commit", replica_id=2, step=2)
    first, second, odd = run(3, replica, fault, sync_every=2)
    assert first == second != odd
    (warning,) = (r for r in caplog.records if "the run's last sync" in r.message)
    assert warning.threadName == "replica_2"


# ---- fewer groups than min_replica_size --------------------------------------------------------

ALONE = "1 replica groups are connected, and min_replica_size=2"


def noting(sent, **settings):
    """A group that notes how many numbers it sends to how many groups."""

    def replica(sim):
        allreduce = sim.manager.allreduce

        def noting_allreduce(tensor, *arguments, **named):
            sent.add((sim.manager.num_participants(), tensor.numel()))
            return allreduce(tensor, *arguments, **named)

        sim.manager.allreduce = noting_allreduce
        with Group(sim, Constant(w=(50_000,)), sync_every=2, min_size=2, **settings) as group:
            group.step(*[-1.0] * 6)

    return replica


@pytest.mark.parametrize("delay", [0, 1])
def test_who_is_left_alone_sends_no_parameters_and_gives_up_when_it_is_told_to(delay):
    sent = set()
    replica = noting(sent, give_up_after_s=0.1, fragment_sync_delay=delay)
    with pytest.raises(Exception, match=ALONE):
        simulate(replica, num_replicas=2, faults=[Fault("kill", replica_id=1, step=2)])
    assert (2, 50_000) in sent and (1, 50_000) not in sent


def test_a_start_with_fewer_sends_no_parameters():
    sent = set()
    awaited = {"num_replicas": 2, "start_timeout_s": 0.1, "on_start_timeout": "start"}
    with pytest.raises(Exception, match="1 of 2 replica groups are connected, and min_replica_siz"):
        simulate(noting(sent, **awaited), num_replicas=1)
    assert sent and (1, 50_000) not in sent


def test_survivors_below_it_wait_and_go_on_when_it_is_met_again():
    restart = Fault("restart", replica_id=1, step=2)
    first, back = traces(2, (-1.0, -2.0), 6, restart, ends=True, sync_every=2, min_size=2)
    # The retry finds the other back, without steps: the first group's own count.
    assert [first[i] for i in (1, 3, 5)] == [(7.0, 7.0), (5.0, 5.0), (2.0, 2.0)]
    assert back[1] == (2.0, 2.0)
    # It stays, with nothing, until the other has ended.
    assert first[-1] == back[-1] == (-6.0, -6.0)


def test_time_with_enough_groups_is_no_wait_for_them(monkeypatch):
    now, present = [0.0], [2]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda s: now.append(now.pop() + s))
    monkeypatch.setattr("composer_replication.diloco.retry.time", clock)
    manager = SimpleNamespace(
        asks_to_gather=False,
        fault="another",
        _min_replica_size=2,
        errored=lambda: OSError("lost") if present[0] == 2 else None,
        num_participants=lambda: present[0],
        start_quorum=lambda: None,
    )
    retries = SyncRetries(manager, SimpleNamespace(outer_step=1), give_up_after_s=10.0)
    for _ in range(1_100):  # for more than an hour, others make the sync fail
        retries.form_quorum(False, False)
    present[0] = 1
    for _ in range(10):
        retries.form_quorum(False, False)
    with pytest.raises(SyncError, match="1 replica groups are connected"):
        for _ in range(2):
            retries.form_quorum(False, False)


FAILED, POSTPONED = OSError("lost"), StartPostponed("1 of 2")


@pytest.mark.parametrize(("attempts", "says"), [
    ([(FAILED, None), (FAILED, None)], "and nobody is known to cause it: this group leaves"),
    ([(FAILED, None), (FAILED, "this")], "because of this group: this group leaves"),
    ([(FAILED, "this"), (FAILED, "another"), (FAILED, "this")], None),
    ([(FAILED, None), (POSTPONED, None), (FAILED, None)], None),
])  # fmt: skip
def test_a_start_that_fails_twice_in_a_row_says_whose_fault_it_is(attempts, says, monkeypatch):
    monkeypatch.setattr("composer_replication.diloco.retry.START_POLL_S", 0.0)
    manager = SimpleNamespace(_min_replica_size=1, num_participants=lambda: 2)
    manager.start_quorum = lambda: None
    barrier = StartBarrier(manager, ReplicaOptions(), None)
    said = None
    for error, fault in attempts:
        manager.errored = lambda error=error: error
        manager.fault = fault
        said = attempt(barrier.form_quorum)()
    assert said is None if says is None else f"failed 2 times in a row {says}" in said


def test_a_resume_may_have_another_min_replica_size():
    (settings,) = run(1, lambda group: group.diloco.state_dict()["settings"])
    assert "min_replica_size" not in settings
