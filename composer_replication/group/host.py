"""What a replica group asks of its trainer, and the keywords of a trainer's callback."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from composer_replication.diloco.wrapped import own_optimizers
from composer_replication.options import OptionKeywords
from composer_replication.replica.ranks import world_size
from composer_replication.settings import SettingKeywords


class GroupKeywords(SettingKeywords, OptionKeywords):
    """The settings and options that a trainer's callback takes by name."""


class Averages:
    """The averages of weights that a trainer keeps, such as EMA. This class stands for none."""

    exist = False
    """Whether the model may hold an average when it is saved or evaluated."""
    are_saved = False
    """Whether the model holds an average now, and is to be saved with it."""
    are_evaluated = False
    """Whether evaluators see an average, which the trainer puts into the model for them."""

    def begin(self, is_resumed: bool) -> None:
        """A fit begins, and its checkpoint has been read. From now on the model is local."""

    def leave(self) -> None:
        """The group counts no more steps."""

    def out_of_the_model(self) -> AbstractContextManager[None]:
        """A context in which the model holds the local weights."""
        return nullcontext()

    def local(self, live: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The local weights by name, given those that the model holds; not copies."""
        return live


NO_AVERAGES = Averages()


class Host:
    """A trainer, as its replica group sees it.

    Each trainer has a subclass. Attributes that have a value here, and methods that do not raise
    ``NotImplementedError``, are right for a trainer that has no such thing.
    """

    group: Any
    """The replica group, which sets this."""
    name: str
    """The trainer's name: the key of what it sends to a joiner."""
    load_weights_only = "its weights alone"
    """For an error: how to load only the weights of a checkpoint."""
    load_checkpoint = "load a checkpoint"
    """For an error, and for what ``launch`` prints: how a script continues from a checkpoint."""
    load_from = "load_path"
    """For an error: the argument that names the checkpoint to load."""
    how_to_save = "a save_folder and save_interval"
    """For what ``launch`` prints: with which arguments a script saves checkpoints."""
    save_argument = "a save_folder"
    """For an error: the argument that names where a group saves."""
    tokens_fix = "give each batch its tokens"
    """For an error: what to do about a batch whose tokens cannot be counted."""
    data_fix = (
        "ReplicaDataLoader(dataset, batch_size), or with a sampler that divides by REPLICA_GROUP_ID"
    )
    """What divides samples between groups, for a warning."""
    averages = NO_AVERAGES
    warning = ""
    """What the groups cannot keep equal in this job, for a warning; empty if there is nothing."""
    is_sharded = False
    """Whether each rank saves its own shards, or rank 0 whole tensors."""

    # ---- what is trained --------------------------------------------------------------------

    model: nn.Module
    """The model, without the wrapper of DDP."""
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
    """The inner optimizer, whose steps are counted; of several those of the first one."""
    loader: object = None
    """The training loader, which the group feeds if it is a ``ReplicaDataLoader``."""

    def size_of(self, batch: Any, what: str) -> int:
        """The number of ``samples`` or ``tokens`` in a batch of this rank; 0 if it is not known.

        By default the batch has tensors, with names or without, with a row for each sample.
        """
        named = batch if isinstance(batch, Mapping) else dict(enumerate(tree_leaves(batch)))
        tensors = {
            str(name): each
            for name, each in named.items()
            if isinstance(each, Tensor) and each.ndim
        }
        return _count_samples(tensors) if what == "samples" else _count_tokens(tensors)

    def size_of_all(self, batch: Any, what: str) -> int:
        """The number of samples or tokens in a batch, over all ranks of the group.

        Raises:
            ValueError: On all ranks, if the batch of one has no tokens.
        """
        own = self.size_of(batch, what)
        device = next(self.model.parameters()).device
        counts = torch.tensor([own, int(own == 0)], device=device)
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(counts)
        total, num_without = counts.tolist()
        if num_without and what == "tokens":
            raise ValueError(
                f"weight_by='tokens', and {num_without} of the group's {world_size()} ranks have a "
                f"batch of 0 tokens: {self.tokens_fix}, or use weight_by='samples'"
            )
        return total

    # ---- the position in training ------------------------------------------------------------

    steps: int
    """Steps so far, skipped ones included, of this group or of the one that it has joined."""
    epochs: float = math.inf
    """After how many epochs training ends; infinite if it does not end by epochs."""
    checkpoints: str | None = None
    """A pattern, as for ``glob``, of this group's checkpoints; None if none is saved."""
    saves_to: Sequence[str] = ()
    """The folders in which this group saves; those in object stores as URLs."""

    def last_step(self, *, is_bound: bool = False) -> int | None:
        """The step at which training ends; None if that is not known.

        Args:
            is_bound: Whether an upper bound is enough: the number if this group got all samples
                that the groups share.
        """
        return None

    # ---- what it shows ----------------------------------------------------------------------

    last_loss: float | None = None
    """The loss of the newest step, a mean over the group's ranks; None where it is not known, or
    only the device knows it."""

    losses: Any
    """The ``Losses`` of its steps; or of another kind, see ``mean_loss``."""

    def mean_loss(self) -> float | None:
        """The mean loss of the steps since the last call, over the group's ranks; None: not known.

        Every rank calls it, and only after a sync: it may wait for the device and for other ranks.
        """
        return self.losses.pop_mean()

    shows_position = False
    """Whether the trainer has a progress bar, for ``show_position`` after each step."""

    def log_metrics(self, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a sync. It must not raise."""

    def show_position(self, position: str, estimated_end: int | None) -> None:
        """Show the position in the run.

        Args:
            position: In words.
            estimated_end: The step at which training ends, if it is estimated from the samples that
                are left; else None.
        """

    # ---- what a joiner gets beside the global state -----------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The position in training: numbers, strings, tensors and plain containers of these.

        It is called on torchft's thread while the training thread waits for a sync, so it calls no
        collective.
        """
        raise NotImplementedError

    def load_state_dict(self, saved: dict[str, Any], is_in_step: bool) -> None:
        """Continue at the donor's position. On every rank, once the step or the join is over.

        Args:
            saved: What ``state_dict`` was in the donor of rank 0.
            is_in_step: Whether this group has healed inside a step.
        """
        raise NotImplementedError


def _count_samples(tensors: Mapping[str, Tensor]) -> int:
    # One of a single dimension may have the tokens of all samples in a row.
    for tensor in tensors.values():
        if tensor.ndim > 1:
            return len(tensor)
    return min(map(len, tensors.values()), default=0)


def _count_tokens(tensors: Mapping[str, Tensor]) -> int:
    usual = [name for name in ("attention_mask", "input_ids") if name in tensors]
    # Others have several inputs: anchor_attention_mask, completion_mask, anchor_input_ids.
    names = usual or [*tensors]
    masks = [int(tensors[name].sum()) for name in names if name.endswith("_mask")]
    ids = [tensors[name].numel() for name in names if name.endswith("_ids")]
    return sum(masks or ids)


def continue_schedule(scheduler: Any, optimizer: Any, state: dict[str, Any]) -> None:
    """Take over a donor's schedule.

    Args:
        scheduler: One of torch's learning rate schedulers.
        optimizer: The optimizer whose steps it counts.
        state: The donor's, of its scheduler.
    """
    scheduler.load_state_dict(state)
    rates = scheduler.get_last_lr()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
    # The donor took the step before it; torch warns if a scheduler steps before the optimizer.
    optimizer._opt_called = True


def check_optimizer(given: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]) -> None:
    """Reject an inner optimizer that moves the weights outside of its steps.

    Raises:
        ValueError: It has the ``eval`` and ``train`` of schedule-free optimizers.
    """
    for optimizer in own_optimizers(given):
        if callable(getattr(optimizer, "eval", None)):
            raise ValueError(
                f"DiLoCo cannot train with {type(optimizer).__name__}, whose eval() and train() "
                "move the weights between steps, also while the model shows the global ones: use "
                "an optimizer without these, such as AdamW"
            )


def check_is_one(callbacks: Sequence[Any], kind: type) -> None:
    """Reject a second callback of ours among those of a trainer.

    Raises:
        ValueError: There are several, which would be one replica group several times.
    """
    count = sum(isinstance(each, kind) for each in callbacks)
    if count > 1:
        raise ValueError(f"{count} callbacks {kind.__name__} in one Trainer: leave all but one out")
