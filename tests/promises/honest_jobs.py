"""Honest groups that train small models, and what may befall one of them."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from harness.logged import logged
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from composer_replication import DiLoCo, simulate
from composer_replication.diloco.retry import SyncError
from composer_replication.simulation import Fault, SimulatedReplica

ALARMS = ("leaves out", "was left out", "not finite", "not sound")

# ---- the parts of a job --------------------------------------------------------------------------


def _mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(16, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 4)
    )


def _deep() -> nn.Module:
    """A model with a small last layer."""
    layers = nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 2)
    return nn.Sequential(*layers, nn.Tanh(), nn.Linear(2, 4))


def _norm_mlp() -> nn.Module:
    layers = nn.BatchNorm1d(16), nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4)
    return nn.Sequential(*layers)


def _conv() -> nn.Module:
    features = nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
    return nn.Sequential(nn.Unflatten(1, (1, 4, 4)), *features, nn.Linear(6, 4))


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "mlp": _mlp,
    "deep": _deep,
    "batch norm": _norm_mlp,
    "convolution": _conv,
}


def _warm(until: float, then: Callable[[float], float]) -> Callable[[float], float]:
    return lambda t: t / until if t < until else then((t - until) / (1 - until))


def _cosine(t: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * min(1.0, t)))


def _linear(t: float) -> float:
    return max(0.0, 1 - t)


SCHEDULES: Mapping[str, Callable[[float], float]] = {
    "constant": lambda t: 1.0,
    "cosine to 0": _cosine,
    "linear to 0": _linear,
    "warm-up from 0, cosine": _warm(0.2, _cosine),
    "warm-up from 0, constant": _warm(0.3, lambda t: 1.0),
    "cosine with restarts": lambda t: _cosine(3 * t % 1.0),
}
"""The learning rate's factor by the part of its steps that a group has taken."""

OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": partial(torch.optim.AdamW, lr=3e-3),
    "SGD with momentum": partial(torch.optim.SGD, lr=0.02, momentum=0.9),
    "SGD": partial(torch.optim.SGD, lr=0.1),
}


@dataclass(frozen=True)
class Job:
    """A training of several groups.

    Attributes:
        seed: Of its model and data.
        steps: Inner steps of each group.
        every: Inner steps in a round of each group.
        model: A key of ``MODELS``.
        optimizer: A key of ``OPTIMIZERS``.
        schedule: A key of ``SCHEDULES``: the learning rate by each group's own step.
        settings: Further arguments of ``DiLoCo``.
        thaws_at: Until which part of its steps a group trains the last layer only.
        faults: Restarts, from a checkpoint of this run, and late groups.
        own_schedule: Whether a late group begins the schedule at its start; else where others are.
        resumes_at: The part of the steps at which all groups stop and resume; 0: they do not.
        loudness: How large each group's inputs are.
    """

    seed: int
    steps: int
    every: Sequence[int]
    model: str = "mlp"
    optimizer: str = "AdamW"
    schedule: str = "constant"
    settings: Mapping[str, Any] = field(default_factory=dict)
    thaws_at: float = 0.0
    faults: Sequence[Fault] = ()
    own_schedule: bool = False
    resumes_at: float = 0.0
    loudness: Sequence[float] = ()


@dataclass
class Sickness:
    """What befalls a group of a job in one inner step.

    Attributes:
        kind: A key of ``KINDS``.
        group: The group's number.
        step: Its inner step.
        outer_step: The run's outer steps when it happened; -1 if it has not.
    """

    kind: str
    group: int
    step: int
    outer_step: int = -1

    def strike(self, number: int, step: int, diloco: DiLoCo, model: nn.Module) -> None:
        """Strike the group, once, after an inner step and before its sync."""
        if (number, step) == (self.group, self.step) and self.outer_step < 0:
            self.outer_step = diloco.outer_step
            theta = diloco.global_parameters()
            with torch.no_grad():
                for name, p in model.named_parameters():
                    p.copy_(KINDS[self.kind](theta[name], p))

    def was_named(self, outcome: Outcome, num_fragments: int) -> bool:
        """Whether the group was named and left out within two syncs of a fragment."""
        for text in outcome.messages:
            if f"leaves out replica group {self.group}," in text or "is not finite at" in text:
                after = int(re.findall(r"outer step (\d+)", text)[0]) - self.outer_step
                if 0 <= after <= 2 * num_fragments:
                    return True
        return False


def _one(values: Tensor, value: float) -> Tensor:
    changed = values.clone()
    changed.view(-1)[0] = value
    return changed


def _flip(values: Tensor) -> Tensor:
    """The highest bit of an exponent flips: numbers below 2 become huge."""
    bits = values.clone().view(torch.int32)
    bits.view(-1)[-1] ^= 1 << 30
    return bits.view(torch.float32)


KINDS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "NaN": lambda theta, local: _one(local, math.nan),
    "1e30": lambda theta, local: _one(local, 1e30),
    "a flipped bit": lambda theta, local: _flip(local),
    "1000 times": lambda theta, local: theta + 1000 * (local - theta),
    "-1000 times": lambda theta, local: theta - 1000 * (local - theta),
}
"""What becomes of the local parameters, given the global and the local ones."""


# ---- a run ---------------------------------------------------------------------------------------


class Trained:
    """What a group trains: all of it is in its checkpoint.

    Args:
        job: The job.
        number: The group's number, from 0.
    """

    def __init__(self, job: Job, number: int) -> None:
        self.job, self.number = job, number
        generator = torch.Generator().manual_seed(job.seed)
        self.model = MODELS[job.model]()
        with torch.no_grad():  # not from torch's generator, which all threads share
            for module in self.model.modules():
                for name, p in module.named_parameters(recurse=False):
                    if p.dim() > 1:
                        p.copy_(torch.randn(p.shape, generator=generator) / p.shape[-1] ** 0.5)
                    elif name == "bias":
                        p.zero_()
        self.truth = torch.randn(16, 4, generator=generator) / 4
        self.inner = OPTIMIZERS[job.optimizer](self.model.parameters())
        factor = SCHEDULES[job.schedule]
        self.schedule = LambdaLR(self.inner, lambda step: factor(min(1.0, step / job.steps)))
        self._parts = self.model, self.inner, self.schedule
        self.data = torch.Generator().manual_seed(1000 * job.seed + number)
        self.now = 0
        self.thaw(0)

    def thaw(self, step: int) -> None:
        """Freeze all but the last layer until its step has come."""
        is_frozen = step < self.job.thaws_at * self.job.steps
        *rest, weight, bias = self.model.parameters()
        for parameter in rest:
            parameter.requires_grad_(not is_frozen)

    def step(self, step: int) -> None:
        """Take an inner step."""
        self.now = step
        self.thaw(step)
        loudness = self.job.loudness[self.number] if self.job.loudness else 1.0
        noise = torch.randn(16, 16, generator=self.data)
        self.inner.zero_grad()
        y = torch.tanh(noise @ self.truth)
        has_norm = "Norm" in str(self.model)  # it is blind to how loud its inputs are
        x = noise * loudness if has_norm else noise
        nn.functional.mse_loss(self.model(x), y).backward()
        self.inner.step()
        self.schedule.step()

    def save(self, step: int, diloco: DiLoCo) -> dict[str, Any]:
        """A checkpoint."""
        states = [each.state_dict() for each in self._parts]
        data = self.data.get_state()
        return copy.deepcopy({"step": step, "states": states, "data": data}) | {
            "diloco": diloco.state_dict()
        }

    def load(self, saved: Mapping[str, Any], diloco: DiLoCo) -> int:
        """Load what ``save`` returned, and return the step."""
        for each, state in zip(self._parts, saved["states"], strict=True):
            each.load_state_dict(copy.deepcopy(state))
        self.data.set_state(saved["data"])
        diloco.load_state_dict(copy.deepcopy(saved["diloco"]))
        return saved["step"]


def train(
    job: Job, sim: SimulatedReplica, saved: dict[int, Any], stop: int, sickness: Sickness | None
) -> str:
    """Train a group from its checkpoint to a step. Returns how it has ended."""
    group = Trained(job, sim.replica_id)
    named = [name for name, _ in group.model.named_parameters()] if job.thaws_at else []
    diloco = DiLoCo(
        sim.manager,
        group.model,
        group.inner,
        sync_every=job.every[sim.replica_id],
        schedule=[],
        also_synced=named,
        **job.settings,
    )
    is_late = any(f.kind == "late" and f.replica_id == sim.replica_id for f in job.faults)
    first = group.load(saved[sim.replica_id], diloco) if sim.replica_id in saved else 0
    if sickness is not None:  # before DiLoCo's own hook
        strike = partial(sickness.strike, sim.replica_id)
        group.inner.register_step_post_hook(lambda *_: strike(group.now, diloco, group.model))
    try:
        with diloco:
            if not first and is_late and not job.own_schedule and saved:
                first = min(state["step"] for state in saved.values())
                for _ in range(first):
                    group.schedule.step()
            for step in range(first, stop):
                diloco.count_samples(16)
                group.step(step)
                if (step + 1) % (3 * job.every[sim.replica_id] + 1) == 0:
                    saved[sim.replica_id] = group.save(step + 1, diloco)
            if stop < job.steps:
                saved[sim.replica_id] = group.save(stop, diloco)
            else:
                diloco.final_sync()
    except SyncError as error:
        return f"left at its step {diloco.inner_steps}: {error}"
    return "ended"


@dataclass
class Outcome:
    """What has become of a job.

    Attributes:
        messages: What was logged.
        left: Groups that have left, with their errors.
    """

    messages: list[str]
    left: list[str]

    @property
    def alarms(self) -> list[str]:
        """Messages of groups that are left out."""
        return [text for text in self.messages if any(each in text for each in ALARMS)]


def run(
    job: Job, sickness: Sickness | None = None, stopped: Mapping[int, Any] | None = None
) -> Outcome:
    """Run a job.

    Args:
        job: The job.
        sickness: What befalls one of its groups.
        stopped: What ``stop`` has returned of this job, which then goes on from there.
    """
    saved = dict(stopped or {})
    stops = [_stop_of(job), job.steps] if job.resumes_at and not saved else [job.steps]
    ends: list[str] = []
    with logged() as messages:
        for at in stops:
            ends += _run_until(at, job, saved, sickness)
    return Outcome(messages, [end for end in ends if end not in (None, "ended")])


def stop(job: Job) -> dict[int, Any]:
    """Train until all groups stop to be resumed: what each has saved then."""
    saved: dict[int, Any] = {}
    _run_until(_stop_of(job), job, saved, None)
    return saved


def _stop_of(job: Job) -> int:
    return int(job.resumes_at * job.steps)


def _run_until(
    at: int, job: Job, saved: dict[int, Any], sickness: Sickness | None
) -> Sequence[str]:
    faults = () if saved else job.faults  # in the first part alone
    replica = partial(train, job, saved=saved, stop=at, sickness=sickness)
    return simulate(replica, num_replicas=len(job.every), faults=faults, timeout_s=120.0)
