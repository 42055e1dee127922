"""What a committed sync did and cost: the one table of metrics, and where each comes from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from composer_replication.diloco.fragment_sync import FragmentSync
from composer_replication.diloco.hang_watch import SyncSeconds
from composer_replication.diloco.outer_health import group_cosine


@dataclass(frozen=True)
class SyncReport:
    """What one committed sync did, as seen by this group.

    Trainers' loggers and ``events.jsonl`` get each number as ``diloco/`` and its name. In brackets
    stand its unit, and where else one sees it: on the page, in the terminal's table, or in the
    result at the end.

    Attributes:
        outer_step: (steps; page, terminal, result) Outer steps committed so far, this one included.
        fragment: (index; result) The fragment that was synced, from 0.
        num_participants: (groups; page, terminal) Groups in the quorum.
        contribution: (weight) This group's weight in the mean; 0 if it had nothing to send, or
            what was not finite, or was left out.
        total_contribution: (weight; page, terminal) The sum of all weights; 0 means that nothing
            moved.
        inner_steps: (steps; page, result) Inner steps of this group since the run began. No metric
            of the loggers, for which it is nearly always the batch.
        sync_seconds: (s; page, result) How long the sync blocked training.
        wait_seconds: (s) The part of ``sync_seconds`` spent waiting for the quorum.
        compute_fraction: (0 to 1; page) The share of the time since the previous sync spent
            training.
        bytes_sent: (bytes; result) Size of this rank's messages in the wire format. Each of k
            groups sends 2 (k - 1) / k times this size to the others: with two groups, this size
            once.
        bytes_float32: (bytes; result) The size that the messages would have in float32.
        pseudo_gradient_norm: (L2 norm; page) Of this group's own pseudo-gradient.
        outer_momentum_norm: (L2 norm) Of the fragment's momentum after the outer step.
        group_cosine: (-1 to 1; result) Mean cosine between the pseudo-gradients of two groups, each
            pair weighted by the product of its contributions and norms. None: fewer than two groups
            contributed.
        sync_every: (steps) Inner steps of this group in a round, from now on: by the settings
            ``sync_every`` and ``schedule``, or measured for ``round_seconds``.
        steps_lost: (steps; page, result) Inner steps that this group has thrown away since the
            previous sync, because it took the global state from a peer, or its pseudo-gradient was
            not finite or was left out.
        retries: (attempts; page) Attempts that did not commit before this one did, without those
            for which too few groups were connected.
        healed: (0 or 1; page) Whether this group took the global state from a peer in this sync.
        outer_lr: (rate) Learning rate of the outer optimizer in this sync.
        outer_momentum: (0 to 1) Its momentum in this sync; 0 if it has none of that name.
        global_digest: (SHA-256; page, terminal, result) Of the global parameters after this sync,
            every ``digest_every`` outer steps; None in between. In ``events.jsonl`` alone, since
            loggers take numbers.
        equal_samples: (names) Groups, this one included, that have trained on the same samples
            before this sync, which was their first one; empty if there are none. No metric: a
            warning names them. See ``DiLoCo.note_batch``.
    """

    outer_step: int
    fragment: int
    num_participants: int
    contribution: float
    total_contribution: float
    inner_steps: int
    sync_seconds: float
    wait_seconds: float
    compute_fraction: float
    bytes_sent: int
    bytes_float32: int
    pseudo_gradient_norm: float
    outer_momentum_norm: float
    group_cosine: float | None
    sync_every: int
    steps_lost: int
    retries: int
    healed: bool
    outer_lr: float
    outer_momentum: float
    global_digest: str | None
    equal_samples: tuple[str, ...]


def report_of(sync: FragmentSync, seconds: SyncSeconds, **counted: Any) -> SyncReport:
    """What a fragment's sync did. Every rank of the group makes it: norms are collectives.

    Args:
        sync: The fragment, after its outer step.
        seconds: Where the time since the previous sync went.
        counted: What the outer loop counts: the other numbers of the report by name.
    """
    mean = sync.mean
    mean_norm, momentum_norm = sync.globals.step_norms()
    outer = sync.globals.optimizer.param_groups[0]
    return SyncReport(
        fragment=sync.fragment_id,
        contribution=mean.contribution,
        total_contribution=sync.total_contribution,
        sync_seconds=seconds.blocked,
        wait_seconds=seconds.waited,
        compute_fraction=seconds.trained / max(seconds.blocked + seconds.trained, 1e-9),
        bytes_sent=mean.num_bytes,
        bytes_float32=mean.num_bytes_float32,
        pseudo_gradient_norm=mean.norm,
        outer_momentum_norm=momentum_norm,
        group_cosine=group_cosine(sync.result.metrics, mean_norm),
        outer_lr=outer["lr"],
        outer_momentum=outer.get("momentum", 0.0),
        equal_samples=sync.result.equal_samples,
        **counted,
    )
