"""What travels beside every sync: who took part, who has more to send, and what each one holds."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from composer_replication.diloco.global_state import GlobalState
from composer_replication.diloco.sample_ledger import Claim
from composer_replication.diloco.settings import SettingsMismatch
from composer_replication.diloco.torchft_api import DiLoCoManager

log = logging.getLogger(__name__)

(
    _PRESENT,
    _PENDING,
    _JOINING,
    _HEALED,
    _OUTER_STEP,
    _VERSION,
    _MIN_SIZE,
    _REPLACING,
    _CLAIM,
) = range(9)
_SETTINGS = _CLAIM + 6  # three numbers, of two columns each
_DIGESTS = _SETTINGS + 2
_BITS = 22
"""Of a number that a sum in fp32 keeps exactly, with room for the 1 that says it was given."""


class DivergenceError(RuntimeError):
    """Replica groups hold different global parameters, which no sync can mend."""


class Syncing(Protocol):
    """What a roll call asks of a fragment."""

    is_joining: bool
    device: torch.device
    frozen: list[bool]

    @property
    def is_replacing(self) -> bool:
        """Whether what this group sends is to be the global parameters."""
        ...

    @property
    def has_more(self) -> bool:
        """Whether this group has something to send that no sync has brought in."""
        ...

    @property
    def claim(self) -> Claim:
        """How much of this group's samples its sync will have brought into the model."""
        ...


class RollCall:
    """A small table that the groups of a sync fill in, a row each, and sum with the messages.

    It tells six things that torchft does not:

    * whether all groups of the quorum were in this sum (under a quorum id that was used before they
      can be others, or fewer);
    * whether any group still trains or has steps to send: when none has, training is over for all;
    * whether all groups hold the same: their settings, ``min_replica_size`` and outer step at every
      sync, and a digest of each fragment every ``digest_every`` outer steps, after a heal and after
      a resume;
    * which version of the settings all groups know, so that all adopt it at the same outer step;
    * how far each group's stream of samples is in the model once the sync has committed;
    * which parameters each group has frozen, and whether one of them has replaced its local
      parameters by an average that is to be the global ones.

    Args:
        manager: The torchft manager, or its simulated double.
        state: The global state.
        digest_every: Every how many outer steps the digests are compared; 0 for never.
    """

    def __init__(self, manager: DiLoCoManager, state: GlobalState, digest_every: int) -> None:
        self._manager = manager
        self._state = state
        self._digest_every = digest_every
        self.fragments: Sequence[Syncing] = ()
        self.is_training = True
        self.is_over = self.are_all_joining = False
        self.known_version = self.agreed_version = 0
        """The newest settings that this group knows, and that all of the last sync knew."""
        self.claims: list[Claim] = []
        """Of the groups in the last sync."""
        self.is_replacing = False
        """Whether a group of the last sync wants the plain mean as the global parameters."""
        self.frozen: dict[int, Tensor] = {}
        """What the groups in training of the last sync have frozen, by their places in it."""

    def send(self, fragment: Syncing) -> RollCallWork:
        """Start the table's allreduce, for the sync of a fragment."""
        left = any(other.has_more for other in self.fragments if other is not fragment)
        rows, rank = self._manager.num_participants(), self._manager.participating_rank()
        assert rank is not None, "torchft gives every group of a synchronous quorum a rank"
        frozen = torch.tensor(fragment.frozen, dtype=torch.float32)
        table = torch.zeros(rows, self._end_of_digests + len(frozen))
        table[rank, _PRESENT] = 1
        table[rank, _PENDING] = float(self.is_training or left)
        table[rank, _JOINING] = float(fragment.is_joining)
        table[rank, _HEALED] = float(self._state.was_taken)
        table[rank, _OUTER_STEP] = self._state.outer_step % 2**_BITS
        table[rank, _VERSION] = self.known_version % 2**_BITS
        table[rank, _MIN_SIZE] = self._manager._min_replica_size
        table[rank, _REPLACING] = float(fragment.is_replacing)
        table[rank, _CLAIM:_SETTINGS] = torch.tensor(_as_columns(fragment.claim))
        table[rank, _SETTINGS:_DIGESTS] = torch.tensor(_as_numbers(self._state.settings_digest()))
        if self._digest_is_due():
            numbers = [n for digest in self._state.fragment_digests() for n in _as_numbers(digest)]
            table[rank, _DIGESTS : self._end_of_digests] = torch.tensor(numbers)
        table[rank, self._end_of_digests :] = frozen
        table = table.to(fragment.device)
        work = self._manager.allreduce(table, reduce_op=ReduceOp.SUM)  # pyright: ignore
        return RollCallWork(self, work, table)

    @property
    def _end_of_digests(self) -> int:
        return _DIGESTS + 2 * len(self.fragments)

    def _digest_is_due(self) -> bool:
        by_count = self._digest_every and self._state.outer_step % self._digest_every == 0
        return bool(by_count) or self._state.was_given or self._state.was_taken

    def read(self, table: Tensor) -> None:
        """Look at the finished table.

        Raises:
            DivergenceError: This group holds other global parameters than most, or there is no
                majority.
            SettingsMismatch: It joins groups in training that have other settings.
        """
        self.is_over = False
        if self._manager.errored():
            return
        table = table.cpu()
        present = table[:, _PRESENT].tolist()
        if present != [1.0] * len(present):
            self._manager.report_error(
                ConnectionError(
                    f"{sum(present):g} of the quorum's {len(present)} replica groups were in the "
                    "allreduce: its connections are those of another quorum"
                )
            )
            return
        self._check_settings(table)
        self._check_agreement(table)
        self.is_over = not table[:, _PENDING].any()
        self.are_all_joining = bool(table[:, _JOINING].all())
        self.agreed_version = int(table[:, _VERSION].min())
        self.is_replacing = bool(table[:, _REPLACING].any())
        training = (table[:, _JOINING] == 0).nonzero().flatten().tolist()
        self.frozen = {rank: table[rank, self._end_of_digests :] for rank in training}
        self.claims = [_as_claim(row) for row in table[:, _CLAIM:_SETTINGS].int().tolist()]
        self._state.was_given = self._state.was_taken = False

    def _check_settings(self, table: Tensor) -> None:
        """A group that resumes at the outer step of those in training is not healed by them."""
        joining = table[:, _JOINING].bool().tolist()
        if all(joining):
            return  # they compare them key by key
        first = joining.index(False)  # of those in training, who have compared theirs already
        settings = [tuple(row) for row in table[:, _SETTINGS:_DIGESTS].tolist()]
        self._refuse_odd(
            settings, first, "settings", f"with {self._state.fingerprint}: make its settings equal"
        )
        sizes = [int(size) for size in table[:, _MIN_SIZE].tolist()]
        own = self._manager._min_replica_size
        fix = f"with {own}, and theirs is {sizes[first]}: set it to {sizes[first]}"
        self._refuse_odd(sizes, first, "min_replica_size", fix)

    def _refuse_odd(self, given: Sequence[object], first: int, what: str, fix: str) -> None:
        odd = [rank for rank, value in enumerate(given) if value != given[first]]
        if not odd:
            return
        mismatch = SettingsMismatch(
            f"replica groups {', '.join(map(str, odd))} (by their place in the quorum) have other "
            f"{what} than those in training"
        )
        if self._manager.participating_rank() in odd:
            raise SettingsMismatch(f"{mismatch}. This group is one of them, {fix}")
        self._manager.report_error(mismatch)

    def _check_agreement(self, table: Tensor) -> None:
        healed = table[:, _HEALED].bool().tolist()
        self._compare(table[:, _OUTER_STEP : _OUTER_STEP + 1], healed, "the outer step")
        for fragment in range(len(self.fragments)):
            start = _DIGESTS + 2 * fragment
            what = f"the global parameters of {fragment=}"
            self._compare(table[:, start : start + 2], healed, what)

    def _compare(self, columns: Tensor, healed: list[bool], what: str) -> None:
        is_digest = columns.shape[1] > 1
        held = {
            rank: tuple(row)
            for rank, row in enumerate(columns.tolist())
            if any(row) or not is_digest  # a group for which none was due gives none
        }
        if len(set(held.values())) < 2:
            return
        # Who has just taken over the state is not asked what is right.
        trusted = [value for rank, value in held.items() if not healed[rank]]
        most, count = Counter(trusted or held.values()).most_common(1)[0]
        has_majority = 2 * count > len(trusted)
        odd = [rank for rank, value in held.items() if not has_majority or value != most]
        message = (
            f"after outer step {self._state.outer_step} replica groups "
            f"{', '.join(map(str, odd))} (by their place in the quorum, in the order of their "
            f"names) differ in {what}"
        )
        if self._manager.participating_rank() in odd:
            raise DivergenceError(
                f"{message}. This group is one of them: stop it, and start it again without its "
                "checkpoint, so that it takes over what the others hold"
            )
        self._manager.report_error(DivergenceError(message))


class RollCallWork:
    """Stands last among a sync's allreduces, so that the table is read before the vote."""

    def __init__(self, roll_call: RollCall, work: Any, table: Tensor) -> None:
        self._roll_call = roll_call
        self._work = work
        self._table = table

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the table and look at it."""
        del timeout  # the manager's
        self._work.wait()
        self._roll_call.read(self._table)
        return True


def _as_columns(claim: Claim) -> list[int]:
    return [half for number in claim for half in divmod(number, 2**_BITS)]


def _as_claim(columns: list[int]) -> Claim:
    pairs = zip(columns[::2], columns[1::2], strict=True)
    return Claim(*((high << _BITS) + low for high, low in pairs))


def _as_numbers(digest: str) -> tuple[int, int]:
    """44 bits of a digest as two numbers above 0."""
    bits = int(digest[:11], 16)
    return (bits >> _BITS) + 1, bits % 2**_BITS + 1
