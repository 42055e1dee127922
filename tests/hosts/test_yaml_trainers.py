"""The recipes of docs/yaml-trainers.md, each where its trainer is installed.

Run: pytest tests/hosts/test_yaml_trainers.py, in an environment with LLaMA-Factory or Axolotl.
They want other versions of transformers than ``make test-hf`` has. Real: the trainer's own command,
a tiny model on the CPU, two groups under ``launch``.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from harness.launching import ROOT, launch

pytestmark = [pytest.mark.integration, pytest.mark.slow]

STEPS = 40
OF_BOTH = {
    "output_dir": "out",
    "max_steps": STEPS,
    "learning_rate": 1e-3,
    "logging_steps": 10,
    "save_steps": 20,
    "use_cpu": True,
}
TRAINERS = {
    "llamafactory": (
        [str(ROOT / "examples" / "train_llamafactory.py")],
        {
            "model_name_or_path": "tiny",
            "stage": "sft",
            "do_train": True,
            "finetuning_type": "full",
            "dataset_dir": ".",
            "dataset": "numbers",
            "template": "default",
            "cutoff_len": 128,
            "per_device_train_batch_size": 4,
            "report_to": "none",
        },
    ),
    "axolotl": (
        ["-m", "axolotl.cli.train"],
        {
            "base_model": "tiny",
            "plugins": ["axolotl_diloco.DiLoCoPlugin"],
            "datasets": [{"path": "numbers.json", "ds_type": "json", "type": "alpaca"}],
            "dataset_prepared_path": "prepared",
            "sequence_len": 256,
            "micro_batch_size": 4,
            "gradient_accumulation_steps": 1,
            "num_epochs": 1,
            "optimizer": "adamw_torch",
            "lr_scheduler": "cosine",
            "bf16": False,
            "fp16": False,
            "tf32": False,
        },
    ),
}
"""For each trainer: its command without the YAML, and the YAML."""


@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_recipe_trains_two_groups_that_save_the_same_model(trainer: str, tmp_path: Path):
    if not find_spec(trainer):
        pytest.skip(f"{trainer} is not installed")
    command, own = TRAINERS[trainer]
    write_model_and_data(tmp_path)
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(OF_BOTH | own))
    paths = [str(ROOT), str(ROOT / "examples"), *sys.path]  # a command has no folder of its script
    offline = {"HF_HUB_OFFLINE": "1", "AXOLOTL_DO_NOT_TRACK": "1"}
    offline |= {"PYTHONPATH": os.pathsep.join(paths)}
    words = ["--set", "sync_every=10", "--", sys.executable, *command, "sft.yaml"]
    summary, said = launch(tmp_path, *words, **offline)
    assert [group["inner_steps"] for group in summary["replicas"]] == [STEPS, STEPS]
    assert "train on the same samples" not in said
    first, second = (tmp_path / "out" / name / "model.safetensors" for name in "01")
    assert first.read_bytes() == second.read_bytes()


def write_model_and_data(folder: Path) -> None:
    sys.path.insert(0, str(ROOT / "examples"))
    from trl_models import tiny_llama, tokenizer_of_bytes

    tokenizer = tokenizer_of_bytes()
    tiny_llama(tokenizer).save_pretrained(folder / "tiny")
    tokenizer.save_pretrained(folder / "tiny")
    rows = [{"instruction": f"say {n}", "input": "", "output": f"{n} {n}"} for n in range(256)]
    (folder / "numbers.json").write_text(json.dumps(rows))
    info = {"numbers": {"file_name": "numbers.json"}}
    (folder / "dataset_info.json").write_text(json.dumps(info))
