"""Keeps the checkpoint that Composer has loaded until DiLoCo can load it."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

from composer import State
from torch import Tensor

from composer_replication.callback.checkpoint import template, unpack
from composer_replication.callback.checkpoint_layout import BadStateError, CheckpointLayout
from composer_replication.callback.composer_job import unwrapped
from composer_replication.callback.global_weights import tied_names
from composer_replication.callback.weight_averages import averages_in
from composer_replication.diloco.fingerprints import SettingsMismatch
from composer_replication.diloco.fragments import synced_tensors
from composer_replication.diloco.settings import DiLoCoSettings

log = logging.getLogger(__name__)


class Resume:
    """Keeps DiLoCo's part of a checkpoint from Composer's load until training starts.

    Composer loads while its ``Trainer`` is built, before DiLoCo exists. A checkpoint is checked
    before this group contacts any other, so that none waits for a group that cannot start.

    Args:
        settings: The run's settings.
        on_bad_state: What to do with a checkpoint whose DiLoCo state is missing or damaged:
            ``error``, or ``fresh``, which starts from its model alone.
    """

    def __init__(self, settings: DiLoCoSettings, on_bad_state: str) -> None:
        self._settings = settings
        self._starts_fresh = on_bad_state == "fresh"
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
            self._reject(
                f"it is of batch {state.timestamp.batch.value} and has no DiLoCo state: no global "
                "parameters, no outer momentum",
                "load its weights alone (load_weights_only: true)",
            )

    def keep(self, saved: dict[str, Any]) -> None:
        """Keep DiLoCo's part of the checkpoint that is being loaded."""
        self._saved = saved or None

    def state_dict(self) -> dict[str, Any]:
        """Return, before training, what has been loaded, or a template to load into."""
        if self._saved is not None:
            return self._saved
        state = self._loading
        if state is None or not state.fsdp_sharded_state_dict_enabled or self._starts_fresh:
            return {}
        return template(self._settings, self.layout(state))

    @property
    def names(self) -> Collection[str]:
        """The names of the tensors in the loaded checkpoint's global state; empty without one."""
        return () if self._saved is None else self._saved.get("local", {}).keys()

    def layout(self, state: State, also_synced: Collection[str] = ()) -> CheckpointLayout:
        """Return the layout of this group's checkpoints. For ``also_synced`` see ``DiLoCo``."""
        model = unwrapped(state)
        fragments = synced_tensors(model, self._settings, also_synced)
        is_sharded = state.fsdp_sharded_state_dict_enabled
        return CheckpointLayout(fragments, is_sharded, bool(averages_in(state)), tied_names(model))

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
            self._reject(str(error), "use the settings that it was saved with", error)
        except (BadStateError, KeyError, TypeError, ValueError, RuntimeError) as error:
            self._reject(str(error), "load another one", error)

    def _reject(self, problem: str, fix: str, cause: Exception | None = None) -> None:
        path = self._path or "the checkpoint"
        if not self._starts_fresh:
            raise BadStateError(
                f"cannot continue from {path}: {problem}. Choose: {fix}, or let this group start "
                "from its model alone (callbacks.diloco.on_bad_state: fresh)"
            ) from cause
        log.warning(
            "Starting from the model of %s alone, as asked (on_bad_state): %s", path, problem
        )
