"""What a fit continues from: nothing, a checkpoint, or the fit before it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from composer_replication.diloco.algorithm import DiLoCo
from composer_replication.diloco.division import held_tensor
from composer_replication.diloco.fragments import listed, synced_tensors
from composer_replication.group.checkpoint import (
    BadStateError,
    CheckpointLayout,
    replaced,
    theta_of,
)
from composer_replication.group.checkpoint_files import newest_whole
from composer_replication.group.host import Host
from composer_replication.group.run_folder import last_outer_step
from composer_replication.replica.ranks import ask_on_rank_0
from composer_replication.settings import SettingsMismatch

log = logging.getLogger(__name__)


class Continuation:
    """Keeps DiLoCo's state from one fit to the next, and from a checkpoint to the fit after it.

    A trainer may load a checkpoint before DiLoCo is built. The checkpoint is checked before this
    group contacts any other, so that no group waits for one that cannot start.

    Args:
        host: The group's trainer.

    Attributes:
        loaded: What a trainer has loaded from a checkpoint (``load``), until ``restore`` has put it
            into DiLoCo; otherwise empty. A fit that fails before leaves it here for the next one.
        is_resumed: Whether this fit continues from a checkpoint.
        ended: DiLoCo's state at the end of the previous fit; empty before. It has no copies, since
            no step follows.
        left: Checksums of what the previous fit has left in the model; empty if that is not known,
            as after an error.
        layout: How this fit's checkpoints store its tensors, from ``begin`` on: also those that
            belonged to the global state before, and are frozen now.
        unusable: Why this group does not continue from a checkpoint that it has; empty if it does,
            or has none. It may still join others, which hold the run's state.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self.loaded: dict[str, Any] = {}
        self.is_resumed = False
        self.ended: dict[str, Any] = {}
        self.left: dict[str, int] = {}
        self.layout: CheckpointLayout
        self.unusable = ""
        self._path: str | None = None
        self._resumed: tuple[dict[str, Any], Mapping[str, Tensor]] | None = None
        self._read_for: Mapping[str, Tensor] = {}
        """The tensors of the fit that has begun with ``loaded``."""

    def load(self, state: dict[str, Any]) -> None:
        """Note what a trainer has loaded from a checkpoint; empty if nothing."""
        self.loaded = state
        self._read_for = {}

    def check_loaded(self, path: str | None, problem: str = "") -> None:
        """Refuse a checkpoint that the trainer has loaded, if it has no state of DiLoCo.

        In a run that has begun, the group joins others all the same: they hold the state. Every
        rank has to call it.

        Args:
            path: The path of the checkpoint, for errors.
            problem: Why the state cannot be read; empty if that is not known.

        Raises:
            BadStateError: It has training state, but no DiLoCo state, and no others can have it.
        """
        self._path = path
        has_begun = self._host.group.has_begun  # on every rank, whatever each has loaded
        if self.loaded or not (problem or self._host.steps):
            return
        rejection = self._rejection(
            problem
            or f"it is of batch {self._host.steps} and has no DiLoCo state: no global parameters, "
            "no outer momentum",
            f"Remove it to continue from the one before, or load {self._host.load_weights_only}",
        )
        if not has_begun:
            raise rejection
        self.skip(str(rejection))

    def skip(self, problem: str) -> None:
        """Begin without a checkpoint, and join others in training if there are any."""
        self.unusable = problem
        log.warning("%s. This group takes over the state of the others, if they have one", problem)

    def begin(self) -> None:
        """Read what a fit continues from, and have averages taken out of the model.

        Raises:
            BadStateError: The checkpoint is damaged, or is one of another model.
            SettingsMismatch: It was saved with other fragments.
            ValueError: The previous fit trained other parameters, or the model holds other values
                than it left.
        """
        known = theta_of(self.ended.get("fragments", ()))
        layout = self.layout_of(self.loaded.get("local", known))
        if self._read_for and not _are_same(layout.live, self._read_for):
            log.warning("What a fit that did not start had loaded is of another model: forgotten")
            self.load({})
            layout = self.layout_of(known)
        self.layout = layout
        self._read_for = layout.live if self.loaded else {}
        self._resumed = self._read()
        self.is_resumed = self._resumed is not None
        self._host.averages.begin(self.is_resumed)
        if self.ended and not self.is_resumed:
            self._check_unchanged(known)

    def layout_of(self, also_synced: Collection[str] = ()) -> CheckpointLayout:
        """How a checkpoint stores the tensors that are trained now, and those named."""
        host = self._host
        settings = host.group.settings
        fragments = synced_tensors(host.model, settings, also_synced)
        return CheckpointLayout(fragments, settings, host.is_sharded, host.averages.exist)

    def _read(self) -> tuple[dict[str, Any], Mapping[str, Tensor]] | None:
        if not self.loaded:
            return None
        try:
            return self.layout.unpack(self.loaded)
        except SettingsMismatch as error:
            raise self._rejection(str(error), "Use the settings that it was saved with") from error
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            problem = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            fix = f"Load another one, or {self._host.load_weights_only}"
            raise self._rejection(problem, fix) from error

    def _rejection(self, problem: str, fix: str) -> BadStateError:
        path = self._path or "the checkpoint"
        return BadStateError(f"cannot continue from {path}: {problem}. {fix}")

    def _check_unchanged(self, known: Collection[str]) -> None:
        added = [name for name in self.layout.live if name not in known]
        other = replaced(self.left, self.layout.live)
        found = []
        if added:
            found.append(f"{listed(added)} were not trained in the fit before")
        if other:
            found.append(f"{listed(other)} were replaced since the fit before")
        if found:
            raise ValueError(
                f"{', and '.join(found)}: this fit cannot continue with its outer momentum. Give a "
                "new Trainer of this model a new DiLoCoCallback, in all replica groups"
            )

    def start_refusal(self, run_dir: str | None, known_step: int = 0) -> str | None:
        """Return why this group must not begin the run; None if it may. A collective of its ranks.

        If the run has made outer steps already, a group with fresh parameters would become the
        donor of every group that comes back, and the run's training would be lost.

        Args:
            run_dir: The run's folder.
            known_step: The number of outer steps that the coordinator knows of.
        """
        if self.is_resumed or self.ended:
            return None
        return ask_on_rank_0(partial(self._start_refusal, run_dir, known_step))

    def _start_refusal(self, run_dir: str | None, known_step: int) -> str | None:
        step = last_outer_step(run_dir)
        source = run_dir
        if known_step > step:
            step = known_step
            source = "the coordinator"
        if not step:
            return None
        why = f" ({self.unusable})" if self.unusable else ""
        fix = self._host.load_checkpoint
        latest = newest_whole(self._host.checkpoints or "")
        if latest is not None:
            fix = f"continue from this group's last checkpoint ({self._host.load_from}={latest})"
        return (
            f"{source} says that this run has made {step} outer steps, and this group starts "
            f"without a checkpoint{why}: it can join other groups, but it cannot begin the run. If "
            f"no other group is left, {fix}, or begin another run: use another run_dir, and "
            "another state folder for its coordinator"
        )

    def restore(self, diloco: DiLoCo) -> Mapping[str, int]:
        """Load what a checkpoint or the previous fit has left into a new DiLoCo and the model.

        Returns:
            The group's position in its samples; empty if it starts from nothing.
        """
        state, local = self._resumed or (self.ended, {})
        self._resumed = None
        with torch.no_grad():
            for name, tensor in local.items():
                held_tensor(self.layout.live[name]).copy_(tensor)
        if not state:
            return {}
        diloco.load_state_dict(state)
        self.load({})
        return state["reading"]


def _are_same(some: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> bool:
    """Whether these have the same names, and are the same parameters.

    ``Module.to`` and ``cpu`` keep parameters, and replace buffers.
    """
    parameters = [name for name, tensor in some.items() if isinstance(tensor, nn.Parameter)]
    return some.keys() == others.keys() and all(some[name] is others[name] for name in parameters)
