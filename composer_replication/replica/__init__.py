"""One replica group's connection to the others: a torchft Manager that waits, recovers and leaves.

``make_manager`` builds it. Read ``manager.py`` first, then ``quorum_watch.py``; ``heal`` has the
way in which a joiner gets the global state. This package may import ``diloco``, and no Composer.
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
    # The command reads options and asks the lighthouse before torch is imported.
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
