"""The ledger says which samples are in the model, whatever happens: the model itself is asked.

Run: pytest tests/diloco/test_sample_ledger.py. Simulated network, scripted faults. Each sample
moves a coordinate of its own in every fragment, so that a coordinate that has moved is a sample
that is in.
"""

import itertools

import pytest
import torch
from common import plain_sgd
from torch import nn

from composer_replication import DiLoCo, simulate
from composer_replication.diloco.sample_ledger import Ledger, SyncedSamples
from composer_replication.simulation.simulation import Fault

STREAMS, LENGTH = 24, 64
VANILLA = {"sync_every": 4}
STREAMING = {"sync_every": 6, "num_fragments": 3}
OVERLAPPED = STREAMING | {"fragment_sync_delay": 1, "fragment_update_alpha": 0.5}


class Samples(nn.Module):
    """A coordinate for every sample of every stream, in each of the fragments."""

    def __init__(self):
        super().__init__()
        self.fragments = nn.ModuleList(nn.Linear(STREAMS * LENGTH, 1, bias=False) for _ in range(3))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def train_on(self, optimizer, stream, position, scale=1.0):
        for parameter in self.parameters():
            parameter.grad = torch.zeros_like(parameter)
            parameter.grad[0, stream * LENGTH + position] = scale
        optimizer.step()


class Run:
    """Streams are numbered in the order in which anybody asks for one."""

    def __init__(self, settings, steps, *, spoilt=(), num_replicas=3):
        self.settings = settings | {"num_replicas": num_replicas}
        self.steps, self.spoilt = steps, spoilt
        self.numbers = itertools.count(1)
        self.ledgers = {}

    def __call__(self, sim):
        model = Samples()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        diloco = DiLoCo(sim.manager, model, inner, plain_sgd(), **self.settings)
        with diloco:
            self.train(diloco, model, inner, sim.replica_id)
            diloco.final_sync()
        return diloco.ledger.rows(), [t.clone() for t in diloco.global_parameters().values()]

    def train(self, diloco, model, inner, replica_id):
        diloco.read_from(next(self.numbers))
        read = 0
        for step in range(self.steps):
            diloco.ledger.position = read + 1
            scale = float("nan") if (replica_id, step) in self.spoilt else 1.0
            model.train_on(inner, diloco.ledger.stream, read, scale)
            read += 1
            for report in diloco.pop_finished_syncs():
                rows = self.ledgers.setdefault(report.outer_step, diloco.ledger.rows())
                assert rows == diloco.ledger.rows(), "all that commit an outer step write the same"
            if not diloco.ledger.stream:  # steps were lost: what follows is another stream
                diloco.read_from(next(self.numbers))
                read = 0


def check(ledger, theta):
    """What the ledger says is what is in the model."""
    rows = {stream: (position, in_part) for stream, position, in_part in ledger}
    for stream in range(STREAMS):
        moved = torch.stack([t[0, stream * LENGTH : (stream + 1) * LENGTH] != 0 for t in theta])
        position, in_part = rows.get(stream, (0, 0))
        expected = torch.arange(LENGTH)
        assert torch.equal(moved.all(0), expected < position), (stream, rows)
        assert torch.equal(moved.any(0), expected < in_part), (stream, rows)
    return rows


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
@pytest.mark.parametrize("settings", [VANILLA, STREAMING, OVERLAPPED], ids=lambda s: str([*s]))
@pytest.mark.parametrize("faults", FAULTS.values(), ids=FAULTS)
def test_the_ledger_is_what_is_in_the_model(settings, faults):
    is_late = any(fault.kind == "late" for fault in faults)
    run = Run(settings, steps=20, num_replicas=2 if is_late else 3)
    results = [r for r in simulate(run, num_replicas=3, faults=faults) if r is not None]
    for ledger, theta in results:
        assert ledger == results[0][0]
        rows = check(ledger, theta)
    assert len(rows) >= 3 and all(position <= in_part for position, in_part in rows.values())
    if not faults:
        assert rows == dict.fromkeys((1, 2, 3), (20, 20))


@pytest.mark.parametrize("settings", [VANILLA, STREAMING], ids=lambda s: str([*s]))
def test_a_group_whose_steps_are_not_finite_does_not_claim_them(settings):
    run = Run(settings, steps=20, spoilt={(1, 5)})
    for ledger, theta in simulate(run, num_replicas=3):
        rows = check(ledger, theta)
    lost = next(position for position, in_part in rows.values() if position < 20 and in_part < 20)
    assert lost < 6 and len(rows) == 4


def test_the_ledger_and_the_place_in_the_stream_go_into_a_checkpoint():
    run = Run(VANILLA, steps=14)

    def replica(sim):
        model = Samples()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        with DiLoCo(sim.manager, model, inner, plain_sgd(), num_replicas=1, **VANILLA) as diloco:
            run.train(diloco, model, inner, 0)
            return diloco.state_dict()

    def resumed(sim):
        inner = torch.optim.SGD((model := Samples()).parameters(), lr=1.0)
        diloco = DiLoCo(sim.manager, model, inner, plain_sgd(), **VANILLA)
        diloco.load_state_dict(saved)
        return diloco.ledger.rows(), diloco.ledger.stream, diloco.ledger.position

    (saved,) = simulate(replica, num_replicas=1)
    assert simulate(resumed, num_replicas=1) == [([[1, 12, 12]], 1, 14)]


def test_standing_by_syncs_in_mid_round_and_costs_the_others_nothing():
    """One has samples for six steps only; the others go on, and it with them, without any."""
    run = Run(VANILLA, steps=16)

    def replica(sim):
        model = Samples()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        with DiLoCo(sim.manager, model, inner, plain_sgd(), num_replicas=2, **VANILLA) as diloco:
            if sim.replica_id == 0:
                run.train(diloco, model, inner, 0)
            else:
                diloco.read_from(20)
                for step in range(6):
                    diloco.ledger.position = step + 1
                    model.train_on(inner, 20, step)
                while not any(row[1] == 8 for row in diloco.ledger.rows()):
                    diloco.sync_idle()
                diloco.sync_idle()
                for step in range(6, 10):  # and there are samples again
                    diloco.ledger.position = step + 1
                    model.train_on(inner, 20, step)
            reports = diloco.pop_finished_syncs()
            diloco.final_sync()
            reports += diloco.pop_finished_syncs()
        return diloco.ledger.rows(), list(diloco.global_parameters().values()), reports

    (ledger, theta, _), (other, _, reports) = simulate(replica, num_replicas=2)
    assert ledger == other == [[1, 16, 16], [20, 10, 10]]
    check(ledger, theta)
    assert [report.outer_step for report in reports] == [1, 2, 3, 4]
    assert [report.contribution for report in reports] == [1, 1, 0, 1]
    assert not any(report.steps_lost or report.healed or report.retries for report in reports)


def test_synced_samples_by_hand():
    ledger = Ledger(num_fragments=2)
    ledger.read_from(7)
    assert ledger.send(0, 10, contributes=True) == SyncedSamples(7, 0, 10)
    own = ledger.send(0, 10, contributes=True)
    ledger.commit([own, SyncedSamples(8, 3, 4), SyncedSamples(0, 9, 9)])
    ledger.has_synced(0, 10)
    assert ledger.send(1, 12, contributes=True) == SyncedSamples(7, 10, 12)
    assert ledger.send(1, 12, contributes=False) == SyncedSamples(7, 0, 10)
    ledger.commit([SyncedSamples(8, 1, 9)])
    assert ledger.rows() == [[7, 0, 10], [8, 3, 9]]  # what is in the model stays in it


def test_leaving_out_overlapped_steps_is_refused():
    def replica(sim):
        model = Samples()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        with pytest.warns(UserWarning, match="throws away"):
            settings = {"fragment_sync_delay": 1, "fragment_update_alpha": 0.0}
            diloco = DiLoCo(sim.manager, model, inner, sync_every=4, **settings)
        with pytest.raises(ValueError, match=r"use fragment_update_alpha=0\.5"):
            diloco.read_from(1)

    simulate(replica, num_replicas=1)
