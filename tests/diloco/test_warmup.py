"""Shorter rounds while a run begins. Run: pytest tests/diloco/test_warmup.py

Real torchft schedule, simulated network.
"""

import pytest
import torch
from common import TinyMLP, batch, load, mse, save

from composer_replication import DiLoCo, simulate
from composer_replication.diloco.settings import DiLoCoSettings
from composer_replication.simulation.simulation import Fault, SimulationError

WARMUP = {"sync_every": 6, "warmup_sync_every": 2, "warmup_outer_steps": 3}


class Replica:
    """Trains a small network, and notes after which inner step each outer step was taken."""

    def __init__(self, sim, **settings):
        self.who = sim.replica_id
        self.model = TinyMLP()
        self.inner = torch.optim.SGD(self.model.parameters(), lr=0.05)
        settings = {"num_replicas": sim.num_replicas, "digest_every": 1} | WARMUP | settings
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
        # With two in flight each ends with the turn after its own: 3, 3, 3, 4, ... steps.
        (
            {"num_fragments": 2, "fragment_sync_delay": 4}
            | {"sync_every": 8, "warmup_sync_every": 6},
            [6, 9, 12, 16, 20, 24, 28],
        ),
    ],
)
def test_the_first_rounds_are_shorter(settings, steps):
    first, second = simulate(lambda sim: run(sim, **settings), num_replicas=2)
    assert [at for at, _ in first.values()] == steps
    assert first == second


def test_several_in_flight_are_sent_by_the_delay_of_the_rounds_in_force():
    # A delay of 4 is a turn of 3 steps and one step, or a turn of 4. So in the warm-up fragments
    # are sent one step before a turn ends, at 2, 5, 8 and 11, and after it at 16, 20, 24, 28. Each
    # contributes the steps since it was sent last: fragment 0 sends 2, 6, 8, 8, fragment 1 sends 5,
    # 6, 9, 8.
    def replica(sim):
        settings = {"num_fragments": 2, "fragment_sync_delay": 4, "weight_by": "steps"}
        one = Replica(sim, **settings, sync_every=8, warmup_sync_every=6)
        with one.diloco:
            one.train(0, 32)
        return one.contributions

    first, second = simulate(replica, num_replicas=2)
    assert first == second == [2, 5, 6, 6, 8, 9, 8, 8]


def test_the_outer_steps_of_the_warm_up_are_those_of_a_run_with_short_rounds():
    warm = simulate(run, num_replicas=2)
    short = simulate(
        lambda sim: run(
            sim, steps=6, sync_every=2, warmup_sync_every=None, warmup_outer_steps=None
        ),
        num_replicas=2,
    )
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


def test_groups_with_another_warm_up_do_not_start_together():
    def replica(sim):
        run(sim, warmup_outer_steps=3 + sim.replica_id)

    with pytest.raises(SimulationError, match="warmup_outer_steps: .* here, .* there"):
        simulate(replica, num_replicas=2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"warmup_outer_steps": None}, "give warmup_outer_steps too, or leave both out"),
        ({"warmup_sync_every": None}, "give warmup_sync_every too, or leave both out"),
        ({"warmup_sync_every": 6}, "is not below sync_every=6: use at most 5"),
        ({"warmup_sync_every": 0}, "warmup_sync_every=0"),
        ({"warmup_outer_steps": 0}, "warmup_outer_steps=0"),
        ({"num_fragments": 3}, "sync_every=2 is not divisible by num_fragments=3: use 3"),
        ({"fragment_sync_delay": 3}, "fragment_sync_delay=3 is not below sync_every=2"),
        ({"round_seconds": 60}, "with round_seconds=60: rounds are a time there"),
        (
            {"sync_every": 8, "warmup_sync_every": 4, "num_fragments": 2, "fragment_sync_delay": 2},
            "would have 1 further turns in flight and not 0",
        ),
    ],
)
def test_a_warm_up_that_does_not_fit_is_refused_with_the_fix(settings, message):
    with pytest.raises(ValueError, match=message):
        DiLoCoSettings(**WARMUP | settings)
