"""A schedule of the outer numbers, and its checks. Run: pytest tests/diloco/test_schedule.py

Real torchft schedule, simulated network; the reference is in plain Python.
"""

import logging

import pytest
import torch
from common import Constant, load, save, take_step

from composer_replication import DiLoCo, simulate
from composer_replication.settings import MAX_ROWS, DiLoCoSettings, value_at
from composer_replication.simulation.simulation import Fault, SimulationError

BASE = {"outer_lr": 0.5, "outer_momentum": 0.75}
ROWS = [[3, 0.25, 0.5], [5, 1, 0], [7, 0.5, 0.75]]
"""The momentum goes down, to nothing, and comes back."""


def dicts(rows):
    """Rows of a schedule, from a step, a learning rate and a momentum each."""
    names = ("outer_step", "outer_lr", "outer_momentum")
    return [dict(zip(names, row, strict=True)) for row in rows]


def move(replica_id, step):
    """What an inner step of a replica adds; in eighths, which fp32 adds without an error."""
    return ((5 * step + 3 * replica_id) % 7 - 2) / 8


class Replica:
    """Trains scalars, one in each fragment, a round of two inner steps for each."""

    def __init__(self, sim, num_fragments=1, **settings):
        self.sim = sim
        self.model = torch.nn.Sequential(*(Constant() for _ in range(num_fragments)))
        self.inner = torch.optim.SGD(self.model.parameters(), lr=1.0)
        settings = {
            "num_replicas": sim.num_replicas,
            "num_fragments": num_fragments,
            "sync_every": 2 * num_fragments,
            "schedule": dicts(ROWS),
            "digest_every": 1,
        } | settings
        self.diloco = DiLoCo(sim.manager, self.model, self.inner, **BASE | settings)
        self.trace = {}

    def train(self, first, last):
        for step in range(first, last):
            take_step(self.inner, move(self.sim.replica_id, step))
            values = [theta.item() for theta in self.diloco.global_parameters().values()]
            for report in self.diloco.pop_finished_syncs():
                numbers = report.outer_lr, report.outer_momentum
                self.trace[report.outer_step] = (*numbers, values, report.global_digest)


def run(sim, steps=20, **settings):
    replica = Replica(sim, **settings)
    with replica.diloco:
        replica.train(0, steps)
    return replica.trace


def reference(num_outer_steps, num_fragments, num_replicas):
    """Streaming DiLoCo of constant moves with SGD, in plain Python."""
    theta, local = [10.0] * num_fragments, [[10.0] * num_fragments for _ in range(num_replicas)]
    momentum, trace = [None] * num_fragments, {}
    for outer_step in range(1, num_outer_steps + 1):
        for step in (2 * outer_step - 2, 2 * outer_step - 1):
            for replica_id, own in enumerate(local):
                own[:] = [value + move(replica_id, step) for value in own]
        lr, beta = BASE["outer_lr"], BASE["outer_momentum"]
        for first, row_lr, row_beta in ROWS:
            if first <= outer_step:
                lr, beta = row_lr, row_beta
        turn = (outer_step - 1) % num_fragments
        delta = sum(theta[turn] - own[turn] for own in local) / num_replicas
        if beta:
            old = momentum[turn]
            momentum[turn] = delta if old is None else beta * old + delta
            theta[turn] -= lr * (delta + beta * momentum[turn])
        else:
            momentum = [None] * num_fragments
            theta[turn] -= lr * delta
        for own in local:
            own[turn] = theta[turn]
        trace[outer_step] = (lr, beta, list(theta))
    return trace


@pytest.mark.parametrize("num_fragments", [1, 2])
def test_each_outer_step_is_taken_with_its_row(num_fragments, caplog):
    caplog.set_level(logging.INFO, "composer_replication")
    traces = simulate(lambda sim: run(sim, num_fragments=num_fragments), num_replicas=2)
    expected = reference(10, num_fragments, num_replicas=2)
    for trace in traces:
        assert {n: values[:2] for n, values in trace.items()} == {
            n: values[:2] for n, values in expected.items()
        }
        for outer_step, (_, _, values, _) in trace.items():
            assert values == pytest.approx(expected[outer_step][2], abs=1e-5)
    assert caplog.text.count("From outer step 5 on: outer_lr 1, outer_momentum 0") == 2


def test_without_a_row_that_applies_a_schedule_changes_no_bit():
    plain = simulate(lambda sim: run(sim, schedule=None), num_replicas=2)
    later = simulate(lambda sim: run(sim, schedule=dicts([[99, 0.1, 0.1]])), num_replicas=2)
    assert plain == later


@pytest.mark.parametrize("at", range(3, 17))
@pytest.mark.slow
def test_a_resume_goes_on_in_the_row_in_which_it_stopped(at):
    def whole(sim):
        replica, saved = Replica(sim), {}
        with replica.diloco:
            for step in range(20):
                replica.train(step, step + 1)
                saved[step + 1] = save(replica.diloco, replica.model)
        return replica.trace, saved

    found = simulate(whole, num_replicas=2)

    def resumed(sim):
        replica = Replica(sim)
        load(found[sim.replica_id][1][at], replica.diloco, replica.model)
        with replica.diloco:
            replica.train(at, 20)
        return replica.trace

    for trace, (expected, _) in zip(simulate(resumed, num_replicas=2), found, strict=True):
        assert trace == {n: values for n, values in expected.items() if 2 * n > at}


@pytest.mark.parametrize("step", range(2, 10))
def test_a_joiner_takes_each_outer_step_with_the_same_row(step):
    late = [Fault("late", replica_id=1, step=step)]
    one, other = simulate(lambda sim: run(sim, num_replicas=1), num_replicas=2, faults=late)
    shared = one.keys() & other.keys()
    assert min(other) == step and len(shared) > 1
    assert [one[n] for n in shared] == [other[n] for n in shared]


def test_a_schedule_that_is_left_out_at_a_resume_leaves_nothing_behind(caplog):
    def replica(sim):
        first = Replica(sim)
        with first.diloco:
            first.train(0, 10)
        return save(first.diloco, first.model)

    (saved,) = simulate(replica, num_replicas=1)

    def resumed(sim):
        replica = Replica(sim, schedule=None)
        load(saved, replica.diloco, replica.model)
        with replica.diloco:
            replica.train(10, 12)
        return replica.trace[6][:2]

    assert simulate(resumed, num_replicas=1) == [(0.5, 0.75)]
    assert "schedule: [{'outer_step': 3" in caplog.text


def test_groups_with_other_schedules_do_not_start_together():
    def replica(sim):
        run(sim, schedule=dicts(ROWS if sim.replica_id else ROWS[:2]))

    with pytest.raises(SimulationError, match="schedule: .* here, .* there"):
        simulate(replica, num_replicas=2)


def test_a_row_leaves_what_it_does_not_name():
    schedule = [{"outer_step": 2, "outer_lr": 0.25}, {"outer_step": 4, "outer_momentum": 0.5}]
    (trace,) = simulate(lambda sim: run(sim, steps=10, schedule=schedule), num_replicas=1)
    numbers = [trace[n][:2] for n in range(1, 6)]
    assert numbers == [(0.5, 0.75), (0.25, 0.75), (0.25, 0.75), (0.25, 0.5), (0.25, 0.5)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedule": "[]"}, r"schedule='\[\]': give a list of rows such as \{outer_step: 61"),
        ({"schedule": [7]}, r"schedule\[0\]=7: write a row with outer_step and any of sync_ev"),
        ({"schedule": [{"outer_step": 3}]}, r"schedule\[0\]=\{'outer_step': 3\}: write a row"),
        ({"schedule": [{"sync_every": 3}]}, r"schedule\[0\]=.*: write a row with outer_step"),
        (
            {"schedule": [{"outer_step": 3, "outer_lrs": 1}]},
            r"schedule\[0\]: outer_lrs cannot change during a run: did you mean outer_lr\?",
        ),
        (
            {"schedule": [{"outer_step": 3, "wire_format": "int8"}]},
            r"wire_format cannot change during a run: use sync_every, outer_lr, outer_momentum",
        ),
        ({"schedule": dicts([[0, 0.7, 0.9]])}, r"schedule\[0\]: outer_step=0: use an integer of"),
        ({"schedule": dicts([[1, -0.7, 0.9]])}, r"schedule\[0\]: outer_lr=-0.7: use a number 0"),
        (
            {"schedule": dicts([[1, 0.7, 0.9], [9, 0.7, 1]])},
            r"schedule\[1\]: outer_momentum=1: use a number between 0 and 1",
        ),
        (
            {"schedule": dicts([[9, 0.7, 0.9], [9, 0.4, 0.9]])},
            r"schedule\[1\]: outer_step=9 does not come after 9: put the rows in ascending order",
        ),
        ({"schedule": dicts([[n + 1, 1, 0] for n in range(MAX_ROWS + 1)])}, "has 65 rows: use at"),
        (
            {"num_fragments": 4, "schedule": [{"outer_step": 3, "sync_every": 30}]},
            r"schedule\[0\]: sync_every=30 is not divisible by num_fragments=4: use 28 or 32",
        ),
        (
            {"fragment_sync_delay": 9, "schedule": [{"outer_step": 3, "sync_every": 8}]},
            r"schedule\[0\]: fragment_sync_delay=9 is not below .* = 8 / 1 = 8.*: use at most 7",
        ),
        (
            {"round_seconds": 60, "schedule": [{"outer_step": 3, "sync_every": 8}]},
            r"schedule\[0\]: sync_every=8 with round_seconds=60: rounds are a time there",
        ),
    ],
)
def test_a_schedule_that_cannot_be_is_refused_with_value_and_fix(settings, message):
    with pytest.raises(ValueError, match=message):
        DiLoCoSettings(**settings)


def test_a_delay_with_several_fragments_in_flight_is_refused_with_both_fixes():
    with pytest.raises(ValueError, match="24 / 24 = 1, .*: use at most 0, or num_fragments=8"):
        DiLoCoSettings(sync_every=24, num_fragments=24, fragment_sync_delay=2)


def test_equal_schedules_are_equal_however_they_are_written():
    one = DiLoCoSettings(schedule=dicts([[4, 1, 0]]))
    assert one == DiLoCoSettings(schedule=(dict(reversed(dicts([[4, 1.0, 0.0]])[0].items())),))
    assert DiLoCoSettings(schedule=[]) == DiLoCoSettings()
    assert one.fingerprint()["schedule"] == dicts([[4, 1.0, 0.0]])
    assert [value_at(one.schedule, "outer_lr", n, 0.7) for n in (1, 3, 4, 5)] == [0.7, 0.7, 1, 1]


def test_an_outer_optimizer_of_ones_own_has_no_scheduled_numbers():
    def replica(sim):
        model = Constant()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        DiLoCo(sim.manager, model, inner, torch.optim.Adam, schedule=dicts([[4, 1, 0]]))

    with pytest.raises(SimulationError, match="in the schedule and an outer_optimizer of your own"):
        simulate(replica, num_replicas=1)
