"""A rank sends nonsense over gloo: all ranks leave its group out of the mean. Of groups of one rank
see tests/promises/test_p12_sick_groups.py."""

from __future__ import annotations

import pytest
from golden.real_runs import RANKS, train_rank
from integration.replicas import Group, kept_messages, run_groups

from composer_replication.diloco.averaging.weighted_mean import WeightedMean

pytestmark = pytest.mark.integration


def train_ranks_of_which_one_lies(process: Group, folder: str) -> tuple[str, int, int]:
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
