"""Lightning's Trainer, with ``DiLoCoLightningCallback``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import lightning.pytorch as lightning
import torch
from harness.logged import logged
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn

from composer_replication.lightning import DiLoCoLightningCallback
from composer_replication.simulation.simulation import SimulatedReplica
from hosts.host import Job, Outcome, Steps, held_out, train_groups, weights_of


class Batches:
    """A loader that a checkpoint of Lightning continues."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches, self.position = batches, 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        self.position %= len(self.batches)
        while self.position < len(self.batches):
            self.position += 1
            yield self.batches[self.position - 1]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Module(lightning.LightningModule):
    """A model whose loss is the squared error."""

    def __init__(self, net: nn.Module, optimizer: Any, schedule: Any = None) -> None:
        super().__init__()
        self.net = net
        self.made = optimizer  # the same in each fit, with its momentum
        self.schedule = schedule

    def configure_optimizers(self) -> Any:
        if self.schedule is None:
            return self.made
        scheduler = {"scheduler": self.schedule(self.made), "interval": "step"}
        return {"optimizer": self.made, "lr_scheduler": scheduler}

    def training_step(self, batch: Any, index: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("eval", nn.functional.mse_loss(self.net(batch[0]), batch[1]))


class Metrics(Logger):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, float]] = []

    name = version = "kept"

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.rows.append(dict(metrics))

    def log_hyperparams(self, *arguments: Any, **named: Any) -> None: ...


class _Steps(Steps, Callback):
    """Tells the job of each step, and ends training where the job stops."""

    step = 0

    def on_train_batch_end(self, trainer, *event) -> None:
        if trainer.global_step == self.step:
            return
        self.step = trainer.global_step
        self.job.after_step(self.replica_id, self.step, self.net)
        if self.step == self.job.stops_at:
            trainer.should_stop = True

    def on_validation_end(self, trainer, *event) -> None:
        self.evaluations[trainer.global_step] = float(trainer.callback_metrics["eval"])


def trainer_of(*callbacks: Callback, **more: Any) -> lightning.Trainer:
    own = {"accelerator": "cpu", "devices": 1, "num_sanity_val_steps": 0, "logger": False}
    silent = {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": any(isinstance(each, ModelCheckpoint) for each in callbacks),
    }
    return lightning.Trainer(callbacks=list(callbacks), **own | silent | more)


def _train(job: Job, sim: SimulatedReplica) -> Outcome:
    manager = None if job.fits > 1 else sim.manager  # a manager is good for one fit
    diloco = DiLoCoLightningCallback(
        manager=manager, **job.arguments(sim.replica_id, sim.num_replicas)
    )
    net = job.model(sim.replica_id)
    callbacks = [_Steps(job, sim.replica_id, net), diloco]
    if job.save_every or job.resumes_at:
        folder = job.own_folder(sim.replica_id)
        own = {"save_top_k": -1, "filename": "{step}", "enable_version_counter": False}
        every = job.save_every or 1  # Lightning warns of a checkpoint of another ModelCheckpoint
        callbacks.append(ModelCheckpoint(folder, every_n_train_steps=every, **own))
    more: dict[str, Any] = {}
    if job.ranks > 1:
        os.environ["LOCAL_RANK"] = os.environ["RANK"]
        more = {"devices": job.ranks, "strategy": "ddp"}
    metrics = Metrics()
    trainer = trainer_of(
        *callbacks,
        accumulate_grad_batches=job.accumulate,
        max_steps=job.steps,
        val_check_interval=job.evaluate_every * job.accumulate or None,
        check_val_every_n_epoch=None,
        limit_val_batches=1 if job.evaluate_every else 0,
        log_every_n_steps=1,
        logger=metrics,
        **more,
    )
    batches = job.batches(sim.replica_id, job.steps * job.accumulate * job.ranks)
    rank = int(os.environ.get("RANK", 0)) if job.ranks > 1 else 0
    loader = Batches(batches[rank :: job.ranks])
    resumed = job.resumes_at and str(job.own_folder(sim.replica_id) / f"step={job.resumes_at}.ckpt")
    module = Module(net, job.optimizer(net))
    with logged() as said:
        for fit in range(job.fits):
            trainer.fit_loop.epoch_loop.max_steps = job.steps * (fit + 1)
            trainer.fit(module, loader, Batches([held_out()]), ckpt_path=resumed)
    return Outcome(
        digest=diloco.result["global_digest"],
        weights=weights_of(net),
        evaluations=callbacks[0].evaluations,
        inner_steps=diloco.result["inner_steps"],
        steps=trainer.global_step,
        outer_steps=diloco.result["outer_steps"],
        contributions=[
            each["diloco/contribution"] for each in metrics.rows if "diloco/round" in each
        ],
        warns_of_samples=any("train on the same samples" in each for each in said),
    )


train = partial(train_groups, _train)


def saved_weights(job: Job, replica_id: int, step: int) -> dict[str, Tensor]:
    path = job.own_folder(replica_id) / f"step={step}.ckpt"
    state = torch.load(path, map_location="cpu", weights_only=True)["state_dict"]
    return {name.removeprefix("net."): tensor for name, tensor in state.items()}
