"""The table that travels beside every sync: a row per replica group, summed like the messages."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from composer_replication.diloco.averaging.weighted_mean import WeightedMean
from composer_replication.diloco.equal_samples import digest_of
from composer_replication.diloco.fingerprints import SettingsMismatch
from composer_replication.diloco.global_state import GlobalState
from composer_replication.diloco.outer_health import Vitals
from composer_replication.diloco.sample_ledger import SyncedSamples
from composer_replication.diloco.torchft_api import DiLoCoManager
from composer_replication.diloco.unsynced import Unsynced

BITS = 22
"""Bits of a number that a sum in fp32 keeps exactly, with room for the 1 that marks it as set."""


class DivergenceError(RuntimeError):
    """Replica groups hold different global parameters, which no sync can mend."""


@dataclass(frozen=True)
class PeerRow:
    """What one replica group reports to the others beside a sync.

    Attributes:
        has_more: Whether it still trains, or has steps that no sync has brought in.
        is_joining: Whether it joins with this sync and contributes nothing.
        was_healed: Whether it has taken over the global state since its last sync.
        outer_step: Its outer step, modulo 2**22.
        min_replica_size: Its ``min_replica_size``.
        is_replacing: Whether its local parameters are to be the global ones, see
            ``DiLoCo.make_local_global``.
        vitals: Its contribution, norm and pace: any numbers of fp32, to which the others
            add 0.
        samples: How much of its sample stream is in the model once this sync has committed.
        settings: 44 bits of the digest of its settings, as two numbers above 0.
        batches: The same of its first batches, at its first sync; else zeros.
        digests: The same of each fragment's global parameters; zeros where none is due.
    """

    has_more: bool
    is_joining: bool
    was_healed: bool
    outer_step: int
    min_replica_size: int
    is_replacing: bool
    vitals: Vitals
    samples: SyncedSamples
    settings: tuple[int, ...]
    batches: tuple[int, ...]
    digests: tuple[tuple[int, ...], ...]

    def encode(self) -> list[float]:
        """The row as numbers of fp32. The first is a 1: this group is in the sum."""
        flags = self.has_more, self.is_joining, self.was_healed
        numbers = [
            *(1, *flags, self.outer_step, self.min_replica_size, self.is_replacing),
            *self.vitals,
            *(half for number in self.samples for half in divmod(number, 2**BITS)),
            *self.settings,
            *self.batches,
            *(half for digest in self.digests for half in digest),
        ]
        return [float(number) for number in numbers]

    @classmethod
    def decode(cls, numbers: Sequence[float]) -> PeerRow:
        """The row of which ``encode`` made these numbers."""
        _, more, joining, healed, step, min_size, replacing = map(int, numbers[:7])
        size = 7 + len(Vitals._fields)
        vitals, rest = Vitals(*numbers[7:size]), [int(number) for number in numbers[size:]]
        samples, settings, batches, digests = rest[:6], rest[6:8], rest[8:10], rest[10:]
        whole = ((high << BITS) + low for high, low in _pairs(samples))
        return cls(
            bool(more), bool(joining), bool(healed), step, min_size, bool(replacing),
            vitals, SyncedSamples(*whole), tuple(settings), tuple(batches), tuple(_pairs(digests)),
        )  # fmt: skip


def _pairs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def as_numbers(digest: str) -> tuple[int, int]:
    """44 bits of a digest in hex, as two numbers above 0."""
    bits = int(digest[:11], 16)
    return (bits >> BITS) + 1, bits % 2**BITS + 1


class Syncing(Protocol):
    """What the table asks of a fragment."""

    is_joining: bool
    device: torch.device
    mean: WeightedMean
    synced_samples: SyncedSamples
    """How much of this group's samples the sync will have brought into the model."""
    unsynced: Unsynced


class PeerTable:
    """Sends this group's row with a sync, and checks the rows of all its groups before the vote.

    The table answers seven questions that torchft does not:

    * Were all groups of the quorum in this sum? Under a quorum id that was used before, the
      connections can be those to other groups, or to fewer.
    * Does any group still train, or have steps to send? If none has, training is over for all.
    * Do all groups hold the same? Their settings, ``min_replica_size`` and outer step are compared
      at every sync, and a digest of each fragment every ``digest_every`` outer steps, after a heal
      and after a resume.
    * How much of each group's sample stream is in the model once the sync has committed?
    * Has a group replaced its local parameters by an average that is to be the global ones?
    * How long is each group's pseudo-gradient?
    * Which groups train on the same samples?

    Args:
        manager: The torchft manager, or its simulated double.
        state: The global state.
        fragments: All fragments of the model.
        digest_every: Every how many outer steps the digests are compared; 0 for never.

    Attributes:
        is_training: Whether this group still trains. The outer loop sets it.
        step_s: Seconds that an inner step of this group takes. The outer loop sets it.
        is_over: Whether no group of the last sync trains or has anything to send.
        are_all_joining: Whether no group of the last sync was in training.
        is_replacing: Whether a group of the last sync wants the plain mean as global parameters.
        synced_samples: How far the groups of the last sync have read their sample streams.
        vitals: Contribution, norm and pace of the groups of the last sync.
        first_batches: Digests of this group's first batches; None after its first sync.
        equal_samples: The names of the groups whose first batches were found to be equal to this
            group's in the last sync, and its own; empty if there are none.
    """

    def __init__(
        self,
        manager: DiLoCoManager,
        state: GlobalState,
        fragments: Sequence[Syncing],
        digest_every: int,
    ) -> None:
        self._manager = manager
        self._state = state
        self._fragments = fragments
        self._digest_every = digest_every
        self.is_training = True
        self.step_s = math.nan
        self.is_over = self.are_all_joining = self.is_replacing = False
        self.synced_samples: list[SyncedSamples] = []
        self.vitals: list[Vitals] = []
        self.first_batches: list[str] | None = []
        self.equal_samples: tuple[str, ...] = ()

    def send(self, fragment: Syncing) -> PeerTableWork:
        """Start the table's allreduce, for the sync of a fragment."""
        rows, rank = self._manager.num_participants(), self._manager.participating_rank()
        assert rank is not None, "torchft gives every group of a synchronous quorum a rank"
        own = self._own_row(fragment).encode()
        table = torch.zeros(rows, len(own))
        table[rank] = torch.tensor(own)
        table = table.to(fragment.device)
        work = self._manager.allreduce(table, reduce_op=ReduceOp.SUM)  # pyright: ignore
        return PeerTableWork(self, work, table)

    def _own_row(self, fragment: Syncing) -> PeerRow:
        others = (other for other in self._fragments if other is not fragment)
        digests = [(0, 0)] * len(self._fragments)
        if self._digest_is_due():
            digests = [as_numbers(digest) for digest in self._state.fragment_digests()]
        mean = fragment.mean
        # A norm that is not finite belongs to a group that contributes nothing.
        norm = mean.norm if mean.contribution else 0.0
        batches = self.first_batches if mean.contribution else None
        return PeerRow(
            has_more=self.is_training or any(other.unsynced.has_more for other in others),
            is_joining=fragment.is_joining,
            was_healed=self._state.was_healed,
            outer_step=self._state.outer_step % 2**BITS,
            min_replica_size=self._manager._min_replica_size,
            is_replacing=fragment.unsynced.packed.is_replacing,
            vitals=Vitals(mean.contribution, norm, self.step_s),
            samples=fragment.synced_samples,
            settings=as_numbers(self._state.settings_digest()),
            batches=as_numbers(digest_of(batches)) if batches and all(batches) else (0, 0),
            digests=tuple(digests),
        )

    def _digest_is_due(self) -> bool:
        by_count = self._digest_every and self._state.outer_step % self._digest_every == 0
        return bool(by_count) or self._state.compare_next or self._state.was_healed

    def read(self, table: Tensor) -> None:
        """Check the finished table, and keep what it says.

        Args:
            table: The sum: (groups in the quorum, columns), fp32.

        Raises:
            DivergenceError: This group holds other global parameters than most groups, or there is
                no majority.
            SettingsMismatch: It joins groups in training that have other settings.
        """
        self.is_over = False
        if self._manager.errored():
            return
        columns = table.cpu().tolist()
        present = [row[0] for row in columns]
        if present != [1.0] * len(present):
            self._manager.report_error(
                ConnectionError(
                    f"{sum(present):g} of the quorum's {len(present)} replica groups were in the "
                    "allreduce: its connections are those of another quorum"
                )
            )
            return
        rows = [PeerRow.decode(row) for row in columns]
        self._check_settings(rows)
        self._check_agreement(rows)
        self.is_over = not any(row.has_more for row in rows)
        self.are_all_joining = all(row.is_joining for row in rows)
        self.is_replacing = any(row.is_replacing for row in rows)
        self.synced_samples = [row.samples for row in rows]
        self.vitals = [row.vitals for row in rows]
        self._find_equal_samples(rows)
        self._state.compare_next = self._state.was_healed = False

    def _find_equal_samples(self, rows: Sequence[PeerRow]) -> None:
        own = rows[self._manager.participating_rank() or 0].batches
        # torchft's own manager has no names of the members.
        names = getattr(self._manager, "members", None) or range(len(rows))
        same = [name for name, row in zip(names, rows, strict=False) if row.batches == own]
        is_found = any(own) and len(same) > 1
        self.equal_samples = tuple(str(n).partition(":")[0] for n in same if is_found)

    def _check_settings(self, rows: Sequence[PeerRow]) -> None:
        """A group that resumes at the outer step of those in training is not healed by them."""
        if all(row.is_joining for row in rows):
            return  # they compare their settings key by key
        # One of those in training; they have compared theirs already.
        first = next(rank for rank, row in enumerate(rows) if not row.is_joining)
        fix = f"with {self._state.fingerprint}: make its settings equal"
        self._reject_odd([row.settings for row in rows], first, "settings", fix)
        sizes = [row.min_replica_size for row in rows]
        own = self._manager._min_replica_size
        fix = f"with {own}, and theirs is {sizes[first]}: set it to {sizes[first]}"
        self._reject_odd(sizes, first, "min_replica_size", fix)

    def _reject_odd(self, values: Sequence[object], first: int, what: str, fix: str) -> None:
        odd = [rank for rank, value in enumerate(values) if value != values[first]]
        if not odd:
            return
        mismatch = SettingsMismatch(
            f"replica groups {', '.join(map(str, odd))} (by their rank in the quorum) have other "
            f"{what} than those in training"
        )
        if self._manager.participating_rank() in odd:
            raise SettingsMismatch(f"{mismatch}. This group is one of them, {fix}")
        self._manager.report_error(mismatch)

    def _check_agreement(self, rows: Sequence[PeerRow]) -> None:
        steps = {rank: row.outer_step for rank, row in enumerate(rows)}
        self._compare(rows, steps, "the outer step")
        for fragment in range(len(self._fragments)):
            digests = {rank: row.digests[fragment] for rank, row in enumerate(rows)}
            # A group for which no digest was due has sent none.
            sent = {rank: digest for rank, digest in digests.items() if any(digest)}
            self._compare(rows, sent, f"the global parameters of {fragment=}")

    def _compare(self, rows: Sequence[PeerRow], held: dict[int, Any], what: str) -> None:
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


class PeerTableWork:
    """Comes last among a sync's allreduces, so that the table is read before the vote."""

    def __init__(self, peer_table: PeerTable, work: Any, table: Tensor) -> None:
        self._peer_table = peer_table
        self._work: Any = work
        self._table = table

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the table and read it. The manager's timeout bounds the wait.

        A joiner may do so twice: when it joins, and when the sync ends, some turns later.
        """
        del timeout
        if self._work is not None:
            self._work.wait()
            self._work = None
        self._peer_table.read(self._table)
        return True
