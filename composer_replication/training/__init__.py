"""Builds a Composer ``Trainer`` from a YAML file, with the quickstart's model and text data.

Read ``trainer.py`` first. ``muon.py`` is an inner optimizer, which is of use without a config too.
This package may import ``callback``, ``simulation`` and the packages below them.
"""

from typing import TYPE_CHECKING

from composer_replication import lazily

if TYPE_CHECKING:
    from composer_replication.training.muon import Muon
    from composer_replication.training.trainer import simulate_replicas, train

__all__ = ["Muon", "simulate_replicas", "train"]

__getattr__ = lazily(
    __name__,
    {
        "Muon": "composer_replication.training.muon",
        "simulate_replicas": "composer_replication.training.trainer",
        "train": "composer_replication.training.trainer",
    },
)
