"""Hugging Face's Trainer, with ``DiLoCoTrainerCallback``: each group is a process."""

from __future__ import annotations

from typing import Any

import torch
from integration.replicas import Group
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainerCallback, TrainingArguments

from composer_replication.hf import DiLoCoTrainerCallback
from hosts.host import (
    BATCH_SIZE,
    Job,
    JobError,
    Outcome,
    as_processes,
    group_of,
    held_out,
    warnings_of_package,
    weights_of,
)

name = "Hugging Face's Trainer"


class _Model(nn.Module):
    """Returns the loss, as the Trainer wants it."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        out = self.net(x)
        return {"loss": nn.functional.mse_loss(out, labels), "logits": out}


class _InOrder(Trainer):
    def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


class _Steps(TrainerCallback):
    """Tells the job of each step. In step 6 a group dies, or lets a late one in."""

    def __init__(self, job: Job, group: Group, net: nn.Module) -> None:
        self._job, self._group, self._net = job, group, net

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self._job.after_step(self._group.replica_id, state.global_step, self._net)
        if state.global_step == 6 and self._job.dies and self._group.replica_id == 1:
            self._group.kill()
        if state.global_step == 6 and self._job.is_late:
            self._group.signal.set()
            self._group.wait_until_somebody_asks()


class _Stop(TrainerCallback):
    def __init__(self, step: int | None) -> None:
        self._step = step

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if state.global_step == self._step:
            control.should_training_stop = True


def train(job: Job, num_replicas: int = 2) -> list[Outcome | None]:
    return as_processes(train_group, job, num_replicas)


def train_group(process: Group, job: Job) -> Outcome | None:
    group = group_of(process, job)
    if job.is_late and group.replica_id == 1:
        group.signal.wait()
    arguments = job.arguments(group.replica_id, group.num_replicas)
    callback = DiLoCoTrainerCallback(
        lighthouse_addr=group.lighthouse_addr, timeout=20.0, **arguments
    )
    net = job.model(group.replica_id)
    model = _Model(net)
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
        args=TrainingArguments(
            output_dir=str(folder) if folder else "unused",
            per_device_train_batch_size=BATCH_SIZE,
            per_device_eval_batch_size=16,
            gradient_accumulation_steps=job.accumulate,
            max_steps=job.steps,
            max_grad_norm=0.0,
            eval_strategy="steps" if job.evaluate_every else "no",
            eval_steps=job.evaluate_every or None,
            save_strategy="steps" if job.save_every else "no",
            save_steps=job.save_every or 500,
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            ddp_backend="gloo" if job.ranks > 1 else None,
            seed=1,
        ),
        train_dataset=_rows(batches),
        eval_dataset=_rows([held_out()]),
        optimizers=(optimizer, constant),
        callbacks=[_Stop(job.stops_at), callback, _Steps(job, group, net)],
    )
    resumed = job.resumes_at and str(folder / f"checkpoint-{job.resumes_at}")
    with warnings_of_package() as said:
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


def _rows(batches: list[tuple[Tensor, Tensor]]) -> list[dict[str, Tensor]]:
    return [{"x": x, "labels": y} for xs, ys in batches for x, y in zip(xs, ys, strict=True)]


def saved_weights(job: Job, replica_id: int, step: int) -> dict[str, Tensor]:
    path = job.own_folder(replica_id) / f"checkpoint-{step}" / "model.safetensors"
    return {name.removeprefix("net."): tensor for name, tensor in load_file(path).items()}
