"""The constructors that a config can name, and the keys that each one accepts.

They are listed as strings, so that a config is checked without importing torch or Composer. A test
compares the keys with the constructors' signatures.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from composer_replication.diloco.settings import DiLoCoSettings
from composer_replication.replica.options import ReplicaOptions


@dataclass(frozen=True)
class Component:
    """A constructor that a config can name.

    Attributes:
        path: Import path, ``module:name``.
        keys: Arguments that a config may set.
        by_name: Of an optimizer, whether it is given ``named_parameters()`` of the model.
    """

    path: str
    keys: tuple[str, ...] = ()
    by_name: bool = False

    def load(self) -> Any:
        """Import the constructor and return it."""
        module, _, name = self.path.partition(":")
        return getattr(import_module(module), name)


def _component(path: str, keys: str = "", *, by_name: bool = False) -> Component:
    return Component(path, tuple(keys.split()), by_name)


_TEXT = _component(
    "composer_replication.training.text_data:build_text_loader",
    "path max_seq_len split shuffle seed drop_last num_workers shards unit_size",
)

_DILOCO = Component(
    "composer_replication.callback:DiLoCoCallback",
    tuple(
        field.name
        for settings in (DiLoCoSettings, ReplicaOptions)
        for field in dataclasses.fields(settings)
    ),
)

COMPONENTS: dict[str, dict[str, Component]] = {
    "model": {
        "byte_gpt": _component(
            "composer_replication.training.byte_gpt:ByteGPT",
            "d_model n_heads n_layers max_seq_len expansion_ratio vocab_size tie_word_embeddings",
        ),
    },
    "train_loader": {"text": _TEXT},
    "eval_loader": {"text": _TEXT},
    "optimizer": {
        "decoupled_adamw": _component(
            "composer.optim:DecoupledAdamW", "lr betas eps weight_decay amsgrad"
        ),
        "decoupled_sgdw": _component(
            "composer.optim:DecoupledSGDW", "lr momentum dampening weight_decay nesterov"
        ),
        "adamw": _component("torch.optim:AdamW", "lr betas eps weight_decay amsgrad foreach fused"),
        "sgd": _component(
            "torch.optim:SGD", "lr momentum dampening weight_decay nesterov foreach fused"
        ),
        "muon": _component(
            "composer_replication.training.muon:Muon",
            "lr momentum nesterov weight_decay betas eps adamw_names",
            by_name=True,
        ),
    },
    "scheduler": {
        "constant_with_warmup": _component(
            "composer.optim:ConstantWithWarmupScheduler", "t_warmup alpha t_max scale_warmup"
        ),
        "cosine_with_warmup": _component(
            "composer.optim:CosineAnnealingWithWarmupScheduler",
            "t_warmup t_max alpha_f scale_warmup",
        ),
        "linear_decay_with_warmup": _component(
            "composer.optim:LinearWithWarmupScheduler",
            "t_warmup alpha_i alpha_f t_max scale_warmup",
        ),
    },
    "callbacks": {
        "diloco": _DILOCO,
        "lr_monitor": _component("composer.callbacks:LRMonitor"),
        "memory_monitor": _component(
            "composer.callbacks:MemoryMonitor", "memory_keys dist_aggregate_batch_interval"
        ),
        "optimizer_monitor": _component(
            "composer.callbacks:OptimizerMonitor", "log_optimizer_metrics batch_log_interval"
        ),
        "speed_monitor": _component(
            "composer.callbacks:SpeedMonitor", "window_size gpu_flops_available time_unit"
        ),
    },
    "loggers": {
        "file_logger": _component(
            "composer.loggers:FileLogger",
            "filename remote_file_name capture_stdout capture_stderr buffer_size log_traces "
            "flush_interval overwrite",
        ),
        "tensorboard": _component(
            "composer.loggers:TensorboardLogger", "log_dir flush_interval rank_zero_only"
        ),
        "wandb": _component(
            "composer.loggers:WandBLogger",
            "project group name entity tags log_artifacts rank_zero_only init_kwargs",
        ),
    },
}
"""Components by section and name.

``model``, the loaders, ``optimizer`` and ``scheduler`` name theirs in a field ``name``. In
``callbacks`` and ``loggers`` every key is a name.
"""

NAMED_BY_FIELD = ("model", "train_loader", "eval_loader", "optimizer", "scheduler")
"""Sections that name one component in a field ``name``."""
