"""Three replica groups of two ranks each, six processes that hold one model.

Run: pytest tests/integration/test_composer_launchers.py. Real: everything, as on three machines:
Composer's launcher and torchrun (for the group that is killed: neither), DDP inside a group, the
lighthouse and gloo between them.
"""

import json
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from harness import commands
from harness.commands import RunningGroup
from waiting import wait_until

from composer_replication.replica.lighthouse import start_lighthouse

pytestmark = [pytest.mark.integration, pytest.mark.slow]

SCRIPT = Path(__file__).with_name("composer_group.py")
RANKS = (0, 1)


LAUNCHERS = [commands.COMPOSER, commands.TORCHRUN, None]
"""Of each group."""


@contextmanager
def running(folder: Path):
    """Groups, and a function that starts one of them again; none outlives this."""
    lighthouse = start_lighthouse(heartbeat_timeout_ms=2_000)

    def start(group: int) -> RunningGroup:
        return commands.start(
            group,
            len(RANKS),
            SCRIPT,
            folder,
            folder=folder,
            launcher=LAUNCHERS[group],
            NUM_REPLICA_GROUPS=str(len(LAUNCHERS)),
            TORCHFT_LIGHTHOUSE=lighthouse.address(),
        )

    running = [start(group) for group in range(len(LAUNCHERS))]
    try:
        yield running, start
    finally:
        for group in running:
            group.kill()
        lighthouse.shutdown()


def lines_of(folder: Path, group: int, rank: int) -> list[dict[str, Any]]:
    path = folder / f"{group}_{rank}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_six_ranks_are_equal_at_every_sync_after_a_group_was_killed_and_healed(tmp_path):
    # torchft picks a donor for each rank: with two healthy ones, whatever differs between them
    # makes the two ranks of the healed group differ for ever (research).
    def wait_for_step(group: int, more_than: int) -> int:
        def newest() -> int:
            steps = [line["outer_step"] for line in lines_of(tmp_path, group, 1)]
            return steps[-1] if steps and steps[-1] > more_than else 0

        return wait_until(newest)

    with running(tmp_path) as (six, start):
        killed_at = wait_for_step(2, 2)
        six[2].kill()
        survivors_at = wait_for_step(0, killed_at + 1)
        six[2] = start(2)
        back_at = wait_for_step(2, survivors_at)
        wait_for_step(2, back_at + 3)
        (tmp_path / "STOP").touch()
        for group in six:
            group.wait()

    held: dict[int, list[tuple[str, ...]]] = {}
    for group in range(3):
        for rank in RANKS:
            for line in lines_of(tmp_path, group, rank):
                assert line["is_level"], line
                found = line["local"], line["global"], line["ema"]
                held.setdefault(line["outer_step"], []).append(found)
    assert all(len(set(values)) == 1 for values in held.values())
    assert len(held[back_at]) == len(held[back_at + 3]) == 6
    assert len({values[0] for values in held.values()}) == len(held)  # they do train
    assert len(held[killed_at + 1]) == 4
    results = [json.loads(path.read_text()) for path in tmp_path.glob("*.result.json")]
    assert len(results) == 6 and len({result["global_digest"] for result in results}) == 1
