"""Groups that the others went on without. Run: pytest tests/diloco/test_late_steps.py

Real torchft schedule, simulated network. A scripted fault keeps a living group out of two syncs.
"""

import pytest
import torch
from common import Constant, TinyMLP, batch, mse, plain_sgd, take_step

from composer_replication import DiLoCo, simulate
from composer_replication.simulation.simulation import Fault

MOVES = (-1.0, -1.0, -3.0)
"""What an inner step adds, by replica."""


def behind(step, replica_id=2):
    return [Fault("left_behind", replica_id, step)]


def train(sim, syncs=6, model=None, moves=MOVES, outer=None, **settings):
    """Move a scalar by the same number in each inner step until a sync; its reports, the values."""
    model = model or Constant(10.0)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    settings = {"sync_every": 2, "num_replicas": 3, "digest_every": 1} | settings
    reports, thetas, local = [], {}, {}
    with DiLoCo(sim.manager, model, inner, outer or plain_sgd(), **settings) as diloco:
        while diloco.outer_step < syncs:
            take_step(inner, moves[sim.replica_id])
            for report in diloco.pop_finished_syncs():
                reports.append(report)
                values = diloco.global_parameters().values()
                thetas[report.outer_step] = [each.item() for each in values]
                local[report.outer_step] = [each.item() for each in model.parameters()]
    return reports, thetas, local


def test_the_steps_of_a_group_that_was_left_behind_are_in_its_next_sync():
    # Outer step 1: deltas 2, 2, 6 make 10/3 a mean. Then two groups are alone for two outer steps:
    # 2 each. The third has moved by 6 from 20/3; it comes back with outer step 4, in which the mean
    # is 10/3 again. Nothing it has trained is missing.
    results = simulate(train, num_replicas=3, faults=behind(2))
    third = 10 / 3
    expected = [10 - third, 8 - third, 6 - third, 6 - 2 * third, 6 - 3 * third, 6 - 4 * third]
    for reports, thetas, _ in results:
        for report in reports:
            assert thetas[report.outer_step] == pytest.approx(
                [expected[report.outer_step - 1]], abs=1e-5
            )
    late = results[2][0]
    assert [r.outer_step for r in late] == [1, 4, 5, 6] and late[1].healed
    assert [(r.contribution, r.late_steps, r.steps_lost) for r in late] == [
        (1, 0, 0), (1, 2, 0), (1, 0, 0), (1, 0, 0)
    ]  # fmt: skip
    assert [r.inner_steps for r in late] == [2, 4, 6, 8]
    digests = [{r.outer_step: r.global_digest for r in reports} for reports, _, _ in results]
    assert all(digests[0][r.outer_step] == r.global_digest for r in late)


@pytest.mark.parametrize("most", [0, 1])
def test_steps_that_are_too_old_are_dropped_and_counted(most):
    late = simulate(
        lambda sim: train(sim, max_missed_outer_steps=most), num_replicas=3, faults=behind(2)
    )[2][0]
    assert [(r.outer_step, r.contribution, r.late_steps, r.steps_lost) for r in late] == [
        (1, 1, 0, 0), (4, 0, 0, 2), (5, 1, 0, 0), (6, 1, 0, 0)
    ]  # fmt: skip


def test_weights_are_what_the_group_has_trained():
    reports = simulate(lambda sim: train(sim, weight_by="steps"), num_replicas=3, faults=behind(2))
    assert reports[2][0][1].contribution == 2 and reports[0][0][3].total_contribution == 6


@pytest.mark.parametrize("delay", [0, 1])
def test_every_fragment_keeps_what_it_has_not_sent(delay):
    # Each fragment is a scalar, in turn every second step. With a delay the group asks for the
    # quorum one step earlier, when it has not sent anything either; and the step that it took
    # during a fragment's last sync is one of those since then.
    def replica(sim):
        model = torch.nn.Sequential(Constant(10.0), Constant(10.0))
        settings = {"num_fragments": 2, "sync_every": 4, "fragment_sync_delay": delay}
        return train(sim, 8, model, **settings, fragment_update_alpha=0.5 if delay else 0.0)

    late = simulate(replica, num_replicas=3, faults=behind(3))[2][0]
    assert [r.outer_step for r in late] == [1, 2, 5, 6, 7, 8]
    assert [r.late_steps for r in late] == [0, 0, 4, 2, 0, 0]
    assert [r.steps_lost for r in late] == [0] * 6
    assert all(r.contribution == 1 for r in late)


def test_a_sync_that_others_may_have_committed_is_not_sent_again():
    # This group fails after the allreduce of outer step 3, and the others commit it.
    faults = [Fault("fail_commit", 2, 3)]
    late = simulate(train, num_replicas=3, faults=faults)[2][0]
    assert [(r.outer_step, r.contribution, r.late_steps, r.steps_lost) for r in late] == [
        (1, 1, 0, 0), (2, 1, 0, 0), (4, 0, 0, 2), (5, 1, 0, 0), (6, 1, 0, 0)
    ]  # fmt: skip


def read_stream(sim, is_held, syncs=5, fragments=1, **settings):
    """Train on a stream, 8 samples a step; the reports, the ledger's rows and the own stream."""
    model = torch.nn.Sequential(*(Constant(10.0) for _ in range(fragments)))
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    settings = {
        "sync_every": 2 * fragments,
        "num_fragments": fragments,
        "num_replicas": 3,
    } | settings
    diloco, reports = DiLoCo(sim.manager, model, inner, plain_sgd(), **settings), []
    with diloco:
        diloco.read_from(1 + sim.replica_id)
        diloco.ledger.is_held = is_held
        while diloco.outer_step < syncs:
            diloco.ledger.position += 8
            take_step(inner, -1.0)
            reports += diloco.pop_finished_syncs()
    rows = [(r.outer_step, r.contribution, r.late_steps, r.steps_lost) for r in reports]
    return rows, diloco.ledger.rows(), diloco.ledger.stream


def test_the_steps_on_samples_that_others_may_have_are_dropped():
    results = simulate(
        lambda sim: read_stream(sim, lambda: False), num_replicas=3, faults=behind(2)
    )
    late, ledger, stream = results[2]
    assert late == [(1, 1, 0, 0), (4, 0, 0, 2), (5, 1, 0, 0)]
    assert stream == 0 and ledger == [[1, 80, 80], [2, 80, 80], [3, 16, 16]]


def test_the_steps_on_samples_that_are_still_its_own_are_in_the_ledger_once():
    results = simulate(lambda sim: read_stream(sim, lambda: True), num_replicas=3, faults=behind(2))
    late, ledger, stream = results[2]
    assert late == [(1, 1, 0, 0), (4, 1, 2, 0), (5, 1, 0, 0)]
    assert stream == 3 and ledger == [[1, 80, 80], [2, 80, 80], [3, 48, 48]]
    assert {str(ledger) for _, ledger, _ in results} == {str(ledger)}


def test_all_steps_on_a_stream_are_dropped_if_one_fragment_may_have_been_committed():
    # The third group fails after the allreduce of outer step 3, which is the first fragment's; the
    # others commit it. Its second fragment was not sent since, and would be kept without a stream.
    def replica(sim):
        return read_stream(sim, lambda: True, 6, fragments=2)

    late, ledger, stream = simulate(replica, num_replicas=3, faults=[Fault("fail_commit", 2, 3)])[2]
    healed = next(row for row in late if row[3])
    assert not any(row[2] for row in late) and healed[0] == 4
    assert stream == 0 and ledger[2][1] < ledger[0][1]


def test_several_in_flight_keep_nothing():
    def replica(sim):
        model = torch.nn.Sequential(Constant(10.0), Constant(10.0))
        return train(sim, 8, model, num_fragments=2, sync_every=4, fragment_sync_delay=3)

    late = simulate(replica, num_replicas=3, faults=behind(4))[2][0]
    healed = next(r for r in late if r.healed)
    assert healed.steps_lost > 0 and not any(r.late_steps for r in late)


@pytest.mark.parametrize("wire_format", ["int8", "fp4"])
def test_all_end_equal_in_every_format(wire_format):
    def replica(sim):
        model = TinyMLP()
        inner = torch.optim.SGD(model.parameters(), lr=0.05)
        settings = {"sync_every": 3, "wire_format": wire_format}
        late = 0
        with DiLoCo(sim.manager, model, inner, num_replicas=3, **settings) as diloco:
            step = 0
            while diloco.outer_step < 6:
                inner.zero_grad()
                mse(model, *batch(sim.replica_id, step)).backward()
                inner.step()
                step += 1
                late += sum(report.late_steps for report in diloco.pop_finished_syncs())
            diloco.final_sync()
            return diloco.global_digest(), late

    digests, late = zip(*simulate(replica, num_replicas=3, faults=behind(2)), strict=True)
    assert len(set(digests)) == 1 and late == (0, 0, 3)


def test_buffers_and_frozen_tensors_become_the_global_ones():
    class WithBuffer(Constant):
        def __init__(self):
            super().__init__(10.0)
            self.register_buffer("seen", torch.zeros(1))

    def replica(sim):
        model = WithBuffer()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        settings = {"sync_every": 2, "num_replicas": 3, "sync_buffers": "mean"}
        buffers = {}
        with DiLoCo(sim.manager, model, inner, plain_sgd(), **settings) as diloco:
            while diloco.outer_step < 5:
                model.seen += 1 + sim.replica_id
                take_step(inner, -1.0)
                for report in diloco.pop_finished_syncs():
                    buffers[report.outer_step] = model.seen.item()
        return buffers

    first, _, third = simulate(replica, num_replicas=3, faults=behind(2))
    # Means of 2, 4 and 6; of 2 and 4 twice; then the third one's is the global one, not moved.
    assert first == pytest.approx({1: 4, 2: 7, 3: 10, 4: 12, 5: 16})
    assert third == {n: first[n] for n in third}
