"""Composer's Trainer, with ``DiLoCoCallback``."""

from __future__ import annotations

import contextlib

import torch
from composer import Callback, Trainer
from composer.loggers import InMemoryLogger
from composer.models import ComposerModel
from composer_jobs import building
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanSquaredError

from composer_replication import DiLoCoCallback, simulate
from composer_replication.simulation.simulation import SimulatedReplica
from hosts.host import BATCH_SIZE, Job, Outcome, held_out, warnings_of_package, weights_of

name = "Composer"


class _Model(ComposerModel):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.metric = MeanSquaredError()

    def forward(self, batch: list[Tensor]) -> Tensor:
        return self.net(batch[0])

    def loss(self, outputs: Tensor, batch: list[Tensor]) -> Tensor:
        return nn.functional.mse_loss(outputs, batch[1])

    def get_metrics(self, is_train: bool = False) -> dict[str, MeanSquaredError]:
        return {} if is_train else {"mse": self.metric}

    def update_metric(self, batch: list[Tensor], outputs: Tensor, metric: MeanSquaredError) -> None:
        metric.update(outputs, batch[1])


class _Steps(Callback):
    """Tells the job of each step, and ends training where the job stops."""

    def __init__(self, job: Job, replica_id: int, net: nn.Module) -> None:
        self._job, self._replica_id, self._net = job, replica_id, net
        self.evaluations: dict[int, float] = {}

    def batch_end(self, state, logger) -> None:
        step = state.timestamp.batch.value
        self._job.after_step(self._replica_id, step, self._net)
        if step == self._job.stops_at:
            state.stop_training()

    def eval_end(self, state, logger) -> None:
        value = float(state.eval_metrics["eval"]["mse"].compute())
        self.evaluations[state.timestamp.batch.value] = value


def train(job: Job, num_replicas: int = 2) -> list[Outcome]:
    return simulate(lambda sim: _train(job, sim), num_replicas=num_replicas)


def _loader(batches: list[tuple[Tensor, Tensor]], batch_size: int) -> DataLoader:
    whole = TensorDataset(*(torch.cat(part) for part in zip(*batches, strict=True)))
    return DataLoader(whole, batch_size)


def _train(job: Job, sim: SimulatedReplica) -> Outcome:
    callback = DiLoCoCallback(
        manager=sim.manager, **job.arguments(sim.replica_id, sim.num_replicas)
    )
    with building:
        net = job.model(sim.replica_id)
        steps = _Steps(job, sim.replica_id, net)
        memory = InMemoryLogger()
        saving = {}
        if job.folder is not None:
            saving = {
                "save_folder": str(job.own_folder(sim.replica_id)),
                "save_filename": "{batch}.pt",
                "save_latest_filename": "latest.pt",
                "save_interval": f"{job.save_every}ba" if job.save_every else "1000ba",
                "save_overwrite": job.resumes,
            }
            if job.resumes:
                saving["load_path"] = f"{saving['save_folder']}/latest.pt"
        batches = job.batches(sim.replica_id, job.steps * job.accumulate)
        trainer = Trainer(
            model=_Model(net),
            optimizers=job.optimizer(net),
            train_dataloader=_loader(batches, BATCH_SIZE * job.accumulate),
            eval_dataloader=_loader([held_out()], 16),
            eval_interval=f"{job.evaluate_every}ba" if job.evaluate_every else 0,
            max_duration=f"{job.steps}ba",
            device_train_microbatch_size=BATCH_SIZE,
            callbacks=[callback, steps],
            loggers=[memory],
            device="cpu",
            progress_bar=False,
            auto_log_hparams=False,
            **saving,
        )
    with warnings_of_package() as said, contextlib.closing(trainer):
        trainer.fit()
    return Outcome(
        digest=callback.result["global_digest"],
        weights=weights_of(net),
        evaluations=steps.evaluations,
        inner_steps=callback.result["inner_steps"],
        outer_steps=callback.result["outer_steps"],
        contributions=[float(v) for _, v in memory.data.get("diloco/contribution", [])],
        warns_of_samples=any("train on the same samples" in each for each in said),
    )


def saved_weights(job: Job, replica_id: int, step: int) -> dict[str, Tensor]:
    path = job.own_folder(replica_id) / f"{step}.pt"
    state = torch.load(path, map_location="cpu", weights_only=False)["state"]["model"]
    prefix = "net."
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
