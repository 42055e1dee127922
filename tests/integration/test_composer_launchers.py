"""Two replica groups of two ranks each, four processes that hold one model.

Run: pytest tests/integration/test_composer_launchers.py. Real: everything, as on two machines:
Composer's launcher or torchrun (where a group is killed: neither), DDP inside a group, the
lighthouse and gloo between them.
"""

import json
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from integration import groups
from integration.groups import RunningGroup
from waiting import wait_until

from composer_replication.replica.lighthouse import start_lighthouse

pytestmark = [pytest.mark.integration, pytest.mark.slow]

SCRIPT = Path(__file__).with_name("composer_group.py")
RANKS = (0, 1)


@contextmanager
def running(launcher: list[str] | None, num_groups: int, folder: Path, *arguments: object):
    """Groups, and a function that starts one of them again; none outlives this."""
    lighthouse = start_lighthouse(heartbeat_timeout_ms=2_000)

    def start(group: int) -> RunningGroup:
        return groups.start(
            group,
            len(RANKS),
            SCRIPT,
            folder,
            *arguments,
            folder=folder,
            launcher=launcher,
            # The others are forks, which need not import.
            is_fresh=launcher == groups.COMPOSER and group == 0,
            NUM_REPLICA_GROUPS=str(num_groups),
            TORCHFT_LIGHTHOUSE=lighthouse.address(),
        )

    running = [start(group) for group in range(num_groups)]
    try:
        yield running, start
    finally:
        for group in running:
            group.kill()
        lighthouse.shutdown()


def lines_of(folder: Path, group: int, rank: int) -> list[dict[str, Any]]:
    path = folder / f"{group}_{rank}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.parametrize(
    ("launcher", "dtype", "microbatch_size"),
    [
        pytest.param(groups.COMPOSER, "float32", 8, id="composer"),
        pytest.param(
            groups.TORCHRUN, "bfloat16", 4, id="torchrun_with_bf16_weights_and_microbatches"
        ),
    ],
)
def test_all_ranks_of_all_groups_hold_the_same_model(tmp_path, launcher, dtype, microbatch_size):
    with running(launcher, 2, tmp_path, dtype, microbatch_size) as (running_groups, _):
        for group in running_groups:
            group.wait()
    lines = {(group, rank): lines_of(tmp_path, group, rank) for group in (0, 1) for rank in RANKS}
    first = lines[0, 0]
    # The start, and a sync every two batches; each batch is one inner step.
    assert [line["outer_step"] for line in first] == [0, 1, 2, 3]
    assert [line["batch"] for line in first] == [0, 2, 4, 6]
    assert [line["inner_steps"] for line in first] == [0, 2, 4, 6]
    assert all(line["is_level"] for line in first)
    assert len({line["global"] for line in first}) == 4  # it did train
    assert len({line["ema"] for line in first}) == 4
    for seen in lines.values():
        assert seen == first
    results = [
        json.loads((tmp_path / f"{group}_{rank}.result.json").read_text())
        for group in (0, 1)
        for rank in RANKS
    ]
    assert {result["outer_steps"] for result in results} == {4}  # the last one in mid-round
    assert {result["inner_steps"] for result in results} == {7}
    assert len({result["global_digest"] for result in results}) == 1
    assert [result["replica_id"] for result in results] == ["0", "0", "1", "1"]


def test_six_ranks_are_equal_at_every_sync_after_a_group_was_killed_and_healed(tmp_path):
    # torchft picks a donor for each rank: with two healthy ones, whatever differs between them
    # makes the two ranks of the healed group differ for ever (research).
    arguments = (tmp_path, "float32", 8, 10_000, 0.25)

    def wait_for_step(group: int, more_than: int) -> int:
        def newest() -> int:
            steps = [line["outer_step"] for line in lines_of(tmp_path, group, 1)]
            return steps[-1] if steps and steps[-1] > more_than else 0

        return wait_until(newest)

    with running(None, 3, *arguments) as (six, start):
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
                found = line["local"], line["global"], line["ema"]
                held.setdefault(line["outer_step"], []).append(found)
    assert all(len(set(values)) == 1 for values in held.values())
    assert len(held[back_at]) == len(held[back_at + 3]) == 6
    assert len(held[killed_at + 1]) == 4
    results = [json.loads(path.read_text()) for path in tmp_path.glob("*.result.json")]
    assert len(results) == 6 and len({result["global_digest"] for result in results}) == 1
