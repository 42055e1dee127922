"""A Composer ``Trainer`` as one replica group of a DiLoCo run.

``DiLoCoCallback`` is all that a training job needs. Read ``callback.py`` first: it follows
Composer's events in their order. This package may import ``data``, the coordinator's client,
``replica`` and ``diloco``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from composer_replication.callback.callback import DiLoCoCallback

__all__ = ["DiLoCoCallback"]

_HOME = {
    "DiLoCoCallback": "composer_replication.callback.callback",
}


def __getattr__(name: str) -> Any:
    # Composer takes seconds to import, and run_folder and progress are read without it.
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
