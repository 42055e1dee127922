"""Run a Hugging Face ``Trainer`` as one replica group. TRL's trainers are such Trainers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import nn

from composer_replication.util.lazy import named_extra

try:
    from transformers import (  # pyright: ignore[reportMissingImports] # only here is it needed
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )
except ModuleNotFoundError as error:
    raise named_extra("DiLoCoTrainerCallback", error) from None

from composer_replication.arguments import shows
from composer_replication.data.sample_stream import replica_shard
from composer_replication.group.call_watch import caller
from composer_replication.group.checkpoint_files import STATE, TRAINER_STATE
from composer_replication.group.host import GroupKeywords, check_is_one
from composer_replication.group.replica_group import ReplicaGroup, ShowsGroup
from composer_replication.group.reports import rejections
from composer_replication.hf_job import TrainerJob, check_parallelism
from composer_replication.replica.ranks import ask_on_rank_0
from composer_replication.util.json_files import replace_file

__all__ = ["DiLoCoTrainerCallback", "replica_shard"]


class DiLoCoTrainerCallback(ShowsGroup, TrainerCallback):
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
        TypeError: A keyword is neither a setting nor an option.
        ValueError: An argument is out of range.
    """

    @shows(GroupKeywords)
    def __init__(self, *, manager: Any = None, **named: Unpack[GroupKeywords]) -> None:
        """Check the arguments.

        Args:
            manager: A manager to use for one training, for simulations. None: build one.
        """
        self._job = TrainerJob()
        self._group = ReplicaGroup(self._job, named, "DiLoCoTrainerCallback", manager)
        self._evaluations_left = 0
        self._is_terminated = False

    # ---- the Trainer's events, in the order in which they come ------------------------------

    def on_init_end(self, args, state, control, **kwargs) -> None:
        init = caller(Trainer.__init__)  # a callback has no other way to its Trainer
        if init is None:
            return
        trainer = init.f_locals["self"]
        self._job.trainer = trainer
        # At on_train_begin the Trainer has loaded a checkpoint already, or failed to.
        trainer.train = partial(self._train, trainer.train)

    def _train(
        self,
        train: Callable[..., Any],
        resume_from_checkpoint: str | bool | None = None,
        *more: Any,
        **named: Any,
    ) -> Any:
        """``Trainer.train``, from the newest checkpoint that is whole."""
        try:
            if resume_from_checkpoint:
                with rejections(self.options):
                    ask_on_rank_0(self._group.hold_folders)  # another group may be writing in it
                    resume_from_checkpoint = self._job.whole_checkpoint(resume_from_checkpoint)
            return train(resume_from_checkpoint, *more, **named)
        except Exception as error:  # the Trainer has no event for it
            self._group.fail(error)
            raise

    def on_train_begin(self, args: TrainingArguments, state, control, **kwargs) -> None:
        train = caller(Trainer.train)
        if train is None:
            raise RuntimeError("on_train_begin outside of Trainer.train: let the Trainer call it")
        trainer = train.f_locals["self"]
        self._job.trainer = trainer
        self._is_terminated = False
        self._job.watch()  # before a join, which is a sync
        with rejections(self.options):
            check_parallelism(trainer)
            check_is_one(trainer.callback_handler.callbacks, DiLoCoTrainerCallback)
            self._group.ask_coordinator()
            self._load(train.f_locals["resume_from_checkpoint"])
            self._group.join()
        self._group.leave_when_over(Trainer.train)
        self._wrap_saves(trainer)
        if args.eval_on_start:
            self._show_for_evaluation()

    def _load(self, folder: str | None) -> None:
        problem = ""
        self._group.forget_failed_start()
        if folder is not None and Path(folder, STATE).exists():
            try:
                saved = torch.load(Path(folder, STATE), map_location="cpu", weights_only=True)
                self._job.load_beside(saved.pop("beside", {}))
                self._group.continuation.load(saved)
            except Exception as error:  # torch raises errors of many classes
                problem = f"{STATE} cannot be read ({error})"
        self._group.continuation.check_loaded(folder, problem)

    def _wrap_saves(self, trainer: Any) -> None:
        """Have this callback take part in the Trainer's saves."""
        save = partial(type(trainer)._save_checkpoint, trainer)
        trainer._save_checkpoint = partial(self._save, save)
        for each in trainer.callback_handler.callbacks:
            saving = getattr(each, "jit_manager", None)  # with enable_jit_checkpoint
            if saving is not None:
                save = partial(type(saving).execute_jit_checkpoint, saving)
                saving.execute_jit_checkpoint = partial(self._terminate, save)

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        self._group.note_progress()
        self._group.show_local()  # a user may have evaluated without on_evaluate
        self._group.begin_step()

    def on_substep_end(self, args, state, control, **kwargs) -> None:
        self._group.note_progress()

    on_prediction_step = on_substep_end

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self._job.losses.num_steps += 1
        if self._group.end_step():
            control.should_training_stop = True
        self._end_or_evaluate(control)

    def on_epoch_end(self, args, state, control, **kwargs) -> None:
        self._end_or_evaluate(control)

    def on_log(self, args, state, control, logs: Any = None, **kwargs) -> None:
        # The Trainer's last log. It comes before load_best_model_at_end, whose weights a final sync
        # would take for this group's training, and also after an early stop at an epoch's end.
        if "train_loss" in (logs or {}):
            self._end()

    def on_evaluate(self, args, state, control, metrics: Any = None, **kwargs) -> None:
        if self._group.weights is None:
            return  # before the first training
        self._evaluations_left -= 1
        if self._evaluations_left <= 0:
            # The next batch, or a checkpoint, has those before.
            self._group.generators.restore()
        numbers = {}
        for name, value in (metrics or {}).items():
            if isinstance(value, int | float):
                numbers[name] = float(value)
        self._group.note_evaluation(numbers)

    def _save(
        self,
        save: Callable[..., None],
        model: nn.Module,
        trial: Any,
    ) -> None:
        """``Trainer._save_checkpoint``, after DiLoCo's part of the checkpoint.

        The Trainer removes older checkpoints before it calls ``on_save``. Killed between the two,
        the group would have nothing whole left.
        """
        trainer = self._job.trainer
        # Of the ranks of DDP the first alone asks for a checkpoint's tensors, which are gathered
        # unless all ranks show them. The next step, or the end, puts the local ones back.
        weights = self._group.weights
        if self.diloco is not None and weights is not None:
            weights.show()
        saved = self._group.state_dict()  # on every rank: it may gather
        if saved:
            saved = {**saved, "beside": self._job.saved_beside()}
        if saved and trainer.args.should_save:
            output_dir = trainer._get_output_dir(trial=trial)
            folder = Path(output_dir, f"checkpoint-{trainer.state.global_step}")
            # In a folder from before, nothing is whole until the Trainer has written all of it.
            trainer_state = folder / TRAINER_STATE
            trainer_state.unlink(missing_ok=True)
            replace_file(
                folder / STATE,
                partial(torch.save, saved),
                survives_power_cut=True,
            )
        save(model, trial)

    def _terminate(self, save: Callable[[], None]) -> None:
        """After a SIGTERM: leave a whole checkpoint, and do not wait for the others' next sync."""
        save()
        self._group.close()
        self._is_terminated = True

    def on_train_end(self, args, state, control, **kwargs) -> None:
        self._end()
        self._group.close()

    def _end_or_evaluate(self, control: Any) -> None:
        if self._is_terminated:  # it has saved, and holds local weights
            control.should_evaluate = False
            control.should_save = False
        elif control.should_training_stop:
            self._end()  # now, so that the last evaluation and checkpoint are of its result
        elif control.should_evaluate:
            self._show_for_evaluation()

    def _end(self) -> None:
        if self.diloco is not None:
            self._group.show_local()  # an evaluation may have asked for the end
            self._group.end()

    def _show_for_evaluation(self) -> None:
        self._evaluations_left = 1
        datasets = self._job.trainer.eval_dataset
        if isinstance(datasets, dict):
            self._evaluations_left = len(datasets)
        self._group.show_global()
