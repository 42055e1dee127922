"""Hugging Face's Trainer on the CPU with ``DiLoCoTrainerCallback``, for the tests of it alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common import TinyMLP
from integration.replicas import Group
from transformers import Trainer, TrainingArguments

from composer_replication.hf import DiLoCoTrainerCallback
from hosts.hf_host import _Model, _rows
from hosts.host import held_out, own_batches


def arguments_of(folder: Path | str, **changed: Any) -> TrainingArguments:
    own = {
        "per_device_train_batch_size": 8,
        "max_steps": 8,
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "save_strategy": "no",
        "learning_rate": 0.01,
    }
    return TrainingArguments(output_dir=str(folder), **own | changed)


def trainer_of(group: Group, manager: Any, args: TrainingArguments, **more: Any) -> Trainer:
    callback = DiLoCoTrainerCallback(
        manager=manager,
        replica_id=str(group.replica_id),
        num_replicas=more.pop("num_replicas", group.num_replicas),
        sync_every=more.pop("sync_every", 4),
    )
    callbacks = [callback, *more.pop("callbacks", [])]
    trainer = Trainer(
        model=_Model(TinyMLP(group.replica_id)),
        args=args,
        train_dataset=_rows(own_batches(group.replica_id, 8)),
        eval_dataset=more.pop("eval_dataset", _rows([held_out()])),
        callbacks=callbacks,
        **more,
    )
    trainer.callback = callback
    return trainer


def alone(tmp_path: Path, **more: Any) -> Trainer:
    settings = more.pop("settings", {})
    diloco = DiLoCoTrainerCallback(num_replicas=1, replica_id="0", sync_every=4, **settings)
    trainer = Trainer(
        model=more.pop("model", None) or _Model(TinyMLP()),
        args=arguments_of(tmp_path, **more.pop("args", {})),
        train_dataset=_rows(own_batches(0, 8)),
        callbacks=[diloco, *more.pop("callbacks", [])],
        **more,
    )
    trainer.callback = diloco
    return trainer
