"""Learning rates of a group that joins in mid-run. Run: pytest tests/callback/test_heal_state.py

Real: Composer's Trainer, its schedulers and torch's. The network is the simulation's.
"""

import logging
from contextlib import closing
from functools import partial

import pytest
import torch
from composer import Callback, State
from composer.devices import DeviceCPU
from composer.optim import CosineAnnealingWithWarmupScheduler
from harness.trainers import TinyModel, callback_of, trainer_of
from torch.optim.lr_scheduler import (
    LambdaLR,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from composer_replication.callback.composer_job import ComposerJob
from composer_replication.replica.heal.state_bytes import dump, load
from composer_replication.simulation import Fault, simulate

pytestmark = pytest.mark.slow

JOINS_LATE = [Fault("restart", replica_id=1, step=2)]
SKIPS_A_SYNC = [Fault("fail_commit", replica_id=1, step=2)]


def job_in(state):
    job = ComposerJob()
    job.state = job.averages.state = state
    job.before_join()
    return job


def sequence(sgd):
    return SequentialLR(sgd, [StepLR(sgd, 1, 0.5), StepLR(sgd, 1, 0.9)], milestones=[5])


class Rates(Callback):
    """The learning rate of each batch."""

    def __init__(self):
        self.found = {}

    def batch_start(self, state, logger):
        rate = state.optimizers[0].param_groups[0]["lr"]
        self.found[state.timestamp.batch.value] = float(rate)


def rates_of_two_groups(
    build, faults, *, every_batch=True, duration="12ba", each=({}, {}), **diloco
):
    """Of each of two groups, the second of which has a fault."""

    def replica(sim):
        trainer = trainer_of(
            callback_of(sim, **diloco | each[sim.replica_id]),
            rates := Rates(),
            replica_id=sim.replica_id,
            max_duration=duration,
        )
        scheduler = build(*trainer.state.optimizers)
        with closing(trainer):
            trainer.fit(schedulers=scheduler, step_schedulers_every_batch=every_batch)
        return rates.found

    return simulate(replica, num_replicas=2, faults=faults)


@pytest.mark.parametrize(
    "build",
    [
        lambda sgd: StepLR(sgd, 1, gamma=0.9),
        lambda sgd: MultiStepLR(sgd, [3, 5, 7], gamma=0.5),
        lambda sgd: LambdaLR(sgd, lambda step: 0.9**step),
        lambda sgd: OneCycleLR(sgd, 0.1, total_steps=20),
        sequence,
        lambda _: CosineAnnealingWithWarmupScheduler(t_warmup="5ba"),
    ],
    ids=["StepLR", "MultiStepLR", "LambdaLR", "OneCycleLR", "SequentialLR", "Composer's"],
)
@pytest.mark.parametrize("faults", [JOINS_LATE, SKIPS_A_SYNC], ids=["joins", "skips"])
def test_who_joins_has_the_others_learning_rate_from_its_first_batch_on(build, faults):
    one, other = rates_of_two_groups(build, faults)
    assert sorted(one) == list(range(12)) and len(set(one.values())) > 3
    shared = [batch for batch in other if batch >= 6]
    assert shared == list(range(6, 12))
    assert [other[batch] for batch in shared] == pytest.approx([one[batch] for batch in shared])


UNEQUAL = [
    {"each": ({"sync_every": 4}, {"sync_every": 2}), "weight_by": "steps"},
    {"each": ({"sync_every": 2}, {"sync_every": 4}), "weight_by": "steps"},
    {"sync_every": 4, "round_seconds": 0.01, "weight_by": "steps"},
]


@pytest.mark.parametrize("settings", UNEQUAL)
def test_where_rounds_differ_a_group_that_is_left_behind_trains_its_own_batches(settings):
    faults = [Fault("left_behind", replica_id=1, step=3)]
    build = partial(StepLR, step_size=1, gamma=0.9)
    for found in rates_of_two_groups(build, faults, duration="32ba", **settings):
        assert found == {batch: pytest.approx(0.05 * 0.9**batch) for batch in range(32)}


def test_where_rounds_differ_a_newcomer_begins_where_its_donor_is():
    build = partial(StepLR, step_size=1, gamma=0.9)
    one, other = rates_of_two_groups(build, JOINS_LATE, **UNEQUAL[0])
    assert min(other) == 12 - len(other) >= 8 and other.items() <= one.items()


def test_where_schedulers_step_with_epochs_a_joiner_has_taken_the_steps_of_the_others():
    one, other = rates_of_two_groups(
        lambda sgd: StepLR(sgd, 1, gamma=0.5), JOINS_LATE, every_batch=False, sync_every=4
    )
    assert min(other) == 8  # the sync that it joins in is in the last batch of an epoch
    assert other == {batch: one[batch] for batch in range(8, 12)}


class Memory:
    """A function of the step that keeps what no heal carries."""

    def __init__(self):
        self.kept = object()

    def __call__(self, step):
        return 0.9**step


def test_what_cannot_be_handed_over_is_warned_of_once(caplog):
    with caplog.at_level(logging.WARNING, "composer_replication"):
        rates_of_two_groups(lambda sgd: LambdaLR(sgd, Memory()), JOINS_LATE)
    [warning] = [r.getMessage() for r in caplog.records if "Schedulers" in r.getMessage()]
    assert "it has sent those of [] for 1 groups" in warning and "has ['LambdaLR'] for 1" in warning


def plateau(lr):
    """A scheduler that Composer cannot step by itself, for it wants a metric."""
    model = TinyModel()
    sgd = torch.optim.SGD(model.parameters(), lr=lr)
    device = DeviceCPU()
    state = State(model, rank_zero_seed=0, run_name="", device=device, optimizers=sgd)
    state.schedulers = [ReduceLROnPlateau(sgd, patience=1, factor=0.1)]
    return state, state.schedulers[0]


def test_a_plateau_goes_on_where_the_donor_s_is_through_the_bytes_of_a_heal():
    (donor, theirs), (joiner, ours) = plateau(0.5), plateau(0.5)
    for loss in (1.0, 2.0, 2.0, 2.0):
        theirs.step(loss)
    body = memoryview(bytearray(b"".join(dump(job_in(donor).schedules()))))
    job_in(joiner).load_schedules(*load(body))
    assert joiner.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.05)
    for scheduler in (theirs, ours):
        scheduler.step(0.5)
    assert theirs.state_dict() == ours.state_dict() and ours.best == 0.5
