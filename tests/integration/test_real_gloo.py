"""Several replica groups as processes. Run: pytest -m integration tests/integration

Real: processes, the torchft lighthouse and Manager, gloo over loopback. Nothing is faked. What the
algorithm computes is worked out by hand in the simulation (tests/promises); here
real groups come to the same bits, and to those of an independent implementation.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from common import Constant, take_step
from harness.groups import Group
from harness.processes import Process, run_groups
from integration.composer_ranks import digest_of
from torch import nn

from composer_replication import simulate
from composer_replication.diloco import division

pytestmark = pytest.mark.integration


# ---- P3 and P5, bit for bit, against DiLoCo written down again ------------------------------


class Assorted(nn.Module):
    """Of every kind: large, of no dimension, bf16, frozen, tied."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embedding = nn.Embedding(40, 25)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.half = nn.Linear(30, 20, dtype=torch.bfloat16)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.head = nn.Linear(25, 40)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        self.head.weight = self.embedding.weight


class Draws:
    """Inner steps of SGD on gradients that are drawn: other ones for each group, same each time."""

    def __init__(self, model: nn.Module, group: int) -> None:
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.01)
        self._generator = torch.Generator().manual_seed(group)

    def step(self) -> None:
        for parameter in self.parameters:
            drawn = torch.randn(parameter.shape, generator=self._generator)
            parameter.grad = drawn.to(parameter.dtype)
        self.optimizer.step()


ROUNDS, SYNC_EVERY = 3, 4
BUCKET = division.BUCKET
SMALL_BUCKET = 512
"""Several buckets, the last one of another size."""


def train(group: Group, draws: Draws) -> list[str]:
    """Train for ``ROUNDS`` rounds; the digest of the global parameters after each outer step."""
    for _ in range(ROUNDS * SYNC_EVERY):
        draws.step()
    group.end()
    return group.of_reports("global_digest")


def train_on_draws(process: Process, runs: list[dict[str, Any]]) -> list[list[str]]:
    """One run after the other, each with settings of its own, and a size of buckets."""
    seen = []
    for settings in runs:
        division.BUCKET = settings.pop("bucket", BUCKET)
        model = Assorted()
        inner = (draws := Draws(model, process.replica_id)).optimizer
        with process.training(model, SYNC_EVERY, inner=inner, outer=None, **settings) as group:
            seen.append(train(group, draws))
    return seen


def digests_of_vanilla_diloco() -> list[str]:
    """Algorithm 1 of arXiv 2311.08105 for two groups of ``Assorted``, in one process."""
    models = [Assorted() for _ in range(2)]
    draws = [Draws(model, group) for group, model in enumerate(models)]
    names = [name for name, p in models[0].named_parameters() if p.requires_grad]
    theta = [nn.Parameter(p.detach().float().clone()) for p in draws[0].parameters]
    outer = torch.optim.SGD(theta, lr=0.7, momentum=0.5, nesterov=True)
    digests = []
    for _ in range(ROUNDS):
        for own in draws:
            for _ in range(SYNC_EVERY):
                own.step()
        with torch.no_grad():
            for index, parameter in enumerate(theta):
                # From where training began: rounded to the model's dtype.
                began = parameter.to(draws[0].parameters[index].dtype).float()
                deltas = [began - own.parameters[index].float() for own in draws]
                parameter.grad = (deltas[0] + deltas[1]) / 2
            outer.step()
            for own in draws:
                for parameter, value in zip(own.parameters, theta, strict=True):
                    parameter.copy_(value)
        digests.append(digest_of(zip(names, theta, strict=True)))
    return digests


RUNS = {
    "default": {},
    "buckets of 64 elements": {"bucket": 64},
    "buckets of 1024 elements": {"bucket": 1024},
    "streaming with one fragment": {
        "fragment_patterns": ["*"],
        "fragment_sync_delay": 0,
        "fragment_update_alpha": 0.0,
    },
}


def test_two_groups_are_bitwise_vanilla_diloco_whatever_the_buckets():
    expected = digests_of_vanilla_diloco()
    assert len(set(expected)) == ROUNDS
    runs = [{"schedule": [], **settings} for settings in RUNS.values()]
    for group in run_groups(train_on_draws, runs=runs):
        assert dict(zip(RUNS, group, strict=True)) == dict.fromkeys(RUNS, expected)


STREAMING = {"num_fragments": 2, "fragment_sync_delay": 1, "fragment_update_alpha": 0.5}
SETTINGS = [
    {"wire_format": wire_format, "schedule": [], **timing}
    for wire_format in ("bfloat16", "int8", "fp4")
    for timing in ({}, STREAMING)
]


def test_real_groups_come_to_the_bits_of_the_simulation(monkeypatch):
    monkeypatch.setattr(division, "BUCKET", SMALL_BUCKET)
    runs = [{"bucket": SMALL_BUCKET, **settings} for settings in SETTINGS]
    first, second, third = run_groups(train_on_draws, num_replicas=3, runs=runs)
    assert first == second == third
    for settings, seen in zip(SETTINGS, first, strict=True):

        def replica(sim, settings=settings):
            draws = Draws(model := Assorted(), sim.replica_id)
            own = {"sync_every": SYNC_EVERY, "num_replicas": 3, "digest_every": 1, **settings}
            with Group(sim, model, inner=draws.optimizer, **own) as group:
                return train(group, draws)

        assert simulate(replica, num_replicas=3) == [seen] * 3, settings
        assert len(set(seen)) == len(seen) >= 3


# ---- deaths and failures in the middle of a sync ----------------------------------------------

PER_STEP = (-1.0, -2.0, -6.0)
TIMEOUT_S = 60.0


def failing(call: Callable[..., Any], at: int, fail: Callable[[], None]) -> Callable[..., Any]:
    """The same call, which fails before it is made for this time, counted from 0."""
    calls = itertools.count()

    def call_or_fail(*arguments: Any, **named: Any) -> Any:
        if next(calls) == at:
            fail()
        return call(*arguments, **named)

    return call_or_fail


def fail_in_an_exchange(
    group: Process, fails_in: list[tuple[str, str]], at: int, dies: bool
) -> list[list[tuple[int, int, float, list[float]]]]:
    """In the second sync of each run group 1 dies, or gives up, after so many messages."""
    division.BUCKET = 512 * 3
    seen = []
    for wire_format, name in fails_in:
        model = Constant(0.0, w=(512 * 200,))
        options = {"timeout": TIMEOUT_S}
        with group.training(model, 1, options=options, wire_format=wire_format) as run:
            take_step(run.inner, PER_STEP[group.replica_id])
            if group.replica_id == 1:
                error = RuntimeError("a message could not be sent")
                give_up = partial(run.manager.report_error, error)
                call = failing(getattr(run.manager, name), at, group.kill if dies else give_up)
                setattr(run.manager, name, call)
            take_step(run.inner, PER_STEP[group.replica_id])
            reports = run.diloco.pop_finished_syncs()
            theta = [model.w.min().item(), model.w.max().item()]
            seen.append([(r.num_participants, r.retries, r.sync_seconds, theta) for r in reports])
    return seen


@pytest.mark.parametrize(
    ("wire_format", "dies_in", "at"),
    [
        ("float32", "allreduce", 0),  # in the quorum, and nothing sent: the worst moment
        ("float32", "allreduce", 20),
        ("int8", "all_to_all", 10),
    ],
)
def test_survivors_of_a_death_in_a_sync_lose_nothing_and_do_not_wait(wire_format, dies_in, at):
    # One sees the broken connection at once, the other waits for the first one's next message:
    # for the whole timeout, in half of such deaths, unless the first one closes its own.
    (one,), killed, (other,) = run_groups(
        fail_in_an_exchange, 3, killed={1}, fails_in=[(wire_format, dies_in)], at=at, dies=True
    )
    assert killed is None
    for seen in (one, other):
        assert [report[:2] for report in seen] == [(3, 0), (2, 1)]
        assert seen[1][2] < TIMEOUT_S / 2
        # The mean of all three, then of the two whose steps are synced again: -3 and -3.5.
        assert seen[1][3] == pytest.approx([-6.5, -6.5], rel=1e-5)


def test_nobody_waits_for_the_messages_of_a_group_that_has_given_up():
    gives_up_in = [("float32", "allreduce"), ("int8", "all_to_all"), ("int8", "all_gather")]
    ends = run_groups(fail_in_an_exchange, 3, fails_in=gives_up_in, at=10, dies=False)
    for reports in itertools.chain.from_iterable(ends):
        assert [report[:2] for report in reports] == [(3, 0), (3, 1)]
        assert reports[1][2] < TIMEOUT_S / 2
        assert reports[1][3] == pytest.approx([-6.0, -6.0], rel=1e-5)
