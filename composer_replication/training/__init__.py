"""From a YAML file to a Composer ``Trainer``, and the quickstart's model and text.

Read ``trainer.py`` first. This package may import ``callback``, ``simulation`` and what is below.
"""

from typing import TYPE_CHECKING

from composer_replication import lazily

if TYPE_CHECKING:
    from composer_replication.training.trainer import simulate_replicas, train

__all__ = ["simulate_replicas", "train"]

__getattr__ = lazily(
    __name__,
    {
        "simulate_replicas": "composer_replication.training.trainer",
        "train": "composer_replication.training.trainer",
    },
)
