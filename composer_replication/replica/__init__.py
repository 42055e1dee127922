"""The connection of one replica group to the others: a torchft Manager that waits and recovers.

``make_manager`` builds it. Read ``manager.py`` first, then ``quorum_watch.py``. With ``heal`` a
joiner gets the global state. This package may import ``diloco``, but not Composer.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from composer_replication.replica.factory import backend_for, make_manager
    from composer_replication.replica.process_group import host_store

__all__ = ["backend_for", "host_store", "make_manager"]

_HOME = {
    "backend_for": "composer_replication.replica.factory",
    "host_store": "composer_replication.replica.process_group",
    "make_manager": "composer_replication.replica.factory",
}


def __getattr__(name: str) -> Any:
    # Lazy: the command reads options and checks the lighthouse before torch is imported.
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
