"""Rounds whose length a schedule changes. Run: pytest tests/diloco/test_scheduled_rounds.py

Real torchft schedule, simulated network.
"""

import pytest
import torch
from common import TinyMLP, batch, load, mse, save

from composer_replication import DiLoCo, simulate
from composer_replication.simulation.simulation import Fault

SHORT_FIRST = {"sync_every": 2, "schedule": [{"outer_step": 4, "sync_every": 6}]}


class Replica:
    """Trains a small network, and notes after which inner step each outer step was taken."""

    def __init__(self, sim, **settings):
        self.who = sim.replica_id
        self.model = TinyMLP()
        self.inner = torch.optim.SGD(self.model.parameters(), lr=0.05)
        settings = {"num_replicas": sim.num_replicas, "digest_every": 1} | SHORT_FIRST | settings
        self.diloco = DiLoCo(sim.manager, self.model, self.inner, **settings)
        self.trace, self.contributions = {}, []

    def train(self, first, last):
        for step in range(first, last):
            self.inner.zero_grad()
            mse(self.model, *batch(self.who, step)).backward()
            self.inner.step()
            for report in self.diloco.pop_finished_syncs():
                self.contributions.append(report.contribution)
                self.trace[report.outer_step] = (report.inner_steps, report.global_digest)
        return self.trace


def run(sim, steps=30, **settings):
    replica = Replica(sim, **settings)
    with replica.diloco:
        return replica.train(0, steps)


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({}, [2, 4, 6, 12, 18, 24, 30]),
        ({"fragment_sync_delay": 1}, [2, 4, 6, 12, 18, 24, 30]),
        # Each sync of a fragment is an outer step: three of them end inside the second round.
        ({"num_fragments": 2}, [1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 30]),
        # Longer, and shorter again.
        (
            {
                "schedule": [
                    {"outer_step": n, "sync_every": h} for n, h in ((2, 4), (4, 10), (5, 2))
                ]
            },
            [2, 6, 10, 20, 22, 24, 26, 28, 30],
        ),
    ],
)
def test_rounds_have_the_length_of_their_outer_step(settings, steps):
    first, second = simulate(lambda sim: run(sim, **settings), num_replicas=2)
    assert [at for at, _ in first.values()] == steps
    assert first == second


def test_the_outer_steps_before_a_row_are_those_of_a_run_without_it():
    warm = simulate(run, num_replicas=2)
    short = simulate(lambda sim: run(sim, steps=6, schedule=None), num_replicas=2)
    assert [dict(list(trace.items())[:3]) for trace in warm] == short


@pytest.mark.parametrize("at", range(1, 14))
@pytest.mark.parametrize("delay", [0, 1])
def test_a_resume_goes_on_with_rounds_of_the_same_length(at, delay):
    def whole(sim):
        replica, saved = Replica(sim, fragment_sync_delay=delay), b""
        with replica.diloco:
            replica.train(0, at)
            saved = save(replica.diloco, replica.model)
            return replica.train(at, 24), saved

    found = simulate(whole, num_replicas=2)

    def resumed(sim):
        replica = Replica(sim, fragment_sync_delay=delay)
        load(found[sim.replica_id][1], replica.diloco, replica.model)
        with replica.diloco:
            return replica.train(at, 24)

    for trace, (expected, _) in zip(simulate(resumed, num_replicas=2), found, strict=True):
        assert trace == {n: values for n, values in expected.items() if values[0] > at}


@pytest.mark.parametrize("step", range(2, 7))
def test_a_joiner_takes_rounds_of_the_length_of_the_others(step):
    late = [Fault("late", replica_id=1, step=step)]
    one, other = simulate(lambda sim: run(sim, num_replicas=1), num_replicas=2, faults=late)
    shared = sorted(one.keys() & other.keys())
    assert shared[0] == step and shared[-1] == 7
    assert [one[n][1] for n in shared] == [other[n][1] for n in shared]
    lengths = [[trace[n + 1][0] - trace[n][0] for n in shared[:-1]] for trace in (one, other)]
    assert lengths[0] == lengths[1] == [2] * max(0, 3 - step) + [6] * (7 - max(3, step))
