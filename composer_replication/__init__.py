"""DiLoCo for Composer, Hugging Face's Trainer, Lightning and plain loops, over torchft."""

import os
from typing import TYPE_CHECKING

from composer_replication.util.lazy import lazily

# torchft's Rust half reads this when it is loaded and prints some 25 lines a sync at its default.
os.environ.setdefault("RUST_LOG", "warn")

if TYPE_CHECKING:
    from composer_replication.callback import DiLoCoCallback
    from composer_replication.data.loader import ReplicaDataLoader
    from composer_replication.data.sample_stream import replica_shard
    from composer_replication.diloco.peer_table import DivergenceError
    from composer_replication.diloco.retry import SyncError
    from composer_replication.diloco.sync_report import SyncReport
    from composer_replication.group.plain_loop import DiLoCo
    from composer_replication.launch.run_record import read_run
    from composer_replication.replica.factory import make_manager
    from composer_replication.settings import DiLoCoSettings
    from composer_replication.simulation.simulation import simulate

__all__ = [
    "DiLoCo",
    "DiLoCoCallback",
    "DiLoCoSettings",
    "DivergenceError",
    "ReplicaDataLoader",
    "SyncError",
    "SyncReport",
    "make_manager",
    "read_run",
    "replica_shard",
    "simulate",
]
__version__ = "0.2.0"

__getattr__ = lazily(
    __name__,
    {
        "DiLoCo": "composer_replication.group.plain_loop",
        "DiLoCoCallback": "composer_replication.callback.callback",
        "DiLoCoSettings": "composer_replication.settings",
        "DivergenceError": "composer_replication.diloco.peer_table",
        "ReplicaDataLoader": "composer_replication.data.loader",
        "SyncError": "composer_replication.diloco.retry",
        "SyncReport": "composer_replication.diloco.sync_report",
        "make_manager": "composer_replication.replica.factory",
        "read_run": "composer_replication.launch.run_record",
        "replica_shard": "composer_replication.data.sample_stream",
        "simulate": "composer_replication.simulation.simulation",
    },
)
