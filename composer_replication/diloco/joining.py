"""Waiting for each other, and the cold start: what groups do before any of them has trained."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed import ReduceOp

from composer_replication.diloco.fragment_sync import FragmentSync
from composer_replication.diloco.options import StartPolicy
from composer_replication.diloco.settings import compare_fingerprints
from composer_replication.diloco.torchft_api import DiLoCoManager

log = logging.getLogger(__name__)


class SyncError(RuntimeError):
    """A sync did not commit, and its retries are used up."""


class NothingToContinueFromError(ValueError):
    """All groups of a run are there, it has made outer steps, and none of them has its state."""


FINGERPRINT_BYTES = 8192
"""Room for one group's fingerprint as JSON."""


class StartBarrier:
    """Holds a start until enough groups are there.

    A lone group would otherwise train by itself, and so would the next one, without a word.

    Args:
        manager: The torchft manager, or its simulated double.
        policy: How many groups to wait for, how long, and what then.
        must_not_start: Why this group must not begin a run; None: it may.
    """

    MAX_FAILURES = 2
    """Attempts to join that may fail because of this group. It leaves early, since each of them
    costs those in training an attempt of their sync."""

    POLL_S = 0.5
    SAY_EVERY_S = 30.0

    def __init__(
        self, manager: DiLoCoManager, policy: StartPolicy, must_not_start: str | None
    ) -> None:
        self._manager = manager
        self._policy = policy
        self._must_not_start = must_not_start
        self._failures = 0
        self._last_failure: str | None = None
        self._began = time.monotonic()
        self._said = self._began - self.SAY_EVERY_S + 2.0

    def hears_start(self, device: torch.device) -> bool:
        """Whether the groups in this quorum start. If not, the manager has an error: vote.

        One group's yes is enough, unless one must not start, and all of the quorum hear it: they
        start together or not at all, however long each of them has been waiting.

        Raises:
            NothingToContinueFromError: This group must not start, and whoever could have the run's
                state is here.
        """
        policy, num_present = self._policy, self._manager.num_participants()
        is_enough = num_present >= policy.num_awaited
        starts_late = policy.on_start_timeout == "start" and self._is_late()
        may_not = self._must_not_start is not None and self._manager.current_step() == 0
        votes = torch.tensor([float(is_enough or starts_late), float(may_not)], device=device)
        self._manager.allreduce(votes, reduce_op=ReduceOp.SUM).wait()  # pyright: ignore
        if self._manager.errored() is not None:
            return False
        situation = f"{num_present} of {policy.num_awaited} replica groups are there"
        yes, no = votes.tolist()
        if may_not:
            situation += f", and none of them has the run's state. {self._must_not_start}"
            if is_enough:
                raise NothingToContinueFromError(situation)
        if no or not yes:
            self._manager.report_error(TooFewGroups(situation))
            return False
        if not is_enough:
            log.warning("Starting although %s", situation)
        return True

    def check_failures(self, was_anothers_fault: bool) -> None:
        """In the quorum after a start that failed, which says whose fault that was.

        Raises:
            TimeoutError: It has failed too often because of this group.
        """
        failure, self._last_failure = self._last_failure, None
        if failure is None or was_anothers_fault:
            return
        self._failures += 1
        if self._failures == self.MAX_FAILURES:
            raise TimeoutError(f"{failure}. This group has tried {self._failures} times and leaves")

    def wait(self, error: Exception | None, cause: str) -> None:
        """After a start that did not commit: wait a moment.

        Raises:
            TimeoutError: Too few groups came in time.
        """
        situation = str(error)
        if not isinstance(error, TooFewGroups):  # for example since a group left again
            situation = self._last_failure = f"the start did not commit: {cause}"
            log.warning("%s%s", situation[0].upper(), situation[1:])
        ends = self._policy.on_start_timeout == "error" or self._must_not_start is not None
        if self._is_late() and ends:
            raise TimeoutError(
                f"no start within start_timeout_s={self._policy.start_timeout_s:g}: {situation}. "
                "Start the missing groups with the same lighthouse, or lower num_replicas"
            )
        now = time.monotonic()
        if now - self._said > self.SAY_EVERY_S:
            self._said = now
            log.warning("Waiting to start: %s", situation)
        time.sleep(self.POLL_S)

    def _is_late(self) -> bool:
        return time.monotonic() - self._began > self._policy.start_timeout_s


class TooFewGroups(Exception):
    """Not an error: the start waits for more."""


class Patience:
    """How survivors that are fewer than ``min_replica_size`` wait for the others to come back.

    Args:
        manager: The torchft manager, or its simulated double.
        give_up_after_s: How long, in seconds; None for ever.
    """

    POLL_S = 1.0
    SAY_EVERY_S = 30.0

    def __init__(self, manager: DiLoCoManager, give_up_after_s: float | None) -> None:
        self._manager = manager
        self._give_up_after_s = give_up_after_s
        self._began = time.monotonic()
        self._say_at = 0.0

    def has_too_few(self) -> bool:
        """Whether the last vote failed for no other reason."""
        present, needed = self._manager.num_participants(), self._manager._min_replica_size
        return self._manager.errored() is None and present < needed

    def wait(self) -> None:
        """Wait a moment, and say so now and then.

        Raises:
            SyncError: It has been too long.
        """
        present, needed = self._manager.num_participants(), self._manager._min_replica_size
        waited = time.monotonic() - self._began
        situation = f"{present} replica groups are there, and min_replica_size={needed}"
        if self._give_up_after_s is not None and waited > self._give_up_after_s:
            raise SyncError(
                f"{situation}, for {waited:.0f} s, above give_up_after_s={self._give_up_after_s:g}."
                " Start the missing groups again, or lower min_replica_size"
            )
        if waited >= self._say_at:
            self._say_at = waited + self.SAY_EVERY_S
            log.warning("Waiting to sync for %.0f s: %s", waited, situation)
        time.sleep(self.POLL_S)


def agree_on_settings(
    manager: DiLoCoManager, fingerprint: Mapping[str, Any], device: torch.device
) -> None:
    """Compare this group's fingerprint and min_replica_size with those of the quorum's first group.

    Before any tensor is sent: other shapes or dtypes at the far end would abort the process inside
    gloo. The sum of a table, in which each group fills its own row, gathers the rows.

    Raises:
        SettingsMismatch: They differ; the message lists every differing key with both values.
    """
    # With unequal ones a group would go on alone while another waits for more. It is no part of the
    # fingerprint, which is in checkpoints too: a resume may have another.
    compared = {**fingerprint, "min_replica_size": manager._min_replica_size}
    text = json.dumps(compared, sort_keys=True).encode()
    if len(text) > FINGERPRINT_BYTES:
        raise ValueError(
            f"the settings take {len(text)} bytes as JSON, more than {FINGERPRINT_BYTES}: "
            "use fewer or shorter fragment_patterns"
        )
    rank = manager.participating_rank()
    table = torch.zeros(manager.num_participants(), FINGERPRINT_BYTES, dtype=torch.uint8)
    assert rank is not None, "torchft gives every group of a synchronous quorum a rank"
    table[rank, : len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    table = table.to(device)
    manager.allreduce(table, reduce_op=ReduceOp.SUM).wait()  # pyright: ignore[reportArgumentType]
    first = bytes(table[0].cpu().numpy().tobytes()).rstrip(b"\0")
    if rank == 0 or manager.errored():
        return
    compare_fingerprints(
        json.loads(text), json.loads(first), "the first replica group of this quorum"
    )


def share_initial_parameters(manager: DiLoCoManager, fragments: Sequence[FragmentSync]) -> bool:
    """Give every group the initial parameters of the quorum's first group.

    The same weighted mean as in a sync, over the parameters themselves, in which only that group
    has weight. torchft's own way (``init_sync``) lets each *rank* copy from another group, after
    which the ranks inside a group differ for ever (research: docs/adrs/ADR-006).

    Returns:
        Whether it committed. If not, nothing has changed.
    """
    weight = 1.0 if manager.participating_rank() == 0 else 0.0
    means = [fragment.mean_of_local(weight) for fragment in fragments]
    for work in [work for mean in means for work in mean.send(manager)]:
        work.wait()
    if not manager.should_commit():
        return False
    for fragment, mean in zip(fragments, means, strict=True):
        fragment.adopt_mean(mean)
    return True
