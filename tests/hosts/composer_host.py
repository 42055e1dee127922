"""Composer's Trainer, with ``DiLoCoCallback``."""

from __future__ import annotations

import contextlib
import os
from functools import partial
from typing import Any

import torch
from composer import Callback
from composer.loggers import InMemoryLogger
from composer.utils import dist
from harness.logged import logged
from harness.trainers import Evaluated, building, part_of, saving, trainer_of
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from composer_replication import DiLoCoCallback
from composer_replication.simulation.simulation import SimulatedReplica
from hosts.host import (
    BATCH_SIZE,
    Job,
    Outcome,
    Steps,
    held_out,
    train_groups,
    weights_of,
)


class _Steps(Steps, Callback):
    """Tells the job of each step, and ends training where the job stops."""

    def batch_end(self, state, logger) -> None:
        step = state.timestamp.batch.value
        self.job.after_step(self.replica_id, step, self.net)
        if step == self.job.stops_at:
            state.stop_training()

    def eval_end(self, state, logger) -> None:
        value = float(state.eval_metrics["eval"]["MeanSquaredError"].compute())
        self.evaluations[state.timestamp.batch.value] = value


def _loader(batches: list[tuple[Tensor, Tensor]], batch_size: int) -> DataLoader:
    whole = TensorDataset(*(torch.cat(part) for part in zip(*batches, strict=True)))
    sampler = dist.get_sampler(whole) if dist.get_world_size() > 1 else None
    return DataLoader(whole, batch_size, sampler=sampler)


def _train(job: Job, sim: SimulatedReplica) -> Outcome:
    if job.is_sharded:
        os.environ["FSDP_VERSION"] = "2"
    # A manager is good for one fit.
    manager = None if job.fits > 1 else sim.manager
    callback = DiLoCoCallback(manager=manager, **job.arguments(sim.replica_id, sim.num_replicas))
    with building:  # a model draws from the generator that another thread's Trainer seeds
        model = Evaluated()
        model.mlp = net = job.model(sim.replica_id)
    steps = _Steps(job, sim.replica_id, net)
    memory = InMemoryLogger()
    more: dict[str, Any] = {}
    if job.save_every or job.resumes_at is not None:
        own = job.own_folder(sim.replica_id)
        more = saving(own.parent, own.name, f"{job.save_every or 1000}ba")
        more["save_overwrite"] = job.resumes_at is not None
    if job.resumes_at is not None:
        more["load_path"] = f"{more['save_folder']}/ba{job.resumes_at}.pt"
    if job.is_sharded:
        more["parallelism_config"] = {"fsdp": {"state_dict_type": "full"}}
    batches = job.batches(sim.replica_id, job.steps * job.accumulate * job.ranks * job.fits)
    trainer = trainer_of(
        *(callback, steps),
        model=model,
        optimizer=lambda _: job.optimizer(net),
        train_dataloader=_loader(batches, BATCH_SIZE * job.accumulate),
        eval_dataloader=_loader([held_out()], 16),
        eval_interval=f"{job.evaluate_every}ba" if job.evaluate_every else 0,
        max_duration=f"{job.steps}ba",
        device_train_microbatch_size=BATCH_SIZE,
        loggers=[memory],
        **more,
    )
    with logged() as said, contextlib.closing(trainer):
        for fit in range(job.fits):
            trainer.fit(duration=f"{job.steps}ba" if fit else None)
        weights = weights_of(net)
    return Outcome(
        digest=callback.result["global_digest"],
        weights=weights,
        evaluations=steps.evaluations,
        inner_steps=callback.result["inner_steps"],
        steps=int(trainer.state.timestamp.batch),
        outer_steps=callback.result["outer_steps"],
        contributions=[float(v) for _, v in memory.data.get("diloco/contribution", [])],
        warns_of_samples=any("train on the same samples" in each for each in said),
    )


train = partial(train_groups, _train)


def saved_weights(job: Job, replica_id: int, step: int) -> dict[str, Tensor]:
    state, _ = part_of(job.own_folder(replica_id) / f"ba{step}.pt")
    prefix = "mlp."
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
