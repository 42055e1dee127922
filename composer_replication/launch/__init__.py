"""Runs replica groups on this machine: starts, watches and restarts them, and writes a report.

Read ``launcher.py`` first. This package may import ``training``, the coordinator's server, the
packages below them, and the plan. ``doctor`` looks for what is wrong before a run.
"""

from typing import TYPE_CHECKING

from composer_replication.util.lazy import lazily

if TYPE_CHECKING:
    from composer_replication.launch.launcher import launch_groups

__all__ = ["launch_groups"]

__getattr__ = lazily(__name__, {"launch_groups": "composer_replication.launch.launcher"})
