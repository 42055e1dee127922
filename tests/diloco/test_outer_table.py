"""``auto``: from one table, once, and the same in all groups.

Run: pytest tests/diloco/test_outer_table.py. Real torchft schedule, simulated network.
"""

import logging
from dataclasses import replace

import pytest
import torch
from common import Constant, plain_sgd, take_step

from composer_replication import DiLoCo, simulate
from composer_replication.diloco.fingerprints import SettingsMismatch
from composer_replication.diloco.outer_table import TABLE, nearest_row, resolve
from composer_replication.diloco.settings import DiLoCoSettings
from composer_replication.simulation.simulation import Fault, SimulationError

AUTO = {"outer_lr": "auto", "outer_momentum": "auto"}


def train(sim, steps, *, saved=None, num_replicas=None, **settings):
    """Train a scalar: what each sync was taken with, and the state at the end."""
    model = Constant()
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    count = sim.num_replicas if num_replicas is None else num_replicas
    diloco = DiLoCo(sim.manager, model, inner, num_replicas=count, **AUTO | settings)
    if saved is not None:
        diloco.load_state_dict(saved)
    with diloco:
        for step in range(steps):
            take_step(inner, -0.1 - 0.1 * sim.replica_id - 0.01 * (step % 3))
        reports = diloco.pop_finished_syncs()
        state = diloco.state_dict()
    return {(r.outer_lr, r.outer_momentum) for r in reports}, state, diloco.global_digest()


# ---- the table -------------------------------------------------------------------------------


@pytest.mark.parametrize("row", TABLE, ids=str)
def test_a_row_of_the_table_is_what_its_own_run_takes(row):
    assert nearest_row(row.groups, row.sync_every) == row
    assert row.outer_lr > 0 and 0 < row.outer_momentum < 1  # for sharded checkpoints, not 0


@pytest.mark.parametrize(
    ("groups", "sync_every", "nearest"),
    [
        (3, 30, (4, 30)),  # 4/3 is less than 3/2
        (5, 30, (4, 30)),
        (6, 30, (8, 30)),
        (64, 30, (16, 30)),
        (2, 1, (2, 30)),
        (2, 54, (2, 30)),  # their geometric mean is 54.8
        (2, 55, (2, 100)),
        (2, 500, (2, 100)),
    ],
)
def test_in_between_the_nearest_row_counts_in_log_scale(groups, sync_every, nearest):
    assert nearest_row(groups, sync_every)[:2] == nearest


def test_only_what_is_auto_is_chosen_and_the_line_says_from_what():
    settings = DiLoCoSettings(sync_every=30, outer_lr="auto", outer_momentum=0.5)
    chosen, line = resolve(settings, 8)
    assert chosen == replace(settings, outer_lr=0.8)
    assert line == "outer_lr auto = 0.8 (num_replicas=8, sync_every=30)"
    assert resolve(chosen, 2) == (chosen, "")


def test_a_run_that_has_begun_keeps_its_numbers():
    chosen, line = resolve(DiLoCoSettings(**AUTO), 8, {"outer_lr": 0.3, "outer_momentum": 0.7})
    assert (chosen.outer_lr, chosen.outer_momentum) == (0.3, 0.7)
    assert line == "outer_lr auto = 0.3, outer_momentum auto = 0.7 (as this run began)"


def test_without_the_number_of_groups_it_is_refused_with_the_fix():
    message = r"outer_lr='auto' depends on the number .* set num_replicas \(or NUM_REPLICA_GROUPS\)"
    with pytest.raises(ValueError, match=message):
        resolve(DiLoCoSettings(**AUTO), None)


def test_beside_an_outer_optimizer_of_ones_own_it_is_refused():
    def replica(sim):
        model = Constant()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        DiLoCo(sim.manager, model, inner, plain_sgd(), num_replicas=1, outer_lr="auto")

    with pytest.raises(SimulationError, match="outer_lr and an outer_optimizer of your own"):
        simulate(replica, num_replicas=1)


# ---- in a run --------------------------------------------------------------------------------


@pytest.mark.parametrize("sync_every", [30, 100])
@pytest.mark.parametrize("groups", [2, 4, 8])
def test_all_groups_train_with_the_row_of_the_table(groups, sync_every):
    (row,) = (row for row in TABLE if row[:2] == (groups, sync_every))
    found = simulate(
        lambda sim: train(sim, 2 * sync_every, sync_every=sync_every), num_replicas=groups
    )
    assert [numbers for numbers, _, _ in found] == [{row[2:]}] * groups
    assert len({digest for _, _, digest in found}) == 1


def test_it_is_what_the_same_numbers_are_when_they_are_named():
    row = nearest_row(2, 30)
    named = {"outer_lr": row.outer_lr, "outer_momentum": row.outer_momentum}
    auto = simulate(lambda sim: train(sim, 60, sync_every=30), num_replicas=2)
    explicit = simulate(lambda sim: train(sim, 60, sync_every=30, **named), num_replicas=2)
    assert [end[2] for end in auto] == [end[2] for end in explicit]


def test_groups_that_die_and_come_back_do_not_change_it():
    faults = [
        Fault("kill", replica_id=0, step=2),
        Fault("restart", replica_id=1, step=3),
        Fault("late", replica_id=7, step=4),
    ]
    expected = nearest_row(8, 30)[2:]
    dead, *others = simulate(
        lambda sim: train(sim, 180, sync_every=30, num_replicas=7 if sim.replica_id < 7 else 8),
        num_replicas=8,
        faults=faults,
    )
    assert dead is None
    assert [numbers for numbers, _, _ in others] == [{expected}] * 7


def test_a_late_joiner_takes_what_the_run_has_whatever_it_would_choose(caplog):
    # The run begins with two groups; the third thinks of eight.
    late = [Fault("late", replica_id=2, step=3)]
    caplog.set_level(logging.INFO, "composer_replication")
    found = simulate(
        lambda sim: train(sim, 180, sync_every=30, num_replicas=8 if sim.replica_id == 2 else 2),
        num_replicas=3,
        faults=late,
    )
    run, eight = nearest_row(2, 30), nearest_row(8, 30)
    assert run.outer_lr != eight.outer_lr
    assert [numbers for numbers, _, _ in found] == [{run[2:]}] * 3
    lines = [record.getMessage() for record in caplog.records]
    assert "outer_lr auto = 0.7, outer_momentum auto = 0.5 (num_replicas=2, sync_every=30)" in lines
    assert "outer_lr, outer_momentum auto: as this run began, outer_lr 0.7, outer_momentum 0.5" in (
        lines
    )


def test_a_joiner_is_refused_for_a_number_that_it_names():
    def replica(sim):
        own = {"outer_momentum": 0.5, "num_replicas": 8} if sim.replica_id else {"num_replicas": 1}
        try:
            train(sim, 150, sync_every=30, **own)
        except SettingsMismatch as error:
            return str(error)

    late = [Fault("late", replica_id=1, step=2)]
    _, refused = simulate(replica, num_replicas=2, faults=late)
    # Its learning rate is the run's by then.
    assert "momentum=0.5, nesterov" in refused and refused.count("lr=0.4") == 2


@pytest.mark.parametrize("groups", [2, 4, 8])
@pytest.mark.slow
def test_a_resume_with_another_number_of_groups_keeps_it_and_a_number_changes_it(groups, caplog):
    before = simulate(lambda sim: train(sim, 40, sync_every=30), num_replicas=groups)
    others = {2: 8, 4: 8, 8: 2}[groups]

    def resumed(**settings):
        def replica(sim):
            return train(sim, 60, saved=before[0][1], sync_every=30, **settings)

        return [numbers for numbers, _, _ in simulate(replica, num_replicas=1)]

    assert nearest_row(others, 30)[2:] != nearest_row(groups, 30)[2:]
    assert resumed(num_replicas=others, start_timeout_s=0.1, on_start_timeout="start") == [
        {nearest_row(groups, 30)[2:]}
    ]
    assert "Resuming with changed settings" not in caplog.text
    assert resumed(outer_lr=0.25, outer_momentum=0.75) == [{(0.25, 0.75)}]
    assert "Resuming with changed settings: outer_optimizer" in caplog.text
    # With one of them named, the other is still the run's.
    assert resumed(outer_lr=0.25) == [{(0.25, nearest_row(groups, 30).outer_momentum)}]
