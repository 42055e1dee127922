"""Hugging Face's Trainer on the CPU with ``DiLoCoTrainerCallback``: small trainings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import TinyMLP
from harness.processes import Process
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from composer_replication.hf import DiLoCoTrainerCallback
from hosts.host import ALONE, held_out, own_batches


class WithLoss(nn.Module):
    """Returns the loss, as the Trainer wants it."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        out = self.net(x)
        return {"loss": nn.functional.mse_loss(out, labels), "logits": out}


class At(TrainerCallback):
    """Calls a function at the end of a step."""

    def __init__(self, step: int, act) -> None:
        self.step, self.act = step, act

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.act()


def rows_of(batches: list[tuple[Tensor, Tensor]]) -> list[dict[str, Tensor]]:
    return [{"x": x, "labels": y} for xs, ys in batches for x, y in zip(xs, ys, strict=True)]


QUIET = {
    "report_to": [],
    "disable_tqdm": True,
    "use_cpu": True,
    "save_strategy": "no",
    "learning_rate": 0.01,
}
"""Arguments of a small training that shows and saves nothing."""


def arguments_of(folder: Path | str, **changed: Any) -> TrainingArguments:
    own = {"per_device_train_batch_size": 8, "max_steps": 8, "logging_steps": 1}
    return TrainingArguments(output_dir=str(folder), **QUIET | own | changed)


def trainer_of(
    diloco: DiLoCoTrainerCallback | None,
    args: TrainingArguments,
    *callbacks: TrainerCallback,
    group: int = 0,
    **more: Any,
) -> Trainer:
    """A trainer of a group, with the callback of DiLoCo as its ``callback``."""
    own = {
        "model": WithLoss(TinyMLP(group)),
        "train_dataset": rows_of(own_batches(group, 8)),
        "eval_dataset": rows_of([held_out()]),
    }
    ours = [] if diloco is None else [diloco]
    trainer = Trainer(args=args, callbacks=[*ours, *callbacks], **own | more)
    trainer.callback = diloco
    return trainer


def alone(
    folder: Path, *callbacks: TrainerCallback, args: Any = (), settings: Any = (), **more: Any
) -> Trainer:
    """A Hugging Face Trainer with our callback, in a run of one group that trains alone."""
    diloco = DiLoCoTrainerCallback(**ALONE | dict(settings))
    return trainer_of(diloco, arguments_of(folder, **dict(args)), *callbacks, **more)


@contextmanager
def callback_in(
    group: Process, sync_every: int, num_replicas: int | None = None
) -> Iterator[DiLoCoTrainerCallback]:
    """Our callback in a group that meets others, whose manager is shut down at the end."""
    with group.manager() as manager:
        yield DiLoCoTrainerCallback(
            manager=manager,
            replica_id=str(group.replica_id),
            num_replicas=num_replicas or group.num_replicas,
            sync_every=sync_every,
        )


@contextmanager
def in_group(
    group: Process,
    folder: Path,
    *callbacks: TrainerCallback,
    num_replicas: int | None = None,
    more: Any = (),
    **args: Any,
) -> Iterator[Trainer]:
    """A trainer of a group that meets others, whose manager is shut down at the end."""
    with callback_in(group, 4, num_replicas) as diloco:
        own = arguments_of(folder / str(group.replica_id), **args)
        yield trainer_of(diloco, own, *callbacks, group=group.replica_id, **dict(more))
