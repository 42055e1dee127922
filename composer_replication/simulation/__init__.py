"""Simulated replica groups: threads of one process, scripted faults, no network, no lighthouse.

``simulate`` runs them. Read ``simulation.py`` first. This package imports nothing else of ours.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from composer_replication.simulation.manager import SimulatedManager
    from composer_replication.simulation.shared_buffer import Fault
    from composer_replication.simulation.simulation import (
        SimulatedReplica,
        SimulationError,
        simulate,
    )

__all__ = ["Fault", "SimulatedManager", "SimulatedReplica", "SimulationError", "simulate"]

_HOME = {
    "Fault": "composer_replication.simulation.shared_buffer",
    "SimulatedManager": "composer_replication.simulation.manager",
    "SimulatedReplica": "composer_replication.simulation.simulation",
    "SimulationError": "composer_replication.simulation.simulation",
    "simulate": "composer_replication.simulation.simulation",
}


def __getattr__(name: str) -> Any:
    # Lazy: importing torch takes a second, and the command does not always need it.
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
