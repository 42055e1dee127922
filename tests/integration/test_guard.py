"""A real group sends nonsense over gloo: the others leave it out by name, and it comes back."""

from __future__ import annotations

import pytest
from common import Constant, take_step
from golden.real_runs import RANKS, train_rank
from harness.logged import kept_messages
from harness.processes import Process, run_groups

from composer_replication.diloco.averaging.weighted_mean import WeightedMean

pytestmark = pytest.mark.integration
SICK = range(2, 4)


def send_nonsense(at: int) -> None:
    """From now on this process sends 1e30 at the start of a message."""
    pack = WeightedMean.pack

    def damaged(mean: WeightedMean, *packed, **named) -> None:
        pack(mean, *packed, **named)
        mean.messages[at][0] = 1e30

    WeightedMean.pack = damaged


def train_beside_a_liar(group: Process, at: int) -> dict:
    logged, honest, seen = kept_messages(), WeightedMean.pack, []
    with group.training(Constant(0.0, weight=(30,)), 1) as run:
        for step in range(6):
            WeightedMean.pack = honest
            if group.replica_id == 2 and step in SICK:
                send_nonsense(at)
            take_step(run.inner, -1.0 - group.replica_id)
            theta = run.diloco.global_parameters()["weight"]
            seen.append(round(theta.amax().item(), 4))
        reports = run.diloco.pop_finished_syncs()
    return {
        "theta": seen,
        "contributions": [report.contribution for report in reports],
        "named": sum("leaves out replica group group_2" in text for text in logged),
    }


@pytest.mark.parametrize("at", [0, -1], ids=["value", "weight"])
def test_a_group_that_sends_nonsense_is_left_out_by_name_and_comes_back(at):
    ends = run_groups(train_beside_a_liar, num_replicas=3, at=at)
    for number, end in enumerate(ends):
        assert end["theta"] == [-2.0, -4.0, -5.5, -7.0, -9.0, -11.0]
        assert end["named"] == len(SICK)
        is_sick = number == 2
        assert end["contributions"] == [0.0 if is_sick and n in SICK else 1.0 for n in range(6)]


def train_ranks_of_which_one_lies(process: Process, folder: str) -> tuple[str, int, int]:
    honest, packed, logged = WeightedMean.pack, [], kept_messages()

    def damaged(mean: WeightedMean, *arguments, **named) -> None:
        honest(mean, *arguments, **named)
        packed.append(mean)
        if len(packed) in (3, 4):  # after the start, in the second sync and when it is repeated
            mean.messages[0][0] = float("nan")

    if process.replica_id == 2 * RANKS - 1:
        WeightedMean.pack = damaged
    digest, steps = train_rank(process, folder)
    return digest, steps, sum("leaves out replica group group_1" in text for text in logged)


def test_what_one_rank_sends_wrongly_is_no_part_of_any_rank_s_mean(tmp_path):
    ends = run_groups(train_ranks_of_which_one_lies, num_replicas=2 * RANKS, folder=str(tmp_path))
    assert len(set(ends)) == 1 and ends[0][2] == 1
