"""The sync of one fragment: pack, send, wait for the mean, vote, and take the outer step."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torchft.utils import get_stream_context

from composer_replication.diloco.averaging.quantized_mean import make_mean
from composer_replication.diloco.flat_chunks import copies_of
from composer_replication.diloco.fragments import listed
from composer_replication.diloco.global_state import GlobalState
from composer_replication.diloco.outer_health import GroupMetrics, GroupsMetrics, UsualPace
from composer_replication.diloco.peer_rows import PeerRow
from composer_replication.diloco.peer_table import PeerTable, TableResult
from composer_replication.diloco.torchft_api import DiLoCoManager

log = logging.getLogger(__name__)


@dataclass
class Steps:
    """Inner steps of a fragment that are not in the global parameters yet.

    Attributes:
        inner_steps: Inner steps since the fragment was last synchronised.
        samples: How many samples these steps have trained on; tokens with ``weight_by: tokens``.
        learning_rates: The sum of the learning rates of these steps.
    """

    inner_steps: int = 0
    samples: int = 0
    learning_rates: float | Tensor = 0.0

    def count(self, samples: int, learning_rate: float | Tensor) -> None:
        """Count a completed inner step, its samples or tokens and its learning rate."""
        self.inner_steps += 1
        self.samples += samples
        self.learning_rates += learning_rate


@dataclass
class Packed(Steps):
    """What a pseudo-gradient was computed from: these steps, and the parameters after them.

    Attributes:
        position: The position in the sample stream.
        local: The local parameters and buffers, in the order of ``GlobalParameters.tensors``, kept
            while the sync is in flight; None without a delay.
        frozen: The tensors that were frozen then, by index. A tensor that is frozen later, while
            the sync is in flight, is sent again as it was sent first.
    """

    position: int = 0
    local: list[Tensor] | None = None
    frozen: Sequence[int] = ()

    @property
    def learning_rate(self) -> float:
        """The mean learning rate of these steps."""
        return float(self.learning_rates) / max(1, self.inner_steps)

    def contribution(self, weight_by: str) -> float:
        """This group's weight in the mean.

        Args:
            weight_by: How it is counted, see ``DiLoCoSettings``.

        Raises:
            ValueError: The weight is a number of samples or tokens, and none were counted.
        """
        if not self.inner_steps:
            return 0.0
        if weight_by == "uniform":
            return 1.0
        if weight_by == "steps":
            return float(self.inner_steps)
        if not self.samples:
            raise ValueError(
                f"weight_by={weight_by!r} but no {weight_by} were counted: call "
                f"count_{weight_by}(n) before each optimizer step, or use weight_by='steps'"
            )
        return float(self.samples)


class Phase(Enum):
    """How far the sync of a fragment is. At most one fragment is not idle."""

    IDLE = "no sync of it has begun"
    RESTORED = "a checkpoint has left it in flight: it is to be sent again"
    SENT = "it has been sent, and there was no vote yet"
    FAILED = "it was not sent, or the vote has failed: it is to be repeated"
    COMMITTED = "it has taken its outer step, which is to be reported"


class FragmentSync:
    """Synchronises one fragment.

    It takes the place of torchft's ``_StreamingDiLoCoFragment`` (``local_sgd.py``), with the same
    streams and the same order of allreduce, vote and outer step. After ``pack`` and ``send``,
    ``perform_sync`` waits for the mean, votes, and then takes the outer step and writes the global
    parameters back into the model, while they are in cache.

    Nothing is applied before the vote, so a sync that did not commit moves no parameter and can be
    tried again.

    Args:
        manager: The torchft manager, or its simulated double.
        fragment_id: The fragment's index in the order of syncs, from 0.
        state: The global state, of which the outer step changes this fragment's part.
        usual_pace: How far this group's inner steps usually move a parameter.

    Attributes:
        phase: How far its sync is.
        unsynced: What has been trained since its last sync.
        unsent: What was in flight in the checkpoint that this group resumes from, until it has been
            sent again; else None.
        packed: What the last pseudo-gradient was computed from.
        is_joining: Whether this group contributed nothing to the last sync, since it joined.
        result: What the groups of the last sync have reported to each other.
    """

    def __init__(
        self,
        manager: DiLoCoManager,
        fragment_id: int,
        state: GlobalState,
        usual_pace: UsualPace,
    ) -> None:
        self._manager = manager
        self.fragment_id = fragment_id
        self.globals = state.fragments[fragment_id]
        self._state = state
        self._usual_pace = usual_pace
        self._settings = state.settings
        self.device = self.globals.device
        self.mean = make_mean(self.globals.layout, state.settings.wire_format)
        # Messages travel beside training, as torchft's do.
        self._stream = None if self.device.type == "cpu" else torch.Stream(self.device)
        self._works: list[Any] = []
        self.unsynced = Steps()
        self.unsent: Packed | None = None
        self.packed = Packed()
        self._buffers: list[Tensor] = []
        self.total_contribution = 0.0
        self.phase = Phase.IDLE
        self.is_joining = False
        self.result = TableResult()
        self.unsound_in_a_row = 0
        """How many syncs in a row have left out what this group has sent of it. One that was not
        finite counts for every fragment."""

    # ---- a sync ----------------------------------------------------------------------------------

    def abandon(self) -> None:
        """Forget the sync in flight. Its mean and its memory are not used again."""
        self.phase = Phase.FAILED
        self._works = []
        self.packed = Packed()
        self.mean.abandon()

    def end(self) -> None:
        """End the sync in flight: what was sent is accounted for, or others have gone on.

        If there is something ``unsent``, the next sync sends that, and not what was trained since.
        """
        self.phase = Phase.IDLE if self.unsent is None else Phase.RESTORED

    def pack(self, *, is_joining: bool) -> None:
        """Compute the pseudo-gradient. A joiner's is zero, with no weight."""
        self.phase = Phase.FAILED  # until it is sent
        self.is_joining = is_joining
        # DDP makes buffers equal only before the next forward pass: the ranks' may differ here.
        tensors = [*self.globals.live.values()]
        self.globals.division.level(tensors[self.globals.num_parameters :])
        packed = self._to_pack()
        self.packed = packed
        local = packed.local or self.globals.local()
        odd_globally, odd_here = self.globals.not_finite(local)
        odd = odd_globally | odd_here
        self.mean.forget_residual({*packed.frozen} | odd)
        self._buffers = local[self.globals.num_parameters :]
        contribution = packed.contribution(self._settings.weight_by)
        # An ``odd`` tensor is sent as zeros (ADR-054).
        self.globals.pack(self.mean, local, odd, contribution)
        odd_here_alone = odd_here - odd_globally
        if self.mean.contribution and odd_here_alone:
            names = [*self.globals.theta]
            left_out = listed([names[index] for index in sorted(odd_here_alone)])
            log.warning("Not finite in this group, and left out: %s", left_out)
        if not is_joining:
            self.unsent = None  # if this attempt fails, the next one computes it again

    def send(self, row: PeerRow) -> None:
        """Start to send what is packed, in a quorum. It does not wait.

        Args:
            row: What this group tells the others beside it.
        """
        if self._stream is not None:  # it reads what the stream of training has computed
            self._stream.wait_stream(torch.accelerator.current_stream(self.device))
        with get_stream_context(self._stream):
            # The table is sent first, because a quantized mean sends more messages after the first
            # ones have arrived, and all groups must start their collectives in one order. It is
            # awaited last.
            table = PeerTable(self._manager, row, self.mean, self._leave_out)
            # Before the mean, since a quantized one starts collectives on a thread of its own.
            works = self.globals.copied.send(self._manager, self.device, self._buffers)
            if not self._manager.gathers:  # else they are gathered once the table has arrived
                works += self.mean.send(self._manager)
            self._works = [*works, table]
        self.phase = Phase.SENT

    def metrics(self, step_s: float) -> GroupMetrics:
        """Return this group's metrics of what is packed.

        Args:
            step_s: Seconds that one of its inner steps takes; NaN if that is not measured.
        """
        mean = self.mean
        if not mean.contribution:  # the norm may not be finite, which no row may have
            return GroupMetrics(step_s=step_s)
        return GroupMetrics(
            step_s=step_s,
            contribution=mean.contribution,
            norm=mean.norm,
            sent_norm=mean.sent_norm,
            moved=mean.moved,
            inner_steps=self.packed.inner_steps,
            pace=self._pace,
            usual_pace=self._usual_pace.at(self.packed.learning_rate),
        )

    @property
    def _pace(self) -> float:
        return self.mean.moved_each / max(1, self.packed.inner_steps)

    def _leave_out(self, sound: GroupsMetrics) -> set[int]:
        """Gather what the groups have sent, and sum it without those that are not sound.

        It is a collective of the group's ranks, each of which has seen a part of the messages.

        Args:
            sound: The metrics of the groups whose rows are valid.

        Returns:
            The ranks left out.
        """
        manager = self._manager
        unsound: set[int] = set()
        if not manager.errored():
            unsound = self.mean.find_unsound(manager, sound)
        found = [float(rank in unsound) for rank in range(manager.num_participants())]
        of_all_ranks = self.globals.mean_over_ranks(*found)
        left_out = {rank for rank, part in enumerate(of_all_ranks) if part}
        if not manager.errored():
            kept = {rank: group for rank, group in sound.items() if rank not in left_out}
            self.mean.sum_sound(manager, kept)
        return left_out

    def perform_sync(self) -> None:
        """Wait for the mean, vote, and on commit take the outer step."""
        try:
            with get_stream_context(self._stream):
                for work in self._works:
                    work.wait()
            if self._stream is not None:
                self._stream.synchronize()
        except BaseException as error:  # Ctrl-C too: peers would wait until their timeout
            self._manager.report_error(error)
            raise
        if self.phase is Phase.SENT:
            self.result = self._works[-1].result
            if self.result.rows:
                self._state.compare_next = False  # they have been compared
        self._works = []
        self.phase = Phase.FAILED  # also if the vote raises
        if self._manager.should_commit():
            self.phase = Phase.COMMITTED
            self._step()
        self.packed.local = None  # no longer in flight

    def _step(self) -> None:
        globals_ = self.globals
        self.total_contribution = self.mean.finish()
        if self.total_contribution > 0.0:
            # Locked until it is counted: no joiner gets half an outer step.
            with self._state.outer_step_of(self.result.synced_samples):
                first = self.result.kept.get(0)
                if first is not None and first.metrics.contribution:  # all take over its buffers
                    globals_.take_buffers(globals_.not_finite()[0])
                else:
                    globals_.copied.write_back()
                globals_.take_outer_step(self.mean, self._write_back_alpha)
        elif not self.is_joining:
            # All groups were resuming: each continues in mid-round where it stopped.
            globals_.write_back(self._write_back_alpha)
        self.mean.clear()

    # ---- what is sent, with which weight, and what stays of the local parameters -----------------

    def _to_pack(self) -> Packed:
        position = self._state.ledger.position
        if self.is_joining:
            return Packed(position=position)
        if self.unsent is not None:
            return self.unsent
        kept = None
        if self._settings.fragment_sync_delay:
            kept = copies_of(self.globals.local())
        unsynced = self.unsynced
        return Packed(
            inner_steps=unsynced.inner_steps,
            samples=unsynced.samples,
            learning_rates=float(unsynced.learning_rates),
            position=position,
            local=kept,
            frozen=self.globals.frozen(),
        )

    @property
    def _write_back_alpha(self) -> float:
        if self.is_joining:
            return 0.0
        return self._settings.fragment_update_alpha

    # ---- between syncs ---------------------------------------------------------------------------

    def discard_synced_steps(self) -> None:
        """Forget the inner steps that the committed sync has brought into the global parameters.

        A join without an outer step changes nothing.
        """
        unsynced = self.unsynced
        packed = self.packed
        if self.is_joining and not self.total_contribution:
            return
        if self.mean.contribution > 0:
            if packed.inner_steps:
                self._usual_pace.add(self.fragment_id, self._pace, packed.learning_rate)
            self._state.ledger.has_synced(self.fragment_id, packed.position)
        if not self._write_back_alpha:  # the steps since it was sent are thrown away
            self._drop_steps()
            return
        unsynced.inner_steps -= packed.inner_steps
        unsynced.samples -= packed.samples
        unsynced.learning_rates -= packed.learning_rates

    def forget_local(self) -> None:
        """Send nothing of what this group has trained since the last sync."""
        self._drop_steps()
        self.mean.forget_residual(range(len(self.globals.theta)))

    def _drop_steps(self) -> None:
        self.unsynced = Steps()
        self.unsent = None
        self.end()
