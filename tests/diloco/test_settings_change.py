"""Settings that change while a run goes on. Run: pytest tests/diloco/test_settings_change.py

Real torchft schedule, simulated network; what a coordinator would tell is told by the test.
"""

from dataclasses import replace

import pytest
import torch
from common import TinyMLP, batch, mse

from composer_replication import DiLoCo, simulate
from composer_replication.diloco.outer_optimizer import nesterov_sgd
from composer_replication.diloco.settings import DiLoCoSettings
from composer_replication.simulation.simulation import Fault

FIRST = DiLoCoSettings(sync_every=4)
SECOND = replace(FIRST, outer_lr=0.35, outer_momentum=0.5)
THIRD = replace(SECOND, sync_every=2)


def run(sim, told, steps=24, *, built_with=1, versions=None, **settings):
    """Train; ``told[replica]`` says after which step it hears of which versions."""
    versions = versions or {1: FIRST, 2: SECOND, 3: THIRD}
    own = versions[built_with]
    model = TinyMLP()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    outer = nesterov_sgd(own.outer_lr, own.outer_momentum)
    settings = {"num_replicas": 2, "digest_every": 1, "sync_every": own.sync_every} | settings
    diloco = DiLoCo(sim.manager, model, inner, outer, **settings)
    diloco.offer_settings({n: versions[n] for n in range(1, built_with + 1)})
    reports, lengths = [], []
    with diloco:
        for step in range(1, steps + 1):
            inner.zero_grad()
            mse(model, *batch(sim.replica_id, step)).backward()
            inner.step()
            news = told[sim.replica_id].get(step, ())
            diloco.offer_settings({number: versions[number] for number in news})
            for report in diloco.pop_finished_syncs():
                reports.append(report)
                lengths.append(step)
        diloco.final_sync()
    return reports, lengths, diloco.global_digest()


def lrs(reports):
    return [(report.outer_step, report.outer_lr, report.settings_version) for report in reports]


def test_all_adopt_a_change_after_the_same_outer_step_whenever_each_has_heard_of_it():
    # One hears of it in the second round, the other in the fourth: so after the fourth sync.
    told = [{6: [2]}, {14: [2]}]
    (one, _, digest), (other, _, its) = simulate(lambda sim: run(sim, told), num_replicas=2)
    expected = [(n, 0.7, 1) for n in range(1, 5)] + [(n, 0.35, 2) for n in (5, 6)]
    assert lrs(one) == lrs(other) == expected
    assert [r.global_digest for r in one] == [r.global_digest for r in other]
    assert digest == its


def test_the_change_takes_effect_in_the_outer_step():
    told = [{6: [2]}, {6: [2]}]
    changed = simulate(lambda sim: run(sim, told), num_replicas=2)[0][0]
    as_it_was = simulate(lambda sim: run(sim, [{}, {}]), num_replicas=2)[0][0]
    same = [a.global_digest == b.global_digest for a, b in zip(changed, as_it_was, strict=True)]
    assert same == [True, True, False, False, False, False]


def test_versions_that_not_all_have_heard_of_wait_and_none_is_skipped_into():
    told = [{1: [2, 3]}, {1: [2]}]
    (one, _, _), (other, _, _) = simulate(lambda sim: run(sim, told), num_replicas=2)
    assert lrs(one) == lrs(other)
    assert {report.settings_version for report in one} == {1, 2}


@pytest.mark.parametrize("delay", [0, 1])
def test_rounds_are_as_long_as_the_settings_in_force_say(delay):
    settings = {"fragment_sync_delay": delay, "fragment_update_alpha": 0.5}
    told = [{5: [2, 3]}, {5: [2, 3]}]
    found = simulate(lambda sim: run(sim, told, 16, **settings), num_replicas=2)
    for reports, lengths, _ in found:
        assert lengths == [4, 8, 10, 12, 14, 16]
        assert [r.settings_version for r in reports] == [1, 1, 3, 3, 3, 3]
    assert found[0][2] == found[1][2]


def test_momentum_can_go_to_nothing_and_come_back():
    versions = {1: FIRST, 2: replace(FIRST, outer_momentum=0.0), 3: FIRST}
    told = [{1: [2], 9: [3]}] * 2
    first, second = simulate(lambda sim: run(sim, told, versions=versions), num_replicas=2)
    assert {r.settings_version for r in first[0]} == {1, 2, 3}
    assert first[2] == second[2]


def test_a_joiner_that_was_built_with_newer_settings_takes_those_in_force_until_all_have_heard():
    def replica(sim):
        late = sim.replica_id == 1
        told = [{17: [2]}, {}]
        settings = {"num_replicas": 1}
        return run(sim, told, 12 if late else 28, built_with=2 if late else 1, **settings)

    late = [Fault("late", replica_id=1, step=3)]
    (one, _, digest), (other, _, its) = simulate(replica, num_replicas=2, faults=late)
    by_step = {report.outer_step: report for report in one}
    assert {report.settings_version for report in other} == {1, 2}
    for report in other:
        theirs = by_step[report.outer_step]
        assert (report.outer_lr, report.settings_version) == (
            theirs.outer_lr,
            theirs.settings_version,
        )
        assert report.global_digest == theirs.global_digest
    assert digest == its


def test_an_outer_optimizer_without_such_numbers_says_so():
    def replica(sim):
        model = TinyMLP()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        diloco = DiLoCo(sim.manager, model, inner, torch.optim.Adagrad, sync_every=4)
        with pytest.raises(ValueError, match="Adagrad has no momentum: only an outer SGD"):
            diloco._state.adopt(2, SECOND)

    simulate(replica, num_replicas=1)
