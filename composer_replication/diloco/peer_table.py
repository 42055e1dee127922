"""The table that travels beside every sync, with a row for each replica group."""

from __future__ import annotations

import logging
import math
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple, get_type_hints

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ReduceOp

from composer_replication.diloco.averaging.weighted_mean import WeightedMean
from composer_replication.diloco.equal_samples import digest_of
from composer_replication.diloco.global_state import GlobalState
from composer_replication.diloco.outer_health import UsualPace, Vitals, beyond_all_others
from composer_replication.diloco.sample_ledger import SyncedSamples
from composer_replication.diloco.torchft_api import DiLoCoManager, Then, gathers

log = logging.getLogger(__name__)


class DivergenceError(RuntimeError):
    """Replica groups hold different global parameters, which no sync can correct.

    A group raises it in a sync if its outer step or a digest differs from those of most groups, or
    if there is no majority. Stop the group, and start it again without its checkpoint.
    """


LeaveOut = Callable[[Mapping[int, Vitals]], set[int]]
"""Takes the metrics of the groups whose rows are valid, by rank, and returns the ranks left out."""

CHECKSUM_BYTES = 4


class PeerRow(NamedTuple):
    """What one replica group reports to the others beside a sync.

    A row is sent as bytes, each field in the type that ``_TYPES`` has for its annotation. A further
    number needs a field here, or in ``Vitals``, and nothing else.

    Attributes:
        has_more: Whether it still trains, or has steps that are not in the global parameters yet.
        is_joining: Whether it joins with this sync and contributes nothing.
        was_healed: Whether it has taken over the global state since its last sync.
        outer_step: Its outer step.
        vitals: Its contribution, norm and pace in this sync.
        samples: How much of its sample stream is in the model once this sync has committed.
        batches: 60 bits of the digest of its first batches, as a number above 0, at its first
            sync; else 0.
        digests: 60 bits of the digest of each fragment's global parameters; zeros where none is
            due.
    """

    has_more: bool
    is_joining: bool
    was_healed: bool
    outer_step: int
    vitals: Vitals
    samples: SyncedSamples
    batches: int
    digests: tuple[int, ...]

    def encode(self) -> bytes:
        """The row as bytes, with a checksum. They are never all zeros, as an empty row is."""
        row = np.array(tuple(self), _dtype(PeerRow, len(self.digests))).tobytes()
        return row + _checksum(row)

    @classmethod
    def decode(cls, sent: bytes, num_digests: int) -> PeerRow:
        """Return the row that ``encode`` has turned into these bytes.

        Raises:
            ValueError: The bytes are damaged, or a number is negative or not finite.
        """
        row = sent[:-CHECKSUM_BYTES]
        if sent != row + _checksum(row):
            raise ValueError("its row in the peer table is damaged")
        sent_row = cls(*np.frombuffer(row, _dtype(cls, num_digests))[0].item())
        decoded = sent_row._replace(
            vitals=Vitals(*sent_row.vitals),
            samples=SyncedSamples(*sent_row.samples),
            digests=tuple(map(int, sent_row.digests)),
        )
        if odd := ", ".join(_odd(decoded)):
            raise ValueError(f"its row in the peer table has {odd}")
        return decoded


_TYPES: dict[Any, Any] = {bool: "?", int: "<i8", float: "<f4"}


def _dtype(kind: Any, num_digests: int = 0) -> np.dtype:
    """The fields of a NamedTuple with their types, in their order and without gaps."""
    types = _TYPES | {tuple[int, ...]: ("<i8", (num_digests,))}
    hints = get_type_hints(kind).items()
    return np.dtype(
        [(name, types[hint] if hint in types else _dtype(hint)) for name, hint in hints]
    )


ROW = _dtype(PeerRow).itemsize
"""Bytes of a row without digests and checksum."""


def _odd(part: Any) -> Iterator[str]:
    """Yield the numbers that no group can have: those that are negative or not finite.

    Fields whose default is NaN may be NaN: the group does not know them.
    """
    for name, value in part._asdict().items():
        may_be_nan = math.isnan(part._field_defaults.get(name, 0.0))
        if hasattr(value, "_fields"):
            yield from _odd(value)
        elif not all(0 <= n < math.inf or (may_be_nan and n != n) for n in np.atleast_1d(value)):
            yield f"{name}={value}"


def _checksum(row: bytes) -> bytes:
    """A CRC-32 of a row's bytes, to find bits that flipped on the way."""
    return zlib.crc32(row).to_bytes(CHECKSUM_BYTES, "little")


def as_number(digest: str) -> int:
    """60 bits of a digest in hex, as a number above 0."""
    return int(digest[:15], 16) + 1


class PeerTable:
    """Sends this group's row with a sync, and checks the rows of all its groups before the vote.

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
        state: The global state.
        num_fragments: How many fragments the model has.
        digest_every: Every how many outer steps the digests are compared; 0 for never.

    Attributes:
        is_training: Whether this group still trains. The outer loop sets it.
        has_more: Whether it does, or has steps of other fragments to send; likewise.
        is_joining: Whether this group obtains the global state, and contributes nothing.
        step_s: Seconds that an inner step of this group takes. The outer loop sets it.
        usual_pace: How far this group's inner steps usually move a parameter.
        is_over: Whether no group of the last sync trains or has anything to send.
        has_doubts: Whether what has arrived in the last sync is not sound.
        are_all_joining: Whether no group of the last sync was in training.
        synced_samples: How far the groups of the last sync have read their sample streams.
        vitals: Contribution, norm and pace of each group in the last sync, by rank in the quorum;
            without the groups that it has left out.
        first_batches: Digests of this group's first batches; None after its first sync.
        equal_samples: The names of the groups whose first batches were found to be equal to this
            group's in the last sync, and its own; empty if there are none.
    """

    def __init__(
        self,
        manager: DiLoCoManager,
        state: GlobalState,
        num_fragments: int,
        digest_every: int,
    ) -> None:
        self._manager = manager
        self._state = state
        self._num_fragments = num_fragments
        self._digest_every = digest_every
        self.is_training = self.has_more = True
        self.is_joining = False
        self.step_s = math.nan
        self.usual_pace = UsualPace(num_fragments)
        self.is_over = self.are_all_joining = self.has_doubts = False
        self.synced_samples: list[SyncedSamples] = []
        self.vitals: Mapping[int, Vitals] = {}
        self.first_batches: list[str] | None = []
        self.equal_samples: tuple[str, ...] = ()

    def send(
        self,
        mean: WeightedMean,
        vitals: Vitals,
        samples: SyncedSamples,
        leave_out: LeaveOut,
    ) -> Then:
        """Start the table's exchange, for the sync of a fragment.

        Args:
            mean: What the fragment sends. Its sum is checked against the table.
            vitals: This group's metrics; ``step_s`` is added here.
            samples: See ``PeerRow``.
            leave_out: Called if messages are gathered, and not summed.

        Returns:
            The last Work of the sync, so that the table is read before the vote.
        """
        digests = [0] * self._num_fragments
        if self._digest_is_due():
            digests = [as_number(digest) for digest in self._state.fragment_digests()]
        batches = self.first_batches if vitals.contribution else None
        row = PeerRow(
            has_more=self.has_more,
            is_joining=self.is_joining,
            was_healed=self._state.was_healed,
            outer_step=self._state.outer_step,
            vitals=vitals._replace(step_s=self.step_s),
            samples=samples,
            batches=as_number(digest_of(batches)) if batches and all(batches) else 0,
            digests=tuple(digests),
        )
        rank = self._manager.participating_rank()
        assert rank is not None, "torchft gives every group of a synchronous quorum a rank"
        own = torch.frombuffer(bytearray(row.encode()), dtype=torch.uint8).to(mean.device)
        table = own.new_zeros(self._manager.num_participants(), own.numel())
        if hasattr(self._manager, "all_gather"):  # no group can write into another's row
            work = self._manager.all_gather(table.view(-1), own)
        else:
            table[rank] = own
            work = self._manager.allreduce(table, reduce_op=ReduceOp.SUM)  # pyright: ignore
        return Then(work, lambda: self._read(table, mean, leave_out))

    def _digest_is_due(self) -> bool:
        by_count = self._state.digest_is_due(self._digest_every)
        return by_count or self._state.compare_next or self._state.was_healed

    def _read(self, table: Tensor, mean: WeightedMean, leave_out: LeaveOut) -> None:
        """Check the finished table and the mean, and keep what they say.

        Raises:
            DivergenceError: This group holds other global parameters than most groups, or there is
                no majority.
        """
        self.is_over = self.has_doubts = False
        rows, faults = self._decode(table.cpu())
        if rows:
            self._check_agreement(rows)
            faults |= beyond_all_others({rank: row.vitals for rank, row in rows.items()})
        left_out = self._judge(mean, leave_out, rows, faults)
        if self._manager.errored():
            return
        self.is_over = not any(row.has_more for row in rows.values())
        self.are_all_joining = all(row.is_joining for row in rows.values())
        kept = {rank: row for rank, row in rows.items() if rank not in left_out}
        self.synced_samples = [row.samples for row in kept.values()]
        self.vitals = {rank: row.vitals for rank, row in kept.items()}
        self._find_equal_samples(rows)
        self._state.compare_next = self._state.was_healed = False

    def _find_equal_samples(self, rows: Mapping[int, PeerRow]) -> None:
        rank = self._manager.participating_rank() or 0
        own = rows[rank].batches if rank in rows else 0
        same = [self._names[each] for each, row in rows.items() if row.batches == own]
        self.equal_samples = tuple(same) if own and len(same) > 1 else ()

    @property
    def _names(self) -> list[str]:
        # torchft's own manager has no names of the members.
        names = getattr(self._manager, "members", ()) or range(self._manager.num_participants())
        return [str(name).partition(":")[0] for name in names]

    def _decode(self, table: Tensor) -> tuple[dict[int, PeerRow], dict[int, str]]:
        """The valid rows by rank, and by rank what is wrong with the others."""
        rows: dict[int, PeerRow] = {}
        faults: dict[int, str] = {}
        if self._manager.errored():
            return rows, faults
        for rank, row in enumerate(table):
            try:
                rows[rank] = PeerRow.decode(row.numpy().tobytes(), self._num_fragments)
            except ValueError as error:
                # Of connections of another quorum too. A retry has others, and gathers.
                faults[rank] = str(error) if row.any() else "its row in the peer table is empty"
        if not rows:
            self._manager.report_error(ConnectionError("no row of the peer table is valid"))
        return rows, faults

    def _judge(
        self,
        mean: WeightedMean,
        leave_out: LeaveOut,
        rows: Mapping[int, PeerRow],
        faults: Mapping[int, str],
    ) -> Collection[int]:
        """Return the groups that this sync leaves out. If it has to be repeated, it fails."""
        sound = {rank: row.vitals for rank, row in rows.items() if rank not in faults}
        names = self._names
        if gathers(self._manager):
            left_out = leave_out(sound)
            for rank in left_out:
                what = f"replica group {names[rank]}, which takes over the global parameters"
                why = faults.get(rank, "its messages are not what it says of them")
                step = self._state.outer_step
                log.warning("The sync after outer step %d leaves out %s: %s", step, what, why)
            return left_out
        if not self._manager.errored() and len(names) >= max(2, self._manager._min_replica_size):
            doubts = [f"replica group {names[rank]}: {fault}" for rank, fault in faults.items()]
            if doubt := ", ".join(doubts) or mean.doubt(sound.values()):
                self.has_doubts = True
                self._manager.report_error(ConnectionError(f"what arrived is not sound ({doubt})"))
        return ()

    def _check_agreement(self, rows: Mapping[int, PeerRow]) -> None:
        steps = {rank: row.outer_step for rank, row in rows.items()}
        self._compare(rows, steps, "the outer step")
        for fragment in range(self._num_fragments):
            digests = {rank: row.digests[fragment] for rank, row in rows.items()}
            # A group for which no digest was due has sent none.
            sent = {rank: digest for rank, digest in digests.items() if digest}
            self._compare(rows, sent, f"the global parameters of {fragment=}")

    def _compare(self, rows: Mapping[int, PeerRow], held: dict[int, Any], what: str) -> None:
        if len(set(held.values())) < 2:
            return
        # A group that has just been healed holds a copy, which is no evidence of what is right.
        trusted = [value for rank, value in held.items() if not rows[rank].was_healed]
        most, count = Counter(trusted or held.values()).most_common(1)[0]
        has_majority = 2 * count > len(trusted)
        odd = [rank for rank, value in held.items() if not has_majority or value != most]
        message = (
            f"after outer step {self._state.outer_step} replica groups "
            f"{', '.join(map(str, odd))} (by their rank in the quorum, in the order of their "
            f"names) differ in {what}"
        )
        if self._manager.participating_rank() in odd:
            raise DivergenceError(
                f"{message}. This group is one of them: stop it, and start it again without its "
                "checkpoint, so that it takes over what the others hold"
            )
        self._manager.report_error(DivergenceError(message))
