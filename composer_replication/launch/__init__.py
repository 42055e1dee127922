"""Replica groups on this machine: start them, watch them, restart them, report on them.

Read ``launcher.py`` first. This package may import ``training``, the coordinator's server and all
that is below.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from composer_replication.launch.launcher import launch

__all__ = ["launch"]

_HOME = {
    "launch": "composer_replication.launch.launcher",
}


def __getattr__(name: str) -> Any:
    # The command answers --help before any of it is imported.
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
