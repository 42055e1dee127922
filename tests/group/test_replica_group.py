"""A trainer that is neither Composer's nor anybody's: a loop, as a replica group.

Run: pytest tests/group/test_replica_group.py. The network is the simulation's. With Composer's
Trainer: tests/callback.
"""

import copy

import pytest
import torch
from common import TinyMLP, batch
from torch import nn

from composer_replication.group.host import Host
from composer_replication.group.replica_group import ReplicaGroup
from composer_replication.simulation.simulation import Fault, simulate


class Loop(Host):
    """Trains with SGD on a batch of its own a step."""

    name = "loop"
    model = optimizer = None
    steps = 0

    def __init__(self, seed):
        self.model = TinyMLP(seed)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.metrics = []

    def last_step(self, *, is_bound=False):
        return 9

    def size_of(self, batch, what):
        return len(batch[0])

    def log_metrics(self, metrics):
        self.metrics.append(metrics)

    def state_dict(self):
        return {"steps": self.steps + self.group.is_in_step}

    def load_state_dict(self, saved, is_in_step):
        self.steps = saved["steps"]

    def step(self, samples):
        inputs, targets = samples
        self.optimizer.zero_grad()
        nn.functional.mse_loss(self.model(inputs), targets).backward()
        self.optimizer.step()
        self.steps += 1


def train(sim, *, saved=None, stop=9, num_replicas=None):
    """Train a group; its host, what it would save at the end, and how it ended."""
    host = Loop(sim.replica_id)
    arguments = {"sync_every": 4, "replica_id": sim.replica_id, "weight_by": "samples"}
    group = host.group = ReplicaGroup(
        host, arguments | {"num_replicas": num_replicas or sim.num_replicas}
    )
    if saved is not None:
        model, optimizer, host.steps, ours = saved
        host.model.load_state_dict(model)
        host.optimizer.load_state_dict(optimizer)
        group.continuation.load(ours)
        group.continuation.check_loaded("the file")
    group.join(sim.manager)
    while host.steps < stop:
        samples = batch(sim.replica_id, host.steps)
        group.begin_step()
        group.count(samples)
        host.step(samples)
        assert not group.end_step(loss=1.0)
    local = copy.deepcopy(dict(host.model.named_parameters()))
    group.show_global()
    shown = copy.deepcopy(host.model.state_dict())
    group.show_local()
    assert all(torch.equal(local[name], p) for name, p in host.model.named_parameters())
    ours = group.state_dict()
    saved = copy.deepcopy([host.model.state_dict(), host.optimizer.state_dict(), host.steps, ours])
    assert all(torch.equal(saved[0][name], tensor) for name, tensor in shown.items())
    group.end()
    group.close()
    return host, saved, group.result


def test_two_loops_end_on_the_same_parameters_and_show_the_same():
    (one, saved, ended), (other, its, theirs) = simulate(train, num_replicas=2)
    assert ended["inner_steps"] == 9 and ended["outer_steps"] == 3
    assert ended["global_digest"] == theirs["global_digest"]
    assert [metrics["diloco/contribution"] for metrics in one.metrics] == [32, 32, 8]
    assert all(torch.equal(saved[0][name], tensor) for name, tensor in its[0].items())


@pytest.mark.parametrize("stop", [3, 4, 6])
def test_loops_that_are_stopped_and_resumed_end_as_if_uninterrupted(stop):
    whole = simulate(train, num_replicas=2)
    parts = simulate(lambda sim: train(sim, stop=stop), num_replicas=2)
    saved = [part for _, part, _ in parts]
    resumed = simulate(lambda sim: train(sim, saved=saved[sim.replica_id]), num_replicas=2)
    assert [end for _, _, end in resumed] == [end for _, _, end in whole]


def test_a_loop_that_joins_late_takes_over_the_position():
    late = [Fault("late", replica_id=1, step=3)]
    (one, _, ended), (other, _, theirs) = simulate(
        lambda sim: train(sim, num_replicas=1), num_replicas=2, faults=late
    )
    assert one.steps == other.steps == 9 and theirs["inner_steps"] < 9
    assert ended["global_digest"] == theirs["global_digest"]
