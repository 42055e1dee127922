"""Hugging Face's Trainer, with ``DiLoCoTrainerCallback``: each group is a process."""

from __future__ import annotations

from typing import Any

import torch
from integration.replicas import Group, run_groups
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainerCallback, TrainingArguments

from composer_replication.hf import DiLoCoTrainerCallback
from hosts.host import BATCH_SIZE, Job, Outcome, held_out, warnings_of_package, weights_of

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
    """Tells the job of each step, and ends training where the job stops."""

    def __init__(self, job: Job, replica_id: int, net: nn.Module) -> None:
        self._job, self._replica_id, self._net = job, replica_id, net

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self._job.after_step(self._replica_id, state.global_step, self._net)


class _Stop(TrainerCallback):
    def __init__(self, step: int | None) -> None:
        self._step = step

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if state.global_step == self._step:
            control.should_training_stop = True


def train(job: Job, num_replicas: int = 2) -> list[Outcome]:
    return run_groups(train_group, num_replicas, job=job)


def train_group(group: Group, job: Job) -> Outcome:
    with group.manager() as manager:
        callback = DiLoCoTrainerCallback(
            manager=manager, **job.arguments(group.replica_id, group.num_replicas)
        )
        net = job.model(group.replica_id)
        folder = job.own_folder(group.replica_id) if job.folder else None
        arguments = TrainingArguments(
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
            seed=1,
        )
        optimizer = job.optimizer(net)
        constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        batches = job.batches(group.replica_id, job.steps * job.accumulate)
        trainer = _InOrder(
            model=_Model(net),
            args=arguments,
            train_dataset=_rows(batches),
            eval_dataset=_rows([held_out()]),
            optimizers=(optimizer, constant),
            callbacks=[_Stop(job.stops_at), callback, _Steps(job, group.replica_id, net)],
        )
        with warnings_of_package() as said:
            trainer.train(resume_from_checkpoint=job.resumes)
        history = trainer.state.log_history
        return Outcome(
            digest=callback.result["global_digest"],
            weights=weights_of(net),
            evaluations={
                each["step"]: each["eval_loss"] for each in history if "eval_loss" in each
            },
            inner_steps=callback.result["inner_steps"],
            outer_steps=callback.result["outer_steps"],
            contributions=[at["diloco/contribution"] for at in history if "diloco/round" in at],
            warns_of_samples=any("train on the same samples" in each for each in said),
        )


def _rows(batches: list[tuple[Tensor, Tensor]]) -> list[dict[str, Tensor]]:
    return [{"x": x, "labels": y} for xs, ys in batches for x, y in zip(xs, ys, strict=True)]


def saved_weights(job: Job, replica_id: int, step: int) -> dict[str, Tensor]:
    path = job.own_folder(replica_id) / f"checkpoint-{step}" / "model.safetensors"
    return {name.removeprefix("net."): tensor for name, tensor in load_file(path).items()}
