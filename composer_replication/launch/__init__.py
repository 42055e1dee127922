"""Runs replica groups on this machine: starts, watches and restarts them, and writes a report.

Read ``launcher.py`` first. This package may import ``training``, the coordinator's server and the
packages below them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from composer_replication.launch.launcher import launch_groups

__all__ = ["launch_groups"]

_HOME = {
    "launch_groups": "composer_replication.launch.launcher",
}


def __getattr__(name: str) -> Any:
    # Lazy: the command answers --help before any of this is imported.
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
