"""How a replica group obtains the global state before its first inner step."""

from __future__ import annotations

import logging

from composer_replication.diloco.arguments import DiLoCoArguments
from composer_replication.diloco.cold_start import (
    StartBarrier,
    agree_on_settings,
    share_initial_parameters,
)
from composer_replication.diloco.outer_loop import OuterLoop
from composer_replication.diloco.retries import why_not_committed
from composer_replication.diloco.torchft_api import fault_of_last_sync, fetched_state

log = logging.getLogger(__name__)

PREPARATIONS = 3
"""How often a joiner prepares for the others' next sync, if they sync before it is ready."""


def join(loop: OuterLoop, arguments: DiLoCoArguments) -> bool:
    """Obtain the global state before the first inner step, without contributing.

    At a cold start no group has a global state: all wait for each other and take the initial
    parameters of the first. In a run that has begun, this group joins at the peers' next sync,
    where torchft heals it. If all groups are resuming, they also wait for each other, and each
    continues where it stopped.

    Args:
        loop: The outer loop of this group.
        arguments: Those of ``DiLoCo``: how a cold start waits for the others, and whether this
            group may begin the run.

    Returns:
        Whether this group has joined others in training.

    Raises:
        TimeoutError: Too few groups were connected in time, or the join failed too often.
        SettingsMismatch: This group's settings differ from the others'.
        NothingToContinueFromError: All groups are connected, and none may begin the run.
    """
    try:
        _prepare(loop)
        return _join(loop, arguments)
    finally:
        loop.state.forget_staged()  # unless a heal has used it


def _join(loop: OuterLoop, arguments: DiLoCoArguments) -> bool:
    manager, state, device = loop.manager, loop.state, loop.fragments[0].device
    barrier = StartBarrier(manager, arguments)
    while True:
        manager.start_quorum()
        barrier.check_failures(fault_of_last_sync(manager) == "another")
        if manager.current_step() == 0:
            starts = barrier.vote_to_start(device)
            if _start(loop) if starts else manager.should_commit():
                return False
        else:
            if manager.num_participants() > 1 or arguments.num_awaited == 1:
                _sync_as_joiner(loop)
                if not loop.peer_table.are_all_joining:
                    state.ledger.stop_reading()  # resumed steps may be lost in part
                    return True
                agree_on_settings(manager, state.fingerprint, loop.fragments)
            # This group is alone, or all are resuming. Without the vote it would begin to train,
            # and a group that resumes later would have to join it.
            barrier.vote_to_start(device)
            if manager.should_commit():
                loop.settle()
                loop.set_torchft_step()
                return False
        error = manager.errored()
        barrier.wait(getattr(error, "original_exception", error), why_not_committed(manager))


def _prepare(loop: OuterLoop) -> None:
    """Do what takes time in a join before the quorum, in which all groups would wait for it."""
    staged = None
    for _ in range(PREPARATIONS):
        fetched = fetched_state(loop.manager)
        if fetched is None or fetched is staged:  # the others have not synced meanwhile
            return
        loop.state.stage(fetched)
        staged = fetched
        for fragment in loop.fragments:
            fragment.mean.touch_memory()


def _start(loop: OuterLoop) -> bool:
    agree_on_settings(loop.manager, loop.state.fingerprint, loop.fragments)
    with loop.state.changing():
        if not share_initial_parameters(loop.manager, loop.fragments):
            return False
    log.info("Started with %d replica groups", loop.manager.num_participants())
    loop.clock.read()  # the wait for the start belongs to no sync
    return True


def _sync_as_joiner(loop: OuterLoop) -> None:
    loop.peer_table.is_joining = True
    loop.sync_in_quorum()
    loop.finish_sync()
    loop.peer_table.is_joining = False
