"""The pages' blocks for Hugging Face's Trainer, Lightning and accelerate, as they stand.

Run: pytest tests/hosts/test_blocks.py

Each block trains one group, in a process and a folder of its own. What it calls ``model``, ``args``
and ``dataset`` is the reader's, and small here; a block that is a file has all it needs.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from page_blocks import ROOT, Block, blocks

OF_TRAINER = """
import torch
from transformers import Trainer, TrainingArguments

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def forward(self, x, labels):
        return {"loss": (self.net(x) - labels).square().mean()}

model = Model()
dataset = held_out = [{"x": torch.ones(4), "labels": torch.zeros(1)} for _ in range(100)]
args = TrainingArguments("out", max_steps=100, use_cpu=True, report_to=[], save_strategy="no")
"""

OF_LIGHTNING = """
import os
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch, index):
        return (self.net(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

model = Model()
dataset = [(torch.ones(4), torch.zeros(1)) for _ in range(100)]
"""

OF_ACCELERATE = """
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
dataset = [(torch.ones(4), torch.zeros(1)) for _ in range(160)]

def loss_of(model, x, y):
    return (model(x) - y).square().mean()
"""

READERS_OWN = {
    "transformers": ("composer_replication.hf", OF_TRAINER, ""),
    "lightning": (
        "composer_replication.lightning",
        OF_LIGHTNING,
        "print({'diloco/outer_step': trainer.callbacks[0].result['outer_steps']})",
    ),
    "accelerate": (
        "accelerator.",
        OF_ACCELERATE,
        "print({'diloco/outer_step': diloco.outer_step})",
    ),
}
"""For each package: what marks a block that is for it, what its reader has, and what then tells of
the outer steps."""


def blocks_of_hosts() -> list[tuple[str, str, Block]]:
    pages = ("hugging-face", "api", "lightning", "loop")
    names = ("README.md", *(f"docs/{page}.md" for page in pages))
    return [
        (f"{name}:{block.line}", package, block)
        for name in names
        for block in blocks(ROOT / name)
        for package, (mark, *_) in READERS_OWN.items()
        if block.language == "python" and mark in block.text
    ]


FOUND = blocks_of_hosts()


def test_each_page_has_a_block():
    assert len(FOUND) == 5


@pytest.mark.parametrize(
    ("package", "block"), [each[1:] for each in FOUND], ids=[name for name, *_ in FOUND]
)
def test_a_block_of_a_page_trains_a_group(package: str, block: Block, tmp_path: Path):
    pytest.importorskip(package, reason=f"{package} is not installed")
    _, own, tells = READERS_OWN[package]
    is_whole = block.text.startswith("# train.py")
    (tmp_path / "page.py").write_text(f"{'' if is_whole else own}{block.text}\n{tells}\n")
    done = subprocess.run(
        [sys.executable, "page.py"],
        cwd=tmp_path,
        env=os.environ
        | {"NUM_REPLICA_GROUPS": "1", "REPLICA_GROUP_ID": "0"}
        | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"'diloco/outer_step': '?[1-9]", done.stdout)
