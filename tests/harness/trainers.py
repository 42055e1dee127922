"""Small Composer jobs as replica groups of a simulation, for the tests."""

import functools
import threading
from contextlib import closing
from typing import Any, NamedTuple

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


building = threading.RLock()  # a Trainer seeds torch's generator, which the replicas' threads share


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def trainer_of(*callbacks, replica_id=0, model: Any = TinyModel, optimizer=sgd, **arguments):
    """A small Trainer.

    Args:
        *callbacks: Of the Trainer.
        replica_id: The group's number.
        model: The model, or a function that makes it of the group's number.
        optimizer: Makes the inner optimizer of the parameters.
        **arguments: Of the Trainer; they go before the defaults here.
    """
    with building:
        if not isinstance(model, torch.nn.Module):
            model = model(replica_id)
        own = {
            "train_dataloader": data(replica_id),
            "device": "cpu",
            "precision": "fp32",
            "seed": 1,
            "progress_bar": False,
            "auto_log_hparams": False,
        }
        return Trainer(
            model=model,
            optimizers=optimizer(model.parameters()),
            callbacks=[*callbacks],
            **own | arguments,
        )


def callback_of(sim, **arguments):
    return DiLoCoCallback(
        manager=sim.manager,
        replica_id=sim.replica_id,
        **{"num_replicas": sim.num_replicas, "sync_every": 2} | arguments,
    )


def alone(**arguments):
    """Our callback in a group without others."""
    return DiLoCoCallback(num_replicas=1, **{"sync_every": 2} | arguments)


def read_checkpoint(path):
    """A checkpoint of Composer that is one file."""
    return torch.load(path, map_location="cpu", weights_only=False)


def part_of(path):
    """The model in such a checkpoint, and what our callback has there."""
    state = read_checkpoint(path)["state"]
    return state["model"], state["callbacks"]["DiLoCoCallback"]


STREAMING = {
    "sync_every": 8,
    "num_fragments": 2,
    "fragment_sync_delay": 2,
    "fragment_update_alpha": 0.5,
}


class Fit(NamedTuple):
    """A replica group after its training.

    Attributes:
        callback: Ours.
        trainer: Composer's; it is closed.
        others: The callbacks beside ours.
    """

    callback: DiLoCoCallback
    trainer: Trainer
    others: list[Callback]

    @property
    def result(self):
        return self.callback.result

    @property
    def digest(self):
        return self.result["global_digest"]

    @property
    def weights(self):
        return dict(self.trainer.state.model.named_parameters())


def train(callback, *others, before=None, **arguments):
    """Train a group with a callback of ours, and close its Trainer, also after an error.

    Args:
        callback: Ours.
        *others: Callbacks after it, or classes of those that take it.
        before: Called with the Trainer before its fit.
        **arguments: As of ``trainer_of``.
    """
    others = [each(callback) if isinstance(each, type) else each for each in others]
    trainer = trainer_of(callback, *others, **{"max_duration": "4ba"} | arguments)
    with closing(trainer):
        if before is not None:
            before(trainer)
        trainer.fit()
    return Fit(callback, trainer, others)


def fit_groups(num_replicas, *others, faults=(), own=None, diloco=None, **arguments):
    """Train simulated replica groups, each with ``train``.

    Args:
        num_replicas: How many.
        *others: Callbacks of each beside ours, or classes of those that take ours.
        faults: Scripted ones.
        own: Returns more arguments for a group, by its number; ``others`` and ``diloco`` too.
        diloco: Arguments of our callback.
        **arguments: As of ``train``. ``{group}`` in ``load_path`` is the group's number.
    """

    def replica(sim):
        given = {"replica_id": sim.replica_id} | arguments | (own(sim.replica_id) if own else {})
        callback = callback_of(sim, **(diloco or {}) | given.pop("diloco", {}))
        if given.get("load_path"):
            given["load_path"] = str(given["load_path"]).format(group=sim.replica_id)
        return train(callback, *others, *given.pop("others", ()), **given)

    return simulate(replica, num_replicas=num_replicas, faults=faults)


def fit_alone(*others, **arguments):
    """The only group of a simulation, trained."""
    return fit_groups(1, *others, **arguments)[0]


def saving(folder, group, interval="3ba"):
    """A Trainer's arguments for checkpoints ``<folder>/<group>/ba<batch>.pt``."""
    return {
        "save_folder": f"{folder}/{group}",
        "save_filename": "ba{batch}.pt",
        "save_interval": interval,
    }


def train_and_save(folder, *others, num_replicas=2, interval="3ba", **arguments):
    """Train groups that leave checkpoints."""
    arguments = {"max_duration": "6ba"} | arguments
    save = functools.partial(saving, folder, interval=interval)
    return fit_groups(num_replicas, *others, own=save, **arguments)
