"""Composer's EMA under DiLoCo: it averages the global weights."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from composer import Event, Logger, State
from composer.algorithms import EMA
from composer.algorithms.ema.ema import EMAParameters
from torch import Tensor
from torch.distributed.tensor import DTensor

from composer_replication.diloco.division import held_tensor
from composer_replication.diloco.fragments import plain_name
from composer_replication.group.host import Averages
from composer_replication.group.replica_group import ReplicaGroup

log = logging.getLogger(__name__)

UPDATES = (Event.BATCH_END, Event.EPOCH_END)
"""The events at which EMA updates its average."""


class WeightAverages(Averages):
    """The EMA of a Composer job.

    While it updates its average, the model holds the global weights, so that the averages are equal
    in all groups (docs/adrs/ADR-021). Composer has no event before an algorithm runs, therefore its
    ``match`` and ``apply`` are wrapped while the group trains.

    EMA swaps its weights with the trained ones, in place. "Active" means that the model holds EMA's
    weights, and EMA holds the trained ones. EMA is active from a checkpoint to the next batch.

    Attributes:
        group: The job's group, whose global weights are averaged.
        state: Composer's state.
    """

    group: ReplicaGroup
    state: State
    _was_active = False

    @property
    def _ema(self) -> EMA | None:
        return next((each for each in self.state.algorithms if isinstance(each, EMA)), None)

    @property
    def _kept(self) -> EMAParameters:
        """EMA's weights, or the trained ones while EMA is active."""
        assert self._ema is not None and self._ema.ema_model is not None, "INIT has made them"
        return self._ema.ema_model

    @property
    def exist(self) -> bool:
        return self._ema is not None

    # ---- EMA's weights in the model ---------------------------------------------------------

    @property
    def are_saved(self) -> bool:
        """Whether EMA is active."""
        return self._ema is not None and self._ema.ema_weights_active

    @property
    def are_evaluated(self) -> bool:
        """Whether EMA has weights of its own. Composer then evaluates these."""
        return self._ema is not None and self._ema.ema_started

    def after_load(self) -> None:
        """Note what is in the model after Composer has loaded a checkpoint, if there is one."""
        self._was_active = self.are_saved

    def before_join(self) -> None:
        """Put EMA's weights back that an evaluation before the fit may have swapped out."""
        self._was_active = self._was_active or self.are_saved
        self._put_average(self._was_active)

    def begin(self, is_resumed: bool) -> None:
        """Take EMA's weights out of the model, and average the global ones until ``leave``."""
        ema = self._ema
        if ema is None:
            return
        if ema.ema_model is not None:
            self._adapt()
            if is_resumed and self._is_sharded:
                self._take_from_model(ema)
            self._put_average(False)
        wrappers = {"match": self._match, "apply": self._apply, "state_dict": self._state_dict}
        for name, wrapper in wrappers.items():
            setattr(ema, name, functools.partial(wrapper, ema, getattr(ema, name)))

    def after_join(self) -> None:
        """Put EMA's weights back that were in the model when the fit began."""
        self._put_average(self._was_active)
        self._was_active = False

    @contextmanager
    def out_of_the_model(self) -> Iterator[None]:
        """A context in which the model holds the local weights. EMA is swapped back after it."""
        was_active = self.are_saved
        self._put_average(False)
        try:
            yield
        finally:
            self._put_average(was_active)

    def _put_average(self, into_model: bool) -> None:
        """Have the model hold EMA's weights, or the local ones, if it does not yet."""
        ema = self._ema
        if ema is not None and ema.ema_weights_active != into_model:
            self._kept.swap_params(model=self.state.model)
            ema.ema_weights_active = into_model

    def local(self, live: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        if not self.are_saved:
            return live
        named = self._kept.named_parameters_dict | self._kept.named_buffers_dict
        kept = {plain_name(name): tensor for name, tensor in named.items()}
        prefix = "module." if self.state.is_model_ddp else ""  # ``state.model`` is the wrapper
        return {name: held_tensor(kept.get(prefix + name, own)) for name, own in live.items()}

    def _take_from_model(self, ema: EMA) -> None:
        """Set EMA's sharded weights to the model's.

        Of these, Composer saves only rank 0's shard of an algorithm and loads it on every rank. The
        model in the checkpoint is complete, and holds EMA's weights if EMA was active.
        """
        if ema.ema_started and not ema.ema_weights_active:
            ema.ema_started = False
            log.warning(
                "EMA restarts from the global weights: Composer saves sharded weights of EMA only "
                "while they are in the model, as in the checkpoints of save_interval"
            )
        own = EMAParameters(self.state.model)
        self._kept.named_parameters_dict.update(own.named_parameters_dict)

    def _adapt(self) -> None:
        """Rename EMA's weights to the names in the model that is to be trained, and copy them.

        EMA may have them from a job with another number of ranks, or from before the model was
        wrapped. Their names then differ by those of wrappers, and Composer would silently skip
        them.
        The loaded tensors may be the same objects as those in DiLoCo's part of the checkpoint,
        therefore they are copied.
        """
        model = self.state.model
        _copy_as_named(self._kept.named_parameters_dict, dict(model.named_parameters()))
        _copy_as_named(self._kept.named_buffers_dict, dict(model.named_buffers()))

    # ---- updates ----------------------------------------------------------------------------

    def leave(self) -> None:
        if self._ema is not None:
            for name in ("match", "apply", "state_dict"):
                vars(self._ema).pop(name, None)

    def _match(self, ema: EMA, match: Callable[..., bool], event: Event, state: State) -> bool:
        had_started = ema.ema_started
        matches = match(event, state)
        if not had_started and ema.ema_started:
            with self._global_weights():  # EMA has just started, from the local weights
                ema.ema_model = EMAParameters(state.model)
        return matches

    def _apply(
        self,
        ema: EMA,
        apply: Callable[..., Any],
        event: Event,
        *rest: State | Logger,
    ) -> int | None:
        if event not in UPDATES:
            return apply(event, *rest)
        # At the end of an epoch EMA may be active, if the last batch was followed by a checkpoint.
        with self.out_of_the_model(), self._global_weights():
            return apply(event, *rest)

    def _state_dict(self, ema: EMA, state_dict: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        state = state_dict()
        if self._is_sharded:
            state["ema_model"]["named_parameters_dict"] = {}  # only rank 0's shards are written
        return state

    @contextmanager
    def _global_weights(self) -> Iterator[None]:
        weights = self.group.weights
        assert weights is not None, "the group trains"
        weights.show()
        try:
            yield
        finally:
            weights.hide()

    # ---- heals ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any] | None:
        """Return EMA's state for a joiner; None if there is no EMA, or its weights are sharded."""
        ema = self._ema
        if ema is None or self._is_sharded:
            return None
        with self.out_of_the_model():
            return ema.state_dict()

    def load_state_dict(
        self,
        saved: dict[str, Any] | None,
        misses_an_update: bool,
        logger: Logger,
    ) -> None:
        """Load the donor's EMA, if this group has one. If the donor sent none, a warning says so.

        Args:
            saved: What ``state_dict`` returned in the donor of rank 0.
            misses_an_update: Whether the donor had not updated it after its last batch.
            logger: Composer's logger.
        """
        ema = self._ema
        if ema is None:
            return
        if saved is None:
            unsent = "no rank of the donor has all of its weights (FSDP)"
            why = unsent if self._is_sharded else "the donor has none"
            log.warning("This joiner keeps its own EMA: %s", why)
            return
        with self.out_of_the_model():
            ema.load_state_dict(saved)
            self._adapt()
        if misses_an_update and ema.match(Event.BATCH_END, self.state):
            ema.apply(Event.BATCH_END, self.state, logger)

    @property
    def _is_sharded(self) -> bool:
        return any(isinstance(p, DTensor) for p in self.state.model.parameters())


def _copy_as_named(kept: dict[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Replace the tensors of EMA by copies under the model's names; drop those of other names.

    Args:
        kept: EMA's, by names with those of wrappers, such as DDP's prefix, or without.
        own: The model's.
    """
    before = {plain_name(name): tensor for name, tensor in kept.items()}
    kept.clear()
    for name, like in own.items():
        plain = plain_name(name)
        for candidate in (
            plain,
            f"module.{plain}",
            plain.removeprefix("module."),
        ):
            if candidate in before:
                kept[name] = before[candidate].to(like.device, copy=True)
                break
