"""What DiLoCo adds to a Composer checkpoint, in bytes and in seconds, as ratios.

    python benchmarks/checkpoint.py [--quick] [--json OUT] [--d-model 512] [--saves 7]

The same job with and without the callback, in one process; saves take turns, and the median counts.
The floor is what a resume cannot do without: model, inner optimizer, and twice the model in fp32
(local parameters and outer momentum; the global parameters are the saved model).
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from composer import Callback, Trainer
from results import command_line, write
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.utils.data import DataLoader

from composer_replication.callback import DiLoCoCallback
from composer_replication.simulation.simulation import simulate
from examples.quickstart.byte_gpt import ByteGPT

STREAMING = {
    "sync_every": 8,
    "num_fragments": 2,
    "fragment_sync_delay": 3,
    "fragment_update_alpha": 0.5,
}
BATCHES = 6
JOBS: dict[str, tuple[dict[str, Any] | None, torch.dtype]] = {
    "Composer alone": (None, torch.float32),
    "vanilla": ({"sync_every": 4}, torch.float32),
    "streaming, a fragment in flight": (STREAMING, torch.float32),
    "Composer alone, bf16 weights": (None, torch.bfloat16),
    "vanilla, bf16 weights": ({"sync_every": 4}, torch.bfloat16),
}


class Saves(Callback):
    """Saves in the middle of the second round, as often as is asked, and takes the time."""

    def __init__(self, path: Path, saves: int) -> None:
        self._path = path
        self._saves = saves
        self.seconds: list[float] = []
        self.num_bytes = 0
        self.trainer: Trainer | None = None

    def batch_checkpoint(self, state: Any, logger: Any) -> None:
        if state.timestamp.batch < BATCHES:
            return
        assert self.trainer is not None
        for _ in range(self._saves):
            self._path.unlink(missing_ok=True)
            began = time.perf_counter()
            self.trainer.save_checkpoint(str(self._path))
            self.seconds.append(time.perf_counter() - began)
        self.num_bytes = self._path.stat().st_size


def run(job: str, path: Path, d_model: int, saves: int) -> dict[str, float]:
    """Train to the middle of a round, save, and tell what that took."""
    settings, dtype = JOBS[job]
    taken = Saves(path, saves)

    def replica(sim: Any) -> None:
        torch.manual_seed(0)
        model = ByteGPT(d_model=d_model, n_heads=8, n_layers=8, max_seq_len=16).to(dtype)
        tokens = torch.zeros(16, dtype=torch.long)
        callbacks: list[Callback] = [taken]
        if settings is not None:
            callbacks.insert(0, DiLoCoCallback(manager=sim.manager, replica_id=0, **settings))
        trainer = Trainer(
            model=model,
            optimizers=torch.optim.AdamW(model.parameters(), lr=1e-4),
            train_dataloader=DataLoader([{"input_ids": tokens, "labels": tokens}] * 8, 1),
            callbacks=callbacks,
            max_duration=f"{BATCHES}ba",
            device="cpu",
            progress_bar=False,
            auto_log_hparams=False,
        )
        taken.trainer = trainer
        trainer.fit()
        trainer.close()
        numel = sum(p.numel() for p in model.parameters())
        each = torch.empty(0, dtype=dtype).element_size()
        result["model"], result["floor"] = each * numel, 3 * each * numel + 2 * 4 * numel

    result: dict[str, float] = {}
    simulate(replica, num_replicas=1)
    return result | {"bytes": taken.num_bytes, "seconds": statistics.median(taken.seconds)}


def main() -> None:
    parser = command_line(__doc__, quick="two saves of a small model")
    parser.add_argument("--d-model", type=int, default=512)
    parser.add_argument("--saves", type=int, default=7)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.d_model, arguments.saves = 64, 2
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for job in track(JOBS, "saving"):
            path = Path(folder) / "checkpoint.pt"
            found[job] = run(job, path, arguments.d_model, arguments.saves)
    table = Table("job", "MB", "/ alone", "/ floor", "seconds", "/ alone", "MB/s")
    for job, row in found.items():
        alone = found["Composer alone, bf16 weights" if "bf16" in job else "Composer alone"]
        row["bytes_ratio"], row["seconds_ratio"] = (
            row[key] / alone[key] for key in ("bytes", "seconds")
        )
        if row is not alone:
            row["bytes / floor"] = row["bytes"] / row["floor"]
        table.add_row(
            job,
            f"{row['bytes'] / 1e6:.1f}",
            f"{row['bytes_ratio']:.2f}",
            f"{row['bytes / floor']:.3f}" if row is not alone else "-",
            f"{row['seconds']:.2f}",
            f"{row['seconds_ratio']:.2f}",
            f"{row['bytes'] / row['seconds'] / 1e6:.0f}",
        )
    Console().print(table)
    write({"params": round(found["Composer alone"]["model"] / 4), "jobs": found}, arguments)


if __name__ == "__main__":
    main()
