"""P7: when a sync fails or a peer dies in it, the others keep their inner steps and sync them."""

import pytest
from harness.groups import ALL, MOVES, TWO, traces

from composer_replication.simulation.simulation import Fault


def test_a_failed_sync_is_tried_again_and_loses_no_inner_step():
    # torchft drops the round: its survivor would stand at 8 instead of 6 after 4 steps.
    fault = Fault("fail_allreduce", replica_id=1, step=1)
    first, second = traces(2, (-1.0, -1.0), 4, fault, sync_every=2)
    assert first == second == [(9.0, 10.0), (8.0, 8.0), (7.0, 8.0), (6.0, 6.0)]


@pytest.mark.parametrize(("kind", "counts"), [
    ("kill", False),  # dead before it sent anything
    ("kill_before_vote", True),  # its part had arrived
    ("kill_after_vote", True),
])  # fmt: skip
def test_survivors_of_a_death_keep_every_step_wherever_it_strikes(kind, counts):
    fault = Fault(kind, replica_id=2, step=2)  # in the second sync
    *survivors, dead = traces(3, MOVES, 6, fault, sync_every=2)
    assert dead is None
    after = [10 - ALL, 10 - ALL - (ALL if counts else TWO)]
    after.append(after[-1] - TWO)
    for seen in survivors:
        assert [seen[i] for i in (1, 3, 5)] == [(x, x) for x in after]


def test_a_group_whose_vote_failed_takes_over_what_its_peers_committed():
    fault = Fault("fail_commit", replica_id=1, step=1)
    healthy, failed = traces(2, (-1.0, -1.0), 6, fault, sync_every=2)
    # Its retry is its peer's second sync, so it is one sync behind at the end: same theta then.
    assert healthy[-1] == (4.0, 4.0)
    assert failed[-1][1] in (4.0, 2.0)


@pytest.mark.parametrize("wire_format", ["float32", "int8"])
@pytest.mark.parametrize("stale", [0, 1, 2])
def test_a_quorum_id_used_twice_is_noticed_and_the_mean_is_right(stale, wire_format, caplog):
    # torchft sums two groups and divides by three: -4/3 instead of -2 (research).
    fault = Fault("stale_quorum", replica_id=stale, step=1)
    settings = {"sync_every": 2, "wire_format": wire_format, "timeout_s": 20}
    for seen in traces(3, (-1.0, -2.0, -3.0), 4, fault, **settings):
        assert [*seen[1], *seen[3]] == pytest.approx([6.0, 6.0, 2.0, 2.0], abs=1e-4)
    assert f"replica group {stale}: its row in the peer table is empty" in caplog.text
