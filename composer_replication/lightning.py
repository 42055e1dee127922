"""Run a Lightning ``Trainer`` as one replica group: of ``lightning`` or ``pytorch_lightning``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from glob import escape
from typing import Any, Unpack

import torch
from torch import nn

from composer_replication.util.lazy import named_extra

try:
    from lightning.pytorch import Callback  # pyright: ignore[reportMissingImports] # an extra
except ModuleNotFoundError as error:
    try:
        from pytorch_lightning import Callback  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:
        raise named_extra("DiLoCoLightningCallback", error) from None

from composer_replication.arguments import shows
from composer_replication.data.sample_stream import replica_shard
from composer_replication.group.host import GroupKeywords, Host, continue_schedule
from composer_replication.group.losses import Losses
from composer_replication.group.replica_group import ReplicaGroup, ShowsGroup
from composer_replication.group.reports import rejections
from composer_replication.util.fence import fence

__all__ = ["DiLoCoLightningCallback", "replica_shard"]


class LightningJob(Host):
    """A Lightning ``Trainer`` as the host of a replica group.

    A joiner takes over its step and its schedulers. With several optimizers Lightning counts the
    steps of all of them.

    Attributes:
        trainer: The Trainer whose ``fit`` runs, or ran last.
        losses: Those of its steps.
        counted_optimizer: The index of the optimizer whose steps are inner steps.
        steps_of_batch: Steps that the last batch with steps has taken.
        begun_at: Lightning's count of steps before this batch.
    """

    name = "lightning"
    load_weights_only = "its weights alone (LightningModule.load_from_checkpoint)"
    load_checkpoint = "continue from a checkpoint (trainer.fit(model, ckpt_path='last'))"
    how_to_save = "a ModelCheckpoint with save_last=True among the Trainer's callbacks"
    load_from = "ckpt_path"
    save_argument = "a default_root_dir, or the dirpath of ModelCheckpoint"
    tokens_fix = "give each batch, a dictionary, its attention_mask or input_ids"
    data_fix = "replica_shard(dataset)"
    trainer: Any
    group: ReplicaGroup

    def __init__(self, counted_optimizer: int) -> None:
        self.losses = Losses()
        self.counted_optimizer = counted_optimizer
        self.begun_at = 0

    def begin(self) -> None:
        """Begin a fit, once its optimizers and loaders are there."""
        trainer = self.trainer
        end = trainer.max_steps
        if trainer.lightning_module.automatic_optimization:
            end = trainer.estimated_stepping_batches
        self._ends_at = None
        if 0 <= end < math.inf:
            self._ends_at = int(end)
        self.steps_of_batch = len(trainer.optimizers)

    # ---- what is trained --------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        return self.trainer.lightning_module

    @property
    def optimizer(self) -> list[torch.optim.Optimizer]:
        others = list(self.trainer.optimizers)
        if self.counted_optimizer not in range(len(others)):
            raise ValueError(
                f"counted_optimizer={self.counted_optimizer}, and configure_optimizers returns "
                f"{len(others)}: give the index of one of them"
            )
        return [others.pop(self.counted_optimizer), *others]

    # ---- the position in training ------------------------------------------------------------

    @property
    def steps(self) -> int:
        return self.trainer.global_step

    def last_step(self, *, is_bound: bool = False) -> int | None:
        return self._ends_at

    @property
    def is_over(self) -> bool:
        """Whether no batch follows the one that has ended."""
        fit = self.trainer.fit_loop
        if self.trainer.should_stop and fit._can_stop_early:
            return True
        if 0 <= fit.max_steps <= self.steps:
            return True
        epochs = fit.epoch_progress.current.processed + 1
        is_last_epoch = 0 <= fit.max_epochs <= epochs
        return is_last_epoch and fit.epoch_loop._num_ready_batches_reached()

    @property
    def saves_to(self) -> list[str]:
        savers = self.trainer.checkpoint_callbacks
        folders = (getattr(each, "dirpath", None) for each in savers)
        return [*filter(None, folders)]

    @property
    def checkpoints(self) -> str | None:
        folders = self.saves_to
        return f"{escape(folders[0])}/*.ckpt" if folders else None

    # ---- what it shows ----------------------------------------------------------------------

    def log_metrics(self, metrics: Mapping[str, float]) -> None:
        step = self.trainer.fit_loop.epoch_loop._batches_that_stepped  # as for its own metrics
        for logger in self.trainer.loggers:
            with fence(f"the metrics of a sync in {type(logger).__name__}"):
                logger.log_metrics(dict(metrics), step)

    # ---- what a joiner gets -----------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        # The sync is in the counted optimizer's step; other steps of the batch follow it, then the
        # schedulers' steps.
        is_in_step = self.group.is_in_step
        configs = self.trainer.lr_scheduler_configs
        return {
            "steps": self.begun_at + self.steps_of_batch if is_in_step else self.steps,
            "ends_at": self._ends_at,
            "schedules": [each.scheduler.state_dict() for each in configs],
            "is_in_step": is_in_step,
        }

    def load_state_dict(self, saved: dict[str, Any], is_in_step: bool) -> None:
        steps = saved["steps"]
        configs = self.trainer.lr_scheduler_configs
        for config, state in zip(configs, saved["schedules"], strict=True):
            scheduler = config.scheduler
            continue_schedule(scheduler, scheduler.optimizer, state)
            by_step = config.interval == "step" and not config.reduce_on_plateau
            if saved["is_in_step"] and by_step and steps % config.frequency == 0:
                scheduler.step()
        loop = self.trainer.fit_loop.epoch_loop
        if self.trainer.lightning_module.automatic_optimization:
            count = loop.automatic_optimization.optim_progress.optimizer.step
        else:
            count = loop.manual_optimization.optim_step_progress
        count.total.ready = steps
        count.total.completed = steps
        loop._batches_that_stepped = steps // self.steps_of_batch
        if saved["ends_at"] is not None and not is_in_step:  # its own epochs would end later
            self._ends_at = saved["ends_at"]
            loop.max_steps = saved["ends_at"]


def _is(each: object, *names: str) -> bool:
    """Whether an object's class has one of these names, in whichever of the two packages."""
    return any(cls.__name__ in names for cls in type(each).__mro__)


def check_can_join(trainer: Any) -> None:
    """Reject what cannot be a replica group.

    Raises:
        ValueError: The message names it and the fix.
    """
    strategy = trainer.strategy
    if not _is(strategy, "SingleDeviceStrategy", "DDPStrategy") or _is(
        strategy, "DeepSpeedStrategy", "SingleDeviceXLAStrategy"
    ):
        raise ValueError(
            f"DiLoCo cannot train with {type(strategy).__name__}: use strategy='ddp', or one device"
        )
    for each in trainer.callbacks:
        if _is(each, "StochasticWeightAveraging", "WeightAveraging"):
            raise ValueError(
                f"DiLoCo cannot train with {type(each).__name__}, which puts an average of this "
                "group's own weights into the model and its checkpoints: leave it out, and average "
                "the checkpoints, which have the global weights"
            )


class DiLoCoLightningCallback(ShowsGroup, Callback):
    """Make a Lightning ``Trainer`` one replica group of a DiLoCo run.

    Each group is a training job of its own, on one device or with DDP. The arguments, their
    defaults, the environment variables and the logged metrics are those of
    :class:`composer_replication.DiLoCoCallback`. Validations and checkpoints are of the global
    parameters. A checkpoint also has DiLoCo's state, with which ``ckpt_path`` continues exactly.

    Example:
        .. code-block:: python

            loader = DataLoader(replica_shard(dataset), 32)  # each group has its own samples
            callbacks = [DiLoCoLightningCallback(sync_every=100), ModelCheckpoint(save_last=True)]
            trainer = Trainer(max_steps=1000, callbacks=callbacks, default_root_dir=own_folder)
            trainer.fit(model, loader, ckpt_path="last")

    Raises:
        TypeError: A keyword is neither a setting nor an option.
        ValueError: An argument is out of range.
    """

    @shows(GroupKeywords)
    def __init__(
        self,
        *,
        manager: Any = None,
        counted_optimizer: int = 0,
        **named: Unpack[GroupKeywords],
    ) -> None:
        """Check the arguments.

        Args:
            manager: A manager to use for one fit, for simulations. None: build one.
            counted_optimizer: Which of several optimizers takes the inner steps: its index in what
                ``configure_optimizers`` returns.
        """
        self._job = LightningJob(counted_optimizer)
        self._group = ReplicaGroup(self._job, named, "DiLoCoLightningCallback", manager)
        self._done = (0, 0)

    # ---- Lightning's events, in the order in which they come --------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._job.trainer = trainer
        if stage == "fit":
            with rejections(self.options):
                check_can_join(trainer)
            # Before all others, which save and export what this one syncs.
            trainer.callbacks = sorted(trainer.callbacks, key=lambda each: each is not self)

    def on_load_checkpoint(
        self,
        trainer: Any,
        pl_module: Any,
        checkpoint: dict[str, Any],
    ) -> None:
        if trainer.state.fn == "fit":
            self._group.forget_failed_start()  # this checkpoint may have nothing of DiLoCo

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._job.trainer.state.fn == "fit":  # and not a validation's
            self._group.continuation.load(state_dict)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._job.begin()
        with rejections(self.options):
            self._group.ask_coordinator()
            path = trainer.ckpt_path
            if path is not None:
                self._group.continuation.check_loaded(path)
            self._group.join()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, *more: Any) -> None:
        self._group.note_progress()
        self._group.show_local()  # a user may have validated without on_validation_end
        self._job.begun_at = self._job.steps
        self._done = self._steps()
        self._group.begin_step()
        self._group.count(batch)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *more: Any) -> None:
        job = self._job
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, torch.Tensor):
            job.losses.add(loss)
        if self.diloco is not None:  # for the bar, whichever it is
            self.log(
                "outer_step",
                float(self.diloco.outer_step),
                prog_bar=True,
                logger=False,
            )
        if self._steps() == self._done:
            return  # gradients are accumulated
        job.losses.num_steps += 1
        job.steps_of_batch = max(1, job.steps - job.begun_at)
        if self._group.end_step():
            trainer.should_stop = True
        if job.is_over:  # now, so that the last validation and checkpoint are of its result
            self._group.end()

    def _steps(self) -> tuple[int, int]:
        """Lightning's count, and ours, if steps pass Lightning's wrapper of an optimizer by."""
        own = 0 if self.diloco is None else self.diloco.inner_steps
        return self._job.steps, own

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if self.diloco is not None:
            self._group.show_global()

    def on_validation_batch_end(self, *event: Any) -> None:
        self._group.note_progress()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return  # of weights that may not be the run's
        self._group.show_local()
        numbers = {}
        for name, value in trainer.callback_metrics.items():
            if name != "outer_step":
                numbers[name] = float(value)
        self._group.note_evaluation(numbers)

    def state_dict(self) -> dict[str, Any]:
        return self._group.state_dict()  # on every rank: it may gather

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._group.fail(exception)

    def on_train_end(self, *event: Any) -> None:
        self._group.end()
        self._group.close()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        is_over = trainer.ckpt_path and trainer.limit_train_batches and trainer.fit_loop.done
        if is_over and self._group.weights is None:  # the checkpoint is of the last step
            # Lightning calls nothing earlier, and has moved the model to host memory by now.
            pl_module.to(trainer.strategy.root_device)
            self.on_train_start(trainer, pl_module)
            self.on_train_end()
            pl_module.cpu()
