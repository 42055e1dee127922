"""The table that travels beside every sync, with a row for each replica group."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import torch

from composer_replication.diloco.averaging.weighted_mean import WeightedMean
from composer_replication.diloco.outer_health import GroupMetrics, GroupsMetrics, beyond_all_others
from composer_replication.diloco.peer_rows import PeerRow, Rows, find_differences, read_rows
from composer_replication.diloco.sample_ledger import SyncedSamples
from composer_replication.diloco.torchft_api import DiLoCoManager

log = logging.getLogger(__name__)


class DivergenceError(RuntimeError):
    """Replica groups hold different global parameters, which no sync can correct.

    A group raises it in a sync if its outer step or a digest differs from those of most groups, or
    if there is no majority. Stop the group, and start it again without its checkpoint.
    """


@dataclass(frozen=True)
class TableResult:
    """What the groups of a sync have reported to each other.

    Attributes:
        rows: Their rows. Empty if the sync fails.
        left_out: The ranks of the groups whose pseudo-gradients are not in the mean.
        has_doubts: Whether what has arrived is not sound, so that the sync is repeated.
        equal_samples: The names of the groups whose first batches were found to be equal to this
            group's, and its own; empty if there are none.
    """

    rows: Rows = field(default_factory=dict)
    left_out: Collection[int] = ()
    has_doubts: bool = False
    equal_samples: tuple[str, ...] = ()

    @property
    def is_over(self) -> bool:
        """Whether no group trains or has anything to send."""
        return bool(self.rows) and not any(row.has_more for row in self.rows.values())

    @property
    def are_all_joining(self) -> bool:
        """Whether no group was in training."""
        return bool(self.rows) and all(row.is_joining for row in self.rows.values())

    @property
    def kept(self) -> dict[int, PeerRow]:
        """The rows of the groups that are not left out, by rank in the quorum."""
        return {rank: row for rank, row in self.rows.items() if rank not in self.left_out}

    @property
    def metrics(self) -> list[GroupMetrics]:
        """The metrics of the groups that are not left out."""
        return [row.metrics for row in self.kept.values()]

    @property
    def synced_samples(self) -> list[SyncedSamples]:
        """How far the groups that are not left out have read their sample streams."""
        return [row.samples for row in self.kept.values()]


class PeerTable:
    """The exchange of rows beside one sync: a Work, which checks the rows of all groups.

    It is sent in a quorum. Wait for it last, so that it ends before the vote.

    The table answers seven questions that torchft does not:

    * Were all groups of the quorum in this sum? With a quorum id that was used before, the
      connections can be those to other groups, or to fewer.
    * Does any group still train, or have steps to send? If none has, training is over for all.
    * Do all groups hold the same? Their outer steps are compared at every sync, and a digest of
      each fragment every ``digest_every`` outer steps, after a heal and after a resume. (Settings
      are compared before the groups connect, see ``compare_groups``.)
    * How much of each group's sample stream is in the model once the sync has committed?
    * How long is each group's pseudo-gradient?
    * Which groups train on the same samples?
    * Has everything arrived as it was sent, and is it sound? If not, the sync is repeated: the
      groups gather each other's messages, and leave out the group at fault (ADR-048).

    Args:
        manager: The torchft manager, or its simulated double.
        row: This group's.
        mean: What is sent beside the table. Its sum is checked against the table.
        leave_out: Called if messages are gathered, and not summed: takes the metrics of the groups
            whose rows are valid, by rank, and returns the ranks left out.

    Attributes:
        result: What the table says; empty before ``wait``.
    """

    result = TableResult()

    def __init__(
        self,
        manager: DiLoCoManager,
        row: PeerRow,
        mean: WeightedMean,
        leave_out: Callable[[GroupsMetrics], set[int]],
    ) -> None:
        self._manager = manager
        self._row = row
        self._mean = mean
        self._leave_out = leave_out
        own = torch.frombuffer(bytearray(row.encode()), dtype=torch.uint8).to(mean.device)
        self._table = own.new_zeros(manager.num_participants(), own.numel())
        # Gathered and not summed: no group can write into another's row.
        self._work = manager.all_gather(self._table.view(-1), own)

    def wait(self) -> None:
        """Wait for the rows, check them and the mean, and set ``result``.

        Raises:
            DivergenceError: This group holds other global parameters than most groups, or there is
                no majority.
        """
        self._work.wait()
        manager = self._manager
        rows: Rows = {}
        faults: dict[int, str] = {}
        if not manager.errored():
            rows, faults = read_rows(self._table.cpu(), len(self._row.digests))
            if not rows:
                manager.report_error(ConnectionError("no row of the peer table is valid"))
        metrics = {rank: row.metrics for rank, row in rows.items()}
        if rows:
            self._check_agreement(rows)
            faults |= beyond_all_others(metrics)
        sound = {rank: group for rank, group in metrics.items() if rank not in faults}
        left_out: Collection[int] = ()
        doubt = ""
        if manager.gathers:
            # A collective of the group's ranks: all of them gather, also one that has an error.
            left_out = self._leave_out(sound)
            for rank in left_out:
                log.warning(
                    "The sync after outer step %d leaves out replica group %s, which takes over "
                    "the global parameters: %s",
                    self._row.outer_step,
                    self._names[rank],
                    faults.get(rank, "its messages are not what it says of them"),
                )
        else:
            doubt = self._doubt(sound, faults)
        if doubt:
            manager.report_error(ConnectionError(f"what arrived is not sound ({doubt})"))
        if manager.errored():
            self.result = TableResult(has_doubts=bool(doubt))
        else:
            self.result = TableResult(rows, left_out, equal_samples=self._equal_samples(rows))

    @property
    def _names(self) -> list[str]:
        names = self._manager.members or range(self._manager.num_participants())
        return [str(name).partition(":")[0] for name in names]

    def _equal_samples(self, rows: Rows) -> tuple[str, ...]:
        """The groups whose first batches are this group's too, and its own; empty if none are."""
        own = self._row.batches
        same = [self._names[rank] for rank, row in rows.items() if row.batches == own]
        return tuple(same) if own and len(same) > 1 else ()

    def _doubt(self, sound: GroupsMetrics, faults: Mapping[int, str]) -> str:
        """Return what is not sound of what has arrived; empty if nothing is, or this sync fails."""
        names = self._names
        needed = max(2, self._manager._min_replica_size)
        if self._manager.errored() or len(names) < needed:
            return ""
        doubts = [f"replica group {names[rank]}: {fault}" for rank, fault in faults.items()]
        return ", ".join(doubts) or self._mean.doubt(sound.values())

    def _check_agreement(self, rows: Rows) -> None:
        for odd, what in find_differences(rows):
            message = (
                f"after outer step {self._row.outer_step} replica groups "
                f"{', '.join(map(str, odd))} (by their rank in the quorum, in the order of their "
                f"names) differ in {what}"
            )
            if self._manager.participating_rank() in odd:
                raise DivergenceError(
                    f"{message}. This group is one of them: stop it, and start it again without "
                    "its checkpoint, so that it takes over what the others hold"
                )
            self._manager.report_error(DivergenceError(message))
