"""Replica groups on this machine: start them, watch them, restart them, report on them.

Read ``launcher.py`` first. This package may import ``training``, the coordinator's server and all
that is below.
"""

from typing import TYPE_CHECKING

from composer_replication import lazily

if TYPE_CHECKING:
    from composer_replication.launch.launcher import launch

__all__ = ["launch"]

__getattr__ = lazily(
    __name__,
    {
        "launch": "composer_replication.launch.launcher",
    },
)
