"""What the callback costs in steps that do not sync, as a ratio.

    python benchmarks/step.py [--quick] [--json OUT] [--device gpu]

Composer's own fit loop with and without the callback, taking turns in one process; of each run the
median time of a batch counts.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from composer import Callback, Trainer
from results import command_line, report
from rich.progress import track
from torch.utils.data import DataLoader

from composer_replication.callback import DiLoCoCallback
from composer_replication.simulation.simulation import simulate
from composer_replication.training.byte_gpt import ByteGPT

WARM_UP = 10


class Times(Callback):
    """The time of each batch, from its end to the next one's."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def batch_end(self, state: Any, logger: Any) -> None:
        self.ends.append(time.perf_counter())

    @property
    def median(self) -> float:
        """Seconds a batch."""
        ends = self.ends[WARM_UP:]
        return statistics.median(b - a for a, b in zip(ends, ends[1:], strict=False))


def seconds_a_batch(with_callback: bool, batches: int, device: str) -> float:
    """Train, and never sync on the way."""
    times = Times()

    def replica(sim: Any) -> None:
        torch.manual_seed(0)
        model = ByteGPT(d_model=128, n_heads=4, n_layers=4, max_seq_len=64)
        tokens = torch.zeros(64, dtype=torch.long)
        samples = [{"input_ids": tokens, "labels": tokens}] * (8 * batches)
        diloco = DiLoCoCallback(
            manager=sim.manager,
            replica_id=0,
            sync_every=10 * batches,
        )
        trainer = Trainer(
            model=model,
            optimizers=torch.optim.AdamW(model.parameters(), lr=1e-3),
            train_dataloader=DataLoader(samples, 8),  # pyright: ignore[reportArgumentType]
            max_duration=f"{batches}ba",
            callbacks=[diloco, times] if with_callback else [times],
            device=device,
            progress_bar=False,
            auto_log_hparams=False,
        )
        trainer.fit()
        trainer.close()

    simulate(replica, num_replicas=1)
    return times.median


def main() -> None:
    """Measure, print a table, write the JSON."""
    parser = command_line(__doc__, quick="5 pairs of runs")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--batches", type=int, default=80)
    parser.add_argument("--device", default="cpu", help="as Composer calls them: cpu, gpu")
    arguments = parser.parse_args()
    pairs = 5 if arguments.quick else arguments.pairs
    ratios, alone = [], []
    for _ in track(range(pairs), "pairs of runs"):
        alone.append(seconds_a_batch(False, arguments.batches, arguments.device))
        ratios.append(seconds_a_batch(True, arguments.batches, arguments.device) / alone[-1])
    rows = {
        "with / without the callback": ratios,
        "without, ms a batch": [1000 * seconds for seconds in alone],
    }
    report(f"{pairs} pairs of runs", rows, arguments)


if __name__ == "__main__":
    main()
