"""Short runs whose global digests must not change from one version to the next.

Inner steps are scripted: they multiply and add element by element, and each operation rounds once.
So a digest depends on the package alone, and on no processor's order of summation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from harness.groups import Group, run
from torch import Tensor, nn

from composer_replication.simulation.simulation import Fault

STEPS = 20
DELAYED = {"fragment_sync_delay": 1}
THREE = {"num_fragments": 3}
SAMPLES = (8, 3, 5, 2)
"""What each group counts for an inner step."""


class Scripted(nn.Module):
    """Three blocks, and buffers; their sizes leave a rest after each vector register."""

    def __init__(
        self,
        dtype: torch.dtype = torch.float32,
        counts: bool = False,
        frozen: Sequence[str] = (),
    ) -> None:
        super().__init__()
        shapes = ((37, 11), (13, 33), (201,))
        self.blocks = nn.ModuleList(nn.ParameterDict() for _ in shapes)
        for number, (block, shape) in enumerate(zip(self.blocks, shapes, strict=True)):
            assert isinstance(block, nn.ParameterDict)
            block["weight"] = nn.Parameter(numbers(shape, seed=number).to(dtype))
            block["bias"] = nn.Parameter(numbers(shape[-1:], seed=number + 10))
        self.register_buffer("mean", numbers((33,), seed=20))
        self.register_buffer("count", torch.tensor(0), persistent=counts)
        for name in frozen:
            self.get_parameter(name).requires_grad_(False)

    def forward(self, seeds: Sequence[int]) -> Tensor:
        """A loss whose gradients are those that ``scripted_step`` sets, for ranks under DDP."""
        parts = zip(self.parameters(), seeds, strict=True)
        return torch.stack([(p * gradient(p, seed)).sum() for p, seed in parts]).sum()


BASE = {"model": Scripted, "sync_every": 6, "sync_buffers": "none"}
"""Settings of every run that has no others."""


def settings_of(own: dict[str, Any]) -> dict[str, Any]:
    """All settings of a run, with the outer numbers unless it has an outer optimizer of its own."""
    return BASE | ({} if "outer" in own else {"outer_lr": 0.7, "outer_momentum": 0.9}) | own


def numbers(shape: Sequence[int], seed: int) -> Tensor:
    """Numbers in [-0.5, 0.5), the same on every machine: integers divided by a power of two."""
    count = torch.Size(shape).numel()
    mixed = (torch.arange(count) * 7919 + 104_729 * seed + 31) % 1024
    return ((mixed - 512) / 1024).reshape(tuple(shape))


def gradient(parameter: Tensor, seed: int) -> Tensor:
    """Noise and a pull towards zero, so that a step depends on where it begins."""
    noise = numbers(parameter.shape, seed) * 0.1
    return parameter.detach() * 0.03 + noise.to(parameter.dtype)


def seeds_of(model: nn.Module, group: int, step: int) -> list[int]:
    """A seed for the gradient of each parameter."""
    return [1000 * group + 17 * step + index for index, _ in enumerate(model.parameters())]


def scripted_step(model: Scripted, inner: torch.optim.Optimizer, group: int, step: int) -> None:
    """One inner step of SGD with learning rate 1, which only subtracts."""
    for parameter, seed in zip(model.parameters(), seeds_of(model, group, step), strict=True):
        parameter.grad = gradient(parameter, seed) if parameter.requires_grad else None
    buffer = model.get_buffer("mean")
    buffer.add_(numbers(buffer.shape, seed=group + step) * 0.01)
    model.get_buffer("count").add_(group + step)
    inner.step()


def train(
    group: Group,
    steps: Sequence[int] = range(STEPS),
    before_step: Callable[[Group, int], None] = lambda group, step: None,
) -> tuple[str, int] | bytes:
    """Train one group: the digest and the number of outer steps at the end, or a checkpoint."""
    for step in steps:
        before_step(group, step)
        group.diloco.count_samples(SAMPLES[group.id])
        group.diloco.count_tokens(3 * SAMPLES[group.id])
        scripted_step(group.model, group.inner, group.id, step)
    if steps[-1] < STEPS - 1:
        return group.save()
    return end(group)


def end(group: Group) -> tuple[str, int]:
    """Make the final sync: the digest and the number of outer steps."""
    group.end()
    return group.diloco.global_digest(), group.diloco.outer_step


def simulated(
    k: int, *faults: Fault, before_step: Any = None, **settings: Any
) -> Callable[[], tuple[str, int]]:
    """A simulation of k groups, all of which must end equal."""
    replica = partial(train, before_step=before_step) if before_step else train

    def simulation() -> tuple[str, int]:
        ends = {end for end in run(k, replica, *faults, **settings_of(settings)) if end is not None}
        assert len(ends) == 1, f"the groups differ: {ends}"
        return ends.pop()

    return simulation


def resumed(at: int, **settings: Any) -> Callable[[], tuple[str, int]]:
    """Two groups that stop after inner step ``at``, and continue from what they have saved."""

    def simulation() -> tuple[str, int]:
        of_all = settings_of(settings)
        saved = run(2, partial(train, steps=range(at)), **of_all)
        own = [{"saved": each} for each in saved]
        rest = partial(train, steps=range(at, STEPS))
        first, second = run(2, rest, own=own, **of_all)
        assert first == second
        return first

    return simulation


def freeze(group: Group, step: int) -> None:
    """Freeze a block in mid-round, as Composer's LayerFreezing does."""
    if step == 8:
        for parameter in group.model.blocks[0].parameters():
            parameter.requires_grad_(False)


def be_sick(group: Group, step: int) -> None:
    """Group 1 has a parameter that is not finite."""
    if (group.id, step) == (1, 9):
        group.model.get_parameter("blocks.1.weight").data[0, 0] = float("inf")


def fall_idle(group: Group, step: int) -> None:
    """Group 1 has nothing to train on for one sync."""
    if (group.id, step) == (1, 9):
        group.diloco.sync_idle()


def rows(*numbers: tuple[int, float, float]) -> list[dict[str, float]]:
    """A schedule of the outer learning rate and momentum."""
    names = ("outer_step", "outer_lr", "outer_momentum")
    return [dict(zip(names, row, strict=True)) for row in numbers]


FAULTS = (
    "kill kill_before_vote kill_after_vote restart fail_allreduce fail_commit stale_quorum late"
)
LATE = Fault("late", replica_id=1, step=2)

RUNS: dict[str, Callable[[], tuple[str, int]]] = {
    **{f"k = {k}": simulated(k) for k in (1, 2, 3, 4)},
    **{f"k = {k}, 3 fragments": simulated(k, **THREE) for k in (1, 2, 3, 4)},
    "delay 2": simulated(2, fragment_sync_delay=2),
    "delay 2, alpha 0.25": simulated(2, fragment_sync_delay=2, fragment_update_alpha=0.25),
    "3 fragments, delay 1, k = 3": simulated(3, **THREE, **DELAYED),
    "3 fragments, alpha 0.5": simulated(2, **THREE, fragment_update_alpha=0.5),
    **{
        f"{wire_format}, k = {k}": simulated(k, wire_format=wire_format)
        for wire_format in ("bfloat16", "int8", "fp4")
        for k in (2, 3)
    },
    "int8, 3 fragments, delay 1": simulated(2, wire_format="int8", **THREE, **DELAYED),
    "fp4, k = 4, 3 fragments": simulated(4, wire_format="fp4", **THREE),
    "weight_by steps": simulated(3, weight_by="steps"),
    "weight_by samples": simulated(3, weight_by="samples"),
    "weight_by tokens, 3 fragments": simulated(3, weight_by="tokens", **THREE),
    "sync_every 4 and 6": simulated(
        2, weight_by="steps", own=[{"sync_every": 4}, {"sync_every": 6}]
    ),
    "sync_every 3, 6 and 9, 3 fragments": simulated(
        3, weight_by="samples", own=[{"sync_every": n} for n in (3, 6, 9)], **THREE
    ),
    "buffers": simulated(2, sync_buffers="mean"),
    "buffers, k = 3, int8, 3 fragments": simulated(
        3, sync_buffers="mean", wire_format="int8", **THREE
    ),
    "buffers, an integer too, 3 fragments": simulated(
        3, sync_buffers="mean", model=partial(Scripted, counts=True), **THREE
    ),
    "schedule": simulated(
        2, schedule=rows((2, 0.5, 0.6), (3, 0.4, 0.0), (4, 0.6, 0.3)), sync_every=3
    ),
    "schedule, 3 fragments": simulated(2, schedule=rows((4, 0.5, 0.5)), **THREE, **DELAYED),
    "short rounds at the start": simulated(
        2, sync_every=3, schedule=[{"outer_step": 4, "sync_every": 6}], outer_momentum=0.5
    ),
    "plain outer SGD": simulated(2, outer_lr=0.9, outer_momentum=0.0),
    "outer momentum, not Nesterov's": simulated(3, outer_nesterov=False),
    "own outer optimizer": simulated(
        2,
        outer=lambda parameters: torch.optim.SGD(parameters, 0.5, weight_decay=0.01),
    ),
    "bfloat16 parameters": simulated(2, model=partial(Scripted, torch.bfloat16), **THREE),
    "frozen parameters": simulated(
        2, model=partial(Scripted, frozen=["blocks.0.weight", "blocks.2.bias"])
    ),
    "frozen during the run": simulated(2, before_step=freeze),
    "not finite": simulated(3, before_step=be_sick),
    "idle": simulated(2, before_step=fall_idle),
    **{f"fault: {kind}": simulated(3, Fault(kind, 1, 2)) for kind in FAULTS.split()},
    "fault: late": simulated(3, LATE),
    "fault: kill_in_heal": simulated(3, LATE, Fault("kill_in_heal", replica_id=1, step=2)),
    "fault: fail_heal": simulated(3, LATE, Fault("fail_heal", replica_id=1, step=2)),
    "fault: left_behind": simulated(3, Fault("left_behind", replica_id=1, step=2), sync_every=3),
    "fault: kill, int8, 3 fragments, delay 1": simulated(
        3, Fault("kill", 2, 4), wire_format="int8", **THREE, **DELAYED
    ),
    "fault: fail_allreduce, 3 fragments, delay 1": simulated(
        2, Fault("fail_allreduce", 0, 3), **THREE, **DELAYED
    ),
    "resume within a sync": resumed(11, fragment_sync_delay=2),
    "resume within a sync, 3 fragments, int8": resumed(9, **THREE, **DELAYED, wire_format="int8"),
    "resume within a round": resumed(9, num_fragments=3),
}
