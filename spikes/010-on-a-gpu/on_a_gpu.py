"""Does what ships help at a size that people train? A byte GPT of 10 million parameters on one GPU.

    python spikes/010-on-a-gpu/on_a_gpu.py                   # trains what is missing, 8 minutes
    python spikes/010-on-a-gpu/on_a_gpu.py --size 124m
    python spikes/010-on-a-gpu/on_a_gpu.py --report          # the tables of what there is

``README.md`` has the question and the design. A training that is in ``results.jsonl`` is not made
again, and none is begun that would not end within the minutes: give the command again to go on.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import subprocess
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from composer_replication import DiLoCo, simulate

RESULTS = Path(__file__).with_name("results.jsonl")
GROUPS = (2, 4, 8)
POINTS = 10
"""How often the held-out loss is evaluated in a training."""
WARMUP = 100
"""Inner steps in which the learning rate rises; at most a tenth of a training."""

PUBLISHED = {0: (18.129, -0.0953), 2: (18.768, -0.0969), 4: (19.762, -0.0992), 8: (21.051, -0.1018)}
"""Loss = A N^alpha by the number of groups, 0 for data parallel: arXiv 2503.09799, table 8."""


@dataclass(frozen=True)
class Size:
    """What is trained. Data parallel and all groups together have ``batch`` samples in a step."""

    width: int
    layers: int
    context: int
    batch: int
    steps: int
    lr: float
    sync_every: int
    megabytes: float

    @property
    def heads(self) -> int:
        """Of 64 numbers each."""
        return max(1, self.width // 64)


SIZES = {
    "tiny": Size(16, 1, 16, 8, 40, 1e-2, 2, 0.1),
    "10m": Size(384, 6, 512, 64, 3000, 1e-3, 50, 60.0),
    "124m": Size(896, 13, 512, 64, 1000, 6e-4, 20, 60.0),
}


@dataclass(frozen=True)
class Arm:
    """A training: data parallel with 0 groups, one group alone of so many, or groups."""

    groups: int = 0
    alone_of: int = 0

    @property
    def name(self) -> str:
        """How the table names it."""
        if self.alone_of:
            return f"one group alone, of {self.alone_of}"
        return f"{self.groups} groups, as shipped" if self.groups else "data parallel"


ARMS = (
    Arm(),
    *(arm for k in GROUPS for arm in (Arm(groups=k), Arm(alone_of=k))),
)


# ---- the text --------------------------------------------------------------------------------


class Text:
    """Source text that is on the machine: the files of its own site-packages.

    Args:
        megabytes: At most so much of it.
        device: Where its bytes lie.

    Attributes:
        train: Bytes, uint8.
        held_out: The bytes of other files: one of fifty.
        digest: Of both.
    """

    def __init__(self, megabytes: float, device: torch.device) -> None:
        parts: dict[bool, list[bytes]] = {True: [], False: []}
        left, digest = round(megabytes * 1e6), hashlib.sha256()
        for number, path in enumerate(_files()):
            content = path.read_bytes()[:left]
            left -= len(content)
            digest.update(content)
            parts[number % 50 == 0].append(content)
            if not left:
                break
        self.train, self.held_out = (
            torch.frombuffer(bytearray(b"\n".join(parts[which])), dtype=torch.uint8).to(device)
            for which in (False, True)
        )
        self.digest = digest.hexdigest()[:16]

    def batch(self, size: Size, seed: int, step: int, part: slice) -> Tensor:
        """Some of the samples of a step: ``context + 1`` bytes of random places, int64."""
        random = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(len(self.train) - size.context - 1, (size.batch,), generator=random)
        return _windows(self.train, starts[part], size.context)

    def evaluation(self, size: Size) -> Iterator[Tensor]:
        """Batches of the size of a step, evenly over the held-out files."""
        count = max(1, min(32, len(self.held_out) // (size.batch * (size.context + 1))))
        last = len(self.held_out) - size.context - 1
        starts = torch.linspace(0, last, count * size.batch).long()
        return (_windows(self.held_out, each, size.context) for each in starts.split(size.batch))


def _files() -> Iterator[Path]:
    """Python and C++ files by the hash of their place, so that each part has some of all."""
    root = Path(sysconfig.get_paths()["purelib"])
    paths = [path for end in ("py", "h", "cpp", "cuh") for path in root.rglob(f"*.{end}")]
    by_hash = {hashlib.sha256(str(p.relative_to(root)).encode()).digest(): p for p in paths}
    return (by_hash[key] for key in sorted(by_hash) if by_hash[key].stat().st_size)


def _windows(text: Tensor, starts: Tensor, context: int) -> Tensor:
    places = starts[:, None] + torch.arange(context + 1)
    return text[places.to(text.device)].long()


# ---- the model -------------------------------------------------------------------------------


class GPT(nn.Module):
    """A GPT over bytes. Its forward pass is a function of its tensors.

    So it is compiled once for the models of all groups, before their threads begin: torch's
    compiler fails in two threads at a time.
    """

    def __init__(self, size: Size, seed: int) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        width, out = size.width, 0.02 / math.sqrt(2 * size.layers)

        def matrix(rows: int, columns: int, spread: float = 0.02) -> nn.Parameter:
            return nn.Parameter(torch.randn(rows, columns, generator=random) * spread)

        self.tensors = nn.ParameterList([matrix(256, width), matrix(size.context, width)])
        for _ in range(size.layers):
            block = (
                nn.Parameter(torch.ones(width)),
                matrix(3 * width, width),
                matrix(width, width, out),
                nn.Parameter(torch.ones(width)),
                matrix(4 * width, width),
                matrix(width, 4 * width, out),
            )
            self.tensors.extend(block)
        self.tensors.append(nn.Parameter(torch.ones(width)))


def loss_of(tensors: Sequence[Tensor], ids: Tensor, heads: int) -> Tensor:
    """The mean loss of each next byte, in nats. On a GPU in bfloat16.

    Args:
        tensors: Of ``GPT``.
        ids: int64, (batch, context + 1).
        heads: Of attention.
    """
    embedding, places, *blocks, last = tensors
    width = embedding.shape[1]
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.is_cuda):
        x = embedding[ids[:, :-1]] + places
        for at in range(0, len(blocks), 6):
            before, qkv, out, between, up, down = blocks[at : at + 6]
            parts = functional.linear(functional.rms_norm(x, (width,), before), qkv).chunk(3, -1)
            q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in parts)
            seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + functional.linear(seen.transpose(1, 2).flatten(-2), out)
            hidden = functional.linear(functional.rms_norm(x, (width,), between), up)
            x = x + functional.linear(functional.gelu(hidden), down)
        logits = functional.linear(functional.rms_norm(x, (width,), last), embedding)
    return functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


# ---- a training ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """All that the trainings of a size have in common."""

    size: Size
    text: Text
    device: torch.device
    loss: Callable[[Sequence[Tensor], Tensor, int], Tensor]
    seed: int = 1


def train(task: Task, arm: Arm) -> dict[str, Any]:
    """Train an arm: its held-out loss in bits per byte along the training, and its seconds."""
    begun = time.monotonic()
    if arm.groups:
        ends = simulate(partial(_group, task), num_replicas=arm.groups, timeout_s=600)
        assert len({digest for _, digest in ends}) == 1, "the groups ended unequal"
        curve = ends[0][0]
    else:
        batch = task.size.batch // max(1, arm.alone_of)
        model, inner = _begin(task)
        curve = [
            _evaluate(task, model)
            for step in _steps(task, model, inner, slice(batch))
            if _is_point(task, step)
        ]
    return {"bits": curve[-1], "curve": curve, "seconds": round(time.monotonic() - begun, 1)}


def _group(task: Task, sim: Any) -> tuple[list[float], str]:
    model, inner = _begin(task)
    batch = task.size.batch // sim.num_replicas
    part = slice(sim.replica_id * batch, (sim.replica_id + 1) * batch)
    curve = []
    with DiLoCo(sim.manager, model, inner, sync_every=task.size.sync_every) as diloco:
        for step in _steps(task, model, inner, part):
            # A point is at the end of a round, when the model has the global weights.
            if _is_point(task, step) and not sim.replica_id:
                curve.append(_evaluate(task, model))
        diloco.final_sync()
        return curve, diloco.global_digest()


_building = threading.Lock()


def _begin(task: Task) -> tuple[GPT, torch.optim.Optimizer]:
    with _building:
        model = GPT(task.size, task.seed).to(task.device)
    own = {"lr": task.size.lr, "betas": (0.9, 0.95), "weight_decay": 0.1}
    return model, torch.optim.AdamW(model.parameters(), fused=task.device.type == "cuda", **own)


def _steps(task: Task, model: GPT, inner: torch.optim.Optimizer, part: slice) -> Iterator[int]:
    """Take all inner steps, and return the number of each."""
    size, tensors = task.size, list(model.tensors)
    warmup = min(WARMUP, size.steps // 10)
    for step in range(1, size.steps + 1):
        progress = max(0, step - warmup) / (size.steps - warmup)
        rate = min(1, step / warmup) * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))
        for group in inner.param_groups:
            group["lr"] = size.lr * rate
        inner.zero_grad()
        task.loss(tensors, task.text.batch(size, task.seed, step, part), size.heads).backward()
        nn.utils.clip_grad_norm_(tensors, 1.0)
        inner.step()
        yield step


def _is_point(task: Task, step: int) -> bool:
    return step % (task.size.steps // POINTS) == 0


@torch.no_grad()
def _evaluate(task: Task, model: GPT) -> float:
    tensors, size = list(model.tensors), task.size
    losses = [task.loss(tensors, ids, size.heads) for ids in task.text.evaluation(size)]
    return round(torch.stack(losses).mean().item() / math.log(2), 5)


def compiled(size: Size, device: torch.device) -> Callable[..., Tensor]:
    """``loss_of``, compiled for the batches of all arms."""
    loss = torch.compile(loss_of, dynamic=False)
    tensors = list(GPT(size, 0).to(device).tensors)
    for parts in (1, *GROUPS):
        ids = torch.zeros(size.batch // parts, size.context + 1, dtype=torch.int64, device=device)
        loss(tensors, ids, size.heads).backward()
    with torch.no_grad():
        whole = torch.zeros(size.batch, size.context + 1, dtype=torch.int64, device=device)
        loss(tensors, whole, size.heads)
    return loss


# ---- what came out ---------------------------------------------------------------------------


def read(path: Path, size: str) -> dict[str, Mapping[str, Any]]:
    """The results of a size by the arm's name. A line that was cut off counts as not made."""
    found = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            result = json.loads(line)
        except json.JSONDecodeError:
            continue
        if result["size"] == size:
            found[result["arm"]] = result
    return found


def _append(path: Path, result: Mapping[str, Any]) -> None:
    """Add a line, which begins a line of its own even if a killed run left half a one."""
    before = path.read_bytes() if path.exists() else b""
    begin = b"" if before[-1:] in (b"", b"\n") else b"\n"
    with path.open("ab") as file:
        file.write(begin + json.dumps(result).encode() + b"\n")


def run(path: Path, name: str, device: torch.device, minutes: float) -> None:
    """Train the arms that are not in the results, as far as the minutes go."""
    size, until = SIZES[name], time.monotonic() + 60 * minutes
    missing = [arm for arm in ARMS if arm.name not in read(path, name)]
    if not missing:
        return
    text = Text(size.megabytes, device)
    loss = compiled(size, device) if device.type == "cuda" else loss_of
    task = Task(size, text, device, loss)
    for arm in missing:
        longest = max((line["seconds"] for line in read(path, name).values()), default=0.0)
        if time.monotonic() + longest > until:
            print(f"{arm.name} and what follows: no time left, give the command again", flush=True)
            return
        where = ["git", "-C", str(path.parent), "describe", "--always", "--dirty"]
        commit = subprocess.run(where, capture_output=True, text=True, check=False).stdout.strip()
        made = {"size": name, "arm": arm.name, **train(task, arm)}
        made |= {"commit": commit, "torch": torch.__version__, "text": text.digest}
        made |= {"device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu"}
        _append(path, made)
        print(f"{arm.name}: {made['bits']:.3f} bits in {made['seconds']:.0f} s", flush=True)


def report(path: Path, name: str) -> str:
    """The results of a size: the last loss with the gain, and the loss along the trainings."""
    size, done = SIZES[name], read(path, name)
    params = sum(p.numel() for p in GPT(size, 0).parameters())
    base = done.get(Arm().name, {}).get("bits", math.nan)
    rows = [
        f"{params:,} parameters, {size.steps * size.batch * size.context / 1e6:.0f} M tokens, "
        f"sync_every {size.sync_every}",
        "",
        "| arm | bits per byte | above data parallel | published fit | gain | seconds |",
        "|---|---|---|---|---|---|",
    ]
    for arm in (arm for arm in ARMS if arm.name in done):
        bits, gain = done[arm.name]["bits"], "-"
        alone = done.get(Arm(alone_of=arm.groups).name)
        if arm.groups and alone:
            gain = f"{(alone['bits'] - bits) / (alone['bits'] - base):+.2f}"
        fit = f"+{100 * (published(params, arm.groups) - 1):.2f} %" if arm.groups else "-"
        rows.append(
            f"| {arm.name} | {bits:.3f} | {100 * (bits / base - 1):+.2f} % | {fit} | {gain} | "
            f"{done[arm.name]['seconds']:.0f} |"
        )
    tokens = [(at + 1) * size.steps * size.batch * size.context / POINTS for at in range(POINTS)]
    rows += ["", "| arm | " + " | ".join(f"{n / 1e6:.0f} M" for n in tokens) + " |"]
    rows += ["|---" * (POINTS + 1) + "|"]
    rows += [
        f"| {arm.name} | " + " | ".join(f"{bits:.3f}" for bits in done[arm.name]["curve"]) + " |"
        for arm in ARMS
        if arm.name in done
    ]
    return "\n".join(rows)


def published(params: float, groups: int) -> float:
    """The loss of so many groups over data parallel's, by the published fit."""
    (scale, power), (own_scale, own_power) = PUBLISHED[0], PUBLISHED[groups]
    return own_scale / scale * params ** (own_power - power)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="10m")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    parser.add_argument("--report", action="store_true", help="train nothing")
    given = parser.parse_args()
    if not given.report:
        run(given.results, given.size, torch.device(given.device), given.minutes)
    print(report(given.results, given.size))


if __name__ == "__main__":
    main()
