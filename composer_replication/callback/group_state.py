"""What a replica group would save: while it trains, and between one fit and the next."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from composer import State
from torch import Tensor

from composer_replication.callback.checkpoint import pack
from composer_replication.callback.checkpoint_layout import CheckpointLayout
from composer_replication.callback.checksums import checksums
from composer_replication.callback.composer_job import unwrapped
from composer_replication.callback.global_weights import GlobalWeights
from composer_replication.callback.next_fit import carry_over, replaced_since
from composer_replication.callback.resume import Resume
from composer_replication.callback.weight_averages import WeightAverages
from composer_replication.data.group_data import GroupData
from composer_replication.diloco.algorithm import DiLoCo
from composer_replication.diloco.shards import local_tensor


class GroupState:
    """A group's DiLoCo and what belongs to it, from fit to fit.

    A fit begins with ``restore`` and ``begin``. It ends with ``keep``, after which the state is
    what that fit has left, and the next one continues from there.

    Args:
        resume: Where Composer has put DiLoCo's part of a checkpoint, if it has loaded one.

    Attributes:
        diloco: During a fit.
        data: The samples that the group trains on, during a fit, if the loader is one of ours.
        ended: DiLoCo's state at the end of the fit before this one.
        weights: Shows the global weights, from the first fit on.
        averages: EMA and SWA, from the first fit on.
        also_synced: See ``DiLoCo``.
        is_resumed: Whether this fit continues from a checkpoint.
    """

    def __init__(self, resume: Resume) -> None:
        self.resume = resume
        self.diloco: DiLoCo | None = None
        self.data: GroupData | None = None
        self.ended: dict[str, Any] | None = None
        self.weights: GlobalWeights | None = None
        self.averages: WeightAverages | None = None
        self.also_synced: set[str] = set()
        self.is_resumed = False
        self._resumed: tuple[dict[str, Any], dict[str, Tensor]] | None = None
        self._left: dict[str, int] | None = None
        self._layout: CheckpointLayout | None = None
        self._loads_active_ema = self._had_active_ema = False

    # ---- a fit begins -----------------------------------------------------------------------

    def after_load(self, state: State) -> None:
        """Composer has loaded a checkpoint, or there is none."""
        self.resume.after_load(state)
        self._loads_active_ema = WeightAverages(state).is_ema_active

    @property
    def is_new(self) -> bool:
        """Whether this fit continues from nothing."""
        return not self.is_resumed and self.ended is None

    def restore(self, state: State) -> None:
        """Read what this fit continues from, and take EMA's weights out of the model."""
        # What belonged to the global state before; some of it may be frozen by now.
        before = self.ended["fragments"] if self.ended is not None else ()
        self.also_synced = {*self.resume.names, *(name for f in before for name in f["theta"])}
        self.averages = WeightAverages(state)
        if self._loads_active_ema:  # an evaluation before fit may have swapped it out
            self.averages.put_in()
        self._loads_active_ema = False
        self._resumed = self.resume.read(state)
        self.is_resumed = self._resumed is not None
        local = None if self._resumed is None else self._resumed[1]
        self._had_active_ema = self.averages.take_out(local)

    def begin(self, state: State, diloco: DiLoCo, data: GroupData | None) -> None:
        """Give a new DiLoCo what a checkpoint or the fit before has left, if there is either."""
        assert self.averages is not None, "restore comes first"
        self.diloco, self.data = diloco, data
        self._layout = self.resume.layout(state, self.also_synced)
        if self.weights is not None:
            self.weights.remove()
        diloco_state = None
        if self._resumed is not None:
            (diloco_state, local), self._resumed = self._resumed, None
            diloco.load_state_dict(diloco_state)
            with torch.no_grad():
                for name, tensor in local.items():
                    local_tensor(self._layout.live[name]).copy_(tensor)
        elif self.ended is not None:
            replaced = replaced_since(self._left, self._layout.live)
            diloco_state = carry_over(self.ended, diloco.state_dict(copies=False), replaced)
            diloco.load_state_dict(diloco_state)
        if diloco_state is not None and data is not None:
            data.load_state_dict(diloco_state["reading"])
        self.weights = GlobalWeights(
            unwrapped(state), diloco.global_parameters(), lambda: self._saved_model != "global"
        )
        self.averages.wrap(self.weights, diloco.make_local_global)

    def put_ema_back(self) -> None:
        """Once the group has joined the others: EMA's weights are in the model if they were."""
        if self._had_active_ema and self.averages is not None:
            self.averages.put_in()

    def without_averages(self) -> AbstractContextManager[None]:
        """A context in which the model holds the local weights, not EMA's."""
        assert self.averages is not None, "restore has made them"
        return self.averages.out_of_the_model()

    # ---- it ends ----------------------------------------------------------------------------

    def note_final_weights(self) -> None:
        """The model holds what this fit leaves in it."""
        assert self._layout is not None, "begin has made it"
        self._left = checksums(self._layout.live)

    def keep(self, *, has_failed: bool = False) -> None:
        """Keep what the fit has left, for the next one; without copies, as no step follows.

        Args:
            has_failed: Whether the fit has raised, so that nobody knows what the model holds.
        """
        self.ended = self._diloco_state()
        if has_failed:
            self._left = None
        if self.weights is not None:
            # Under DDP these have been gathered, so that rank 0 alone may save the model from now.
            fragments = self.ended["fragments"]
            self.weights.read_from({name: t for f in fragments for name, t in f["theta"].items()})

    def stop(self) -> None:
        """Count no more steps, read no more data, and leave EMA and SWA to Composer."""
        if self.averages is not None:
            self.averages.unwrap()
        if self.diloco is not None:
            self.diloco.__exit__(None, None, None)
        if self.data is not None:
            self.data.close()

    def drop(self) -> None:
        """There is no DiLoCo any more."""
        self.diloco = self.data = None

    # ---- what is saved, and what the model holds of it ----------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state, for a checkpoint. Under FSDP a collective."""
        if self.diloco is not None:
            return self._packed(self._diloco_state())  # Composer writes it at once
        return self.resume.state_dict() if self.ended is None else self._packed(self.ended)

    @property
    def evaluates_as_is(self) -> bool:
        """Whether evaluators see the model as it is, since EMA or SWA has put its weights there."""
        has_ema = self.averages is not None and self.averages.has_ema_started
        return has_ema or self._replaces_global

    def _diloco_state(self) -> dict[str, Any]:
        """Return DiLoCo's state with its own tensors, valid until the next inner step."""
        assert self.diloco is not None, "while there is one"
        diloco_state = self.diloco.state_dict(copies=False)
        if self.data is not None:
            diloco_state["reading"] |= self.data.state_dict()
        return diloco_state

    def _packed(self, diloco_state: dict[str, Any]) -> dict[str, Any]:
        assert self.weights is not None and self._layout is not None, "begin has made them"
        assert self.averages is not None, "restore has made them"
        local = self.averages.local(self.weights.local())
        return pack(diloco_state, local, self.weights.saved, self._layout, self._saved_model)

    @property
    def _saved_model(self) -> str:
        """Which weights Composer saves as the model: ``global``, ``ema`` or ``local``."""
        if self.averages is not None and self.averages.is_ema_active:
            return "ema"
        return "local" if self._replaces_global else "global"

    @property
    def _replaces_global(self) -> bool:
        """Whether SWA's average is in the model and not yet in the global weights."""
        if self.diloco is not None:
            return self.diloco.replaces_global
        return self.ended is not None and any(self.ended["replaces_global"])
