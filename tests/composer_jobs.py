"""Small Composer jobs as replica groups of a simulation, for the tests."""

import threading

import torch
from common import Buffered, TinyMLP, batch
from composer import Callback, Trainer
from composer.callbacks import ExportForInferenceCallback
from composer.models import ComposerModel
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanSquaredError

from composer_replication.callback import DiLoCoCallback
from composer_replication.simulation.simulation import simulate


class TinyModel(ComposerModel):
    """``TinyMLP`` for Composer."""

    def __init__(self, seed=0):
        super().__init__()
        self.mlp = TinyMLP(seed)

    def forward(self, batch):
        return self.mlp(batch[0])

    def loss(self, outputs, batch):
        return torch.nn.functional.mse_loss(outputs, batch[1])


class Evaluated(TinyModel):
    """With a metric of evaluators."""

    def get_metrics(self, is_train):
        return {} if is_train else {"MeanSquaredError": MeanSquaredError()}

    def eval_forward(self, batch, outputs=None):
        return self(batch)

    def update_metric(self, batch, outputs, metric):
        metric.update(outputs, batch[1])


class BufferedModel(TinyModel):
    """With buffers of which each group computes others."""

    def __init__(self, seed=0):
        super().__init__(seed)
        self.mlp = Buffered(seed)


class Each(Callback):
    """Calls a function at every end of a batch."""

    def __init__(self, look):
        self._look = look

    def batch_end(self, state, logger):
        self._look(state)


compiling = threading.Lock()  # torch's compiler is one for all threads


class Exporting(ExportForInferenceCallback):
    """Composer's, of which simulated groups may run several at a time."""

    def fit_end(self, state, logger):
        with compiling:
            super().fit_end(state, logger)


def data(replica_id=0, batches=4):
    """An epoch of batches of eight samples, always in the same order."""
    parts = [batch(replica_id, step) for step in range(batches)]
    return DataLoader(TensorDataset(*(torch.cat(part) for part in zip(*parts, strict=True))), 8)


building = threading.Lock()  # Composer seeds torch's generator, which the replicas' threads share


def trainer_of(*callbacks, replica_id=0, optimizer=None, **arguments):
    with building:
        model = arguments.pop("model", None) or TinyModel
        if isinstance(model, type):
            model = model(seed=replica_id)
        build = optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9))
        return Trainer(
            model=model,
            optimizers=build(model.parameters()),
            train_dataloader=arguments.pop("train_dataloader", None) or data(replica_id),
            callbacks=list(callbacks),
            device="cpu",
            precision=arguments.pop("precision", "fp32"),
            seed=1,
            progress_bar=arguments.pop("progress_bar", False),
            auto_log_hparams=False,
            **arguments,
        )


def callback_of(sim, **arguments):
    return DiLoCoCallback(
        manager=sim.manager,
        replica_id=sim.replica_id,
        **{"num_replicas": sim.num_replicas, "sync_every": 2} | arguments,
    )


def read_checkpoint(path):
    """A checkpoint of Composer that is one file."""
    return torch.load(path, map_location="cpu", weights_only=False)


def final_theta(callback):
    """The global parameters that the last fit has left, by name."""
    fragments = callback._group.continuation.ended["fragments"]
    return {name: theta for each in fragments for name, theta in each["theta"].items()}


def fit_alone(max_duration="4ba", *, others=(), diloco=(), **arguments):
    """Train one simulated replica group; its callback and trainer, closed."""

    def replica(sim):
        callback = callback_of(sim, **dict(diloco))
        trainer = trainer_of(callback, *others, max_duration=max_duration, **arguments)
        trainer.fit()
        trainer.close()
        return callback, trainer

    return simulate(replica, num_replicas=1)[0]


STREAMING = {
    "sync_every": 8,
    "num_fragments": 2,
    "fragment_sync_delay": 2,
    "fragment_update_alpha": 0.5,
}


def fit(sim, *others, diloco=None, **arguments):
    """Train one replica group; its callback and trainer, closed."""
    callback = callback_of(sim, **{"sync_every": 4} | (diloco or {}))
    others = [each(callback) if isinstance(each, type) else each for each in others]
    trainer = trainer_of(callback, *others, replica_id=sim.replica_id, **arguments)
    trainer.fit()
    trainer.close()
    return callback, trainer


def saving(folder, sim, interval="3ba"):
    return {
        "save_folder": f"{folder}/{sim.replica_id}",
        "save_filename": "ba{batch}.pt",
        "save_interval": interval,
    }


def train_and_save(folder, *others, num_replicas=2, max_duration="6ba", interval="3ba", **more):
    def replica(sim):
        return fit(sim, *others, max_duration=max_duration, **saving(folder, sim, interval), **more)

    return simulate(replica, num_replicas=num_replicas)
