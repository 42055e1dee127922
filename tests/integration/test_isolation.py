"""What goes wrong in one group, or between it and another, ends no other group.

Real processes, a real lighthouse, real gloo. That an address does not answer is made by a group
that reports another address, or by a check that fails for one member.

Run: pytest -m integration tests/integration/test_isolation.py
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from common import plain_sgd, take_step
from harness.processes import Process, run_groups
from integration.test_faults import Scalar

import composer_replication.replica.manager as manager_module
from composer_replication import DiLoCo, SyncError
from composer_replication.replica.blame import AtFaultError, Blame
from composer_replication.replica.manager import ReplicaManager
from composer_replication.replica.peer_client import PeerError

pytestmark = pytest.mark.integration

SYNCS_BEFORE = 5
LEAVES_AFTER_S = 3.0
ENOUGH = 13
LOST = ConnectionError("all connections are lost")


def train(
    group: Process,
    trouble: Callable[[Process, ReplicaManager], None],
    first: int = 1,
    **settings: Any,
) -> dict[str, Any]:
    """Train with trouble after the first syncs; say how it went.

    All have ``ENOUGH`` syncs after that. The group ``first`` then ends, unless it has had to leave
    before, and the others end after it.
    """
    Blame.LEAVES_AFTER_S = LEAVES_AFTER_S
    model = Scalar()
    lost = syncs_after = retries = 0
    ended, last, longest = None, time.monotonic(), 0.0
    connected: list[int] = []
    try:
        with group.training(model, 1, options={"timeout": 60.0}, **settings) as own:
            manager = own.manager
            count_connections(manager, connected)
            has_begun = False
            while not (
                syncs_after >= ENOUGH and (group.replica_id == first or group.over.is_set())
            ):
                time.sleep(0.1)
                if own.diloco.outer_step >= SYNCS_BEFORE and not has_begun:
                    has_begun, last = True, time.monotonic()
                    trouble(group, manager)
                take_step(own.inner, -1.0)
                for report in own.diloco.pop_finished_syncs():
                    lost, retries = lost + report.steps_lost, retries + report.retries
                    if has_begun:
                        longest = max(longest, time.monotonic() - last)
                        last, syncs_after = time.monotonic(), syncs_after + 1
    except (SyncError, AtFaultError) as error:
        ended = f"{type(error).__name__}: {error}"
    finally:
        group.over.set()
    return {
        "ended": ended,
        "lost": lost,
        "syncs_after": syncs_after,
        "longest_s": longest,
        "retries": retries,
        "theta": model.w.item(),
        "connections": len(connected),
    }


def check_went_on(*groups: dict[str, Any]) -> None:
    """These have trained on, and lost nothing."""
    for group in groups:
        assert group["ended"] is None and group["lost"] == 0 and group["syncs_after"] > 3


def count_connections(manager: ReplicaManager, connected: list[int]) -> None:
    """Note each time that the members of a quorum connect."""
    connect = manager._reconfigure_pg

    def noted(number: int, handles: list[str]) -> None:
        connected.append(number)
        connect(number, handles)

    manager._reconfigure_pg = noted


def unreachable(manager: ReplicaManager, seconds: float) -> None:
    """Report an address at which nothing listens, and lose all connections."""
    handle, until = manager._pg.get_reconfigure_handle, time.monotonic() + seconds

    def report() -> str:
        where = {"store": "127.0.0.1:9"} if time.monotonic() < until else {}
        return json.dumps(json.loads(handle()) | where)

    manager._pg.get_reconfigure_handle = report
    manager.report_error(LOST)


def one_is_unreachable(group: Process, lasts_s: float) -> dict[str, Any]:
    def trouble(group: Process, manager: ReplicaManager) -> None:
        if group.replica_id == 1:
            unreachable(manager, lasts_s)

    return train(group, trouble)


def test_a_group_that_cannot_be_reached_for_a_moment_ends_nobody_and_costs_the_others_no_step():
    first, sick, last = run_groups(one_is_unreachable, 3, lasts_s=2.0)
    for result in (first, sick, last):
        assert result["ended"] is None and result["retries"] > 0
        assert result["syncs_after"] > 3
    # The others went on without it meanwhile, so that it is behind and heals.
    assert first["lost"] == last["lost"] == 0
    assert max(first["longest_s"], last["longest_s"]) < sick["longest_s"]


def test_a_group_that_cannot_be_reached_for_good_leaves_alone():
    first, sick, last = run_groups(one_is_unreachable, 3, lasts_s=1e9)
    assert sick["ended"].startswith("AtFaultError: for ") and "cannot reach it" in sick["ended"]
    for survivor in (first, last):
        check_went_on(survivor)
        # They connect anew when it fails, without it, and when it has left, and not in each sync.
        assert survivor["syncs_after"] > 12 > survivor["connections"]
    assert first["theta"] == pytest.approx(last["theta"], abs=2.5)


def two_cannot_reach_each_other(group: Process) -> dict[str, Any]:
    def trouble(group: Process, manager: ReplicaManager) -> None:
        cut = {0: "group_2", 2: "group_0"}.get(group.replica_id)
        find = manager_module.find_unreachable

        def find_with_a_fault(handles: Any, limit_s: float) -> tuple[str, ...]:
            return find({n: h | {"store": "127.0.0.1:9"} if n.split(":")[0] == cut else h
                         for n, h in handles.items()}, limit_s)  # fmt: skip

        manager_module.find_unreachable = find_with_a_fault
        manager.report_error(LOST)

    return train(group, trouble, first=2)


def test_of_two_groups_that_cannot_reach_each_other_one_leaves():
    first, middle, last = run_groups(two_cannot_reach_each_other, 3)
    assert last["ended"].startswith("AtFaultError") and "group_0 cannot reach it" in last["ended"]
    check_went_on(first, middle)


def one_fails_by_itself(group: Process) -> dict[str, Any]:
    def trouble(group: Process, manager: ReplicaManager) -> None:
        if group.replica_id == 1:

            def allreduce(*arguments: Any, **named: Any) -> Any:
                manager.report_error(OSError(24, "Too many open files"))
                return ReplicaManager.allreduce(manager, *arguments, **named)

            manager.allreduce = allreduce

    return train(group, trouble)


def test_a_group_with_an_error_of_its_own_in_every_sync_leaves_alone():
    first, sick, last = run_groups(one_fails_by_itself, 3)
    assert sick["ended"].startswith("AtFaultError") and "an error of its own" in sick["ended"]
    check_went_on(first, last)


def one_hangs(group: Process) -> dict[str, Any]:
    def trouble(group: Process, manager: ReplicaManager) -> None:
        if group.replica_id == 1:
            time.sleep(1000)

    return train(group, trouble, first=0, hang_timeout_s=3.0)


@pytest.mark.alone
def test_a_group_whose_training_thread_hangs_stops_the_other_for_its_limit_and_no_longer():
    survivor, hung = run_groups(one_hangs, 2, killed=[1])
    assert hung is None and survivor["ended"] is None and survivor["lost"] == 0
    assert 2 < survivor["longest_s"] < 10 and survivor["syncs_after"] > 5


def one_resumes_and_cannot_heal(group: Process) -> dict[str, Any]:
    def trouble(group: Process, manager: ReplicaManager) -> None:
        group.signal.set()

    if group.replica_id < 2:
        return train(group, trouble, first=2, num_replicas=2, max_sync_retries=0)
    group.signal.wait(30)
    model = Scalar()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with group.manager() as manager:

        def no_state(*arguments: Any, **named: Any) -> Any:
            raise PeerError("it does not accept the token")

        manager._checkpoint_transport.recv_checkpoint = no_state
        manager.load_state_dict({"step": 1, "batches_committed": 1})  # as from a checkpoint
        try:
            loop = DiLoCo(manager, model, optimizer, plain_sgd(), sync_every=1, num_replicas=2)
            loop.__enter__()
        except SyncError as error:
            return {"ended": str(error)}
        finally:
            group.over.set()
    return {"ended": None}


def test_a_resumed_group_that_cannot_heal_leaves_soon_and_takes_nobody_along():
    first, second, joiner = run_groups(one_resumes_and_cannot_heal, 3)
    assert "did not commit in 2 attempts" in joiner["ended"]
    assert "start this group again" in joiner["ended"]
    assert "it does not accept the token" in joiner["ended"]
    check_went_on(first, second)
