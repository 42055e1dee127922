"""What travels beside a sync is read as it was sent."""

import math

import pytest

from composer_replication.diloco.equal_samples import as_number
from composer_replication.diloco.outer_health import GroupMetrics
from composer_replication.diloco.peer_rows import PeerRow
from composer_replication.diloco.sample_ledger import SyncedSamples


def test_a_row_is_read_as_it_was_sent():
    row = PeerRow(
        has_more=True,
        is_joining=False,
        was_healed=True,
        outer_step=2**40,
        metrics=GroupMetrics(
            2.0**23, 2.0**-70, 2.0**-9, 2.0**60, 2.0**59, 2.0**20, 2.0**-20, math.inf
        ),
        samples=SyncedSamples(2**43 + 5, 2**40 + 2**22 - 1, 2**44 - 1),
        batches=as_number("f" * 64),
        digests=(as_number("0" * 64), 0),
    )
    with pytest.raises(ValueError, match="its row in the peer table has usual_pace=inf"):
        PeerRow.decode(row.encode(), 2)
    row = row._replace(metrics=row.metrics._replace(usual_pace=2.0**-30))
    assert PeerRow.decode(row.encode(), 2) == row
