"""Trainers as those of sentence-transformers. Run: pytest tests/hosts/test_loss_module.py

Their loss is a module with parameters of its own, which calls the model once for each column, with
features as a positional argument. Real: transformers, and in the last test processes and gloo.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.logged import kept_messages
from harness.processes import Process, run_groups
from torch import Tensor, nn

pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import Trainer, TrainerCallback

from composer_replication.hf import DiLoCoTrainerCallback
from composer_replication.hf_job import TrainerJob
from hosts.hf_trainers import arguments_of, callback_in
from hosts.host import ALONE


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(16, 4)

    def forward(self, features: dict[str, Tensor]) -> Tensor:
        return self.table(features["input_ids"], features["offsets"])


class PairLoss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.head = nn.Linear(8, 2)

    def forward(self, columns: list[dict[str, Tensor]], label: Tensor) -> Tensor:
        both = torch.cat([self.model(features) for features in columns], dim=1)
        return nn.functional.cross_entropy(self.head(both), label)


class ClearsGradients(TrainerCallback):
    """The Trainer clears those of its model alone."""

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        named["optimizer"].zero_grad()


class PairTrainer(Trainer):
    """The parts of a SentenceTransformerTrainer that a Trainer lacks."""

    def __init__(self, *args: Any, losses: Any, **named: Any) -> None:
        self.loss = losses
        super().__init__(*args, **named)

    def create_optimizer(self, *model: Any) -> Any:
        optimizer = super().create_optimizer(*model)
        own = {id(p) for p in self.model.parameters()}
        rest = [p for p in self.loss_of_all().parameters() if id(p) not in own]
        optimizer.add_param_group({"params": rest})
        return optimizer

    def loss_of_all(self) -> nn.Module:
        return self.loss["pairs"] if isinstance(self.loss, dict) else self.loss

    def compute_loss(self, model: Any, inputs: Any, *more: Any, **named: Any) -> Any:
        columns = [
            {key: inputs[f"{column}_{key}"] for key in ("input_ids", "offsets")}
            for column in ("anchor", "positive")
        ]
        return self.loss_of_all()(columns, inputs["label"])


def collate(rows: list[list[int]]) -> dict[str, Tensor]:
    """All tokens of a column in a row, as for an EmbeddingBag."""
    offsets = torch.arange(len(rows)) * 3
    columns = {
        f"{name}_{key}": value
        for name, shift in (("anchor", 0), ("positive", 1))
        for key, value in (
            ("input_ids", (torch.tensor(rows).flatten() + shift) % 16),
            ("offsets", offsets),
        )
    }
    return {**columns, "label": torch.tensor([sum(row) % 2 for row in rows])}


def trainer_of(
    folder: Path, diloco: DiLoCoTrainerCallback, group: int = 0, in_dict: bool = False, **args: Any
) -> PairTrainer:
    torch.manual_seed(group)
    model = Embedding()
    loss = PairLoss(model)
    rows = [[group + i, i + 1, 2 * i] for i in range(64)]
    return PairTrainer(
        model=model,
        args=arguments_of(folder, remove_unused_columns=False, **args),
        train_dataset=[[token % 16 for token in row] for row in rows],
        data_collator=collate,
        callbacks=[diloco, ClearsGradients()],
        losses={"pairs": loss} if in_dict else loss,
    )


def alone(folder: Path, in_dict: bool = False, **args: Any) -> tuple[PairTrainer, Any]:
    diloco = DiLoCoTrainerCallback(**ALONE, weight_by="samples")
    return trainer_of(folder, diloco, in_dict=in_dict, **args), diloco


@pytest.mark.parametrize("in_dict", [False, True])
def test_samples_are_counted_once_and_the_parameters_of_the_loss_are_synced(in_dict, tmp_path):
    trainer, diloco = alone(
        tmp_path, in_dict, gradient_accumulation_steps=2, save_strategy="steps", save_steps=8
    )
    before = trainer.loss_of_all().head.weight.clone()
    trainer.train()
    history = trainer.state.log_history
    assert [at["diloco/contribution"] for at in history if "diloco/round" in at] == [64, 64]
    saved = torch.load(tmp_path / "checkpoint-8" / "diloco.pt")
    name = "loss.0.head.weight" if in_dict else "loss.head.weight"
    assert saved["local"].keys() == {"model.table.weight", name, name.replace("weight", "bias")}
    assert saved["beside"].keys() == saved["local"].keys() - {"model.table.weight"}
    held = trainer.loss_of_all().head.weight
    assert not torch.equal(held, before)
    torch.testing.assert_close(held.data, saved["beside"][name], rtol=0, atol=0)


def test_a_resumed_training_has_the_loss_too(tmp_path):
    saves = {"save_strategy": "steps", "save_steps": 6, "max_steps": 12}
    trainer, whole = alone(tmp_path, **saves)
    trainer.train()
    shutil.rmtree(tmp_path / "checkpoint-12")
    again, resumed = alone(tmp_path, **saves)
    nn.init.zeros_(again.loss.head.weight)  # the Trainer does not load it
    again.train(resume_from_checkpoint=True)
    assert whole.result["global_digest"] == resumed.result["global_digest"]


def train(group: Process, folder: Path, same: bool) -> tuple[str, list[float], list[str]]:
    logged = kept_messages()
    with callback_in(group, 4) as diloco:
        shard = 0 if same else group.replica_id
        trainer = trainer_of(folder / str(group.replica_id), diloco, shard)
        trainer.train()
    head = trainer.loss.head.weight.flatten().tolist()
    return diloco.result["global_digest"], head, logged


@pytest.mark.integration
@pytest.mark.parametrize("same", [True, False])
def test_groups_end_with_equal_losses_and_are_told_of_equal_samples(same, tmp_path):
    (first, head, said), (second, other, _) = run_groups(train, folder=tmp_path, same=same)
    assert first == second
    assert head == other
    assert any("same samples" in line for line in said) == same


@pytest.mark.parametrize(
    ("batch", "samples", "tokens"),
    [
        ({"input_ids": torch.ones(4, 7), "labels": torch.ones(4)}, 4, 28),
        ({"labels": torch.ones(4), "attention_mask": torch.ones(4, 5), "input_ids": 0}, 4, 20),
        ({"anchor_input_ids": torch.ones(30), "anchor_offsets": torch.ones(8)}, 8, 30),
        ({"a_attention_mask": torch.ones(2, 3), "a_input_ids": torch.ones(2, 3)}, 2, 6),
        ({"prompt_mask": torch.ones(2, 3), "completion_mask": torch.ones(2, 4)}, 2, 14),
        ((torch.ones(5, 2), torch.ones(5)), 5, 0),
        (torch.ones(5, 2), 5, 0),
        ({"texts": ["a", "b"]}, 0, 0),
    ],
)
def test_samples_and_tokens_of_a_batch(batch, samples, tokens):
    job = TrainerJob()
    assert (job.size_of(batch, "samples"), job.size_of(batch, "tokens")) == (samples, tokens)
