"""DiLoCo for MosaicML Composer: several replica groups train one model, over torchft."""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

# torchft's Rust half reads this when it is loaded and prints some 25 lines a sync at its default.
os.environ.setdefault("RUST_LOG", "warn")

if TYPE_CHECKING:
    from composer_replication.callback import DiLoCoCallback
    from composer_replication.data.loader import ReplicaDataLoader
    from composer_replication.diloco.algorithm import DiLoCo
    from composer_replication.diloco.settings import DiLoCoSettings
    from composer_replication.simulation.simulation import simulate

__all__ = ["DiLoCo", "DiLoCoCallback", "DiLoCoSettings", "ReplicaDataLoader", "simulate"]
__version__ = "0.1.0"

_HOME = {
    "DiLoCo": "composer_replication.diloco.algorithm",
    "DiLoCoCallback": "composer_replication.callback.callback",
    "DiLoCoSettings": "composer_replication.diloco.settings",
    "ReplicaDataLoader": "composer_replication.data.loader",
    "simulate": "composer_replication.simulation.simulation",
}


def __getattr__(name: str) -> Any:
    # Composer takes seconds to import: the command must be able to refuse a config before that.
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
