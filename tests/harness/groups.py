"""A replica group in training, for the tests, and runs of several in a simulation.

``harness.processes`` has the same groups as real processes.
"""

import io
import time

import torch
from common import Constant, TinyMLP, batch, mse, plain_sgd, take_step
from torch import nn

from composer_replication import DiLoCo, simulate

STREAMING = {"fragment_sync_delay": 1, "fragment_update_alpha": 0.5}
"""Settings with which the outer step comes one inner step after its sync has begun."""

MOVES = (-1.0, -2.0, -6.0)
"""What an inner step adds to each parameter, in each of three groups."""

ALL, TWO = 2 * 3.0, 2 * 1.5
"""What a round of two such steps adds: the mean of all three groups, and of the first two."""


REPORTED = ("outer_step", "num_participants", "contribution", "global_digest")


def adamw(parameters):
    """An inner optimizer that learns."""
    return torch.optim.AdamW(parameters, lr=1e-2)


def sgd(parameters, lr=1.0):
    """An inner optimizer whose steps can be computed by hand."""
    return torch.optim.SGD(parameters, lr=lr)


class Group:
    """A replica group, which is with the others inside of its ``with`` block.

    Args:
        sim: What ``simulate`` passes to the replica function; its manager may be a real one.
        model: The model, or a function that makes it. None: a scalar of value 10.
        outer: The outer optimizer, as for ``DiLoCo``.
        inner: The inner optimizer, or a function that makes it of the model's parameters.
        saved: A checkpoint of ``save``, from which the group continues.
        min_size: The simulated manager's ``min_replica_size``.
        settings: Further arguments of ``DiLoCo``.

    Attributes:
        reports: The reports of its syncs so far.
    """

    def __init__(
        self, sim, model=None, outer=None, *, inner=sgd, saved=None, min_size=None, **settings
    ):
        self.id, self.is_last = sim.replica_id, sim.replica_id == sim.num_replicas - 1
        self.manager = sim.manager
        if min_size is not None:
            self.manager._min_replica_size = min_size
        self.model = model if isinstance(model, nn.Module) else (model or Constant)()
        is_made = isinstance(inner, torch.optim.Optimizer)
        self.inner = inner if is_made else inner(self.model.parameters())
        self.diloco = DiLoCo(self.manager, self.model, self.inner, outer, **settings)
        self.reports = []
        if saved is not None:
            state, model_state, inner_state = torch.load(io.BytesIO(saved), weights_only=True)
            self.model.load_state_dict(model_state)
            self.inner.load_state_dict(inner_state)
            self.diloco.load_state_dict(state)

    def __enter__(self):
        self.diloco.__enter__()
        return self

    def __exit__(self, *raised):
        return self.diloco.__exit__(*raised)

    def step(self, *moves):
        """Take an inner step for each move, which is added to every parameter."""
        for move in moves:
            take_step(self.inner, move)
            self.reports += self.diloco.pop_finished_syncs()

    def steps(self, count, move, pause_s=0.0):
        """Take equal inner steps, and return what ``reported`` returns after each."""
        seen = []
        for _ in range(count):
            time.sleep(pause_s)
            take_step(self.inner, move)
            seen += self.reported()
        return seen

    def reported(self):
        """Of each sync since the last look what is in ``REPORTED``, and theta after it."""
        theta, reports = self.theta[0], self.diloco.pop_finished_syncs()
        self.reports += reports
        return [(*(getattr(report, name) for name in REPORTED), theta) for report in reports]

    def learn(self, first, last):
        """Take inner steps on the group's own batches from ``first`` to before ``last``."""
        device = next(self.model.parameters()).device
        for number in range(first, last):
            self.inner.zero_grad()
            mse(self.model, *(part.to(device) for part in batch(self.id, number))).backward()
            self.inner.step()
            self.reports += self.diloco.pop_finished_syncs()

    def end(self):
        """Make the final sync, and keep the reports of it and of those before it."""
        self.diloco.final_sync()
        self.reports += self.diloco.pop_finished_syncs()

    def save(self):
        """A checkpoint, as the bytes of a file that is loaded without running code."""
        file = io.BytesIO()
        states = [each.state_dict() for each in (self.diloco, self.model, self.inner)]
        torch.save(states, file)
        return file.getvalue()

    @property
    def theta(self):
        """The first number of each global parameter."""
        return [t.reshape(-1)[0].item() for t in self.diloco.global_parameters().values()]

    @property
    def local(self):
        """The first number of each local parameter."""
        return [t.detach().reshape(-1)[0].item() for t in self.model.parameters()]

    @property
    def digests(self):
        """The digest after each outer step, if ``digest_every`` is 1."""
        return {report.outer_step: report.global_digest for report in self.reports}

    def of_reports(self, *names):
        """The named fields of all reports: a tuple for each report, or a value for one name."""
        rows = [tuple(getattr(report, name) for name in names) for report in self.reports]
        return [row[0] for row in rows] if len(names) == 1 else rows


def run(k, replica, *faults, own=(), timeout_s=60.0, **settings):
    """Call a function in each of k groups that have joined, and return its results.

    Args:
        k: The number of groups.
        replica: The function, which gets its ``Group``.
        faults: Scripted faults.
        own: For each group, settings that the others do not have.
        timeout_s: As for ``simulate``.
        settings: Settings of all groups, as for ``Group``.
    """

    def joined(sim):
        with Group(sim, **settings | (own[sim.replica_id] if own else {})) as group:
            return replica(group)

    return simulate(joined, num_replicas=k, faults=faults, timeout_s=timeout_s)


def learn(k, steps, *faults, **settings):
    """Train a small network in k groups, each on its own samples, and return their digests."""

    def replica(group):
        group.learn(0, steps)
        return group.digests

    settings = {"model": TinyMLP, "inner": adamw, "digest_every": 1} | settings
    return run(k, replica, *faults, **settings)


def trace(group, *moves, ends=False):
    """Take steps; the local and global scalar after each, and after a final sync if ``ends``."""
    seen = []
    for move in moves:
        group.step(move)
        seen.append((round(group.local[0], 5), round(group.theta[0], 5)))
    if ends:
        group.end()
        seen.append((round(group.local[0], 5), round(group.theta[0], 5)))
    return seen


def traces(k, moves, steps, *faults, ends=False, **settings):
    """The traces of k groups that each repeat a move, with plain outer steps of learning rate 1."""
    settings = {"outer": plain_sgd()} | settings
    return run(k, lambda g: trace(g, *[moves[g.id]] * steps, ends=ends), *faults, **settings)


def attempt(function):
    """The same function, but it returns an error as text where it would raise it."""

    def guarded(*arguments, **named):
        try:
            return function(*arguments, **named)
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    return guarded
