"""What a wire format costs: bytes, rounding, time, and what becomes of a training.

    python benchmarks/wire.py [--quick] [--json OUT] [--seeds 3] [--config configs/quickstart.yaml]

First the formats alone, on the pseudo-gradient of a round of the quickstart's model: bytes, error
and bias against fp32, and seconds to encode and to decode against copying the same numbers. Then
the quickstart's training, two replica groups in one process (bitwise what real ones get), once for
each format and seed: the held-out loss as a ratio to that of float32 with the same seed.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import logging
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from composer.utils import reproducibility
from e3m0 import E3M0, E3M0OfOneScale
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from composer_replication.config import load_config
from composer_replication.diloco import encoded_mean
from composer_replication.diloco.fragment_sync import FragmentSync
from composer_replication.diloco.wire import BFloat16, Fp4, Int8, WireFormat
from composer_replication.diloco.wire_sizes import PART
from composer_replication.training import simulate_replicas

ROUND = 25
FORMATS: dict[str, WireFormat] = {
    "bfloat16": BFloat16(),
    "int8": Int8(),
    "fp4": Fp4(),
    "fp4, E3M0 in blocks": E3M0(),
    "fp4, E3M0 of one scale": E3M0OfOneScale(),
}
TRAININGS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"wire_format": "bfloat16"},
    "int8": {"wire_format": "int8"},
    "int8, no error feedback": {"wire_format": "int8", "error_feedback": False},
    "fp4": {"wire_format": "fp4"},
    "fp4, no error feedback": {"wire_format": "fp4", "error_feedback": False},
    "fp4, E3M0 in blocks": {"wire_format": "fp4"},
}


def train(config: dict[str, Any], name: str, seed: int, batches: str) -> float:
    """The held-out bits per byte after one training of two groups."""
    config = copy.deepcopy(config)
    config |= {"seed": seed, "max_duration": batches, "eval_interval": batches}
    config["callbacks"]["diloco"] |= TRAININGS[name]
    make: Callable[[str], WireFormat] = encoded_mean.make_wire_format
    if "E3M0" in name:
        make = lambda _: FORMATS[name]  # noqa: E731
    with replaced(encoded_mean, "make_wire_format", make), silence():
        first, second = simulate_replicas(config, 2)
    assert first["global_digest"] == second["global_digest"]
    return first["eval"]["bits_per_byte"]


@contextlib.contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Something else in a place inside the package, for a while."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """What Composer and we say while training is not what this is about."""
    warnings.filterwarnings("ignore")
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def pseudo_gradient(config: dict[str, Any]) -> Tensor:
    """That of one group after a round."""
    seen: list[Tensor] = []
    form = FragmentSync._save_grads

    def watched(fragment: FragmentSync) -> None:
        form(fragment)
        if fragment.contribution:
            seen.append(torch.cat(fragment.mean.messages[:-1]).clone())

    config = copy.deepcopy(config)
    config |= {"max_duration": f"{ROUND}ba", "eval_interval": "1000ba"}
    with replaced(FragmentSync, "_save_grads", watched), silence():
        simulate_replicas(config, 1)
    return seen[0]


def measure_formats(values: Tensor) -> dict[str, dict[str, float]]:
    """Bytes, error and bias of each format, and its time against that of a copy."""
    values = values[: values.numel() // PART * PART].clone()
    decoded, other = torch.empty_like(values), torch.empty_like(values)
    torch.set_num_threads(1)
    found = {}
    for name, wire_format in FORMATS.items():
        encoded = torch.empty(wire_format.num_bytes(values.numel()), dtype=torch.uint8)
        encode, decode = (
            partial(wire_format.encode, values, encoded),
            partial(wire_format.decode, encoded, decoded),
        )
        encode()
        decode()
        found[name] = {
            "bytes / float32's": encoded.numel() / (4 * values.numel()),
            "relative error": float((decoded - values).norm() / values.norm()),
            "bias": float(decoded @ values / (values @ values)) - 1,
            "encode / copy": seconds(encode) / seconds(partial(other.copy_, values)),
            "decode / copy": seconds(decode) / seconds(partial(other.copy_, values)),
        }
    return found


def seconds(call: Callable[[], object]) -> float:
    """The median of a few calls."""
    taken = []
    for _ in range(9):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def measure_trainings(
    config: dict[str, Any], names: Sequence[str], seeds: int, batches: str
) -> tuple[dict[str, dict[str, float]], dict[str, list[float]]]:
    """Ratios of held-out loss to float32's, and the losses themselves."""
    losses: dict[str, list[float]] = {name: [] for name in names}
    runs = [(config["seed"] + i, name) for i in range(seeds) for name in names]
    for seed, name in track(runs, "trainings"):
        losses[name].append(train(config, name, seed, batches))
        print(json.dumps({"training": name, "seed": seed, "bits_per_byte": losses[name][-1]}))
    ratios = {}
    for name, found in losses.items():
        each = [a / b for a, b in zip(found, losses["float32"], strict=True)]
        ratios[name] = {"median": statistics.median(each), "min": min(each), "max": max(each)}
    return ratios, losses


def main() -> None:
    """Measure, print the tables, write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one seed, one round: no result")
    parser.add_argument("--json", type=Path, help="write the ratios there")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--config", type=Path, default=Path("configs/quickstart.yaml"))
    arguments = parser.parse_args()
    logging.getLogger("composer_replication").setLevel(logging.ERROR)
    reproducibility.seed_all(0)
    config = load_config(arguments.config, [])
    if arguments.quick:
        config["eval_subset_num_batches"] = 2
    formats = measure_formats(pseudo_gradient(config))
    table = Table("format", *next(iter(formats.values())), title="on one pseudo-gradient")
    for name, row in formats.items():
        table.add_row(name, *(f"{value:.4g}" for value in row.values()))
    Console().print(table)
    names, seeds, batches = list(TRAININGS), arguments.seeds, config["max_duration"]
    if arguments.quick:
        names, seeds, batches = ["float32", "int8", "fp4"], 1, f"{ROUND}ba"
    ratios, losses = measure_trainings(config, names, seeds, batches)
    title = f"held-out loss / float32's, {batches}, {seeds} seeds"
    table = Table("format", "median", "min", "max", "bits per byte", title=title)
    for name, value in ratios.items():
        numbers = [f"{value[key]:.5f}" for key in ("median", "min", "max")]
        table.add_row(name, *numbers, ", ".join(f"{loss:.4f}" for loss in losses[name]))
    Console().print(table)
    if arguments.json is not None:
        found = {"ratios": ratios, "formats": formats, "bits_per_byte": losses}
        arguments.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
