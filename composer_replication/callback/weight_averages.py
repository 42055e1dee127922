"""Composer's EMA and SWA under DiLoCo: they average the global weights."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from composer import Algorithm, Event, Logger, State
from composer.algorithms import EMA, SWA
from composer.algorithms.ema.ema import EMAParameters
from torch import Tensor
from torch.distributed.tensor import DTensor

from composer_replication.diloco.shards import local_tensor
from composer_replication.group.host import Averages
from composer_replication.group.replica_group import ReplicaGroup

log = logging.getLogger(__name__)

UPDATES = (Event.BATCH_END, Event.EPOCH_END)
"""The events at which EMA and SWA update their averages."""


class WeightAverages(Averages):
    """The EMA and SWA of a Composer job.

    While they update their averages, the model holds the global weights, so that the averages are
    equal in all groups (docs/adrs/ADR-021). Composer has no event before an algorithm runs,
    therefore their ``match`` and ``apply`` are wrapped while the group trains.

    EMA swaps its weights with the trained ones, in place. "Active" means that the model holds EMA's
    weights, and EMA holds the trained ones. EMA is active from a checkpoint to the next batch.

    Attributes:
        group: The job's group, whose global weights are averaged.
        state: Composer's state.
    """

    group: ReplicaGroup
    state: State
    _is_loaded_active = _was_active = False

    @property
    def _algorithms(self) -> list[Algorithm]:
        return [each for each in self.state.algorithms if isinstance(each, EMA | SWA)]

    @property
    def _ema(self) -> EMA | None:
        return next((each for each in self._algorithms if isinstance(each, EMA)), None)

    @property
    def exist(self) -> bool:
        return bool(self._algorithms)

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
        self._is_loaded_active = self.are_saved

    def before_join(self) -> None:
        """Put EMA's weights back that an evaluation before the fit may have swapped out."""
        if self._is_loaded_active:
            self._put_in()
        self._is_loaded_active = False

    def begin(self, is_resumed: bool) -> None:
        """Take EMA's weights out of the model, and average the global ones until ``leave``."""
        ema, self._was_active = self._ema, self.are_saved
        if ema is not None and ema.ema_model is not None:
            self._adapt(ema)
            if is_resumed and self._is_sharded:
                self._take_from_model(ema)
            if self._was_active:
                self._swap()
        wrappers = {"match": self._match, "apply": self._apply, "state_dict": self._state_dict}
        for algorithm in self._algorithms:
            for name, wrapper in wrappers.items():
                original = getattr(algorithm, name)
                setattr(algorithm, name, functools.partial(wrapper, algorithm, original))

    def after_join(self) -> None:
        """Put EMA's weights back that were in the model when the fit began."""
        if self._was_active:
            self._put_in()

    @contextmanager
    def out_of_the_model(self) -> Iterator[None]:
        """A context in which the model holds the local weights. EMA is swapped back after it."""
        was_active = self.are_saved
        if was_active:
            self._swap()
        try:
            yield
        finally:
            if was_active:
                self._put_in()

    def _put_in(self) -> None:
        """Put EMA's weights into the model, which holds the local ones."""
        if not self.are_saved:
            self._swap()

    def _swap(self) -> None:
        ema = self._ema
        assert ema is not None and ema.ema_model is not None, "it is active, or was"
        ema.ema_model.swap_params(model=self.state.model)
        ema.ema_weights_active = not ema.ema_weights_active

    def local(self, live: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        ema = self._ema
        if ema is None or not self.are_saved:
            return live
        assert ema.ema_model is not None, "it is active"
        kept = dict([*ema.ema_model.named_parameters(), *ema.ema_model.named_buffers()])
        prefix = "module." if self.state.is_model_ddp else ""  # ``state.model`` is the wrapper
        return {name: local_tensor(kept.get(prefix + name, t)) for name, t in live.items()}

    def _take_from_model(self, ema: EMA) -> None:
        """Set EMA's sharded weights to the model's.

        Of these, Composer saves only rank 0's shard of an algorithm and loads it on every rank. The
        model in the checkpoint is complete, and holds EMA's weights if EMA was active.
        """
        assert ema.ema_model is not None, "INIT has made it"
        if ema.ema_started and not ema.ema_weights_active:
            ema.ema_started = False
            log.warning(
                "EMA restarts from the global weights: Composer saves sharded weights of EMA only "
                "while they are in the model, as in the checkpoints of save_interval"
            )
        own = EMAParameters(self.state.model)
        ema.ema_model.named_parameters_dict.update(own.named_parameters_dict)

    def _adapt(self, ema: EMA) -> None:
        """Rename EMA's weights to the names in the model that is to be trained, and copy them.

        EMA may have them from a job with another number of ranks, or from before the model was
        wrapped. Their names then differ by DDP's prefix, and Composer would silently skip them.
        The loaded tensors may be the same objects as those in DiLoCo's part of the checkpoint,
        therefore they are copied.
        """
        assert ema.ema_model is not None, "INIT has made it"
        model, ema_model = self.state.model, ema.ema_model
        for kept, own in (
            (ema_model.named_parameters_dict, dict(model.named_parameters())),
            (ema_model.named_buffers_dict, dict(model.named_buffers())),
        ):
            renamed = _named_as(own, kept)
            kept.clear()
            for name, tensor in renamed.items():
                if name in own:
                    kept[name] = tensor.to(own[name].device, copy=True)

    # ---- updates ----------------------------------------------------------------------------

    def leave(self) -> None:
        for algorithm in self._algorithms:
            for name in ("match", "apply", "state_dict"):
                vars(algorithm).pop(name, None)

    def _match(
        self, algorithm: Algorithm, match: Callable[..., bool], event: Event, state: State
    ) -> bool:
        had_started = getattr(algorithm, "ema_started", True)
        matches = match(event, state)
        if isinstance(algorithm, EMA) and not had_started and algorithm.ema_started:
            with self._global_weights(algorithm):  # EMA has just started, from the local weights
                algorithm.ema_model = EMAParameters(state.model)
        return matches

    def _apply(
        self, algorithm: Algorithm, apply: Callable[..., Any], event: Event, *rest: State | Logger
    ) -> int | None:
        if event not in UPDATES:
            return apply(event, *rest)
        # At the end of an epoch EMA may be active, if the last batch was followed by a checkpoint.
        with self.out_of_the_model(), self._global_weights(algorithm):
            return apply(event, *rest)

    def _state_dict(
        self, algorithm: Algorithm, state_dict: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        state = state_dict()
        if isinstance(algorithm, EMA) and self._is_sharded:
            state["ema_model"]["named_parameters_dict"] = {}  # only rank 0's shards are written
        return state

    @contextmanager
    def _global_weights(self, algorithm: Algorithm) -> Iterator[None]:
        weights, diloco = self.group.weights, self.group.diloco
        assert weights is not None and diloco is not None, "the group trains"
        was_completed = getattr(algorithm, "swa_completed", False)
        weights.show()
        try:
            yield
            if getattr(algorithm, "swa_completed", False) and not was_completed:
                # SWA has put its average into the model for good, in all groups after the same
                # batch.
                weights.keep_shown()
                diloco.make_local_global()
                log.info("All groups continue from SWA's average of the global weights")
        finally:
            weights.hide()

    # ---- heals ------------------------------------------------------------------------------

    def state_dict(self) -> list[Any]:
        """Return name and state of each average for a joiner; nothing if weights are sharded."""
        if self._is_sharded:
            return []
        with self.out_of_the_model():
            return [[type(a).__name__, a.state_dict()] for a in self._algorithms]

    def load_state_dict(self, saved: list[Any], misses_an_update: bool, logger: Logger) -> None:
        """Load the donor's averages. If the algorithms differ, a warning is logged instead.

        Args:
            saved: What ``state_dict`` returned in the donor of rank 0.
            misses_an_update: Whether the donor had not updated them after its last batch.
            logger: Composer's logger.
        """
        own = [type(algorithm).__name__ for algorithm in self._algorithms]
        theirs = [name for name, _ in saved]
        if own != theirs:
            if not self._is_sharded:
                why = f"the donor has {' and '.join(theirs) or 'none'}"
            else:
                why = "no rank of the donor has all of its weights (FSDP)"
            log.warning("This joiner keeps its own averages, %s: %s", own or "none", why)
            return
        with self.out_of_the_model():
            for algorithm, (_, state) in zip(self._algorithms, saved, strict=True):
                self._load(algorithm, state)
                if isinstance(algorithm, EMA):
                    self._adapt(algorithm)
        if misses_an_update:
            for algorithm in self._algorithms:
                if algorithm.match(Event.BATCH_END, self.state):
                    algorithm.apply(Event.BATCH_END, self.state, logger)

    def _load(self, algorithm: Algorithm, state: dict[str, Any]) -> None:
        if isinstance(algorithm, SWA):
            if state["swa_started"] and not algorithm.swa_started:
                algorithm._initialize_swa(self.state)  # as SWA does at its start, under DDP
            own = algorithm.swa_model.state_dict() if algorithm.swa_model else {}
            state["swa_model"] = _named_as(own, state["swa_model"] or {})
        algorithm.load_state_dict(state)

    @property
    def _is_sharded(self) -> bool:
        return any(isinstance(p, DTensor) for p in self.state.model.parameters())


def _named_as(own: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors under the names that ``own`` has, with DDP's prefix or without."""

    def own_name(name: str) -> str:
        candidates = (name, f"module.{name}", name.removeprefix("module."))
        return next((candidate for candidate in candidates if candidate in own), name)

    return {own_name(name): value for name, value in tensors.items()}
