"""One fragment's sync: torchft's sequence and streams, over global parameters of our own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torchft.manager import Manager

from composer_replication.diloco.averaging.quantized_mean import EncodedMean
from composer_replication.diloco.averaging.weighted_mean import CHUNK, MeanLayout, WeightedMean
from composer_replication.diloco.averaging.wire_sizes import WIRE_FORMATS
from composer_replication.diloco.freezing import StepRules
from composer_replication.diloco.global_state import GlobalState
from composer_replication.diloco.outer_optimizer import (
    GlobalParameters,
    local_tensor,
    pseudo_gradient,
)
from composer_replication.diloco.peer_table import RollCall
from composer_replication.diloco.sample_ledger import Claim
from composer_replication.diloco.settings import DiLoCoSettings
from composer_replication.diloco.sync_report import SyncClock
from composer_replication.diloco.torchft_api import DiLoCoManager, _StreamingDiLoCoFragment


@dataclass
class Formed:
    """What a pseudo-gradient was formed of.

    Attributes:
        inner_steps: Inner steps since the fragment was last synchronised.
        samples: Samples in them.
        position: How far the group had read its stream of samples.
        is_replacing: Whether the local parameters are to be the global ones, see
            ``DiLoCo.make_local_global``.
        local: The local parameters then, kept while the sync is in flight; None without a delay.
    """

    inner_steps: int
    samples: int
    position: int
    is_replacing: bool
    local: list[Tensor] | None


class FragmentSync(_StreamingDiLoCoFragment):
    """Synchronises one fragment (torchft ``local_sgd.py``, ``_StreamingDiLoCoFragment``).

    torchft's ``prepare_sync`` and ``perform_sync`` run unchanged: streams, events, the order of
    allreduce, vote and outer step are theirs. They are given an empty module, so that torchft
    backs up and restores nothing, and call these instead:

    * ``_save_grads``: form the pseudo-gradient as messages, weighted by the contribution;
    * ``_average_grads``: start the allreduces;
    * ``_set_grads``, after the commit vote: take the outer step and write the global parameters
      back into the model, while they are in cache; the step of the outer optimizer that torchft
      takes next finds no gradients;
    * ``_merge_parameters``: nothing is left to do.

    Nothing is applied before the vote, so a sync that did not commit leaves no trace and can be
    tried again.

    Args:
        manager: The torchft manager, or its simulated double.
        fragment_id: Its place in the order of syncs, from 0.
        global_parameters: Its parameters, local and global, and their outer optimizer.
        inner_optimizer: Passed on to torchft.
        settings: The run's settings.
        clock: Told when a quorum has formed and when a vote is over.
        state: What the outer step changes.
        roll_call: Goes along with the messages.
        ranks: Those of this group, if all hold the same parameters, see ``DiLoCo``.
        message_device: See there.
    """

    def __init__(
        self,
        manager: DiLoCoManager | Manager,
        fragment_id: int,
        global_parameters: GlobalParameters,
        inner_optimizer: torch.optim.Optimizer,
        settings: DiLoCoSettings,
        clock: SyncClock,
        state: GlobalState,
        roll_call: RollCall,
        ranks: ProcessGroup | None = None,
        message_device: torch.device | None = None,
    ) -> None:
        super().__init__(
            cast(Manager, manager),
            nn.Module(),
            fragment_id,
            settings.sync_every // settings.fragment_count * (fragment_id + 1),
            inner_optimizer,
            global_parameters.optimizer,
            settings.sync_every,
            fragment_sync_delay=settings.fragment_sync_delay,
            fragment_update_alpha=settings.fragment_update_alpha,
        )
        self.fragment_id = fragment_id
        self.globals = global_parameters
        self._clock = clock
        self._state = state
        self._roll_call = roll_call
        self._alpha = settings.fragment_update_alpha
        self._weight_by = settings.weight_by
        self._local = list(global_parameters.local.values())
        self._theta = [theta.detach() for theta in global_parameters.theta.values()]
        model_device = local_tensor(self._local[0]).device
        self.device = message_device or model_device
        self._sizes = [theta.numel() for theta in self._theta]
        self._layout = MeanLayout(
            self._sizes,
            settings.bucket_cap_mb,
            self.device,
            ranks,
            model_device,
            global_parameters.shards,
        )
        self.mean = WeightedMean(*self._layout)
        if settings.wire_format != WIRE_FORMATS[0]:
            self.mean = EncodedMean(
                *self._layout,
                wire_format=settings.wire_format,
                error_feedback=settings.error_feedback,
            )
        self._staging: Tensor | None = None
        if self.device.type == "cpu" and model_device.type != "cpu":
            self._staging = torch.empty(CHUNK, pin_memory=True)  # on the way from the accelerator
        self.inner_steps = 0
        self.samples = 0
        self._formed = Formed(0, 0, 0, False, None)
        self._unsent: Formed | None = None
        self._keeps_what_it_sends = settings.fragment_sync_delay > 0
        self.total_contribution = 0.0
        self.is_joining = False
        self.committed = False
        self.replaces_global = False
        """Whether the local parameters are to be the global ones, from the next sync on."""
        self.frozen: list[bool] = []
        """Of each tensor, whether this group has frozen it by the last pseudo-gradient."""

    @property
    def is_in_flight(self) -> bool:
        """Whether its allreduce has been started and its outer step not taken."""
        return bool(self._allreduce_work)

    @property
    def is_to_be_sent_again(self) -> bool:
        """Whether it was in flight when the state was saved that this group continues from."""
        return self._unsent is not None

    def in_flight_state(self) -> dict[str, Any] | None:
        """What a group that continues from here has to send again; None if nothing.

        A sync without a delay is in flight only if it was broken off: it is formed anew.
        """
        formed = self._formed if self.is_in_flight else self._unsent
        if formed is None or formed.local is None:
            return None
        return {
            "fragment": self.fragment_id,
            "inner_steps": formed.inner_steps,
            "samples": formed.samples,
            "position": formed.position,
            "is_replacing": formed.is_replacing,
            "local": dict(zip(self.globals.theta, formed.local, strict=True)),
        }

    def load_in_flight_state(self, state: dict[str, Any]) -> None:
        """Send, at the next sync, what ``in_flight_state`` says was in flight."""
        local = [state["local"][name] for name in self.globals.theta]
        self._unsent = Formed(
            state["inner_steps"],
            state["samples"],
            state["position"],
            state.get("is_replacing", False),
            local,
        )

    def residual_state(self) -> dict[str, Tensor]:
        """What the wire format has kept back, by name in the shapes of the parameters, if any.

        Under DDP a collective of the group's ranks.
        """
        residual = self.mean.gather_residual()
        if residual is None:
            return {}
        parts = residual.split(self._sizes)
        theta = self.globals.theta
        return {
            name: part.view(t.shape) for (name, t), part in zip(theta.items(), parts, strict=True)
        }

    def load_residual_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on with what another wire message has kept back."""
        self.mean.load_residual([state[name].reshape(-1) for name in self.globals.theta])

    @property
    def contribution(self) -> float:
        """This group's weight in the last mean."""
        return self.mean.contribution

    @property
    def has_more(self) -> bool:
        """Whether this group has something to send that no sync has brought in."""
        return self.inner_steps > 0 or self.replaces_global

    @property
    def is_replacing(self) -> bool:
        """Whether what was sent is to be the global parameters."""
        return self._formed.is_replacing

    @property
    def claim(self) -> Claim:
        """How much of this group's samples the sync will have brought into the model."""
        contributes = self.contribution > 0
        return self._state.ledger.claim(self.fragment_id, self._formed.position, contributes)

    def prepare_sync(self) -> None:
        """In a quorum: form the pseudo-gradient and start its allreduce, without waiting for it."""
        self._clock.quorum_formed()
        self.committed = False
        try:
            super().prepare_sync()
        except BaseException as error:
            self._break_off(error)
            raise

    def perform_sync(self) -> bool:
        """Wait for the mean, vote, and on commit take the outer step. True if it committed."""
        try:
            self.committed = super().perform_sync()
        except BaseException as error:
            if self.is_in_flight:  # not yet at the vote
                self._break_off(error)
            raise
        self._formed.local = None  # no longer in flight
        self._clock.vote_over()
        return self.committed

    def _break_off(self, error: BaseException) -> None:
        """Ctrl-C, or an error of this group's own: peers need not wait for what it has not sent."""
        self._manager.report_error(error)  # pyright: ignore[reportArgumentType]

    def count_inner_step(self, samples: int) -> None:
        """Count a completed inner step of ``samples`` samples since the last sync."""
        self.inner_steps += 1
        self.samples += samples

    def settle(self) -> None:
        """Forget the steps that the committed sync has used up.

        With a delay, those taken while it was in flight are still to be sent, unless alpha = 0
        has thrown them away. A join in which nobody moved leaves all as it was.
        """
        if self.is_joining and self.total_contribution == 0.0:
            return
        if self.contribution > 0:
            self._state.ledger.has_synced(self.fragment_id, self._formed.position)
        if self._write_back_alpha:
            self.inner_steps -= self._formed.inner_steps
            self.samples -= self._formed.samples
        else:
            self.inner_steps = self.samples = 0
        if self._formed.is_replacing or self.is_joining:
            self.replaces_global = False
        self._unsent = None

    def take_global(self) -> None:
        """Continue from the global parameters: nothing trained here since the last sync stays."""
        self.globals.write_back()
        self.inner_steps = self.samples = 0
        self.replaces_global = False
        self._unsent = None
        self.mean.forget_residual()

    def _save_grads(self) -> None:
        if self._unsent is not None and not self.is_joining:
            self._formed = self._unsent
        else:
            keeps = self._keeps_what_it_sends and not self.is_joining
            kept = self.globals.copy_of_local() if keeps else None
            position = self._state.ledger.position
            replaces = self.replaces_global and not self.is_joining
            self._formed = Formed(self.inner_steps, self.samples, position, replaces, kept)
        self.frozen = self.globals.freezing.own()
        local = self._formed.local or self._local_now()
        sources = self.mean.share.own(self._theta), self.mean.share.own(local)
        self.mean.form(self._pseudo_gradient, sources, self._own_contribution())
        if not self.is_joining:
            self._unsent = None  # should this attempt fail, the next one forms what is there then

    def _own_contribution(self) -> float:
        formed = self._formed
        if formed.is_replacing and not formed.inner_steps:
            return 1.0  # an average that nothing has been trained on since
        if self.is_joining or not formed.inner_steps:
            return 0.0
        if self._weight_by == "samples" and not formed.samples:
            raise ValueError(
                "weight_by='samples' but no samples were counted: call count_samples(n) before "
                "each optimizer step, or use weight_by='steps'"
            )
        by = {"uniform": 1, "steps": formed.inner_steps, "samples": formed.samples}
        return float(by[self._weight_by])

    def _local_now(self) -> list[Tensor]:
        return [local_tensor(tensor) for tensor in self._local]

    def _pseudo_gradient(self, theta: Tensor, local: Tensor, into: Tensor) -> None:
        if local.device != into.device:
            local = self._landing(local, into).copy_(local)
        # To a CPU a copy that does not block would be read before it is there.
        theta = theta.to(into.device, non_blocking=into.device.type != "cpu")
        pseudo_gradient(theta, local, into)

    def _landing(self, local: Tensor, into: Tensor) -> Tensor:
        """Where local parameters are copied to from another device."""
        if self._staging is None:
            return into
        staging = self._staging.view(local.dtype)
        return staging[: local.numel()] if local.numel() <= staging.numel() else into

    def mean_of_local(self, contribution: float) -> WeightedMean:
        """For the cold start: that of the local parameters, formed.

        Without a collective of the group's ranks. A rank that has just seen a peer die is not at
        the start with the others, but at the vote, and they would wait for it here.

        Raises:
            ValueError: All groups are to start from these parameters, and they are not finite.
        """
        mean = WeightedMean(*self._layout)
        local = (mean.share.own(self._local_now()),)
        mean.form(lambda t, into: into.copy_(t), local, contribution, asks_ranks=False)
        if contribution and not mean.is_finite:
            raise ValueError(
                "the initial parameters of this replica group, from which all groups start, are "
                "not finite: check how the model is initialized, or what it is loaded from"
            )
        return mean

    def adopt_mean(self, mean: WeightedMean) -> None:
        """Take the mean of ``mean_of_local`` as global and local parameters."""
        if mean.receive():
            for theta, value in zip(self._theta, mean.take(), strict=True):
                theta.copy_(value.view(theta.shape))
        self.take_global()

    def _average_grads(self) -> None:
        # The table is sent first, since an encoded mean sends more once it has received; it is
        # waited for last.
        table = self._roll_call.send(self)
        manager = cast(DiLoCoManager, self._manager)
        self._allreduce_work.extend([*self.mean.send(manager), table])  # pyright: ignore[reportArgumentType]

    def _set_grads(self) -> None:
        self.total_contribution = self.mean.receive()
        if self.total_contribution > 0.0:
            self._state.begin_outer_step()
            self.globals.take_outer_step(self.mean, self._rules())
        self.mean.clear()

    def _rules(self) -> StepRules:
        frozen, alpha = self._roll_call.frozen, self._write_back_alpha
        rules = self.globals.freezing.rules(self.frozen, frozen, alpha)
        if not self._roll_call.is_replacing:
            return rules
        return replace(rules, plain=frozenset(range(len(self._theta))) - rules.held)

    def _merge_parameters(self) -> None:
        # Where something moved it has been done, piece by piece. If not, and all groups were
        # resuming, each continues in mid-round where it stopped.
        if self.total_contribution == 0.0 and not self.is_joining:
            self.globals.write_back(self._write_back_alpha)

    @property
    def _write_back_alpha(self) -> float:
        if self.is_joining:
            return 0.0
        if self.replaces_global and not self._formed.is_replacing:
            return 1.0  # what was in flight does not touch the average that came meanwhile
        return self._alpha
