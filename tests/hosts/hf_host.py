"""Hugging Face's Trainer, with ``DiLoCoTrainerCallback``: each group is a process."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from harness.logged import logged
from harness.processes import Process
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainerCallback

from composer_replication.hf import DiLoCoTrainerCallback
from hosts.hf_trainers import WithLoss, arguments_of, rows_of
from hosts.host import (
    BATCH_SIZE,
    Job,
    JobError,
    Outcome,
    as_processes,
    group_of,
    held_out,
    weights_of,
)


class _InOrder(Trainer):
    def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


class _Steps(TrainerCallback):
    """Tells the job of each step, and ends it where the job stops.

    In step 6 a group dies, or lets a late one in.
    """

    def __init__(self, job: Job, group: Process, net: nn.Module) -> None:
        self.job, self.group, self.net = job, group, net

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.job.after_step(self.group.replica_id, state.global_step, self.net)
        if state.global_step == 6 and self.job.dies and self.group.replica_id == 1:
            self.group.kill()
        if state.global_step == 6 and self.job.is_late:
            self.group.signal.set()
            self.group.wait_until_somebody_asks()
        if state.global_step == self.job.stops_at:
            control.should_training_stop = True


def train_group(process: Process, job: Job) -> Outcome | None:
    group = group_of(process, job)
    if job.is_late and group.replica_id == 1:
        group.signal.wait()
    net = job.model(group.replica_id)
    arguments = job.arguments(group.replica_id, group.num_replicas)
    callback = DiLoCoTrainerCallback(
        lighthouse_addr=group.lighthouse_addr, timeout=20.0, **arguments
    )
    model = WithLoss(net)
    if job.is_sharded:
        fully_shard(net)
        model._is_accelerate_prepared = True  # accelerate shards on GPUs alone, and has DDP here
    saves = job.save_every or job.resumes_at is not None
    folder = job.own_folder(group.replica_id) if saves else None
    optimizer = job.optimizer(net)
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    batches = job.batches(group.replica_id, job.steps * job.accumulate * job.ranks)
    trainer = _InOrder(
        model=model,
        args=arguments_of(
            folder or "unused",
            per_device_train_batch_size=BATCH_SIZE,
            per_device_eval_batch_size=16,
            gradient_accumulation_steps=job.accumulate,
            max_steps=job.steps,
            max_grad_norm=0.0,
            eval_strategy="steps" if job.evaluate_every else "no",
            eval_steps=job.evaluate_every or None,
            save_strategy="steps" if job.save_every else "no",
            save_steps=job.save_every or 500,
            ddp_backend="gloo" if job.ranks > 1 else None,
            seed=1,
        ),
        train_dataset=rows_of(batches),
        eval_dataset=rows_of([held_out()]),
        optimizers=(optimizer, constant),
        callbacks=[callback, _Steps(job, group, net)],
    )
    resumed = job.resumes_at and str(folder / f"checkpoint-{job.resumes_at}")
    with logged() as said:
        try:
            for _ in range(job.fits):
                trainer.train(resume_from_checkpoint=resumed)
        except JobError:
            return None  # the process lives on until the others have ended
    history = trainer.state.log_history
    return Outcome(
        digest=callback.result["global_digest"],
        weights=weights_of(net),
        evaluations={each["step"]: each["eval_loss"] for each in history if "eval_loss" in each},
        inner_steps=callback.result["inner_steps"],
        steps=trainer.state.global_step,
        outer_steps=callback.result["outer_steps"],
        contributions=[at["diloco/contribution"] for at in history if "diloco/round" in at],
        warns_of_samples=any("train on the same samples" in each for each in said),
    )


train = partial(as_processes, train_group)


def saved_weights(job: Job, replica_id: int, step: int) -> dict[str, Tensor]:
    path = job.own_folder(replica_id) / f"checkpoint-{step}" / "model.safetensors"
    return {name.removeprefix("net."): tensor for name, tensor in load_file(path).items()}
