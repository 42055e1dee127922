"""The sync of one fragment: torchft's sequence and streams over our own global parameters."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn
from torchft.manager import Manager

from composer_replication.diloco.arguments import DiLoCoArguments
from composer_replication.diloco.averaging.quantized_mean import make_mean
from composer_replication.diloco.averaging.weighted_mean import CHUNK
from composer_replication.diloco.global_parameters import GlobalParameters
from composer_replication.diloco.global_state import GlobalState
from composer_replication.diloco.outer_health import Vitals
from composer_replication.diloco.outer_optimizer import pseudo_gradient
from composer_replication.diloco.peer_table import PeerTable
from composer_replication.diloco.shards import local_tensor
from composer_replication.diloco.torchft_api import (
    DiLoCoManager,
    _StreamingDiLoCoFragment,
    gathers,
)
from composer_replication.diloco.unsynced import Packed, Unsynced
from composer_replication.settings import DiLoCoSettings

USUAL = 5
"""Over how many syncs of a fragment the usual norm of a pseudo-gradient is taken."""


class FragmentSync(_StreamingDiLoCoFragment):
    """Synchronises one fragment (torchft ``local_sgd.py``, ``_StreamingDiLoCoFragment``).

    torchft's ``prepare_sync`` and ``perform_sync`` run unchanged, with their streams, events and
    order of allreduce, vote and outer step. They get an empty module, so that torchft backs up and
    restores nothing, and call these methods:

    * ``_save_grads``: compute the pseudo-gradient and pack it, weighted by the contribution;
    * ``_average_grads``: start the allreduces;
    * ``_set_grads``, after the commit vote: take the outer step and write the global parameters
      back into the model, while they are in cache; the step of the outer optimizer that torchft
      takes next finds no gradients;
    * ``_merge_parameters``: writes back if there was no outer step.

    Nothing is applied before the vote, so a sync that did not commit leaves no trace and can be
    tried again.

    Args:
        manager: The torchft manager, or its simulated double.
        fragment_id: The fragment's index in the order of syncs, from 0.
        global_parameters: Its parameters, local and global, and their outer optimizer.
        arguments: What ``DiLoCo`` was built with: where messages are summed.
        settings: The run's settings.
        state: The global state that the outer step changes.
        peer_table: The table whose allreduce goes with this fragment's.
    """

    def __init__(
        self,
        manager: DiLoCoManager | Manager,
        fragment_id: int,
        global_parameters: GlobalParameters,
        arguments: DiLoCoArguments,
        settings: DiLoCoSettings,
        state: GlobalState,
        peer_table: PeerTable,
    ) -> None:
        super().__init__(
            cast(Manager, manager),
            nn.Module(),
            fragment_id,
            settings.sync_every // settings.fragment_count * (fragment_id + 1),
            arguments.inner_optimizer,
            global_parameters.optimizer,
            settings.sync_every,
            fragment_sync_delay=settings.fragment_sync_delay,
            fragment_update_alpha=settings.fragment_update_alpha,
        )
        self.fragment_id = fragment_id
        self.globals = global_parameters
        self._state = state
        self._peer_table = peer_table
        self._settings = settings
        self._local = [*global_parameters.local_tensors.values()]
        model_device = local_tensor(self._local[0]).device
        self.device = torch.device(arguments.message_device or model_device)
        self.mean = make_mean(
            global_parameters.share,
            self.device,
            # With shares theta is gathered instead, after it has moved.
            not global_parameters.is_shared,
            settings.wire_format,
        )
        self._staging: Tensor | None = None
        if self.device.type == "cpu" and model_device.type != "cpu":
            # Parameters pass through it on the way from the accelerator.
            self._staging = torch.empty(CHUNK, pin_memory=True)
        self.unsynced = Unsynced(settings.weight_by)
        self._copied: list[Tensor] | None = None
        self._copies_first = True
        self._paces: deque[float] = deque(maxlen=USUAL)
        self.total_contribution = 0.0
        self.committed = False

    # ---- a sync, in the order of torchft ---------------------------------------------------------

    def prepare_sync(self) -> None:
        """Compute the pseudo-gradient and start its allreduce, in a quorum. It does not wait."""
        self.committed = False
        self._allreduce_work = []  # of an attempt that failed
        super().prepare_sync()

    def abandon(self) -> None:
        """Forget the sync in flight. Its mean and its memory are not used again."""
        self.committed = False
        self._allreduce_work = []
        self.mean.abandon()
        self.unsynced.packed = Packed()

    def _save_grads(self) -> None:
        # DDP makes buffers equal only before the next forward pass: the ranks' may differ here.
        self.globals.level_buffers()
        packed = self.unsynced.packed = self._pack()
        frozen, share = set(packed.frozen), self.globals.share
        # An average is sent as it is, without the rounding errors of earlier syncs.
        self.mean.forget_residual(None if packed.is_replacing else frozen)
        local = packed.local or self.local()
        averaged, copied = self.globals.divide(local)
        theta = (
            _unrounded(part, share.part_of(index, local[index])) if index in frozen else part
            for index, part in enumerate(self.globals.own_parts())
        )
        contribution = 0.0 if self._peer_table.is_joining else self.unsynced.contribution()
        self.mean.pack(self._pseudo_gradient, (theta, share.own(averaged)), contribution)
        self._copied = copied if self.mean.contribution else None
        if not self._peer_table.is_joining:
            self.unsynced.unsent = None  # if this attempt fails, the next one computes it again

    def _pseudo_gradient(self, theta: Tensor, local: Tensor, into: Tensor) -> None:
        if local.device != into.device:
            local = self._landing(local, into).copy_(local)
        # A non-blocking copy to a CPU could be read before it has arrived.
        theta = theta.to(into.device, non_blocking=into.device.type != "cpu")
        pseudo_gradient(theta, local, into)

    def _average_grads(self) -> None:
        # The table is sent first, because a quantized mean sends more messages after the first ones
        # have arrived, and all groups must start their collectives in one order. It is awaited
        # last.
        packed = self.unsynced.packed
        samples = self._state.ledger.send(
            self.fragment_id, packed.position, self.mean.contribution > 0
        )
        self._copies_first = True
        table = self._peer_table.send(
            self.mean, self._vitals(), samples, packed.is_replacing, self._leave_out
        )
        manager = cast(DiLoCoManager, self._manager)
        # Before the mean, since a quantized one starts collectives on a thread of its own.
        means = self.globals.copied.send(manager, self.device, self._copied)
        if not gathers(manager):  # otherwise they are gathered once the table has arrived
            means += self.mean.send(manager)
        self._allreduce_work.extend([*means, table])  # pyright: ignore[reportArgumentType]

    def _vitals(self) -> Vitals:
        mean = self.mean
        if not mean.contribution:  # the norm may not be finite, which no row may have
            return Vitals()
        steps, usual_pace = self.unsynced.packed.inner_steps, max(self._paces, default=math.nan)
        return Vitals(mean.contribution, mean.norm, math.nan, mean.sent_norm, steps, usual_pace)

    def _leave_out(self, sound: Mapping[int, Vitals]) -> set[int]:
        """Gather what the groups have sent, and sum it without those that are not sound.

        It is a collective of the group's ranks, each of which has seen a part of the messages.

        Args:
            sound: The metrics of the groups whose rows are valid, by rank in the quorum.

        Returns:
            The ranks left out.
        """
        manager, unsound = cast(DiLoCoManager, self._manager), set[int]()
        if not manager.errored():
            unsound = self.mean.find_unsound(manager, sound)
        found = (float(rank in unsound) for rank in range(manager.num_participants()))
        left_out = {rank for rank, part in enumerate(self.globals.mean_over_ranks(*found)) if part}
        self._copies_first = 0 not in left_out  # all groups copy the buffers of the first group
        if not manager.errored():
            kept = {rank: group for rank, group in sound.items() if rank not in left_out}
            self.mean.sum_sound(manager, kept)
        return left_out

    def perform_sync(self) -> bool:
        """Wait for the mean, vote, and on commit take the outer step. Returns the vote."""
        self.committed = super().perform_sync()
        self.unsynced.packed.local = None  # no longer in flight
        return self.committed

    def _set_grads(self) -> None:
        self.total_contribution = self.mean.finish()
        if self.total_contribution > 0.0:
            table, globals_ = self._peer_table, self.globals
            # Locked until it is counted: no joiner gets half an outer step.
            with self._state.outer_step_of(table.synced_samples):
                globals_.take_outer_step(
                    self.mean, self._write_back_alpha, replaces=table.is_replacing
                )
                globals_.copied.take() if self._copies_first else globals_.copied.write_back()
        self.mean.clear()

    def _merge_parameters(self) -> None:
        # After an outer step take_outer_step has already written back. If there was none and all
        # groups were resuming, each continues in mid-round where it stopped.
        if self.total_contribution == 0.0 and not self._peer_table.is_joining:
            self.globals.write_back(self._write_back_alpha)

    # ---- what is sent, with which weight, and what stays of the local parameters -----------------

    def _pack(self) -> Packed:
        if self._peer_table.is_joining:
            return Packed(position=self._state.ledger.position)
        if self.unsynced.unsent is not None:
            return self.unsynced.unsent
        kept = None
        if self._settings.fragment_sync_delay:
            kept = [t.to(self.globals.flat.device, copy=True) for t in self.local()]
        return self.unsynced.pack(self._state.ledger.position, kept, self.globals.frozen())

    def local(self) -> list[Tensor]:
        """The local parameters and buffers, as this rank holds them; not copies."""
        return [local_tensor(tensor) for tensor in self._local]

    def _landing(self, local: Tensor, into: Tensor) -> Tensor:
        """Return host memory to copy local parameters of an accelerator to."""
        if self._staging is None:
            return into
        staging = self._staging.view(local.dtype)
        return staging[: local.numel()] if local.numel() <= staging.numel() else into

    @property
    def _write_back_alpha(self) -> float:
        if self._peer_table.is_joining:
            return 0.0
        if self.unsynced.replaces_global and not self.unsynced.packed.is_replacing:
            return 1.0  # an average has been put into the model since this sync was sent: keep it
        return self._settings.fragment_update_alpha

    # ---- between syncs ---------------------------------------------------------------------------

    def discard_synced_steps(self) -> None:
        """Forget the inner steps that the committed sync has brought into the global parameters.

        A join without an outer step changes nothing.
        """
        if self._peer_table.is_joining and self.total_contribution == 0.0:
            return
        if self.mean.contribution > 0:
            if steps := self.unsynced.packed.inner_steps:
                self._paces.append(self.mean.sent_norm / steps)
            self._state.ledger.has_synced(self.fragment_id, self.unsynced.packed.position)
        keeps_later = self._write_back_alpha > 0
        self.unsynced.discard_synced(
            keeps_later=keeps_later, is_joining=self._peer_table.is_joining
        )

    def take_global(self) -> None:
        """Continue from the global parameters, and drop what was trained here since the last sync.

        With shares it is a collective of the group's ranks.
        """
        self.globals.write_back()
        self.forget_local()

    def forget_local(self) -> None:
        """Send nothing of what this group has trained since the last sync."""
        self.unsynced = Unsynced(self._settings.weight_by)
        self.mean.forget_residual()

    # ---- what others ask -------------------------------------------------------------------------

    @property
    def is_in_flight(self) -> bool:
        """Whether an allreduce has been started and its outer step has not been taken."""
        return bool(self._allreduce_work)

    @property
    def in_flight(self) -> Packed | None:
        """What has been sent, or is to be sent again; None if nothing has."""
        return self.unsynced.packed if self.is_in_flight else self.unsynced.unsent


def _unrounded(theta: Tensor, local: Tensor) -> Tensor:
    """Take a frozen tensor's value where it is the rounded global one, so that they are equal."""
    if local.dtype == theta.dtype:
        return theta
    rounded = theta.to(device=local.device, dtype=local.dtype)
    kept = local.to(device=theta.device, dtype=theta.dtype)
    return torch.where((rounded == local).to(theta.device), kept, theta)
