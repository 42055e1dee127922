"""How a replica group obtains the global state before its first inner step."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from composer_replication.diloco.averaging.weighted_mean import WeightedMean
from composer_replication.diloco.flat_chunks import Chunk
from composer_replication.diloco.fragment_sync import FragmentSync
from composer_replication.diloco.outer_loop import OuterLoop, Role
from composer_replication.diloco.retry import StartBarrier
from composer_replication.diloco.torchft_api import STATE_NAME

PREPARATIONS = 3
"""How often a joiner prepares for the others' next sync, if they sync before it is ready."""


def join(loop: OuterLoop, start_refusal: str | None) -> bool:
    """Obtain the global state before the first inner step, without contributing.

    At a cold start no group has a global state: all wait for each other and take the initial
    parameters of the first. In a run that has begun, this group joins at the peers' next sync,
    where torchft heals it. If all groups are resuming, they also wait for each other, and each
    continues where it stopped.

    Args:
        loop: The outer loop of this group.
        start_refusal: Why this group must not begin the run. None: it may.

    Returns:
        Whether this group has joined others in training.

    Raises:
        TimeoutError: Too few groups were connected in time, or the start failed too often.
        SyncError: The sync in which this group joins failed too often.
        DivergenceError: In that sync, the global parameters were not the others'.
        ValueError: This is the first group, and its initial parameters are not finite.
        SettingsMismatch: This group's settings differ from the others'.
        NothingToContinueFromError: All groups are connected, and none may begin the run.
    """
    manager = loop.manager
    options = loop.options
    device = loop.fragments[0].device
    _prepare(loop)
    barrier = StartBarrier(manager, options, start_refusal)
    manager.start_quorum()
    while True:
        if manager.current_step() == 0:
            if not barrier.vote_to_start(device):
                manager.should_commit()  # it fails in all groups
            elif share_initial_parameters(loop):
                return False
        else:
            if manager.num_participants() > 1 or options.num_awaited == 1:
                loop.role = Role.JOINS
                loop.prepare_sync()
                loop.end_sync()
                if not loop.result.are_all_joining:
                    loop.state.ledger.stop_reading()  # resumed steps may be lost in part
                    return True
            # This group is alone, or all are resuming. Without the vote it would begin to train,
            # and a group that resumes later would have to join it.
            barrier.vote_to_start(device)
            if manager.should_commit():
                loop.finish_heal()
                if loop.state.was_healed:  # this group's checkpoint was older
                    loop.steps_left = loop.steps_before_sync
                loop.set_torchft_step()
                return False
        loop.clock.vote_over()
        barrier.form_quorum()


def _prepare(loop: OuterLoop) -> None:
    """Do what takes time in a join before the quorum, in which all groups would wait for it."""
    staged = ""
    for _ in range(PREPARATIONS):
        fetched = loop.manager.fetched_state()
        if fetched is None or fetched[STATE_NAME] == staged:  # the others have not synced meanwhile
            return
        loop.state.stage(fetched)
        staged = fetched[STATE_NAME]
        for fragment in loop.fragments:
            fragment.mean.touch_memory()


def share_initial_parameters(loop: OuterLoop) -> bool:
    """Give every group the initial parameters of the quorum's first group.

    It computes the same weighted mean as a sync, over the parameters themselves, in which only the
    first group has weight. torchft's ``init_sync`` lets each *rank* copy from another group, so
    that the ranks of a group would differ from then on (docs/adrs/ADR-006).

    Returns:
        Whether the start committed. If not, no parameter has changed.

    Raises:
        ValueError: This is the first group, and its initial parameters are not finite.
    """
    manager = loop.manager
    weight = float(manager.participating_rank() == 0)
    means = [_mean_of_local(fragment, weight) for fragment in loop.fragments]
    works: list[Any] = []
    for mean in means:
        works += mean.send(manager)
    for fragment in loop.fragments:
        globals_ = fragment.globals
        buffers = globals_.local()[globals_.num_parameters :]
        works += globals_.copied.send(manager, fragment.device, buffers)
    for work in works:
        work.wait()
    with loop.state.changing():
        if not manager.should_commit():
            return False
        for fragment, mean in zip(loop.fragments, means, strict=True):
            if mean.finish():
                fragment.globals.flat.copy_(fragment.globals.unpack(mean))
                fragment.globals.take_buffers(fragment.globals.averaged_buffers)
            fragment.globals.write_back()
    loop.clock.read()  # the wait for the start belongs to no sync
    return True


def _mean_of_local(fragment: FragmentSync, weight: float) -> WeightedMean:
    """Pack the local parameters of a fragment, without a collective of the ranks.

    A rank that has just seen a peer die is already at the vote while the other ranks are here. In a
    collective they would wait for it.
    """
    mean = WeightedMean(fragment.globals.layout)
    local = fragment.globals.local()

    def write(chunk: Chunk, into: Tensor) -> None:
        values = into[chunk.place]
        if chunk.indices[0] in fragment.globals.averaged_buffers:
            # All take the first group's buffers: these need not be finite, nor are in the mean.
            values.zero_()
        else:
            chunk.read(local, values)

    mean.pack(write, weight, asks_ranks=False)
    if weight and not mean.is_finite:
        raise ValueError(
            "the initial parameters of this replica group, from which all groups start, are "
            "not finite: check how the model is initialized, or what it is loaded from"
        )
    return mean
