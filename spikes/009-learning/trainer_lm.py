"""A GPT-2 under Hugging Face's Trainer, over the docstrings of Python's standard library.

    python spikes/009-learning/trainer_lm.py --alone --batch 16   # data parallel of two groups
    python spikes/009-learning/trainer_lm.py --alone              # one group alone
    composer-replication launch --replicas 2 --set sync_every=20 -- \\
        python spikes/009-learning/trainer_lm.py                  # two groups

It prints the held-out loss in nats per byte, with the global weights in a replica group. It needs
`.[transformers]`. ``benchmarks/measured/trainer-lm.json`` has the results: the longer trainings
have the defaults, the shorter ones ``--steps 150 --accum 3 --length 128 --dim 64 --lr 2e-3``.
``OMP_NUM_THREADS=1`` repeats them.
"""

from __future__ import annotations

import argparse
import ast
import sysconfig
import tempfile
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from composer_replication.hf import DiLoCoTrainerCallback, replica_shard

HELD_OUT = 128
"""How many windows of the text are for the held-out loss: no training reads them."""


def docstrings() -> bytes:
    """Those of the modules, classes and functions of the standard library's single files."""
    found = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                found.append(ast.get_docstring(node))
    return "\n\n".join(text for text in found if text).encode()


class Windows(Dataset):
    """Rows of bytes, each of which is its own target."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def split(length: int, seed: int) -> tuple[Windows, Windows]:
    """The windows to train on, and those held out."""
    text = torch.tensor([*docstrings()])
    windows = text[: len(text) // length * length].reshape(-1, length)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(1 + seed))
    return Windows(windows[order[HELD_OUT:]]), Windows(windows[order[:HELD_OUT]])


def parse() -> argparse.Namespace:
    """Read the job from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--alone", action="store_true", help="one process, without DiLoCo")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=8, help="samples of one backward pass")
    parser.add_argument("--accum", type=int, default=1, help="backward passes in an inner step")
    parser.add_argument("--length", type=int, default=64, help="bytes in a sample")
    parser.add_argument("--dim", type=int, default=48, help="width of the model")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Train, and print the held-out loss."""
    its = parse()
    train, held_out = split(its.length, its.seed)
    set_seed(its.seed)
    shape = {"n_positions": its.length, "n_embd": its.dim, "n_layer": 2, "n_head": 4}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, use_cache=False, **shape, **ends))
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model,
            TrainingArguments(
                output_dir=folder,
                max_steps=its.steps,
                per_device_train_batch_size=its.batch,
                gradient_accumulation_steps=its.accum,
                learning_rate=its.lr,
                warmup_steps=20,
                lr_scheduler_type="cosine",
                per_device_eval_batch_size=32,
                eval_strategy="steps",
                eval_steps=its.steps // 3,
                save_strategy="no",
                logging_steps=10,
                report_to="none",
                seed=its.seed,
                use_cpu=True,
            ),
            train_dataset=train if its.alone else replica_shard(train),
            eval_dataset=held_out,
            callbacks=[] if its.alone else [DiLoCoTrainerCallback()],
        )
        trainer.train()
        print(f"held-out loss {trainer.evaluate()['eval_loss']:.5f}")


if __name__ == "__main__":
    main()
