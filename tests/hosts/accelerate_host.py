"""A loop with accelerate, and ``DiLoCo`` in it: each group is a process, since accelerate keeps
state for the whole process."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from common import mse
from harness.processes import Process
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from composer_replication import DiLoCo, make_manager
from hosts.host import (
    Job,
    JobError,
    Outcome,
    as_processes,
    evaluate,
    group_of,
    theta_of,
    weights_of,
)
from hosts.plain import shut_down


def train_group(process: Process, job: Job) -> Outcome | None:
    group = group_of(process, job)
    if job.is_late and group.replica_id == 1:
        group.signal.wait()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=job.accumulate)
    net = job.model(group.replica_id)
    if job.is_sharded:
        fully_shard(net)  # accelerate's own FSDP2 needs GPUs
    model, optimizer = net, accelerator.prepare(job.optimizer(net))
    if not job.is_sharded:
        model = accelerator.prepare(net)
    saved, outcome = None, None
    for _ in range(job.fits):
        with group.manager() if job.fits == 1 else alone() as manager:
            try:
                outcome, saved = _fit(
                    job, group, accelerator, (net, model, optimizer), manager, saved
                )
            except JobError:
                return None
    return outcome


train = partial(as_processes, train_group)


def alone() -> Any:
    """A manager for one of several fits: a manager is good for one."""
    return shut_down(make_manager(num_replicas=1, replica_id="0"))


def _fit(job, group, accelerator, trained, manager, saved) -> tuple[Outcome, Any]:
    net, model, optimizer = trained
    arguments = job.arguments(group.replica_id, group.num_replicas)
    del arguments["replica_id"]  # the manager's
    diloco = DiLoCo(manager, model, optimizer, **arguments)  # DDP's wrapper knows the ranks
    folder = job.own_folder(group.replica_id) if job.save_every or job.resumes_at else None
    accelerator._custom_objects.clear()
    accelerator.register_for_checkpointing(diloco)
    first = job.resumes_at or 0
    if job.resumes_at:
        accelerator.load_state(str(folder / str(job.resumes_at)))
    if saved is not None:
        diloco.load_state_dict(saved)
    batches = job.batches(group.replica_id, job.steps * job.accumulate * job.ranks)
    own = batches[accelerator.process_index :: job.ranks]
    evaluations, reports, step = {}, [], first
    last = job.stops_at or job.steps
    with diloco:
        for x, y in own[first * job.accumulate :]:
            diloco.note_batch((x, y))
            diloco.count_samples(len(x) * job.ranks)
            with accelerator.accumulate(model):
                accelerator.backward(mse(model, x, y))
                if accelerator.sync_gradients and step + 1 == job.steps and not job.is_late:
                    diloco.expect_last_step()
                optimizer.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            step += 1
            diloco.forget_counted()
            reports += diloco.pop_finished_syncs()
            job.after_step(group.replica_id, step, net)
            if step == 6 and job.dies and group.replica_id == 1:
                group.kill()
            if step == 6 and job.is_late and group.replica_id == 0:
                group.signal.set()
                group.wait_until_somebody_asks()
            if job.evaluate_every and step % job.evaluate_every == 0:
                evaluations[step] = evaluate(job, group.replica_id, diloco)
            if job.save_every and step % job.save_every == 0:
                accelerator.save_state(str(folder / str(step)))
            if job.is_late and diloco.outer_step == job.steps // arguments["sync_every"]:
                break  # a joiner's own count of steps began at 1
            if step == last:
                break
        diloco.final_sync()
        reports += diloco.pop_finished_syncs()
        digest, saved = diloco.global_digest(), diloco.state_dict()
    outcome = Outcome(
        digest=digest,
        weights=weights_of(net),
        evaluations=evaluations,
        inner_steps=diloco.inner_steps,
        steps=step,
        outer_steps=diloco.outer_step,
        contributions=[each.contribution for each in reports],
        warns_of_samples=any(each.equal_samples for each in reports),
    )
    return outcome, saved


def saved_weights(job: Job, replica_id: int, step: int) -> dict[str, Tensor]:
    path = job.own_folder(replica_id) / str(step) / "custom_checkpoint_0.pkl"
    return theta_of(torch.load(path, weights_only=True))
