"""A ``Trainer`` of Hugging Face as the trainer of a replica group."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from glob import escape
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (  # pyright: ignore[reportMissingImports] # only here is it needed
    ProgressCallback,
    Trainer,
)

from composer_replication.diloco.wrapped import own_model, own_optimizers
from composer_replication.group.checkpoint_files import (
    NO_STATE,
    newest_first,
    problem_of,
    set_aside,
    whole_of,
)
from composer_replication.group.host import Host, continue_schedule
from composer_replication.group.losses import Losses
from composer_replication.group.replica_group import ReplicaGroup
from composer_replication.replica.ranks import broadcast, gather, rank
from composer_replication.util.fence import fence

log = logging.getLogger(__name__)


class TrainerJob(Host):
    """A ``Trainer`` as the host of a replica group. A joiner takes over its step and scheduler.

    Attributes:
        trainer: The Trainer whose ``train`` runs, or ran last.
        losses: Those of its steps.
        beside: Modules of the Trainer that its optimizer trains and that are not in its model, by
            name, such as a loss of sentence-transformers.
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

    def __init__(self) -> None:
        self.losses = Losses()
        self.beside: dict[str, nn.Module] = {}

    # ---- what is trained --------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        own, _ = own_model(self.trainer.model)  # as DiLoCo does, for the same names
        if not self.beside:
            return own
        return nn.ModuleDict({"model": own, **self.beside})

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return own_optimizers(self.trainer.optimizer)[0]  # accelerate has wrapped it

    @property
    def warning(self) -> str:
        if not getattr(self.trainer.args, "sync_ref_model", False):
            return ""
        return (
            "sync_ref_model=True moves the reference model by this group's own weights: it differs "
            "between groups, and a group that is started again begins with its first one. Leave it "
            "out for one reference in all groups"
        )

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

    def whole_checkpoint(self, wanted: str | bool) -> str | bool | None:
        """Return the checkpoint to train from: the one that is wanted, or the one before it.

        A checkpoint is torn if the group was killed while it saved. With none before it the group
        begins without one, and may join others. Every rank of the group has to call it.

        Args:
            wanted: The Trainer's ``resume_from_checkpoint``; True stands for the newest.
        """
        pattern = self.checkpoints
        named = None
        if wanted is not True:
            named = Path(str(wanted)).absolute()
            pattern = checkpoints_in(named.parent)
        found = broadcast(newest_first(pattern))
        if named in found:
            found = found[found.index(named) :]
        elif named is not None:
            return wanted  # no folder of the Trainer's, which knows what to say of it
        whole, torn = whole_of(found, _problem_on_any_rank)
        if whole is None:
            whole, torn = whole_of(found, _problem_of_trainer)
        if whole is None and not torn:  # there is none at all, which is an error of the Trainer's
            self.group.ask_coordinator()
            return None if self.group.has_begun else wanted
        if torn:
            is_locked = bool(self.saves_to) and pattern == self.checkpoints
            renames = is_locked and self.trainer.args.should_save
            said = set_aside(torn, whole, renames=renames)
            if whole is None:
                self.group.continuation.skip(said)
            elif not rank():
                log.warning("%s", said)
        return None if whole is None else str(whole)

    # ---- what it shows ----------------------------------------------------------------------

    def watch(self) -> None:
        """Look at what is trained, count batches and add up the losses of the steps from now on.

        Callbacks see no batch. The Trainer's own logs of the loss come once in ``logging_steps``,
        and have no NaN.
        """
        trainer = self.trainer
        self.losses = Losses()
        self.beside = dict(self._trained_beside())
        watched = {
            "training_step": self._training_step,
            "compute_loss": self._compute_loss,
        }
        for name, ours in watched.items():
            its = getattr(trainer, name)
            if getattr(its, "func", None) != ours:  # it is, from the second training on
                setattr(trainer, name, partial(ours, its))

    def _trained_beside(self) -> Iterator[tuple[str, nn.Module]]:
        """The Trainer's modules besides the model that the optimizer trains, by attribute."""
        trained: set[int] = set()
        for group in self.optimizer.param_groups:
            trained.update(map(id, group["params"]))
        trained.difference_update(map(id, self.trainer.model.parameters()))
        for name, module in _modules_of(self.trainer):
            if not trained.isdisjoint(map(id, module.parameters())):
                yield name, module

    def _training_step(self, step: Callable[..., Tensor], *inputs: Any, **named: Any) -> Tensor:
        """The Trainer's own, and its loss is added up."""
        loss = step(*inputs, **named)
        self.losses.add(loss)
        return loss

    def _compute_loss(
        self,
        compute_loss: Callable[..., Any],
        model: nn.Module,
        inputs: Any,
        *more: Any,
        **named: Any,
    ) -> Any:
        """The Trainer's own, after what it is computed from has been counted."""
        if self.group.is_in_step and torch.is_grad_enabled():
            self.group.count(inputs)
        return compute_loss(model, inputs, *more, **named)

    def saved_beside(self) -> dict[str, Tensor]:
        """The global weights of ``beside`` by name, which the Trainer does not save."""
        weights = self.group.weights
        assert weights is not None, "join has made them"
        if not self.beside:
            return {}
        saved = {}
        for name in weights.local():
            if not name.startswith("model."):
                saved[name] = weights.saved(name)
        return saved

    @torch.no_grad()
    def load_beside(self, saved: Mapping[str, Tensor]) -> None:
        """Put what ``saved_beside`` has returned into the modules."""
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            if name in saved:
                tensor.copy_(saved[name])

    def log_metrics(self, metrics: Mapping[str, float]) -> None:
        control = self.trainer.control
        wants_own = control.should_log  # on_log resets it, and the Trainer has yet to log this step
        with fence("the metrics of a sync in the Trainer's callbacks"):
            # The base class's: TRL's log also takes and clears the averages that it collects.
            Trainer.log(self.trainer, dict(metrics))
        control.should_log = wants_own

    @property
    def shows_position(self) -> bool:
        return any(isinstance(each, ProgressCallback) for each in self._callbacks)

    @property
    def _callbacks(self) -> list[Any]:
        return self.trainer.callback_handler.callbacks

    def show_position(self, position: str, estimated_end: int | None) -> None:
        for callback in self._callbacks:
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
        by_step = "metrics" not in inspect.signature(scheduler.step).parameters  # of an evaluation
        continue_schedule(scheduler, self.optimizer, saved["schedule"])
        if saved["is_in_step"] and by_step:
            scheduler.step()
        jump = saved["steps"] - self.steps
        self.trainer.state.global_step += jump
        # Its logs divide the losses of this group's steps by their number since these.
        self.trainer._initial_global_step += jump
        self.trainer._globalstep_last_logged += jump


def _modules_of(trainer: Trainer) -> Iterator[tuple[str, nn.Module]]:
    """The modules that a Trainer holds, by attribute; those of a dictionary as one."""
    for name, held in vars(trainer).items():
        if isinstance(held, nn.Module):
            yield name, held
        elif isinstance(held, dict):
            values = held.values()
            modules = [each for each in values if isinstance(each, nn.Module)]
            yield name, nn.ModuleList(modules)


def _problem_on_any_rank(checkpoint: Path) -> str | None:
    """Why a checkpoint is not whole on one of the ranks: each node may have a disk of its own."""
    problems = gather(problem_of(checkpoint))
    return next(filter(None, problems), None)


def _problem_of_trainer(checkpoint: Path) -> str | None:
    """The same, but one that lacks only DiLoCo's part can be loaded, and is refused there."""
    problem = _problem_on_any_rank(checkpoint)
    return None if problem == NO_STATE else problem


def checkpoints_in(folder: Path) -> str:
    """A pattern, as for ``glob``, of the Trainer's checkpoints in a folder."""
    return f"{escape(str(folder.absolute()))}/checkpoint-*"


def check_parallelism(trainer: Trainer) -> None:
    """Reject what cannot be a replica group.

    Raises:
        ValueError: The message names it and the fix.
    """
    args = trainer.args
    optim = str(getattr(args.optim, "value", args.optim))
    parallelism = trainer.accelerator.parallelism_config
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
        f"optim={optim!r}, which steps inside of backward: use one that steps after it, such as "
        "adamw_torch": optim.endswith(("lomo", "layerwise")),
    }
    for problem, is_there in rejected.items():
        if is_there:
            raise ValueError(f"DiLoCo cannot train with {problem}")
