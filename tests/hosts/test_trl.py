"""TRL and PEFT under DiLoCo, and the examples. Run: pytest tests/hosts/test_trl.py

Real: the examples under ``launch``, with a coordinator, torchrun, gloo; TRL's trainers elsewhere.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from common import are_equal

pytest.importorskip("trl", reason="trl is not installed")

from datasets import Dataset, concatenate_datasets, interleave_datasets
from harness.launching import ROOT, launch
from harness.logged import kept_messages
from harness.processes import Process, run_groups
from peft import LoraConfig
from torch.utils.data import IterableDataset, random_split
from transformers import LlamaForCausalLM
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from composer_replication.hf import DiLoCoTrainerCallback, replica_shard
from hosts.hf_trainers import QUIET, callback_in, in_group
from hosts.host import ALONE, weights_of

sys.path.insert(0, str(ROOT / "examples"))
from trl_models import tiny_llama, tokenizer_of_bytes


@pytest.mark.parametrize(
    ("example", "ranks"), [("train_sft.py", 1), ("train_grpo.py", 1), ("train_sft.py", 2)]
)
def test_an_example_trains_in_two_groups_that_end_equal(example, ranks, tmp_path):
    options = ["--nproc", ranks, "--set", "sync_every=5"]
    command = [sys.executable, ROOT / "examples" / example, "10"]
    summary, _ = launch(tmp_path, *options, "--", *command)
    assert [group["outer_steps"] for group in summary["replicas"]] == [2, 2]


# ---- alone: what is synced ------------------------------------------------------------------


def arguments(folder):
    return QUIET | {
        "output_dir": str(folder),
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "bf16": False,
    }


def sft(folder, diloco, **more):
    """A trainer of TRL, on a tiny model and a small text."""
    tokenizer = tokenizer_of_bytes()
    return SFTTrainer(
        model=tiny_llama(tokenizer),
        args=SFTConfig(max_length=32, **arguments(folder)),
        train_dataset=Dataset.from_list([{"text": f"the number {i}"} for i in range(32)]),
        processing_class=tokenizer,
        callbacks=[diloco],
        **more,
    )


def test_lora_syncs_what_is_trained_and_no_more(tmp_path):
    synced = {}

    class Looks(DiLoCoTrainerCallback):
        def on_optimizer_step(self, args, state, control, **kwargs):
            synced.update(self.diloco.global_parameters())

    looks = Looks(**ALONE)
    trainer = sft(tmp_path, looks, peft_config=LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    trainer.train()
    trained = {name for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert synced.keys() == trained and all("lora_" in name for name in trained)


def dpo(folder, diloco, **more):
    tokenizer = tokenizer_of_bytes()
    rows = [{"prompt": f"say {i}", "chosen": f" {i}", "rejected": f" {i + 1}"} for i in range(24)]
    return DPOTrainer(
        model=tiny_llama(tokenizer),
        ref_model=tiny_llama(tokenizer),
        args=DPOConfig(**arguments(folder), **more),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[diloco],
    )


def test_dpo_moves_the_model_and_not_its_reference(tmp_path):
    trainer = dpo(tmp_path, diloco := DiLoCoTrainerCallback(**ALONE))
    before = weights_of(trainer.ref_model)
    trainer.train()
    assert diloco.result["outer_steps"] == 2
    after = trainer.ref_model.state_dict()
    assert are_equal(after, before)
    assert not torch.equal(trainer.model.lm_head.weight, after["lm_head.weight"])


def move_the_reference(group: Process, folder: Path, moves: bool) -> list[str]:
    said = kept_messages()
    with callback_in(group, 3) as diloco:
        dpo(folder / str(group.replica_id), diloco, sync_ref_model=moves).train()
    return [each for each in said if "reference" in each]


@pytest.mark.parametrize("moves", [True, False])
def test_a_reference_that_follows_the_model_is_warned_of_by_name(moves, tmp_path):
    for messages in run_groups(move_the_reference, folder=tmp_path, moves=moves):
        assert len(messages) == moves
        assert all(re.match("sync_ref_model=True moves .* differs", each) for each in messages)


# ---- the data -------------------------------------------------------------------------------


def parts_of(dataset, groups, monkeypatch):
    """What each of several groups trains on."""
    monkeypatch.setenv("NUM_REPLICA_GROUPS", str(groups))
    parts = []
    for group in range(groups):
        monkeypatch.setenv("REPLICA_GROUP_ID", str(group))
        parts.append([row["x"] for row in replica_shard(dataset)])
    return parts


ROWS = list(range(32))
WHOLE = Dataset.from_dict({"x": ROWS})


@pytest.mark.parametrize("dataset", [WHOLE, [{"x": x} for x in ROWS]])
def test_groups_get_parts_of_equal_length_that_do_not_overlap(dataset, monkeypatch):
    parts = parts_of(dataset, 3, monkeypatch)
    assert [len(part) for part in parts] == [10, 10, 10]
    assert sorted(sum(parts, [])) == ROWS[:30]


def test_a_group_that_has_a_name_gets_no_part(monkeypatch):
    monkeypatch.setenv("NUM_REPLICA_GROUPS", "2")
    monkeypatch.setenv("REPLICA_GROUP_ID", "berlin")
    with pytest.raises(ValueError, match="'berlin' does not say which shard.*number the 2 groups"):
        replica_shard([1, 2, 3])


class Endless(IterableDataset):
    def __iter__(self):
        return iter(ROWS)


@pytest.mark.parametrize("shards", [1, 4])
def test_a_dataset_that_is_iterated_is_divided_if_it_is_one_of_datasets(shards, monkeypatch):
    parts = parts_of(WHOLE.to_iterable_dataset(shards), 2, monkeypatch)
    assert [len(part) for part in parts] == [16, 16]
    assert sorted(sum(parts, [])) == ROWS
    with pytest.raises(ValueError, match="Endless can only be iterated.*yield every 2-th in"):
        replica_shard(Endless())


def number(row, index):
    return {"number": index, **row}


# What keeps the samples from number 9 on, before replica_shard.
CUTS = {
    "skip": lambda stream: stream.skip(9),
    "skip, then map": lambda stream: stream.skip(9).map(dict),
    "take": lambda stream: stream.skip(9).take(11),
    "shuffle, then skip": lambda stream: stream.shuffle(seed=3, buffer_size=7).skip(9),
    "filter by index": lambda stream: stream.filter(lambda row, i: i >= 9, with_indices=True),
    "map by index": lambda stream: stream.map(number, with_indices=True).filter(
        lambda row: row["number"] >= 9
    ),
    "interleaved": lambda stream: interleave_datasets([stream.skip(9), stream.skip(20)]),
    "concatenated": lambda stream: concatenate_datasets([stream.skip(9), stream.take(4)]),
}


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("groups", [2, 3, 4])
def test_a_stream_that_was_cut_is_divided_by_samples(cut, groups, monkeypatch):
    stream = cut(WHOLE.to_iterable_dataset(4))
    parts = parts_of(stream, groups, monkeypatch)
    assert sorted(sum(parts, [])) == sorted(row["x"] for row in stream)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_stream_that_was_not_cut_is_divided_by_files(monkeypatch):
    stream = WHOLE.to_iterable_dataset(4).shuffle(seed=3).map(dict)
    monkeypatch.setenv("NUM_REPLICA_GROUPS", "2")
    monkeypatch.setenv("REPLICA_GROUP_ID", "1")
    assert replica_shard(stream).num_shards == 2  # it reads no file of the other group


def test_a_version_of_datasets_that_cannot_divide_by_samples_is_named(monkeypatch):
    def split_dataset_by_node(dataset, rank, world_size):
        raise AssertionError("the samples would leak")

    monkeypatch.setenv("REPLICA_GROUP_ID", "0")
    monkeypatch.setattr("datasets.distributed.split_dataset_by_node", split_dataset_by_node)
    with pytest.raises(ValueError, match="skip, take or with_indices.* needs datasets 5.1 or new"):
        replica_shard(WHOLE.to_iterable_dataset(4).skip(9))


def train_on_the_same(group: Process, folder: Path) -> list[str]:
    said = kept_messages()
    with callback_in(group, 3) as diloco:
        sft(folder / str(group.replica_id), diloco).train()
    return said


def test_groups_of_trl_on_the_same_samples_are_warned_of(tmp_path):
    said = "groups group_0 and group_1 train on the same samples, .* with replica_shard.dataset.; "
    for messages in run_groups(train_on_the_same, folder=tmp_path):
        assert any(re.match(said, message) for message in messages), messages


TEXTS = Dataset.from_list([{"text": f"the number {i}"} for i in range(64)])
OTHER_ORDERS = {
    "an unseeded shuffle": lambda: TEXTS.shuffle(),
    "an unseeded split": lambda: TEXTS.train_test_split(0.5)["train"],
    "a stream": lambda: TEXTS.to_iterable_dataset(4).shuffle(buffer_size=8),
    "torch's split": lambda: random_split([*TEXTS], [32, 32])[0],
    "other samples": lambda: TEXTS.select(range(64 - int(os.environ["REPLICA_GROUP_ID"]))),
}
SAME_ORDER = {
    "a seeded shuffle": lambda: TEXTS.shuffle(seed=3),
    "a seeded stream": lambda: TEXTS.to_iterable_dataset(4).shuffle(seed=3, buffer_size=8),
    "a random transform": lambda: TEXTS.with_transform(
        lambda rows: {"text": [f"{text} {torch.rand(())}" for text in rows["text"]]}
    ),
}


def divide(group: Process, folder: Path, data: str) -> list[str]:
    os.environ.update(REPLICA_GROUP_ID=str(group.replica_id), NUM_REPLICA_GROUPS="2")
    torch.manual_seed(group.replica_id)  # these processes are forks of one: their own, as others'
    np.random.seed(group.replica_id)
    replica_shard((OTHER_ORDERS | SAME_ORDER)[data]())
    said = kept_messages()
    with in_group(group, folder) as trainer:
        trainer.train()
    return [each for each in said if "divide" in each]


@pytest.mark.parametrize("data", [*OTHER_ORDERS, *SAME_ORDER])
def test_groups_that_divide_another_order_are_told_before_they_train(data, tmp_path):
    warning = (
        "groups group_0 and group_1 divide datasets by replica_shard that differ in samples or "
        "order, so some samples are read twice and others never: give all the same one, shuffled "
        "and split with the same seed"
    )
    for messages in run_groups(divide, folder=tmp_path, data=data):
        assert messages == [warning] * (data in OTHER_ORDERS)


def test_a_saved_model_is_loaded_by_from_pretrained(tmp_path):
    trainer = sft(tmp_path, DiLoCoTrainerCallback(**ALONE))
    trainer.train()
    trainer.save_model(str(tmp_path / "final"))
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "final")
    assert are_equal(loaded.state_dict(), trainer.model.state_dict())
