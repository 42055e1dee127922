"""A training loop of one's own, with ``DiLoCo`` around it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from common import mse
from harness.groups import Group
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from composer_replication.replica import make_manager
from composer_replication.simulation.simulation import SimulatedReplica
from hosts.host import Job, Outcome, evaluate, theta_of, train_groups, weights_of


def _train(job: Job, sim: SimulatedReplica) -> Outcome:
    model = job.model(sim.replica_id)
    if job.is_sharded:
        fully_shard(model)
    arguments = job.arguments(sim.replica_id, sim.num_replicas)
    del arguments["replica_id"]  # the manager's
    if job.ranks > 1:
        arguments["ranks"] = dist.group.WORLD
    called = DistributedDataParallel(model) if job.ranks > 1 and not job.is_sharded else model
    batches = job.batches(sim.replica_id, job.steps * job.accumulate)
    evaluations, contributions, saved, first = {}, [], None, 1
    if job.resumes_at is not None:
        saved = _path(job, sim.replica_id, job.resumes_at).read_bytes()
        first = job.resumes_at + 1
    for _ in range(job.fits):
        # A manager is good for one fit.
        manager = sim.manager if job.fits == 1 else make_manager(num_replicas=1, replica_id="0")
        of_fit = replace(sim, manager=manager)
        group = Group(of_fit, model, inner=lambda _: job.optimizer(model), saved=saved, **arguments)
        diloco = group.diloco
        with shut_down(manager), group:
            for step in range(first, (job.stops_at or job.steps) + 1):
                group.inner.zero_grad()
                for x, y in batches[(step - 1) * job.accumulate : step * job.accumulate]:
                    diloco.note_batch((x, y))
                    diloco.count_samples(len(x))
                    (mse(called, x, y) / job.accumulate).backward()
                if step == job.steps and not job.is_late:
                    diloco.expect_last_step()
                group.inner.step()
                diloco.forget_counted()  # a gradient scaler may not have called it
                group.reports += diloco.pop_finished_syncs()
                job.after_step(sim.replica_id, step, model)
                if job.evaluate_every and step % job.evaluate_every == 0:
                    evaluations[step] = evaluate(job, sim.replica_id, diloco)
                if job.save_every and step % job.save_every == 0:
                    path = _path(job, sim.replica_id, step)
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(group.save())
                if job.is_late and diloco.outer_step == job.steps // arguments["sync_every"]:
                    break  # a joiner's own count of steps began at 1
            group.end()
            saved, digest = group.save(), diloco.global_digest()
        contributions += group.of_reports("contribution")
    return Outcome(
        digest=digest,
        weights=weights_of(model),
        evaluations=evaluations,
        inner_steps=diloco.inner_steps,
        steps=step,
        outer_steps=diloco.outer_step,
        contributions=contributions,
        warns_of_samples=any(group.of_reports("equal_samples")),
    )


train = partial(train_groups, _train)


@contextmanager
def shut_down(manager: Any) -> Iterator[Any]:
    """The others wait for a group that failed until its manager is shut down."""
    try:
        yield manager
    finally:
        manager.shutdown()


def _path(job: Job, replica_id: int, step: int) -> Any:
    return job.own_folder(replica_id) / f"{step}.pt"


def saved_weights(job: Job, replica_id: int, step: int) -> dict[str, torch.Tensor]:
    diloco, *_ = torch.load(_path(job, replica_id, step), weights_only=True)
    return theta_of(diloco)
