"""A small training job, and what comes of it: what every host of DiLoCo is asked to train.

A host is a module with two functions. ``train(job, num_replicas=2)`` returns the ``Outcome`` of
each group, or None if it failed as the job asked for it; ``saved_weights(job, replica_id, step)``
the model in the checkpoint of a step.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from common import TinyMLP, batch, mse
from harness.processes import Process, run_groups
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composer_replication import DiLoCo, simulate
from composer_replication.simulation.simulation import Fault, SimulatedReplica

BATCH_SIZE = 8

ALONE = {"num_replicas": 1, "replica_id": "0", "sync_every": 4}
"""Arguments of a callback in a run of one group that trains alone."""

_JOINS_LATER = "test_a_group_that_joins_later_continues_at_the_step_of_the_others"
_HAS_A_FOLDER = "test_the_folder_of_a_run_has_its_events_and_a_file_STOP_in_it_ends_training"
_SHARDS = "test_groups_whose_two_ranks_shard_the_model_with_FSDP2_train_as_unsharded_ones"

LACKS = {
    ("accelerate_host", _JOINS_LATER): "end at a `diloco.outer_step`",
    ("accelerate_host", _HAS_A_FOLDER): "events only under `launch`",
    ("lightning_host", _SHARDS): "refused, use DDP",
    ("plain", _JOINS_LATER): "end at a `diloco.outer_step`",
    ("plain", _HAS_A_FOLDER): "events only under `launch`",
}
"""What a host has not got, and why: by its module and the test that asks for it."""

SOME = {
    ("accelerate_host", _SHARDS): "its own [untried](fsdp.md)",
    ("hf_host", _SHARDS): "its own [untried](fsdp.md)",
}
"""What the test does by itself for a host whose own way to do it has not been tried."""


def own_batches(replica_id: int, count: int) -> list[tuple[Tensor, Tensor]]:
    """Batches of this group's own samples."""
    return [batch(replica_id, step, BATCH_SIZE) for step in range(count)]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


class FarFromZero(TinyMLP):
    """No small step halves or doubles a weight, so theta - (theta - phi) is phi bit for bit."""

    def __init__(self) -> None:
        super().__init__(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.where(parameter < 0, -0.5, 0.5) + parameter.clamp(-0.4, 0.4))


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
        resumes_at: From the checkpoint of which step to continue.
        fits: How often the job is trained, each time for so many steps more.
        ranks: Processes of a group.
        is_sharded: Whether each rank has its shards of the model (FSDP2), or all of it (DDP).
        is_late: Whether group 1 begins when group 0 is in its second round.
        dies: Whether group 1 is killed in its second round.
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
    resumes_at: int | None = None
    fits: int = 1
    ranks: int = 1
    is_sharded: bool = False
    is_late: bool = False
    dies: bool = False
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
        steps: At which the trainer itself ended; a joiner has taken over the others'.
        outer_steps: Outer steps of the run.
        contributions: Weight of this group in each sync that it took part in.
        warns_of_samples: Whether it was said that groups train on the same samples.
    """

    digest: str
    weights: dict[str, Tensor]
    evaluations: dict[int, float]
    inner_steps: int
    steps: int
    outer_steps: int
    contributions: list[float]
    warns_of_samples: bool


def train_groups(
    train: Callable[[Job, SimulatedReplica], Outcome], job: Job, num_replicas: int = 2
) -> list[Outcome | None]:
    """Train groups as threads over the simulation's network, or as processes of several ranks."""
    if job.ranks > 1:
        return as_processes(_train_rank, job, num_replicas, train=train)
    is_over = threading.Event()

    def replica(sim: SimulatedReplica) -> Outcome | None:
        try:
            outcome = train(job, sim)
        except JobError:
            if len(job.fails_at) < num_replicas:
                is_over.wait(60)  # it lives on, as in a notebook; the others must not wait for it
            return None
        is_over.set()
        return outcome

    kinds = {"late": job.is_late, "kill": job.dies}
    faults = [Fault(kind, replica_id=1, step=2) for kind, happens in kinds.items() if happens]
    return simulate(replica, num_replicas=num_replicas, faults=faults)


def _train_rank(
    process: Process, job: Job, train: Callable[[Job, SimulatedReplica], Outcome]
) -> Outcome:
    group = group_of(process, job)
    with group.manager() as manager:
        return train(job, group.member(manager))


def as_processes(
    train_rank: Callable[..., Outcome | None], job: Job, num_replicas: int = 2, **more: Any
) -> list[Outcome | None]:
    """Train groups as processes over a real lighthouse and gloo: ``train_rank(group, job)``."""
    killed = [1] if job.dies else []
    return run_groups(train_rank, num_replicas * job.ranks, job=job, killed=killed, **more)


def group_of(process: Process, job: Job) -> Process:
    """The group of a process, which is one rank of it."""
    if job.ranks == 1:
        return process
    assert job.folder is not None, "where the ranks meet"
    meeting = job.folder / "ranks"
    meeting.mkdir(exist_ok=True)
    group = process.of_rank(str(meeting), job.ranks)
    rank = process.replica_id % job.ranks
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(job.ranks)}
    return group


class Steps:
    """What the callbacks of trainers have in common that tell the job of each step."""

    def __init__(self, job: Job, replica_id: int, net: nn.Module) -> None:
        self.job, self.replica_id, self.net = job, replica_id, net
        self.evaluations: dict[int, float] = {}


def held_out() -> tuple[Tensor, Tensor]:
    """Samples that no group trains on."""
    return batch(99, 0, 16)


def evaluate(job: Job, replica_id: int, diloco: DiLoCo) -> float:
    """The loss of the global weights on these samples, in a loop of one's own."""
    shown = job.model(replica_id)
    shown.load_state_dict(dict(diloco.global_parameters()))
    with torch.no_grad():
        return float(mse(shown, *held_out()))


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """The model's tensors; of shards the whole, for which all ranks have to call this."""
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
        for name, tensor in model.state_dict().items()
    }


def theta_of(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The global parameters in a state of ``DiLoCo``."""
    return {name: theta for each in state["fragments"] for name, theta in each["theta"].items()}
