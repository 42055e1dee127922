"""Trains one cell of the study, on the code that a run uses, and evaluates the global weights."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import count, repeat
from typing import Any

import torch
import two_bits
from cells import EARLY_STEPS, Cell
from composer.optim import DecoupledAdamW
from inner_state import QuasiHyperbolicMuon, RisingMomentum, average_inner_state, fill_inner_state
from jobs import MODELS, data_of
from torch import nn
from torchft.data import DistributedSampler

from composer_replication import DiLoCo, simulate
from composer_replication.diloco import hang_watch
from composer_replication.simulation import Fault, SimulationError
from examples.quickstart.byte_gpt import BitsPerByte
from examples.quickstart.muon import Muon

PRETRAINED = Cell(
    model="small", data="manual", batch=16, lr=1.5e-3, warmup=20, final_lr=0.0, beta2=0.999
)
"""How a model that is not fresh was trained, but for the steps and the seed: data parallel."""


def train(cell: Cell) -> dict[str, Any]:
    """Train a cell to its end.

    Args:
        cell: The training.

    Returns:
        ``text``, the name of what it was trained and evaluated on; ``bits``, held-out bits per byte
        (of a picture: per label) of the global weights at the end; ``accuracy`` there; ``loss``,
        the training loss of group 0 in nats, as a mean over each 60th of the run; ``held_out``, as
        ``bits`` along the run, if it is asked for; ``seconds``, and those of a processor.
    """
    began, used = time.monotonic(), time.process_time()
    if cell.wire_format == two_bits.NAME:
        two_bits.register()
    curve: list[float] = []
    if cell.groups:
        model, losses = _simulated(cell, curve)
    else:
        model = _model(cell)
        losses = _steps(cell, model, _inner(cell, model), rank=0, curve=curve)
    bits, accuracy = (math.inf, 0.0) if model is None else _evaluate(cell, model)
    return {
        "text": data_of(cell.data, "train").name,
        "bits": round(bits, 5),
        "accuracy": round(accuracy, 5),
        "loss": [round(value, 4) for value in losses],
        **({"held_out": [round(value, 5) for value in curve]} if cell.curve else {}),
        "seconds": round(time.monotonic() - began, 1),
        "cpu_seconds": round(time.process_time() - used, 1),
    }


def _simulated(cell: Cell, curve: list[float]) -> tuple[nn.Module | None, list[float]]:
    _model(cell)  # what it was pretrained to is there now for all groups
    try:
        results = simulate(
            lambda sim: _group(cell, sim, curve),
            num_replicas=cell.groups + cell.away,
            faults=_comings_and_goings(cell),
            timeout_s=None,
        )
    except SimulationError as error:
        if "not finite" not in str(error):
            raise
        return None, []  # it has diverged, and that is a result
    digests = {result[2] for result in results if result is not None}
    assert len(digests) == 1, f"the groups ended on different weights: {digests}"
    return results[0][:2]


def _group(cell: Cell, sim: Any, curve: list[float]) -> tuple[nn.Module, list[float], str]:
    model = _model(cell)
    inner = _inner(cell, model)
    if cell.periods:
        fill_inner_state(inner)
    outer: dict[str, Any] = {"outer_lr": cell.outer_lr, "outer_momentum": cell.outer_momentum}
    if cell.ramp:
        outer = {"outer_optimizer": RisingMomentum.of(cell)}
    diloco = DiLoCo(
        sim.manager,
        model,
        inner,
        num_replicas=cell.groups,
        sync_every=cell.early or cell.sync_every,
        schedule=_schedule(cell),
        num_fragments=cell.num_fragments,
        fragment_sync_delay=cell.delay,
        fragment_update_alpha=cell.alpha,
        wire_format=cell.wire_format,
        round_seconds="auto" if cell.step_times else None,
        sync_buffers="mean",
        **outer,
    )
    synced = 0

    def average(share: float = 1.0) -> None:
        nonlocal synced
        if cell.periods and diloco.outer_step > synced:
            synced = diloco.outer_step
            average_inner_state(sim.manager, inner, cell.periods, synced, share)

    with diloco:
        if diloco.has_joined_others:
            average(share=0.0)  # a joiner has none of its own, and takes the others'
        rank, own = sim.replica_id, [] if sim.replica_id else curve
        losses = _steps(cell, model, inner, rank=rank, after_step=average, curve=own)
        diloco.final_sync()
        return model, losses, diloco.global_digest()


def _schedule(cell: Cell) -> list[dict[str, Any]]:
    """Short rounds at the start, and other outer numbers, if the cell has such.

    Raises:
        ValueError: The cell needs what the package has no more.
    """
    if cell.merge != "mean" or cell.heal_inner_state != "own":
        raise ValueError(
            f"merge={cell.merge}, heal_inner_state={cell.heal_inner_state}: this arm trained with "
            "version 0.1.0, which had them; its results are in results.jsonl"
        )
    rounds = cell.rounds
    if cell.early:
        rounds = ((EARLY_STEPS // cell.early + 1, cell.sync_every), *rounds)
    rows: dict[int, dict[str, Any]] = {step: {"sync_every": steps} for step, steps in rounds}
    for step, lr, momentum in cell.outer:
        rows.setdefault(step, {}).update(outer_lr=lr, outer_momentum=momentum)
    return [{"outer_step": step, **rows[step]} for step in sorted(rows)]


class _Clock:
    """The time of the group whose thread asks: it goes on with the group's inner steps alone."""

    def __init__(self) -> None:
        self._own = threading.local()

    def monotonic(self) -> float:
        return getattr(self._own, "now", 0.0)

    def advance(self, seconds: float) -> None:
        self._own.now = self.monotonic() + seconds


_clock = _Clock()
hang_watch.time = _clock  # pyright: ignore[reportAttributeAccessIssue]


def _comings_and_goings(cell: Cell) -> list[Fault]:
    """The last of the groups die after a quarter of the steps; others join for the last quarter."""
    first = cell.groups - cell.away
    early, late = (_outer_steps(cell, steps) for steps in (cell.steps // 4, _joined_at(cell)))
    dead = [Fault("kill", group, early) for group in range(first, cell.groups)]
    joiners = range(cell.groups, cell.groups + cell.away)
    return dead + [Fault("late", group, late) for group in joiners]


def _joined_at(cell: Cell) -> int:
    return cell.steps * 3 // 4


def _outer_steps(cell: Cell, steps: int) -> int:
    """How many outer steps there are in the first ``steps`` inner steps."""
    if not cell.early:
        return steps // cell.sync_every
    return EARLY_STEPS // cell.early + (steps - EARLY_STEPS) // cell.sync_every


def _steps(
    cell: Cell,
    model: nn.Module,
    inner: torch.optim.Optimizer,
    *,
    rank: int,
    after_step: Callable[[], None] = lambda: None,
    curve: list[float],
) -> list[float]:
    step_time = cell.step_times[rank] if cell.step_times else 1.0
    steps = round(cell.steps / step_time)
    groups, done = cell.alone_of or max(1, cell.groups), 0
    if rank >= groups:  # in the place of a group that died
        rank, done = rank - cell.away, _joined_at(cell)
    for group in inner.param_groups:
        group.setdefault("initial_lr", group["lr"])
    schedule = torch.optim.lr_scheduler.LambdaLR(
        inner,
        lambda step: _decay(cell, max(0, step - cell.lag), steps),
        last_epoch=done - 1,
    )
    batches = _batches(cell, rank, groups)
    for _ in range(done):
        next(batches)
    every = max(1, steps // 60)
    losses, total = [], 0.0
    for step in range(done + 1, steps + 1):
        _clock.advance(step_time)
        batch = next(batches)
        inner.zero_grad()
        loss = model.loss(model(batch), batch)  # pyright: ignore[reportCallIssue]
        loss.backward()
        if cell.clip:
            nn.utils.clip_grad_norm_(model.parameters(), cell.clip)
        inner.step()
        after_step()
        schedule.step()
        total += loss.item()
        if step % every == 0:
            losses.append(total / every)
            total = 0.0
        if cell.curve and step % cell.curve == 0 and not rank:
            curve.append(_evaluate(cell, model)[0])
            model.train()
    return losses


def _decay(cell: Cell, step: int, steps: int) -> float:
    """Composer's cosine with warm-up."""
    if step < cell.warmup:
        return step / cell.warmup
    progress = (step - cell.warmup) / (steps - cell.warmup)
    return cell.final_lr + (1 - cell.final_lr) * (1 + math.cos(math.pi * progress)) / 2


def _batches(cell: Cell, rank: int, groups: int) -> Iterator[dict[str, torch.Tensor]]:
    """This group's batches. Those of all groups together are data parallel's, in the same order."""
    data = data_of(cell.data, "train")
    sampler = DistributedSampler(
        data,
        replica_rank=rank,
        num_replica_groups=groups,
        group_rank=0,
        num_replicas=1,
        shuffle=True,
        seed=cell.seed,
        drop_last=True,
    )
    order, at, epoch = [], 0, 0
    for size in _sizes(cell, groups):
        if at + size > len(order):
            sampler.set_epoch(epoch)
            order, at, epoch = list(sampler), 0, epoch + 1
        samples = [data[index] for index in order[at : at + size]]
        at += size
        yield {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def _sizes(cell: Cell, groups: int) -> Iterator[int]:
    """The samples in each of a group's batches, without end."""
    if not cell.batches:
        return repeat(cell.batch // groups)
    last = len(cell.batches) - 1
    return (cell.batches[min(last, step * len(cell.batches) // cell.steps)] for step in count())


_building = threading.Lock()  # initial weights come from torch's generator, which threads share


def _model(cell: Cell) -> nn.Module:
    with _building:
        torch.manual_seed(cell.seed)
        model = MODELS[cell.model]()
    if cell.after:
        model.load_state_dict(_pretrained(cell.after, cell.seed))
    return model


@lru_cache
def _pretrained(steps: int, seed: int) -> dict[str, torch.Tensor]:
    cell = replace(PRETRAINED, steps=steps, seed=seed)
    model = _model(cell)
    _steps(cell, model, _inner(cell, model), rank=0, curve=[])
    return model.state_dict()


def _inner(cell: Cell, model: nn.Module) -> torch.optim.Optimizer:
    betas = 0.9, cell.beta2
    if cell.inner == "muon":
        muon = QuasiHyperbolicMuon if cell.slow else Muon
        own = {"lr": cell.lr, "momentum": cell.momentum, "betas": betas, "weight_decay": 0.0}
        inner = muon(model.named_parameters(), **own)
        if isinstance(inner, QuasiHyperbolicMuon):
            inner.share = cell.slow
        return inner
    return DecoupledAdamW(model.parameters(), lr=cell.lr, betas=betas, weight_decay=1e-5)


@torch.no_grad()
def _evaluate(cell: Cell, model: nn.Module) -> tuple[float, float]:
    metric, data, right, labels = BitsPerByte(), data_of(cell.data, "eval"), 0, 0
    model.eval()
    for start in range(0, len(data), 64):
        samples = [data[i] for i in range(start, min(start + 64, len(data)))]
        batch = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
        logits = model(batch)
        metric.update(logits, batch["labels"])
        right += int((logits.argmax(-1) == batch["labels"]).sum())
        labels += batch["labels"].numel()
    return metric.compute().item(), right / labels
