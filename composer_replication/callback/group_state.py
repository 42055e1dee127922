"""What a replica group continues from, and what it would save: in a fit, and between two fits."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from composer import State
from torch import Tensor

from composer_replication.callback.composer_job import unwrapped
from composer_replication.callback.weight_averages import WeightAverages, averages_in
from composer_replication.data.group_data import GroupData
from composer_replication.diloco.algorithm import DiLoCo
from composer_replication.diloco.fingerprints import SettingsMismatch
from composer_replication.diloco.fragments import listed, synced_tensors
from composer_replication.diloco.settings import DiLoCoSettings
from composer_replication.diloco.shards import local_tensor
from composer_replication.group.checkpoint import pack, template, unpack
from composer_replication.group.checkpoint_layout import (
    BadStateError,
    CheckpointLayout,
    checksums,
    replaced,
)
from composer_replication.group.global_weights import GlobalWeights


class Resume:
    """Keeps DiLoCo's part of a checkpoint from Composer's load until training starts.

    Composer loads while its ``Trainer`` is built, before DiLoCo exists. A checkpoint is checked
    before this group contacts any other, so that none waits for a group that cannot start.

    Args:
        settings: The run's settings.
    """

    def __init__(self, settings: DiLoCoSettings) -> None:
        self._settings = settings
        self._loading: State | None = None
        self._saved: dict[str, Any] | None = None
        self._path: str | None = None

    def before_load(self, state: State) -> None:
        """Record that Composer loads: until ``after_load``, ``state_dict`` returns a template."""
        self._loading = state

    def after_load(self, state: State) -> None:
        """Check the checkpoint that has been loaded, if there is one.

        Raises:
            BadStateError: It has training state, but no DiLoCo state.
        """
        self._loading = None
        self._path = state.load_path
        if self._saved is None and state.timestamp.batch.value > 0:
            raise self._rejection(
                f"it is of batch {state.timestamp.batch.value} and has no DiLoCo state: no global "
                "parameters, no outer momentum",
                "Load its weights alone (load_weights_only: true)",
            )

    def keep(self, saved: dict[str, Any]) -> None:
        """Keep DiLoCo's part of the checkpoint that is being loaded."""
        self._saved = saved or None

    def state_dict(self) -> dict[str, Any]:
        """Return, before training, what has been loaded, or a template to load into."""
        if self._saved is not None:
            return self._saved
        state = self._loading
        if state is None or not state.fsdp_sharded_state_dict_enabled:
            return {}
        return template(self._settings, self.layout(state))

    @property
    def names(self) -> Collection[str]:
        """The names of the tensors in the loaded checkpoint's global state; empty without one."""
        return () if self._saved is None else self._saved.get("local", {}).keys()

    def layout(self, state: State, also_synced: Collection[str] = ()) -> CheckpointLayout:
        """Return the layout of this group's checkpoints. For ``also_synced`` see ``DiLoCo``."""
        fragments = synced_tensors(unwrapped(state), self._settings, also_synced)
        is_sharded = state.fsdp_sharded_state_dict_enabled
        return CheckpointLayout(fragments, is_sharded, bool(averages_in(state)))

    def read(self, state: State) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """Return the input of ``DiLoCo.load_state_dict``, and the local parameters; None if none.

        Raises:
            BadStateError: The checkpoint is damaged, or is one of another model.
            SettingsMismatch: It was saved with other fragments.
        """
        saved, self._saved = self._saved, None
        if saved is None:
            return None
        try:
            return unpack(saved, self._settings, self.layout(state, saved.get("local", {})))
        except SettingsMismatch as error:
            raise self._rejection(str(error), "Use the settings that it was saved with") from error
        except (BadStateError, KeyError, TypeError, ValueError, RuntimeError) as error:
            problem = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise self._rejection(
                problem, "Load another one, or its weights alone (load_weights_only: true)"
            ) from error

    def _rejection(self, problem: str, fix: str) -> BadStateError:
        path = self._path or "the checkpoint"
        return BadStateError(f"cannot continue from {path}: {problem}. {fix}")


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
        """Read what this fit continues from, and take EMA's weights out of the model.

        Raises:
            BadStateError: See ``Resume.read``.
            SettingsMismatch: See ``Resume.read``.
            ValueError: The fit before trained other parameters, or left other values of them.
        """
        # What belonged to the global state before; some of it may be frozen by now.
        before = self.ended["fragments"] if self.ended is not None else ()
        self.also_synced = {*self.resume.names, *(name for f in before for name in f["theta"])}
        self.averages = WeightAverages(state)
        if self._loads_active_ema:  # an evaluation before fit may have swapped it out
            self.averages.put_in()
        self._loads_active_ema = False
        self._resumed = self.resume.read(state)
        self.is_resumed = self._resumed is not None
        self._had_active_ema = self.averages.take_out(self.is_resumed)
        self._layout = self.resume.layout(state, self.also_synced)
        if self.ended is not None and self._resumed is None:
            self._check_unchanged(self._layout.live, before)

    def _check_unchanged(self, live: Mapping[str, Tensor], before: Sequence[Any]) -> None:
        known = {name for fragment in before for name in fragment["theta"]}
        changed = [] if self._left is None else replaced(self._left, live)
        kinds = {
            "were not trained in the fit before": [name for name in live if name not in known],
            "were replaced since the fit before": [name for name in changed if name in known],
        }
        if found := [f"{listed(names)} {what}" for what, names in kinds.items() if names]:
            raise ValueError(
                f"{', and '.join(found)}: this fit cannot continue with its outer momentum. Give a "
                "new Trainer of this model a new DiLoCoCallback, in all replica groups"
            )

    def begin(self, state: State, diloco: DiLoCo, data: GroupData | None) -> None:
        """Give a new DiLoCo what a checkpoint or the fit before has left, if there is either."""
        assert self.averages is not None, "restore comes first"
        self.diloco, self.data = diloco, data
        assert self._layout is not None, "restore has made it"
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
            diloco_state = self.ended
            diloco.load_state_dict(diloco_state)
        if diloco_state is not None and data is not None:
            data.load_state_dict(diloco_state["reading"])
        self.weights = GlobalWeights(
            unwrapped(state), diloco.global_parameters(), lambda: self._saves_as_is
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
        return pack(diloco_state, local, self.weights.saved, self._layout)

    @property
    def _saves_as_is(self) -> bool:
        """Whether Composer saves the model as it is, since it holds EMA's weights, or SWA's."""
        has_ema = self.averages is not None and self.averages.is_ema_active
        return has_ema or self._replaces_global

    @property
    def _replaces_global(self) -> bool:
        """Whether SWA's average is in the model and not yet in the global weights."""
        if self.diloco is not None:
            return self.diloco.replaces_global
        return self.ended is not None and any(self.ended["replaces_global"])
