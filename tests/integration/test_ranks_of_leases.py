"""The ranks of a group read the same leases, which rank 0 asks for.

Run: pytest tests/integration/test_ranks_of_leases.py. Real: processes and torch.distributed. The
coordinator is a function.
"""

import time

import pytest
import torch.distributed as dist
from harness.processes import run_groups

from composer_replication.coordinator.wire_types import DatasetSpec, Lease
from composer_replication.data import sample_stream
from composer_replication.replica import ranks

pytestmark = pytest.mark.integration


def read(process, folder, away_s):
    """All that a rank reads of a stream, whose coordinator answers late and to one rank alone."""
    process.of_rank(folder, 2, timeout_s=4.0)
    ranks.POLL_S = 0.1

    def lease(number, epoch):
        time.sleep(away_s)
        if number or dist.get_rank():  # its state is lost, and with it the stream
            return Lease(number, epoch, 0, 0, 0, 0, is_open=False)
        return Lease(number, epoch, 0, 0, 10, 0)

    spec = DatasetSpec("numbers", 20, seed=0, unit_size=10, shuffle=False)
    reader = sample_stream.StreamReader(spec, lease, sample_stream.StreamPosition())
    return reader.read(20, 0), reader.read(20, 0), reader.is_closed


@pytest.mark.parametrize("away_s", [0.0, pytest.param(6.0, marks=pytest.mark.slow)])
def test_a_coordinator_that_loses_its_state_between_two_late_answers_parts_no_ranks(
    tmp_path, away_s
):
    # Ranks wait longer for it than a collective may take.
    expected = ([*range(10)], [], True)
    assert run_groups(read, 2, folder=str(tmp_path), away_s=away_s) == [expected] * 2
