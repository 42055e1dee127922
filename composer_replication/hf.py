"""Run a Hugging Face ``Trainer`` as one replica group. TRL's trainers are such Trainers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from glob import escape
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from composer_replication import named_extra

try:
    from transformers import (  # pyright: ignore[reportMissingImports] # only here is it needed
        ProgressCallback,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )
except ModuleNotFoundError as error:
    raise named_extra("DiLoCoTrainerCallback", error) from None

from composer_replication.arguments import takes
from composer_replication.data.sample_stream import replica_shard
from composer_replication.diloco.algorithm import DiLoCo
from composer_replication.group.call_watch import caller, when_over
from composer_replication.group.checkpoint_files import (
    NO_STATE,
    STATE,
    TRAINER_STATE,
    newest_first,
    problem_of,
    set_aside,
    whole_of,
    write_whole,
)
from composer_replication.group.host import GroupArguments, Host
from composer_replication.group.replica_group import ReplicaGroup
from composer_replication.group.reports import rejections
from composer_replication.replica.ranks import broadcast, gather, rank, world_size

__all__ = ["DiLoCoTrainerCallback", "replica_shard"]

log = logging.getLogger(__name__)


class Losses:
    """A Trainer's ``training_step``, which also adds up the losses, on their device.

    Args:
        of: The Trainer's own.

    Attributes:
        of: The same.
        num_steps: Steps since the last ``pop_mean``.
    """

    def __init__(self, of: Callable[..., Tensor]) -> None:
        self.of = of
        self.num_steps = 0
        self._sum: Tensor | None = None

    def __call__(self, *inputs: Any, **named: Any) -> Tensor:
        loss = self.of(*inputs, **named)
        own = loss.detach().float()
        self._sum = own if self._sum is None else self._sum + own
        return loss

    def pop_mean(self) -> float | None:
        """The mean loss of the steps since the last call, over the group's ranks; None without."""
        total, num_steps = self._sum, self.num_steps
        self._sum, self.num_steps = None, 0
        if total is None or not num_steps:
            return None
        if torch.distributed.is_initialized():
            total = total / world_size()
            torch.distributed.all_reduce(total)
        return total.item() / num_steps


class TrainerJob(Host):
    """A ``Trainer`` as the host of a replica group. A joiner takes over its step and scheduler.

    Attributes:
        trainer: The Trainer whose ``train`` runs, or ran last.
        losses: Those of its steps.
    """

    name = "transformers"
    load_weights_only = "its weights alone (from_pretrained, without resume_from_checkpoint)"
    load_checkpoint = "continue from a checkpoint (trainer.train(resume_from_checkpoint=...))"
    how_to_save = "save_steps in the TrainingArguments"
    load_from = "resume_from_checkpoint"
    save_argument = "an output_dir"
    tokens_fix = "give the model attention_mask or input_ids"
    data_fix = "replica_shard(dataset)"
    trainer: Trainer
    group: ReplicaGroup
    losses: Losses

    # ---- what is trained --------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        return self.trainer.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        own = self.trainer.optimizer
        return getattr(own, "optimizer", own)  # accelerate has wrapped the optimizer

    def size_of(self, batch: Any, what: str) -> int:
        tensors = [each for each in batch.values() if isinstance(each, Tensor) and each.ndim]
        if what == "samples":
            return len(tensors[0]) if tensors else 0
        mask, ids = batch.get("attention_mask"), batch.get("input_ids")
        return int(mask.sum()) if mask is not None else 0 if ids is None else ids.numel()

    # ---- the position in training ------------------------------------------------------------

    @property
    def steps(self) -> int:
        return self.trainer.state.global_step

    def last_step(self, *, is_bound: bool = False) -> int | None:
        return self.trainer.state.max_steps

    @property
    def checkpoints(self) -> str:
        return checkpoints_in(Path(self.trainer.args.output_dir))

    @property
    def saves_to(self) -> list[str]:
        args = self.trainer.args
        saves = args.save_strategy != "no" or args.enable_jit_checkpoint
        return [args.output_dir] if saves else []

    # ---- what it shows ----------------------------------------------------------------------

    def watch_losses(self) -> None:
        """Add up the losses of the steps from now on. The Trainer logs them rarely, without NaN."""
        step = self.trainer.training_step
        self.losses = Losses(step.of if isinstance(step, Losses) else step)
        self.trainer.training_step = self.losses

    def mean_loss(self) -> float | None:
        return self.losses.pop_mean()

    def log_metrics(self, metrics: Mapping[str, float]) -> None:
        control = self.trainer.control
        wants_own = control.should_log  # on_log resets it, and the Trainer has yet to log this step
        # The base class's, because TRL's log also takes and clears the averages that it collects.
        Trainer.log(self.trainer, dict(metrics))
        control.should_log = wants_own

    @property
    def shows_position(self) -> bool:
        return any(isinstance(c, ProgressCallback) for c in self.trainer.callback_handler.callbacks)

    def show_position(self, position: str, end: int | None, is_estimate: bool) -> None:
        for callback in self.trainer.callback_handler.callbacks:
            if isinstance(callback, ProgressCallback) and callback.training_bar is not None:
                callback.training_bar.set_description_str(position, refresh=False)

    # ---- what a joiner gets -----------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        # The sync is in the optimizer's step, after which the Trainer counts it and steps the
        # scheduler.
        return {
            "steps": self.steps + self.group.is_in_step,
            "schedule": self.trainer.lr_scheduler.state_dict(),
            "is_in_step": self.group.is_in_step,
        }

    def load_state_dict(self, saved: dict[str, Any], is_in_step: bool) -> None:
        scheduler = self.trainer.lr_scheduler
        scheduler.load_state_dict(saved["schedule"])
        if saved["is_in_step"]:
            # The donor took the step before it; torch warns if a scheduler steps before the
            # optimizer.
            self.optimizer._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]
            scheduler.step()
        for group, rate in zip(self.optimizer.param_groups, scheduler.get_last_lr(), strict=True):
            group["lr"] = rate
        self.trainer.state.global_step = saved["steps"]


class DiLoCoTrainerCallback(TrainerCallback):
    """Make a Hugging Face ``Trainer`` one replica group of a DiLoCo run.

    Each group is a training job of its own, under plain ``python`` or ``torchrun``. The arguments,
    their defaults, the environment variables and the logged metrics are those of
    :class:`composer_replication.DiLoCoCallback`. Evaluations and saved models are of the global
    parameters. A checkpoint of the Trainer also has ``diloco.pt``, with which
    ``resume_from_checkpoint`` continues exactly.

    Example:
        .. code-block:: python

            data = replica_shard(dataset)  # each group has its own samples
            diloco = DiLoCoTrainerCallback(sync_every=100)
            trainer = Trainer(model, args, train_dataset=data, callbacks=[diloco])

    Raises:
        ValueError: An argument is out of range.
    """

    @takes(GroupArguments)
    def __init__(self, **arguments: Any) -> None:
        self._job = TrainerJob()
        self._group = self._job.group = ReplicaGroup(self._job, arguments)
        self._manager = arguments.get("manager")
        self._hook: Any = None
        self._evaluations_left = 0
        self._is_terminated = False

    @property
    def diloco(self) -> DiLoCo | None:
        """DiLoCo, while training."""
        return self._group.diloco

    @property
    def result(self) -> dict[str, Any]:
        """The result of the last training; empty before its end."""
        return self._group.result

    # ---- the Trainer's events, in the order in which they come ------------------------------

    def on_init_end(self, args: TrainingArguments, state, control, **kwargs: Any) -> None:
        init = caller(Trainer.__init__)  # a callback has no other way to its Trainer
        if init is not None:
            trainer = self._job.trainer = init.f_locals["self"]
            # At on_train_begin the Trainer has loaded a checkpoint already, or failed to.
            trainer.train = partial(self._train, trainer.train)

    def _train(self, train: Callable[..., Any], resume_from_checkpoint=None, *more, **named) -> Any:
        """``Trainer.train``, from the newest checkpoint that is whole."""
        if resume_from_checkpoint:
            with rejections(self._group.options):
                self._group.hold_folders()  # another group may be writing the newest one
                resume_from_checkpoint = self._whole(resume_from_checkpoint)
        return train(resume_from_checkpoint, *more, **named)

    def _whole(self, wanted: str | bool) -> str | bool | None:
        """Return the wanted checkpoint, True: the newest; if it is torn the one before it."""
        last = None if wanted is True else Path(str(wanted)).absolute()
        pattern = self._job.checkpoints if last is None else checkpoints_in(last.parent)
        found = broadcast(newest_first(pattern))  # each node may have a disk of its own
        if last in found:
            found = found[found.index(last) :]
        elif last is not None:
            return wanted
        whole, torn = whole_of(found, lambda p: next(filter(None, gather(problem_of(p))), None))
        if whole is None:
            whole = next((path for path, problem in torn.items() if problem == NO_STATE), None)
            torn = dict(takewhile(lambda each: each[0] != whole, torn.items()))
        if torn:
            saves = self._job.trainer.args.should_save
            said = set_aside(torn, whole, renames=saves)
            if whole is None:
                self._group.continuation.skip(said)
            elif not rank():
                log.warning("%s", said)
        elif whole is None:
            self._group.ask_coordinator()
            return None if self._group.has_begun else wanted
        return None if whole is None else str(whole)

    def on_train_begin(self, args: TrainingArguments, state, control, **kwargs: Any) -> None:
        train = caller(Trainer.train)
        if train is None:
            raise RuntimeError("on_train_begin outside of Trainer.train: let the Trainer call it")
        trainer = self._job.trainer = train.f_locals["self"]
        self._is_terminated = False
        with rejections(self._group.options):
            check_parallelism(trainer)
            self._group.ask_coordinator()
            self._load(train.f_locals["resume_from_checkpoint"])
            self._group.join(self._manager)
        save = partial(type(trainer)._save_checkpoint, trainer)
        trainer._save_checkpoint = partial(self._save, save)
        when_over(Trainer.train, partial(self._group.leave_after_error, self._group.manager))
        if self._hook is not None:
            self._hook.remove()  # of a training that has failed
        # What the Trainer passes to the model is what a step trains on; callbacks do not see it.
        self._hook = self._job.model.register_forward_pre_hook(self._count, with_kwargs=True)
        self._job.watch_losses()
        for each in self._job.trainer.callback_handler.callbacks:
            if saving := getattr(each, "jit_manager", None):  # with enable_jit_checkpoint
                save = partial(type(saving).execute_jit_checkpoint, saving)
                saving.execute_jit_checkpoint = partial(self._terminate, save)
        if args.eval_on_start:
            self._show_for_evaluation()

    def _load(self, folder: str | None) -> None:
        problem = None
        if folder is not None and (path := Path(folder) / STATE).exists():
            try:
                saved = torch.load(path, map_location="cpu", weights_only=True)
                self._group.continuation.load(saved)
            except Exception as error:  # torch raises errors of many classes
                problem = f"{STATE} cannot be read ({error})"
        self._group.continuation.check_loaded(folder, self._group.has_begun, problem)

    @torch.compiler.disable
    def _count(self, model: nn.Module, inputs: tuple[Any, ...], batch: dict[str, Any]) -> None:
        if self._group.is_in_step and torch.is_grad_enabled() and batch:
            self._group.count(batch)

    def on_step_begin(self, args, state, control, **kwargs: Any) -> None:
        self._group.note_progress()
        self._group.show_local()  # a user may have evaluated without on_evaluate
        self._group.begin_step()

    def on_substep_end(self, args, state, control, **kwargs: Any) -> None:
        self._group.note_progress()

    def on_step_end(self, args, state, control, **kwargs: Any) -> None:
        self._job.losses.num_steps += 1
        if self._group.end_step():
            control.should_training_stop = True
        self._end_or_evaluate(control)

    def on_epoch_end(self, args, state, control, **kwargs: Any) -> None:
        self._end_or_evaluate(control)

    def on_log(self, args, state, control, logs: Any = None, **kwargs: Any) -> None:
        # The Trainer's last log. It comes before load_best_model_at_end, whose weights a final sync
        # would take for this group's training, and also after an early stop at an epoch's end.
        if "train_loss" in (logs or {}):
            self._end()

    def on_prediction_step(self, args, state, control, **kwargs: Any) -> None:
        self._group.note_progress()

    def on_evaluate(self, args, state, control, metrics: Any = None, **kwargs: Any) -> None:
        if self._group.weights is None:
            return  # before the first training
        self._evaluations_left -= 1
        if self._evaluations_left <= 0:
            self._group.generators.restore()  # the next batch, or a checkpoint, has those before
        numbers = {k: float(v) for k, v in (metrics or {}).items() if isinstance(v, (int, float))}
        self._group.note_evaluation(numbers)

    def _save(self, save: Callable[..., None], model: nn.Module, trial: Any) -> None:
        """``Trainer._save_checkpoint``, after DiLoCo's part of the checkpoint.

        The Trainer removes older checkpoints before it calls ``on_save``. Killed between the two,
        the group would have nothing whole left.
        """
        trainer = self._job.trainer
        self._show_for_checkpoint()
        saved = self._group.state_dict()  # on every rank: it may gather
        if trainer.args.should_save and saved:
            step = trainer.state.global_step
            folder = Path(trainer._get_output_dir(trial=trial)) / f"checkpoint-{step}"
            # In a folder from before, nothing is whole until the Trainer has written all of it.
            (folder / TRAINER_STATE).unlink(missing_ok=True)
            write_whole(folder / STATE, partial(torch.save, saved))
        save(model, trial)

    def _terminate(self, save: Callable[[], None]) -> None:
        """After a SIGTERM: leave a whole checkpoint, and do not wait for the others' next sync."""
        save()
        self._group.close()
        self._is_terminated = True

    def on_train_end(self, args, state, control, **kwargs: Any) -> None:
        self._end()
        self._hook.remove()
        self._group.close()

    def _end_or_evaluate(self, control: Any) -> None:
        if self._is_terminated:  # it has saved, and holds local weights
            control.should_evaluate = control.should_save = False
        elif control.should_training_stop:
            self._end()  # now, so that the last evaluation and checkpoint are of its result
        elif control.should_evaluate:
            self._show_for_evaluation()

    def _end(self) -> None:
        if self.diloco is not None:
            self._group.show_local()  # an evaluation may have asked for the end
            self._group.end()

    def _show_for_evaluation(self) -> None:
        datasets = self._job.trainer.eval_dataset
        self._evaluations_left = len(datasets) if isinstance(datasets, dict) else 1
        self._group.show_global()

    def _show_for_checkpoint(self) -> None:
        # Of the ranks of DDP the first alone asks for a checkpoint's tensors, which are gathered
        # unless all ranks show them. The next step, or the end, puts the local ones back.
        if self.diloco is not None and self._group.weights is not None:
            self._group.weights.show()


def checkpoints_in(folder: Path) -> str:
    """A pattern, as for ``glob``, of the Trainer's checkpoints in a folder."""
    return f"{escape(str(folder.absolute()))}/checkpoint-*"


def check_parallelism(trainer: Trainer) -> None:
    """Reject what cannot be a replica group.

    Raises:
        ValueError: The message names it and the fix.
    """
    args = trainer.args
    parallelism = getattr(trainer.accelerator, "parallelism_config", None)
    rejected = {
        f"nn.DataParallel over {args.n_gpu} GPUs: start the job with torchrun": args.n_gpu > 1,
        "DeepSpeed: use DDP or FSDP2": trainer.is_deepspeed_enabled,
        "FSDP version 1: set fsdp_config={'version': 2}": trainer.is_fsdp_enabled
        and getattr(trainer.accelerator.state.fsdp_plugin, "fsdp_version", 1) == 1,
        "tensor, context or sequence parallelism: use DDP or FSDP2": parallelism is not None
        and parallelism.non_data_parallel_size > 1,
        "auto_find_batch_size, which begins training anew while others wait: set the batch size": (
            args.auto_find_batch_size
        ),
    }
    for problem, is_there in rejected.items():
        if is_there:
            raise ValueError(f"DiLoCo cannot train with {problem}")
