"""Trains one cell of the study, on the code that a run uses, and evaluates the global weights."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from functools import lru_cache
from itertools import count, repeat
from typing import Any

import torch
from cells import EARLY_STEPS, Cell
from composer.optim import DecoupledAdamW
from torch import nn
from torchft.data import DistributedSampler

from composer_replication import DiLoCo, simulate
from composer_replication.diloco import hang_watch
from composer_replication.simulation import Fault
from composer_replication.training import Muon
from composer_replication.training.byte_gpt import BitsPerByte, ByteGPT
from composer_replication.training.loaders import TextBytes

MODEL = {"d_model": 128, "n_heads": 4, "n_layers": 2, "max_seq_len": 128}
WARMUP = 50


@lru_cache
def text(split: str) -> TextBytes:
    """The source of Python's standard library, of which some files are held out."""
    return TextBytes(max_seq_len=MODEL["max_seq_len"], split=split)  # pyright: ignore[reportArgumentType]


def train(cell: Cell) -> dict[str, Any]:
    """Train a cell to its end.

    Args:
        cell: The training.

    Returns:
        ``text``, the name of what it was trained and evaluated on; ``bits``, held-out bits per byte
        of the global weights at the end; ``loss``, the training loss of group 0 in nats, as a mean
        over each 60th of the run; and ``seconds``.
    """
    began = time.monotonic()
    if cell.groups:
        results = simulate(
            lambda sim: _group(cell, sim),
            num_replicas=cell.groups + cell.away,
            faults=_comings_and_goings(cell),
            timeout_s=None,
        )
        digests = {result[2] for result in results if result is not None}
        assert len(digests) == 1, f"the groups ended on different weights: {digests}"
        model, losses, _ = results[0]
    else:
        model = _model(cell)
        losses = _steps(cell, model, _inner(cell, model), rank=0)
    return {
        "text": text("train").name,
        "bits": round(_evaluate(model), 5),
        "loss": [round(value, 4) for value in losses],
        "seconds": round(time.monotonic() - began, 1),
    }


def _group(cell: Cell, sim: Any) -> tuple[nn.Module, list[float], str]:
    model = _model(cell)
    inner = _inner(cell, model)
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
        outer_lr=cell.outer_lr,
        outer_momentum=cell.outer_momentum,
        wire_format=cell.wire_format,
        round_seconds="auto" if cell.step_times else None,
    )
    with diloco:
        losses = _steps(cell, model, inner, rank=sim.replica_id)
        diloco.final_sync()
        return model, losses, diloco.global_digest()


def _schedule(cell: Cell) -> list[dict[str, int]] | None:
    """Short rounds at the start, if the cell has such.

    Raises:
        ValueError: The cell needs what the package has no more.
    """
    if cell.merge != "mean" or cell.heal_inner_state != "own":
        raise ValueError(
            f"merge={cell.merge}, heal_inner_state={cell.heal_inner_state}: this arm trained with "
            "version 0.1.0, which had them; its results are in results.jsonl"
        )
    if not cell.early:
        return None
    return [{"outer_step": EARLY_STEPS // cell.early + 1, "sync_every": cell.sync_every}]


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


def _steps(cell: Cell, model: nn.Module, inner: torch.optim.Optimizer, *, rank: int) -> list[float]:
    step_time = cell.step_times[rank] if cell.step_times else 1.0
    steps = round(cell.steps / step_time)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        inner, lambda step: _decay(step, steps, cell.final_lr)
    )
    groups, done = max(1, cell.groups), 0
    if rank >= groups:  # in the place of a group that died
        rank, done = rank - cell.away, _joined_at(cell)
    batches = _batches(cell, rank, groups)
    for _ in range(done):
        next(batches)
        schedule.step()
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
        schedule.step()
        total += loss.item()
        if step % every == 0:
            losses.append(total / every)
            total = 0.0
    return losses


def _decay(step: int, steps: int, final: float) -> float:
    """Composer's cosine with warm-up."""
    if step < WARMUP:
        return step / WARMUP
    progress = (step - WARMUP) / (steps - WARMUP)
    return final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2


def _batches(cell: Cell, rank: int, groups: int) -> Iterator[dict[str, torch.Tensor]]:
    """This group's batches. Those of all groups together are data parallel's, in the same order."""
    data = text("train")
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
        yield {
            name: torch.stack([sample[name] for sample in samples])
            for name in ("input_ids", "labels")
        }


def _sizes(cell: Cell, groups: int) -> Iterator[int]:
    """The samples in each of a group's batches, without end."""
    if not cell.batches:
        return repeat(cell.batch // groups)
    last = len(cell.batches) - 1
    return (cell.batches[min(last, step * len(cell.batches) // cell.steps)] for step in count())


_building = threading.Lock()  # initial weights come from torch's generator, which threads share


def _model(cell: Cell) -> ByteGPT:
    with _building:
        torch.manual_seed(cell.seed)
        return ByteGPT(**MODEL)


def _inner(cell: Cell, model: nn.Module) -> torch.optim.Optimizer:
    if cell.inner == "muon":
        return Muon(
            model.named_parameters(),
            lr=cell.lr,
            momentum=cell.momentum,
            betas=(0.9, cell.beta2),
            weight_decay=0.0,
        )
    betas = 0.9, cell.beta2
    return DecoupledAdamW(model.parameters(), lr=cell.lr, betas=betas, weight_decay=1e-5)


@torch.no_grad()
def _evaluate(model: nn.Module) -> float:
    metric, data = BitsPerByte(), text("eval")
    for start in range(0, len(data), 64):
        samples = [data[i] for i in range(start, min(start + 64, len(data)))]
        batch = torch.stack([sample["input_ids"] for sample in samples])
        metric.update(
            model({"input_ids": batch}), torch.stack([sample["labels"] for sample in samples])
        )
    return metric.compute().item()
