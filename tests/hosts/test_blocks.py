"""The pages' blocks for Hugging Face's Trainer, as they stand.

Run: pytest tests/hosts/test_blocks.py

Each block trains one group, in a process and a folder of its own. What it calls ``model``, ``args``
and ``dataset`` is the reader's, and small here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

from page_blocks import ROOT, Block, blocks

READERS_OWN = """
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


def blocks_of_the_trainer() -> list[tuple[str, Block]]:
    pages = (ROOT / name for name in ("README.md", "docs/hugging-face.md", "docs/api.md"))
    return [
        (f"{page.name}:{block.line}", block)
        for page in pages
        for block in blocks(page)
        if block.language == "python" and "composer_replication.hf" in block.text
    ]


FOUND = blocks_of_the_trainer()


def test_each_page_has_a_block():
    assert len(FOUND) == 3


@pytest.mark.parametrize("block", [block for _, block in FOUND], ids=[name for name, _ in FOUND])
def test_a_block_of_a_page_trains_a_group(block: Block, tmp_path: Path):
    (tmp_path / "page.py").write_text(READERS_OWN + block.text)
    done = subprocess.run(
        [sys.executable, "page.py"],
        cwd=tmp_path,
        env=os.environ | {"NUM_REPLICA_GROUPS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "'diloco/outer_step'" in done.stdout
