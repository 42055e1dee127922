"""What a user may name in a config: a model, loaders, optimizers and a callback of their own."""

import torch
from common import TinyMLP, batch
from composer import Callback
from composer.models import ComposerModel
from torch.utils.data import DataLoader, TensorDataset

seen = []
"""What the functions below were given."""


class Model(ComposerModel):
    def __init__(self, mlp, scale=1.0, names=()):
        super().__init__()
        self.mlp, self.scale, self.names = mlp, scale, names

    def forward(self, batch):
        return self.scale * self.mlp(batch[0])

    def loss(self, outputs, batch):
        return torch.nn.functional.mse_loss(outputs, batch[1])


def mlp(width: int):
    return TinyMLP(width=width)


def loader(batch_size, replica_rank, num_replica_groups, size=16):
    seen.append((batch_size, replica_rank, num_replica_groups))
    return DataLoader(TensorDataset(*batch(replica_rank, 0, size)), batch_size)


def eval_loader(batch_size):
    seen.append(batch_size)
    return DataLoader(TensorDataset(*batch(0, 0)), batch_size)


class ByNames(torch.optim.SGD):
    needs_names = True

    def __init__(self, params, lr):
        named = dict(params)
        seen.append(sorted(named))
        super().__init__(named.values(), lr)


def fails(value=1):
    return int("no number")


class Counts(Callback):
    def __init__(self, every, label="none"):
        self.every, self.label = every, label

    def batch_end(self, state, logger):
        seen.append(self.label)
