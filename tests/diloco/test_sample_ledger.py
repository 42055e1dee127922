"""The ledger says which samples are in the model, whatever happens: the model itself is asked.

Each sample moves a coordinate of its own in every fragment, so that a coordinate that has moved is
a sample that is in.
"""

import itertools
import math

import pytest
import torch
from common import plain_sgd
from harness.groups import STREAMING, Group, run
from torch import nn

from composer_replication import simulate
from composer_replication.diloco.sample_ledger import Ledger, SyncedSamples
from composer_replication.simulation.simulation import Fault

STREAMS, LENGTH = 24, 64
VANILLA = {"sync_every": 4}
FRAGMENTS = {"sync_every": 6, "num_fragments": 3}
OVERLAPPED = FRAGMENTS | STREAMING


class Samples(nn.Module):
    """A coordinate for every sample of every stream, in each of the fragments."""

    def __init__(self):
        super().__init__()
        self.fragments = nn.ModuleList(nn.Linear(STREAMS * LENGTH, 1, bias=False) for _ in range(3))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)


def train_on(group, position, scale=1.0):
    """One inner step on the sample at a position of the group's stream."""
    ledger = group.diloco.ledger
    ledger.position = position + 1
    for parameter in group.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
        parameter.grad[0, ledger.stream * LENGTH + position] = scale
    group.inner.step()
    group.reports += group.diloco.pop_finished_syncs()


class Run:
    """Trains groups. Streams are numbered in the order in which anybody asks for one."""

    def __init__(self, steps, *, spoilt=()):
        self.steps, self.spoilt = steps, spoilt
        self.numbers = itertools.count(1)
        self.ledgers = {}

    def train(self, group):
        ledger, read = group.diloco.ledger, 0
        group.diloco.read_from(next(self.numbers))
        for step in range(self.steps):
            done = len(group.reports)
            train_on(group, read, math.nan if (group.id, step) in self.spoilt else 1.0)
            read += 1
            for report in group.reports[done:]:
                rows = self.ledgers.setdefault(report.outer_step, ledger.rows())
                assert rows == ledger.rows(), "all that commit an outer step write the same"
            if not ledger.stream:  # steps were lost: what follows is another stream
                group.diloco.read_from(next(self.numbers))
                read = 0

    def __call__(self, group):
        self.train(group)
        return ended(group)


def ended(group):
    """The rows of the ledger at the end, which are what is in the model."""
    group.end()
    theta, ledger = group.diloco.global_parameters().values(), group.diloco.ledger.rows()
    rows = {stream: (position, in_part) for stream, position, in_part in ledger}
    for stream in range(STREAMS):
        moved = torch.stack([t[0, stream * LENGTH : (stream + 1) * LENGTH] != 0 for t in theta])
        position, in_part = rows.get(stream, (0, 0))
        samples = torch.arange(LENGTH)
        assert torch.equal(moved.all(0), samples < position), (stream, rows)
        assert torch.equal(moved.any(0), samples < in_part), (stream, rows)
    return rows


def trained(replica, *faults, k=3, **settings):
    settings = {"model": Samples, "outer": plain_sgd(), "num_replicas": k} | settings
    return run(k, replica, *faults, **settings)


FAULTS = {
    "none": [],
    "restart": [Fault("restart", 2, 3)],
    "killed when its part had arrived": [Fault("kill_before_vote", 1, 3)],
    "killed when it had voted": [Fault("kill_after_vote", 0, 4)],
    "does not commit what its peers commit": [Fault("fail_commit", 1, 3)],
    "connections break": [Fault("fail_allreduce", 0, 3), Fault("fail_allreduce", 1, 5)],
    "late, and another restarts": [Fault("late", 0, 4), Fault("restart", 1, 6)],
    "reaches nobody": [Fault("stale_quorum", 2, 4)],
    "donor and joiner": [
        Fault("restart", 2, 3),
        Fault("kill_after_vote", 0, 4),
        Fault("fail_commit", 1, 5),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("settings", [VANILLA, FRAGMENTS, OVERLAPPED], ids=lambda s: str([*s]))
@pytest.mark.parametrize("faults", FAULTS.values(), ids=FAULTS)
def test_the_ledger_is_what_is_in_the_model(settings, faults):
    awaited = 2 if any(fault.kind == "late" for fault in faults) else 3
    found = trained(Run(20), *faults, **settings | {"num_replicas": awaited})
    rows, *others = (each for each in found if each is not None)
    assert all(other == rows for other in others)
    assert len(rows) >= 3 and all(position <= in_part for position, in_part in rows.values())
    if not faults:
        assert rows == dict.fromkeys((1, 2, 3), (20, 20))


@pytest.mark.parametrize("settings", [VANILLA, FRAGMENTS], ids=lambda s: str([*s]))
def test_a_group_whose_steps_are_not_finite_does_not_claim_them(settings):
    rows, *_ = trained(Run(20, spoilt={(1, 5)}), **settings)
    lost = next(position for position, in_part in rows.values() if position < 20 and in_part < 20)
    assert lost < 6 and len(rows) == 4


def test_the_ledger_and_the_place_in_the_stream_go_into_a_checkpoint():
    def begin(group):
        Run(14).train(group)
        return group.save()

    def go_on(sim):
        group = Group(sim, Samples, plain_sgd(), saved=saved, **VANILLA)
        ledger = group.diloco.ledger
        return ledger.rows(), ledger.stream, ledger.position

    (saved,) = trained(begin, k=1, **VANILLA)
    assert simulate(go_on, num_replicas=1) == [([[1, 12, 12]], 1, 14)]


def test_standing_by_syncs_in_mid_round_and_costs_the_others_nothing():
    """One has samples for six steps only; the others go on, and it with them, without any."""
    busy = Run(16)

    def replica(group):
        if group.id == 0:
            return busy(group), group.reports
        diloco = group.diloco
        diloco.read_from(20)
        for step in range(6):
            train_on(group, step)
        while not any(row[1] == 8 for row in diloco.ledger.rows()):
            diloco.sync_idle()
        diloco.sync_idle()
        for step in range(6, 10):  # and there are samples again
            train_on(group, step)
        return ended(group), group.reports

    (rows, _), (others, reports) = trained(replica, k=2, **VANILLA)
    assert rows == others == {1: (16, 16), 20: (10, 10)}
    assert [(r.outer_step, r.contribution) for r in reports] == [(1, 1), (2, 1), (3, 0), (4, 1)]
    assert not any(report.steps_lost or report.healed or report.retries for report in reports)


def test_what_is_in_the_model_stays_in_it():
    ledger = Ledger(num_fragments=2)
    ledger.commit([SyncedSamples(8, 3, 4)])
    ledger.commit([SyncedSamples(8, 1, 9)])
    assert ledger.rows() == [[8, 3, 9]]


def test_leaving_out_overlapped_steps_is_refused():
    def replica(group):
        with pytest.raises(ValueError, match=r"use fragment_update_alpha=0\.5"):
            group.diloco.read_from(1)

    with pytest.warns(UserWarning, match="throws away"):
        trained(replica, k=1, fragment_sync_delay=1, fragment_update_alpha=0.0)
