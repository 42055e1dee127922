"""Wire formats between real groups: the same bits as in the simulation, and deaths in the middle.

Run: pytest -m integration tests/integration/test_wire_formats.py. Real: processes, the lighthouse,
torchft's Manager, gloo.
"""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from common import Constant, TinyMLP, batch, mse, plain_sgd, take_step
from integration.replicas import Group, run_groups

from composer_replication import simulate
from composer_replication.diloco import shards
from composer_replication.diloco.algorithm import DiLoCo

pytestmark = pytest.mark.integration

STREAMING = {
    "sync_every": 4,
    "num_fragments": 2,
    "fragment_sync_delay": 1,
    "fragment_update_alpha": 0.5,
}


def train(
    manager: AbstractContextManager[Any], replica_id: int, num_replicas: int, settings: dict
) -> list[str | None]:
    """The digests of all outer steps."""
    torch.set_num_threads(1)
    model = TinyMLP(width=200)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with (
        manager as entered,
        DiLoCo(
            entered,
            model,
            inner,
            num_replicas=num_replicas,
            digest_every=1,
            **settings,
        ) as diloco,
    ):
        for step in range(12):
            inner.zero_grad()
            mse(model, *batch(replica_id, step)).backward()
            inner.step()
        diloco.final_sync()
        return [report.global_digest for report in diloco.pop_finished_syncs()]


BUCKET = 2**13
"""Several buckets, the last one of another size."""


def train_for_real(group: Group, settings: dict) -> list[str | None]:
    shards.BUCKET = BUCKET
    return train(group.manager(), group.replica_id, group.num_replicas, settings)


@pytest.mark.parametrize("wire_format", ["bfloat16", "int8", "fp4"])
@pytest.mark.parametrize("schedule", [{"sync_every": 4}, STREAMING], ids=["vanilla", "streaming"])
def test_real_groups_come_to_the_bits_of_the_simulation(wire_format, schedule, monkeypatch):
    monkeypatch.setattr(shards, "BUCKET", BUCKET)
    settings = {**schedule, "wire_format": wire_format}
    seen = run_groups(train_for_real, num_replicas=3, settings=settings)
    simulated = simulate(
        lambda sim: train(nullcontext(sim.manager), sim.replica_id, 3, settings), num_replicas=3
    )
    assert seen == simulated
    assert seen[0] == seen[1] == seen[2] and len(set(seen[0])) == len(seen[0]) >= 3


def fail_in_an_exchange(
    group: Group, wire_format: str, fails_in: str, dies: bool
) -> list[tuple[int, int, float]]:
    """In the second sync group 1 dies, or gives up, after ten messages."""
    shards.BUCKET = 512 * 3
    model = Constant(0.0, w=(512 * 60,))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with (
        group.manager(timeout=20.0) as manager,
        DiLoCo(
            manager,
            model,
            optimizer,
            plain_sgd(),
            sync_every=1,
            num_replicas=group.num_replicas,
            wire_format=wire_format,
        ) as diloco,
    ):
        take_step(optimizer, -1.0)
        if group.replica_id == 1:
            call, calls = getattr(manager, fails_in), itertools.count()

            def call_or_fail(*arguments: Any, **named: Any) -> Any:
                if next(calls) == 10:
                    if dies:
                        group.kill()
                    manager.report_error(RuntimeError("a message could not be sent"))
                return call(*arguments, **named)

            setattr(manager, fails_in, call_or_fail)
        take_step(optimizer, -1.0)
        assert model.w.tolist() == pytest.approx([-2.0] * (512 * 60), rel=1e-5)
        reports = diloco.pop_finished_syncs()
        return [(r.num_participants, r.retries, r.sync_seconds) for r in reports]


@pytest.mark.parametrize("dies_in", ["all_to_all", "all_gather"])
def test_survivors_of_a_death_in_an_exchange_lose_nothing_and_do_not_wait(dies_in):
    one, _, other = run_groups(
        fail_in_an_exchange,
        num_replicas=3,
        killed={1},
        wire_format="int8",
        fails_in=dies_in,
        dies=True,
    )
    for seen in (one, other):
        assert [report[:2] for report in seen] == [(3, 0), (2, 1)]
        assert seen[1][2] < 10.0


@pytest.mark.parametrize(
    ("wire_format", "gives_up_in", "groups"),
    [
        ("float32", "allreduce", 2),
        ("int8", "all_gather", 2),
        ("int8", "all_to_all", 3),
        ("int8", "all_gather", 3),
    ],
)
def test_nobody_waits_for_the_messages_of_a_group_that_has_given_up(
    wire_format, gives_up_in, groups
):
    seen = run_groups(
        fail_in_an_exchange,
        num_replicas=groups,
        wire_format=wire_format,
        fails_in=gives_up_in,
        dies=False,
    )
    for reports in seen:
        assert [report[:2] for report in reports] == [(groups, 0), (groups, 1)]
        assert reports[1][2] < 10.0
