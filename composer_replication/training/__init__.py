"""Builds a Composer ``Trainer`` from a YAML file, with the quickstart's model and text data.

Read ``trainer.py`` first. This package may import ``callback``, ``simulation`` and the packages
below them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from composer_replication.training.trainer import simulate_replicas, train

__all__ = ["simulate_replicas", "train"]

_HOME = {
    "simulate_replicas": "composer_replication.training.trainer",
    "train": "composer_replication.training.trainer",
}


def __getattr__(name: str) -> Any:
    # Lazy: the command rejects a bad config before Composer is imported, which takes seconds.
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
