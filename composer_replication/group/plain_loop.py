"""A training loop of one's own as a replica group: what it leaves in the run's folder."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, Unpack

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torchft.manager import Manager

from composer_replication.arguments import among, check_names, shows
from composer_replication.diloco import algorithm
from composer_replication.diloco.algorithm import SyncReport
from composer_replication.diloco.construction import check_outer_settings
from composer_replication.diloco.fragments import whole_model
from composer_replication.diloco.outer_optimizer import OuterOptimizer
from composer_replication.diloco.torchft_api import DiLoCoManager, as_diloco_manager
from composer_replication.group.continuation import Continuation
from composer_replication.group.host import Host
from composer_replication.group.losses import Losses
from composer_replication.group.reports import Reporter, folder_of, rejections
from composer_replication.group.run_folder import SAVED, WARNING
from composer_replication.options import ReplicaOptions, SyncKeywords
from composer_replication.settings import (
    OUTER_LR,
    OUTER_MOMENTUM,
    DiLoCoSettings,
    SettingKeywords,
)


class PlainLoop(Host):
    """A training loop that calls ``DiLoCo`` itself: it has no progress bar for us.

    Args:
        diloco: The ``DiLoCo`` that it calls.
        modules: The model, or its fragments.
        losses: What ``DiLoCo.note_loss`` has noted.
    """

    name = "plain loop"
    how_to_save = "torch.save of diloco.state_dict(), beside the model's and the optimizer's"
    load_checkpoint = "load what it has saved (diloco.load_state_dict, before `with diloco`)"

    def __init__(self, diloco: algorithm.DiLoCo, modules: nn.Module, losses: Losses) -> None:
        self._diloco = diloco
        self.model = modules
        self.losses = losses

    @property
    def steps(self) -> int:
        return self._diloco.inner_steps


class DiLoCoKeywords(SettingKeywords, SyncKeywords):
    """The settings and options that ``DiLoCo`` takes by name."""


class DiLoCo(algorithm.DiLoCo):
    # The one that scripts import: it takes settings and options by name. `launch` and `run` name a
    # folder and a group in the environment: then it also writes there what a trainer's callback
    # would write.
    __doc__ = algorithm.DiLoCo.__doc__

    _reporter: Reporter | None = None
    _num_reported = 0

    @shows(DiLoCoKeywords)
    def __init__(
        self,
        manager: DiLoCoManager | Manager,
        model_fragments: nn.Module | Sequence[nn.Module],
        inner_optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        outer_optimizer: OuterOptimizer | None = None,
        *,
        start_refusal: str | None = None,
        ranks: ProcessGroup | None = None,
        also_synced: Collection[str] = (),
        **named: Unpack[DiLoCoKeywords],
    ) -> None:
        check_names(named, DiLoCoKeywords, "DiLoCo")
        if not isinstance(model_fragments, nn.Module) and model_fragments:
            named.setdefault("num_fragments", len(model_fragments))
        own = among(named, SettingKeywords)
        if outer_optimizer is not None:
            # Its numbers are its own from the first outer step on: no plain averages come first.
            own.setdefault("outer_lr", OUTER_LR)
            own.setdefault("outer_momentum", OUTER_MOMENTUM)
        settings = DiLoCoSettings(**own)
        if outer_optimizer is not None:
            check_outer_settings(named, settings)
        manager = as_diloco_manager(manager)
        options = ReplicaOptions(**among(named, SyncKeywords))
        options = replace(  # they may be arguments of make_manager
            options,
            num_replicas=options.num_replicas or manager.num_replicas,
            give_up_after_s=options.give_up_after_s or manager.give_up_after_s,
        )
        self._model_fragments = model_fragments
        self._losses = Losses(of_all_ranks=False)  # perhaps not all of them note one
        super().__init__(
            manager,
            model_fragments,
            inner_optimizer,
            outer_optimizer,
            settings=settings,
            options=options.with_environment(),
            start_refusal=start_refusal,
            ranks=ranks,
            also_synced=also_synced,
        )

    def note_loss(self, loss: torch.Tensor) -> None:
        """Note the loss of a batch, for the page, the report and ``events.jsonl``.

        They show the mean of what rank 0 has noted between two syncs. No step waits for it.

        Args:
            loss: A scalar, on any device.
        """
        self._losses.add(loss)
        self._losses.num_steps += 1

    def state_dict(self, *, copies: bool = True) -> dict[str, Any]:
        """Return the state that a resume needs, see ``diloco.algorithm.DiLoCo.state_dict``.

        The run's folder has that it was taken, and at which step. Whether the loop then writes it,
        nobody here knows.
        """
        if self._reporter is not None:
            self._reporter.folder.append(SAVED, {"batch": self.inner_steps})
        return super().state_dict(copies=copies)

    def __enter__(self) -> DiLoCo:
        """Join the other groups, then count the inner optimizer's steps."""
        options = self.options
        if options.run_dir is None or options.replica_id is None:
            super().__enter__()
            return self
        has_steps = self.inner_steps or self.outer_step
        is_resumed = bool(has_steps and self._reporter is None)  # it is the first part of the loop
        folder = folder_of(options)
        host = PlainLoop(self, whole_model(self._model_fragments), self._losses)
        reporter = Reporter(folder, self.settings, host)
        self._reporter = reporter
        reporter.settings("")
        if options.coordinator_addr is not None:
            said = f"a loop of your own names its settings itself: {self.settings}"
            folder.append(WARNING, {"warning": f"{said}; those of the command do not reach it"})
        reporter.position("joining", self)
        with rejections(options):
            if not is_resumed and self._start_refusal is None:
                self._start_refusal = Continuation(host).start_refusal(options.run_dir)
            super().__enter__()
        reporter.joined(self, self._outer.manager, is_resumed)
        self._report("training")
        return self

    def __exit__(self, *raised: Any) -> Any:
        """Stop counting inner steps, and the watch for a hang."""
        if self._reporter is not None and raised:
            self._reporter.folder.write_error(raised[1])
        return super().__exit__(*raised)

    def _step_post_hook(self, *step: Any) -> None:
        super()._step_post_hook(*step)
        self._report("training")

    def final_sync(self) -> None:
        super().final_sync()
        self._report("evaluating")
        if self._reporter is not None:
            self._reporter.folder.write_end(self._reporter.result(self))

    def pop_finished_syncs(self) -> list[SyncReport]:
        """The syncs committed since the last call, oldest first."""
        self._num_reported = 0
        return super().pop_finished_syncs()

    def _report(self, phase: str) -> None:
        """Write new syncs and the position in training to the group's folder, if it has one."""
        if self._reporter is None:
            return
        syncs = self._outer.reports[self._num_reported :]
        self._num_reported += len(syncs)
        if syncs:
            self._reporter.synced(syncs, self._outer.manager)
        if syncs or self._reporter.is_due(phase):
            self._reporter.position(phase, self)
