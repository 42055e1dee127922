"""Which samples of a shared dataset a replica group trains on.

``ReplicaDataLoader`` reads them; read ``loader.py`` first, then ``group_data.py``. This package may
import the coordinator's client, ``replica`` and ``diloco``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from composer_replication.data.loader import ReplicaDataLoader

__all__ = ["ReplicaDataLoader"]

_HOME = {
    "ReplicaDataLoader": "composer_replication.data.loader",
}


def __getattr__(name: str) -> Any:
    # torch takes a second to import.
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
