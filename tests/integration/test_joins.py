"""Joins among real processes, a real lighthouse and real gloo: what they cost those in training.

Run: pytest -m integration tests/integration/test_joins.py. Nothing is faked; a slow copy waits for
an event, and what is hashed is counted.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable
from hashlib import sha256
from typing import Any

import pytest
from common import take_step
from integration.replicas import Group, kept_messages, run_groups
from torch import nn

from composer_replication.diloco.global_state import GlobalState
from composer_replication.replica import peer_server
from composer_replication.replica.heal import state_bytes
from composer_replication.replica.lighthouse import read_status
from composer_replication.replica.peer_client import PeerClient

pytestmark = pytest.mark.integration

WAIT_S = 60.0
JOINER = 2
NUM_BYTES = 8 * 300 * 300
"""Of the state that a joiner takes over: the parameters and the outer momentum."""


def train_until_joined(
    group: Group, before_round: Callable[[int], None]
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
    with group.training(model, outer=None, num_replicas=2, digest_every=100) as run:

        def note() -> None:
            for report in run.diloco.pop_finished_syncs():
                digest = run.diloco.global_digest()
                seen.append((report.outer_step, report.num_participants, digest))

        note()
        while rounds_after:
            rounds_after -= has_joined(run.manager.members)
            before_round(len(seen))
            for _ in range(2):
                take_step(run.inner, -0.001 * (1 + group.replica_id))
            note()
    return seen


def has_joined(members: tuple[str, ...]) -> bool:
    return any(name.startswith(f"group_{JOINER}:") for name in members)


def is_heard_of(group: Group) -> bool:
    return has_joined(tuple(read_status(group.lighthouse_addr).heard_of))


def step_of_the_others(group: Group) -> int:
    return max(member.step for member in read_status(group.lighthouse_addr).members)


def check_equal(*groups: list[tuple[int, int, str]]) -> None:
    held: dict[int, set[str]] = {}
    for seen in groups:
        for outer_step, _, digest in seen:
            held.setdefault(outer_step, set()).add(digest)
    assert all(len(digests) == 1 for digests in held.values())


# ---- nothing in the quorum -----------------------------------------------------------------------


class Counted:
    """Counts what is hashed with SHA-256, in bytes."""

    total = 0

    def __init__(self, data: Any = b"") -> None:
        self._hash = sha256()
        self.update(data)

    def update(self, data: Any) -> None:
        Counted.total += len(data)
        self._hash.update(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._hash, name)


def count_what_a_join_hashes(group: Group) -> Any:
    if group.replica_id == JOINER:
        assert group.signal.wait(WAIT_S)
        return train_until_joined(group, lambda _: None)
    library: Any = hashlib

    def before_round(round_number: int) -> None:
        if round_number == 2:
            if group.replica_id == 0:  # the donor is through with its outer step
                group.signal.set()
            group.wait_until_somebody_asks()  # the joiner, which has loaded the state
            Counted.total, library.sha256 = 0, Counted
        if round_number == 3:
            library.sha256 = sha256

    return train_until_joined(group, before_round), Counted.total


def test_the_sync_of_a_join_hashes_nothing_if_the_state_was_fetched_ahead():
    (first, cost), (second, other_cost), joiner = run_groups(
        count_what_a_join_hashes, num_replicas=3
    )
    assert [count for _, count, _ in first] == [2, 2, 3, 3, 3]
    # global_digest, which this test calls, hashes the parameters once.
    assert max(cost, other_cost) < NUM_BYTES / 2 + 100_000
    check_equal(first, second, joiner)


# ---- nothing before it ---------------------------------------------------------------------------


def train_while_a_joiner_downloads(group: Group) -> Any:
    if group.replica_id == JOINER:
        assert group.signal.wait(WAIT_S)
        return train_until_joined(group, lambda _: None)
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
            assert not is_heard_of(group)
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
    check_equal(first, second, joiner)


def prepare_slowly(group: Group) -> Any:
    if group.replica_id != JOINER:
        is_overtaken = False

        def before_round(round_number: int) -> None:
            nonlocal is_overtaken
            if is_overtaken:
                group.wait_until_somebody_asks()
            while round_number == 2 and group.signal.is_set():  # until the joiner prepares
                threading.Event().wait(0.05)
            is_overtaken = round_number == 2
            if round_number == 1 and group.replica_id == 0:
                group.signal.set()

        return train_until_joined(group, before_round)
    what: list[str] = []
    fetch, stage, take_over = PeerClient.fetch, GlobalState.stage, GlobalState.take_over

    def noting_fetch(client: Any, *request: Any, into: Any, **more: Any) -> None:
        if len(into) > NUM_BYTES / 2:
            what.append("fetch")
        fetch(client, *request, into=into, **more)

    def slow_stage(state: Any, sent: Any) -> None:
        what.append("stage")
        if what.count("stage") == 1:  # the others sync once more, and then wait for it
            before = step_of_the_others(group)
            group.signal.clear()
            while step_of_the_others(group) == before:
                threading.Event().wait(0.05)
        stage(state, sent)

    def noting_take_over(state: Any, sent: Any, whose: str) -> None:
        what.append("take over what was staged" if state._staged[0] is sent else "take over")
        take_over(state, sent, whose)

    PeerClient.fetch, GlobalState.stage = noting_fetch, slow_stage  # type: ignore[method-assign]
    GlobalState.take_over = noting_take_over  # type: ignore[method-assign]
    assert group.signal.wait(WAIT_S)
    return train_until_joined(group, lambda _: None), what


def test_a_joiner_that_was_overtaken_prepares_again_and_not_in_the_quorum():
    first, second, (joiner, what) = run_groups(prepare_slowly, num_replicas=3)
    assert what == ["fetch", "stage", "fetch", "stage", "take over what was staged"]
    check_equal(first, second, joiner)


# ---- a donor that dies ---------------------------------------------------------------------------


def lose_the_donor_in_mid_download(group: Group) -> Any:
    if group.replica_id == JOINER:
        said = kept_messages(logging.INFO)
        assert group.signal.wait(WAIT_S)
        return train_until_joined(group, lambda _: None), said
    if group.replica_id == 0:

        def die_half_way(connection: Any, body: Any) -> None:
            send(connection, body[: len(body) // 2])
            if sum(map(len, body)) > NUM_BYTES / 2:
                group.kill()
            send(connection, body[len(body) // 2 :])

        send, peer_server._send_body = peer_server._send_body, die_half_way

    def before_round(round_number: int) -> None:
        if round_number == 1:
            group.signal.set()
        threading.Event().wait(0.05)

    return train_until_joined(group, before_round)


def test_a_donor_that_is_killed_in_mid_download_is_followed_by_the_next():
    _, second, (joiner, said) = run_groups(
        lose_the_donor_in_mid_download, num_replicas=3, killed=[0]
    )
    [broken] = [line for line in said if line.startswith("No global state from")]
    assert "was closed after" in broken
    fetching = [line for line in said if line.startswith("Fetching the global state")]
    assert len(fetching) >= 2  # the second one came from the other donor
    assert joiner[-1][1] == 2
    check_equal(second, joiner)
