"""Small models and replicas for the tests. Inner steps are scripted, so that traces can be read."""

import torch
from torch import nn

from composer_replication.diloco.averaging.weighted_mean import WeightedMean
from composer_replication.diloco.flat_chunks import Layout
from examples.quickstart.muon import Muon, is_matrix


class Constant(nn.Module):
    """Parameters of the given shapes and dtypes, all filled with one value."""

    def __init__(self, value=10.0, dtype=torch.float32, **shapes):
        super().__init__()
        for name, shape in (shapes or {"weight": (1,)}).items():
            self.register_parameter(name, nn.Parameter(torch.full(shape, value, dtype=dtype)))


def take_step(optimizer, move):
    """One inner step of SGD with lr 1 that adds ``move`` to every trainable parameter."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                parameter.grad = torch.full_like(parameter, -move)
    optimizer.step()


def plain_sgd(lr=1.0):
    """An outer optimizer without momentum: global - lr * pseudo-gradient."""
    return lambda parameters: torch.optim.SGD(parameters, lr=lr)


def written(tensors):
    """Writes tensors into the messages of a mean."""
    return lambda chunk, into: chunk.read(tensors, into[chunk.place])


def mean_of(share, groups, weights=(1.0,)):
    """The mean of groups' values as this group has it, with the sums that a network would give."""
    layout = Layout(share, groups[0])
    means = [WeightedMean(layout) for _ in groups]
    for mean, values, weight in zip(means, groups, weights, strict=True):
        mean.pack(written(values), weight)
    for one, *others in zip(*(mean.messages for mean in means), strict=True):
        for other in others:
            one += other
    means[0].finish()
    return means[0]


def are_equal(one, other):
    """Whether two tensors, or containers of tensors, have the same numbers to the bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(are_equal(v, other[k]) for k, v in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(are_equal, one, other))
    return one == other


def parameters_of(model):
    """Copies of a model's parameters, by name."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def muon_by_shape(parameters, **arguments):
    """Muon for every matrix, AdamW for the rest; no names are needed."""
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if is_matrix(p) == use_muon], "use_muon": use_muon}
        for use_muon in (True, False)
    ]
    return Muon(groups, **arguments)


class TinyMLP(nn.Module):
    """Three linear layers, so three blocks; inputs of 8 features, outputs of 4."""

    def __init__(self, seed=0, width=16):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.layers = nn.Sequential(
            nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 4)
        )
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)

    def forward(self, x):
        return self.layers(x)


class Buffered(TinyMLP):
    """With a running mean and a counter, which are others in each group."""

    def __init__(self, seed=0, **size):
        super().__init__(seed, **size)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("positive", torch.tensor(0))

    def forward(self, x):
        self.mean.lerp_(x.mean(0), 0.1)
        self.positive += (x > 0).sum()
        return super().forward(x)


def batch(replica_id, step, size=8):
    """A batch of the replica's own data, the same whenever it is asked for."""
    generator = torch.Generator().manual_seed(1000 * replica_id + step)
    x = torch.randn(size, 8, generator=generator)
    return x, x[:, :4].sin() + 0.1 * torch.randn(size, 4, generator=generator)


def mse(model, x, y):
    return nn.functional.mse_loss(model(x), y)
