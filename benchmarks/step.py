"""What the callback costs in steps that do not sync, as a ratio.

    python benchmarks/step.py [--quick] [--host hf] [--json OUT] [--device gpu]

The loop of Composer, or of Hugging Face's Trainer, with and without the callback, taking turns in
one process; of each run the median time of a step counts.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from typing import Any

import torch
from results import command_line, report
from rich.progress import track
from torch.utils.data import DataLoader

from composer_replication.simulation.simulation import simulate

WARM_UP = 10
BATCH_SIZE, LENGTH = 8, 64


def median_step(ends: list[float]) -> float:
    """Seconds a step, from one's end to the next one's."""
    ends = ends[WARM_UP:]
    return statistics.median(b - a for a, b in zip(ends, ends[1:], strict=False))


def in_composer(manager: Any, steps: int, device: str) -> list[float]:
    """Train in Composer, without DiLoCo if there is no manager; when each batch has ended."""
    from composer import Callback, Trainer

    from composer_replication.callback import DiLoCoCallback
    from examples.quickstart.byte_gpt import ByteGPT

    class Times(Callback):
        def batch_end(self, state: Any, logger: Any) -> None:
            ends.append(time.perf_counter())

    ends: list[float] = []
    callbacks: list[Callback] = [Times()]
    if manager is not None:
        own = {"replica_id": 0, "sync_every": 10 * steps, "schedule": []}
        callbacks.insert(0, DiLoCoCallback(manager=manager, **own))
    model = ByteGPT(d_model=128, n_heads=4, n_layers=4, max_seq_len=LENGTH)
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.AdamW(model.parameters(), lr=1e-3),
        train_dataloader=DataLoader(samples(steps), BATCH_SIZE),  # pyright: ignore[reportArgumentType]
        max_duration=f"{steps}ba",
        callbacks=callbacks,
        device=device,
        progress_bar=False,
        auto_log_hparams=False,
    )
    trainer.fit()
    trainer.close()
    return ends


def in_hugging_face(manager: Any, steps: int, device: str) -> list[float]:
    """The same in Hugging Face's Trainer; when each step has ended."""
    from transformers import (  # pyright: ignore[reportMissingImports]
        GPT2Config,
        GPT2LMHeadModel,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    from composer_replication.hf import DiLoCoTrainerCallback

    class Times(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            ends.append(time.perf_counter())

    ends: list[float] = []
    callbacks: list[TrainerCallback] = [Times()]
    if manager is not None:
        own = {"replica_id": "0", "sync_every": 10 * steps, "schedule": []}
        callbacks.insert(0, DiLoCoTrainerCallback(manager=manager, **own))
    size = {"n_positions": LENGTH, "n_embd": 128, "n_layer": 4, "n_head": 4}
    config = GPT2Config(vocab_size=256, bos_token_id=None, eos_token_id=None, **size)
    with tempfile.TemporaryDirectory() as folder:
        Trainer(
            model=GPT2LMHeadModel(config),
            args=TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=BATCH_SIZE,
                max_steps=steps,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                use_cpu=device == "cpu",
            ),
            train_dataset=samples(steps),  # pyright: ignore[reportArgumentType]
            callbacks=callbacks,
        ).train()
    return ends


HOSTS = {"composer": in_composer, "hf": in_hugging_face}


def samples(steps: int) -> list[dict[str, torch.Tensor]]:
    """As many as the steps read, all alike."""
    tokens = torch.zeros(LENGTH, dtype=torch.long)
    return [{"input_ids": tokens, "labels": tokens}] * (BATCH_SIZE * steps)


def seconds_a_step(host: str, with_callback: bool, steps: int, device: str) -> float:
    """Train, and never sync on the way."""

    def replica(sim: Any) -> list[float]:
        torch.manual_seed(0)
        return HOSTS[host](sim.manager if with_callback else None, steps, device)

    return median_step(simulate(replica, num_replicas=1)[0])


def main() -> None:
    """Measure, print a table, write the JSON."""
    parser = command_line(__doc__, quick="5 pairs of runs")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--batches", type=int, default=80)
    parser.add_argument("--host", choices=HOSTS, default="composer")
    parser.add_argument("--device", default="cpu", help="as Composer calls them: cpu, gpu")
    arguments = parser.parse_args()
    pairs = 5 if arguments.quick else arguments.pairs
    run = (arguments.batches, arguments.device)
    ratios, alone = [], []
    for _ in track(range(pairs), "pairs of runs"):
        alone.append(seconds_a_step(arguments.host, False, *run))
        ratios.append(seconds_a_step(arguments.host, True, *run) / alone[-1])
    rows = {
        "with / without the callback": ratios,
        "without, ms a batch": [1000 * seconds for seconds in alone],
    }
    report(f"{pairs} pairs of runs", rows, arguments)


if __name__ == "__main__":
    main()
