"""A small training job, and what comes of it: what every host of DiLoCo is asked to train."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from common import TinyMLP, batch
from torch import Tensor, nn

BATCH_SIZE = 8


def own_batches(replica_id: int, count: int) -> list[tuple[Tensor, Tensor]]:
    """Batches of this group's own samples."""
    return [batch(replica_id, step, BATCH_SIZE) for step in range(count)]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a replica group trains.

    Args:
        steps: Inner steps until training ends.
        settings: Arguments of the host's callback, or of ``DiLoCo``.
        model: Builds the model from the group's number.
        optimizer: Builds the inner optimizer.
        batches: Returns this many batches of a group, each the inputs and the targets.
        accumulate: Batches of an inner step.
        evaluate_every: Inner steps between two evaluations; 0: none.
        save_every: Inner steps between two checkpoints; 0: none.
        folder: For checkpoints; each group has its own in it.
        resumes: Whether to continue from the newest checkpoint in the folder.
        stops_at: After which step the job ends early, with the host's own way to do so.
        fails_at: In which step the job raises, by the group's number.
        looks: Called after every inner step with the group's number, the step and the model.
    """

    steps: int = 8
    settings: Mapping[str, Any] = field(default_factory=dict)
    model: Callable[[int], nn.Module] = TinyMLP
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd
    batches: Callable[[int, int], list[tuple[Tensor, Tensor]]] = own_batches
    accumulate: int = 1
    evaluate_every: int = 0
    save_every: int = 0
    folder: Path | None = None
    resumes: bool = False
    stops_at: int | None = None
    fails_at: Mapping[int, int] = field(default_factory=dict)
    looks: Callable[[int, int, nn.Module], None] | None = None

    def arguments(self, replica_id: int, num_replicas: int) -> dict[str, Any]:
        """Arguments of the host's callback."""
        own = {"replica_id": str(replica_id), "num_replicas": num_replicas, "sync_every": 4}
        return own | dict(self.settings)

    def own_folder(self, replica_id: int) -> Path:
        assert self.folder is not None, "a job that saves has a folder"
        return self.folder / f"group_{replica_id}"

    def after_step(self, replica_id: int, step: int, model: nn.Module) -> None:
        """Every host calls it after an inner step."""
        if self.looks is not None:
            self.looks(replica_id, step, model)
        if self.fails_at.get(replica_id) == step:
            raise JobError(f"step {step} of group {replica_id} fails")


class JobError(RuntimeError):
    """The failure that a job was asked for."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a group has at the end of its training.

    Attributes:
        digest: Of its global parameters.
        weights: The model's tensors.
        evaluations: The loss on held-out samples, by inner step.
        inner_steps: Inner steps of this group in the run.
        outer_steps: Outer steps of the run.
        contributions: Weight of this group in each sync that it took part in.
        warns_of_samples: Whether it was said that groups train on the same samples.
    """

    digest: str
    weights: dict[str, Tensor]
    evaluations: dict[int, float]
    inner_steps: int
    outer_steps: int
    contributions: list[float]
    warns_of_samples: bool


class Host(Protocol):
    """Trains a job as several replica groups."""

    name: str

    def train(self, job: Job, num_replicas: int = 2) -> list[Outcome]: ...

    def saved_weights(self, job: Job, replica_id: int, step: int) -> dict[str, Tensor]:
        """The model in the checkpoint of a step."""
        ...


@contextmanager
def warnings_of_package() -> Iterator[list[str]]:
    """Collect what the package warns of in its log."""
    said: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    log, handler = logging.getLogger("composer_replication"), Collect(logging.WARNING)
    log.addHandler(handler)
    try:
        yield said
    finally:
        log.removeHandler(handler)


def held_out() -> tuple[Tensor, Tensor]:
    """Samples that no group trains on."""
    return batch(99, 0, 16)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
