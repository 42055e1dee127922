"""The cold start: wait for the other groups, compare settings, share the first parameters."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed import ReduceOp

from composer_replication.diloco.arguments import DiLoCoArguments
from composer_replication.diloco.averaging.weighted_mean import WeightedMean
from composer_replication.diloco.fragment_sync import FragmentSync
from composer_replication.diloco.fragments import described_tensors
from composer_replication.diloco.retries import MAX_FAILED_JOINS
from composer_replication.diloco.torchft_api import DiLoCoManager
from composer_replication.settings import SettingsMismatch, compare_fingerprints

log = logging.getLogger(__name__)


class NothingToContinueFromError(ValueError):
    """All groups of a run are connected, it has made outer steps, and no group has its state."""


FINGERPRINT_BYTES = 8192
"""Most bytes that one group's fingerprint may take as JSON."""

MODEL_BYTES = 2**20
"""The same of the names and shapes of its tensors, which are sent where two models differ."""


class StartBarrier:
    """Holds a start until enough groups are connected.

    Without it the first group would train alone, and so would the next one, unnoticed.

    Args:
        manager: The torchft manager, or its simulated double.
        arguments: Those of ``DiLoCo``: how many groups to wait for, for how long, what to do after
            that, and whether this group may begin the run.
    """

    POLL_S = 0.5
    LOG_EVERY_S = 30.0

    def __init__(self, manager: DiLoCoManager, arguments: DiLoCoArguments) -> None:
        self._manager = manager
        self._arguments = arguments
        self._can_commit = True
        self._failures = 0
        self._last_failure: str | None = None
        self._began = time.monotonic()
        self._logged_at = self._began - self.LOG_EVERY_S + 2.0  # the first warning after 2 s

    def vote_to_start(self, device: torch.device) -> bool:
        """Vote on the start with the other groups of this quorum.

        With fewer groups than ``min_replica_size`` no group votes yes: a start sends all
        parameters, and could not commit.

        The start takes one yes and no veto. All groups see the same sum of the votes, so they start
        together or not at all, however long each of them has been waiting.

        Args:
            device: Where the votes are summed.

        Returns:
            Whether the groups start. If not, an error has been reported to the manager, and the
            commit vote that the caller still has to take fails.

        Raises:
            NothingToContinueFromError: This group must not start, and every group that could hold
                the run's state is connected.
        """
        arguments, num_present = self._arguments, self._manager.num_participants()
        is_enough = num_present >= arguments.num_awaited
        starts_late = arguments.on_start_timeout == "start" and self._is_late()
        self._can_commit = num_present >= self._manager._min_replica_size
        vetoes = self._arguments.start_refusal is not None and self._manager.current_step() == 0
        is_yes = self._can_commit and (is_enough or starts_late)
        votes = torch.tensor([float(is_yes), float(vetoes)], device=device)
        self._manager.allreduce(votes, reduce_op=ReduceOp.SUM).wait()  # pyright: ignore
        if self._manager.errored() is not None:
            return False
        situation = f"{num_present} of {arguments.num_awaited} replica groups are connected"
        if not self._can_commit:
            situation += f", and min_replica_size={self._manager._min_replica_size}"
        num_yes, num_vetoes = votes.tolist()
        if vetoes:
            situation += f", and none of them has the run's state. {self._arguments.start_refusal}"
            if is_enough:
                raise NothingToContinueFromError(situation)
        if num_vetoes or not num_yes:
            self._manager.report_error(StartPostponed(situation))
            return False
        if not is_enough:
            log.warning("Starting although %s", situation)
        return True

    def check_failures(self, was_anothers_fault: bool) -> None:
        """Count a start that failed because of this group.

        Called in the quorum after the failed start, since that quorum names the group at fault.

        Args:
            was_anothers_fault: Whether that quorum names another group.

        Raises:
            TimeoutError: The start has failed ``MAX_FAILED_JOINS`` times because of this group.
        """
        failure, self._last_failure = self._last_failure, None
        if failure is None or was_anothers_fault:
            return
        self._failures += 1
        if self._failures == MAX_FAILED_JOINS:
            raise TimeoutError(
                f"the start has failed {self._failures} times because of this group, which leaves. "
                f"The last time {failure}"
            )

    def wait(self, error: Exception | None, cause: str) -> None:
        """Wait ``POLL_S`` seconds after a start that did not commit.

        Args:
            error: The error that the manager has, if it has one.
            cause: Why the start did not commit, for the log.

        Raises:
            TimeoutError: ``start_timeout_s`` has passed, and too few groups are connected to start
                with.
        """
        situation = str(error)
        if not isinstance(error, StartPostponed):  # for example because a group has left again
            situation = self._last_failure = f"the start did not commit: {cause}"
            log.warning("The start did not commit: %s", cause)
        arguments = self._arguments
        may_start = arguments.on_start_timeout == "start" and arguments.start_refusal is None
        if self._is_late() and not (may_start and self._can_commit):
            raise TimeoutError(
                f"no start within start_timeout_s={arguments.start_timeout_s:g}: {situation}. "
                "Start the missing groups with the same lighthouse, or lower num_replicas"
            )
        now = time.monotonic()
        if now - self._logged_at > self.LOG_EVERY_S:
            self._logged_at = now
            log.warning("Waiting for replica groups: %s", situation)
        time.sleep(self.POLL_S)

    def _is_late(self) -> bool:
        return time.monotonic() - self._began > self._arguments.start_timeout_s


class StartPostponed(Exception):
    """Fails the commit vote of a start that waits for more groups. It is never raised."""


def agree_on_settings(
    manager: DiLoCoManager, fingerprint: Mapping[str, Any], fragments: Sequence[FragmentSync]
) -> None:
    """Compare this group's fingerprint and min_replica_size with those of the quorum's first group.

    This comes before any other tensor is sent: if another group sent other shapes or dtypes, gloo
    would abort the process. A group that differs leaves, and the others log what it has.

    Args:
        manager: The torchft manager, in a quorum.
        fingerprint: This group's settings and model, as plain containers.
        fragments: Of this group's model.

    Raises:
        SettingsMismatch: They differ; the message lists every differing key with both values, and
            the first tensor in which the models differ.
        ValueError: The fingerprint is longer than ``FINGERPRINT_BYTES`` as JSON.
    """
    # With unequal values one group would train alone while another waits for more. The fingerprint
    # does not contain min_replica_size: checkpoints hold the fingerprint, and a resume may change
    # this value.
    compared = {**fingerprint, "min_replica_size": manager._min_replica_size}
    device = fragments[0].device
    rows = _gather(manager, compared, FINGERPRINT_BYTES, device)
    if len({row["model"] for row in rows}) > 1:
        model = described_tensors(fragment.globals.local for fragment in fragments)
        if len(json.dumps(model)) > MODEL_BYTES:
            model = fingerprint["model"]
        models = _gather(manager, model, MODEL_BYTES, device)
        rows = [row | {"model": each} for row, each in zip(rows, models, strict=False)]
    if manager.errored():
        return
    own = rows[manager.participating_rank() or 0]
    for rank, row in enumerate(rows if own == rows[0] else rows[:1]):
        try:
            compare_fingerprints(own, row, f"replica group {rank} (by its rank in the quorum)")
        except SettingsMismatch as error:
            if own != rows[0]:
                raise
            log.warning("That group leaves, and this one goes on: %s", error)


def _gather(manager: DiLoCoManager, value: Any, size: int, device: torch.device) -> list[Any]:
    """Gather a value of each group, by summing a table in which each group fills its own row.

    Returns:
        The values by the groups' ranks in the quorum; empty after an error.
    """
    text = json.dumps(value, sort_keys=True).encode()
    if len(text) > size:
        raise ValueError(
            f"the settings take {len(text)} bytes as JSON, more than {size}: "
            "use fewer or shorter fragment_patterns"
        )
    rank = manager.participating_rank()
    table = torch.zeros(manager.num_participants(), size, dtype=torch.uint8)
    assert rank is not None, "torchft gives every group of a synchronous quorum a rank"
    table[rank, : len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    table = table.to(device)
    manager.allreduce(table, reduce_op=ReduceOp.SUM).wait()  # pyright: ignore[reportArgumentType]
    if manager.errored():
        return []
    return [json.loads(row.numpy().tobytes().rstrip(b"\0")) for row in table.cpu()]


def share_initial_parameters(manager: DiLoCoManager, fragments: Sequence[FragmentSync]) -> bool:
    """Give every group the initial parameters of the quorum's first group.

    It computes the same weighted mean as a sync, over the parameters themselves, in which only the
    first group has weight. torchft's own way (``init_sync``) lets each *rank* copy from another
    group, after which the ranks inside a group never agree again (docs/adrs/ADR-006).

    Returns:
        Whether the start committed. If not, no parameter has changed.

    Raises:
        ValueError: This is the first group, and its initial parameters are not finite.
    """
    weight = 1.0 if manager.participating_rank() == 0 else 0.0
    means = [_mean_of_local(fragment, weight) for fragment in fragments]
    works = [work for mean in means for work in mean.send(manager)]
    for fragment in fragments:
        copied = fragment.globals.copied
        works += copied.send(manager, fragment.device, copied.live.values())
    for work in works:
        work.wait()
    if not manager.should_commit():
        return False
    for fragment, mean in zip(fragments, means, strict=True):
        if mean.finish():
            for theta, value in zip(fragment.globals.theta.values(), mean.unpack(), strict=True):
                theta.detach().copy_(value.view(theta.shape))
            fragment.globals.copied.take()
        fragment.take_global()
    return True


def _mean_of_local(fragment: FragmentSync, weight: float) -> WeightedMean:
    """Pack the local parameters of a fragment, without a collective of the ranks.

    A rank that has just seen a peer die is already at the vote, while the other ranks come here. In
    a collective they would wait for that rank.
    """
    mean = WeightedMean(fragment.mean.share, fragment.device, fragment.mean.gathers)
    averaged, _ = fragment.globals.divide(fragment.local())
    local = (mean.share.own(averaged),)
    mean.pack(lambda t, into: into.copy_(t), local, weight, asks_ranks=False)
    if weight and not mean.is_finite:
        raise ValueError(
            "the initial parameters of this replica group, from which all groups start, are "
            "not finite: check how the model is initialized, or what it is loaded from"
        )
    return mean
