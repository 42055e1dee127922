"""Simulated replica groups: threads of one process, scripted faults, no network, no lighthouse.

``simulate`` runs them. Read ``simulation.py`` first. This package imports nothing else of ours.
"""

from typing import TYPE_CHECKING

from composer_replication import lazily

if TYPE_CHECKING:
    from composer_replication.simulation.manager import SimulatedManager
    from composer_replication.simulation.shared_buffer import Fault
    from composer_replication.simulation.simulation import (
        SimulatedReplica,
        SimulationError,
        simulate,
    )

__all__ = ["Fault", "SimulatedManager", "SimulatedReplica", "SimulationError", "simulate"]

__getattr__ = lazily(
    __name__,
    {
        "Fault": "composer_replication.simulation.shared_buffer",
        "SimulatedManager": "composer_replication.simulation.manager",
        "SimulatedReplica": "composer_replication.simulation.simulation",
        "SimulationError": "composer_replication.simulation.simulation",
        "simulate": "composer_replication.simulation.simulation",
    },
)
