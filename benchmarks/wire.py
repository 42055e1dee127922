"""What a wire format costs: bytes, rounding, time, and what becomes of a training.

    python benchmarks/wire.py [--quick] [--json OUT] [--seeds 3] [--trainings float32 fp4]
                              [--config configs/quickstart.yaml]

First the formats alone, on the pseudo-gradient of a round of the quickstart's model: bytes, error
and bias against fp32, and seconds to encode and to decode against copying the same numbers. Then
the quickstart's training, two replica groups in one process (bitwise what real ones get), once for
each format and seed: the held-out loss as a ratio to that of float32 with the same seed.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from composer.utils import reproducibility
from floating_fp4 import FloatingFp4
from groups import context
from omegaconf import DictConfig
from results import SPREAD, Spread, command_line, spread, write
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from composer_replication.config_file import with_values
from composer_replication.diloco.averaging.wire_formats import BFloat16, Fp4, Int8, WireFormat
from composer_replication.diloco.averaging.wire_sizes import PART
from composer_replication.diloco.fragment_sync import FragmentSync
from composer_replication.training import load_config, simulate_replicas

ROUND = 25
FORMATS: dict[str, WireFormat] = {
    "bfloat16": BFloat16(),
    "int8": Int8(),
    "fp4": Fp4(),
    "E2M1 in blocks": FloatingFp4("E2M1"),
    "E3M0 in blocks": FloatingFp4("E3M0"),
    "E3M0 of one scale": FloatingFp4("E3M0", has_blocks=False),
}
TRAININGS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"wire_format": "bfloat16"},
    "int8": {"wire_format": "int8"},
    "fp4": {"wire_format": "fp4"},
}

CONFIG = Path(__file__).parent.parent / "configs" / "quickstart.yaml"


def train(config: DictConfig, name: str, seed: int, batches: str) -> float:
    """The held-out bits per byte after one training of two groups."""
    torch.set_num_threads(1)
    logging.getLogger("composer_replication").setLevel(logging.ERROR)
    own = {"seed": seed, "max_duration": batches, "eval_interval": batches}
    config = with_values(config, **own, callbacks={"diloco": TRAININGS[name]})
    with silence():
        first, second = simulate_replicas(config, 2)
    assert first["global_digest"] == second["global_digest"]
    return first["eval"]["BitsPerByte"]


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


def pseudo_gradient(config: DictConfig) -> Tensor:
    """That of one group after a round."""
    seen: list[Tensor] = []
    pack = FragmentSync.pack

    def watched(fragment: FragmentSync, *, is_joining: bool) -> None:
        pack(fragment, is_joining=is_joining)
        if fragment.mean.contribution:
            seen.append(torch.cat(fragment.mean.messages[:-1]).clone())

    config = with_values(config, max_duration=f"{ROUND}ba", eval_interval="1000ba")
    with replaced(FragmentSync, "pack", watched), silence():
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
        normal = torch.randn_like(values)
        found[name] = {
            "bytes / float32's": encoded.numel() / (4 * values.numel()),
            "relative error": error_of(wire_format, values, encoded),
            "bias": float(decoded @ values / (values @ values)) - 1,
            "on Gaussian numbers": error_of(wire_format, normal, encoded),
            "encode / copy": seconds(encode) / seconds(partial(other.copy_, values)),
            "decode / copy": seconds(decode) / seconds(partial(other.copy_, values)),
        }
    return found


def error_of(wire_format: WireFormat, values: Tensor, encoded: Tensor) -> float:
    """What rounding changes, as a part of the L2 norm."""
    decoded = torch.empty_like(values)
    wire_format.encode(values, encoded)
    wire_format.decode(encoded, decoded)
    return float((decoded - values).norm() / values.norm())


def seconds(call: Callable[[], object]) -> float:
    """The median of a few calls."""
    taken = []
    for _ in range(9):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def measure_trainings(
    config: DictConfig, names: Sequence[str], seeds: int, batches: str
) -> tuple[dict[str, Spread], dict[str, list[float]]]:
    """Ratios of held-out loss to float32's, and the losses themselves."""
    losses: dict[str, list[float]] = {name: [] for name in names}
    runs = [(config, name, config["seed"] + i, batches) for i in range(seeds) for name in names]
    # Two threads of a small model hold each other up: more trainings at a time than cores.
    with ProcessPoolExecutor(3 * (os.cpu_count() or 1) // 2, context) as pool:
        for run, loss in zip(
            track(runs, "trainings"), pool.map(train, *zip(*runs, strict=True)), strict=True
        ):
            losses[run[1]].append(loss)
            print(f"{run[1]}, seed {run[2]}: {loss:.5f} bits per byte", flush=True)
    ratios = {
        name: spread([a / b for a, b in zip(found, losses["float32"], strict=True)])
        for name, found in losses.items()
    }
    return ratios, losses


def main() -> None:
    """Measure, print the tables, write the JSON."""
    parser = command_line(__doc__, quick="one seed, one round: no result")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--trainings", nargs="+", choices=TRAININGS, default=list(TRAININGS), help="float32 first"
    )
    parser.add_argument("--config", type=Path, default=CONFIG)
    arguments = parser.parse_args()
    logging.getLogger("composer_replication").setLevel(logging.ERROR)
    reproducibility.seed_all(0)
    rounds = [f"callbacks.diloco.sync_every={ROUND}", "callbacks.diloco.schedule=[]"]
    config = load_config(arguments.config, rounds)
    if arguments.quick:
        config["eval_subset_num_batches"] = 2
    formats = measure_formats(pseudo_gradient(config))
    table = Table("format", *next(iter(formats.values())), title="on one pseudo-gradient")
    for name, row in formats.items():
        table.add_row(name, *(f"{value:.4g}" for value in row.values()))
    Console().print(table)
    names, seeds, batches = arguments.trainings, arguments.seeds, config["max_duration"]
    if arguments.quick:
        names, seeds, batches = ["float32", "int8", "fp4"], 1, f"{ROUND}ba"
    ratios, losses = measure_trainings(config, names, seeds, batches)
    title = f"held-out loss / float32's, {batches}, {seeds} seeds"
    table = Table("format", *SPREAD, "bits per byte", title=title)
    for name, value in ratios.items():
        numbers = [f"{value[key]:.5f}" for key in SPREAD]
        table.add_row(name, *numbers, ", ".join(f"{loss:.4f}" for loss in losses[name]))
    Console().print(table)
    write({"ratios": ratios, "formats": formats, "bits_per_byte": losses}, arguments)


if __name__ == "__main__":
    main()
