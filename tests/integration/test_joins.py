"""Joins among real processes, a real lighthouse and real gloo: what they cost those in training.

Run: pytest -m integration tests/integration/test_joins.py. Nothing is faked; a slow copy waits for
an event, and what is hashed is counted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from common import take_step
from harness.processes import Process, run_groups
from lighthouse_page import heard_of
from torch import nn

from composer_replication.replica.heal import state_bytes

pytestmark = pytest.mark.integration

WAIT_S = 60.0
JOINER = 2


def train_until_joined(
    group: Process, before_round: Callable[[int], None] = lambda _: None
) -> list[tuple[int, int, str]]:
    """Rounds of two steps, until the joiner is in a sync, and two more.

    Args:
        group: This group.
        before_round: Called before each round, with the number of syncs so far.

    Returns:
        Of each sync the outer step, the number of groups and the digest of the parameters.
    """
    model = nn.Linear(300, 300, bias=False)
    seen: list[tuple[int, int, str]] = []
    rounds_after = 2
    with group.training(model, outer=None, num_replicas=2) as run:
        while rounds_after:
            for report in run.diloco.pop_finished_syncs():
                digest = run.diloco.global_digest()
                seen.append((report.outer_step, report.num_participants, digest))
            rounds_after -= has_joined(run.manager.members)
            before_round(len(seen))
            for _ in range(2):
                take_step(run.inner, -0.001 * (1 + group.replica_id))
    return seen


def has_joined(names: Iterable[str]) -> bool:
    return any(name.startswith(f"group_{JOINER}:") for name in names)


def train_while_a_joiner_downloads(group: Process) -> Any:
    if group.replica_id == JOINER:
        assert group.signal.wait(WAIT_S)
        return train_until_joined(group)
    is_copying, may_copy, rounds, dump = threading.Event(), threading.Event(), [], state_bytes.dump

    def slow_copy(content: Any, *, copies: bool = False) -> Any:
        body = dump(content, copies=copies)
        if copies:
            is_copying.set()
            assert may_copy.wait(WAIT_S)
        return body

    state_bytes.dump = slow_copy

    def before_round(round_number: int) -> None:
        if round_number == 1:
            group.signal.set()
            if group.replica_id == 0:  # the donor: it trains on while it copies
                assert is_copying.wait(WAIT_S)
        if is_copying.is_set() and not may_copy.is_set():
            assert not has_joined(heard_of(group.lighthouse_addr))
            rounds.append(round_number)
            if len(rounds) == 4:
                may_copy.set()
        threading.Event().wait(0.05)

    return train_until_joined(group, before_round), rounds


def test_a_joiner_that_is_still_downloading_is_in_no_quorum_and_keeps_nobody_waiting():
    (first, rounds), (second, _), joiner = run_groups(
        train_while_a_joiner_downloads, num_replicas=3
    )
    assert rounds == [1, 2, 3, 4]  # three syncs while it waited for its state
    assert [count for _, count, _ in first][:4] == [2, 2, 2, 2]
    assert first[-1][1] == 3
    digests = {step: digest for step, _, digest in first}
    assert all(digests[step] == digest for step, _, digest in (*second, *joiner) if step in digests)
    assert joiner[-1][0] in digests
