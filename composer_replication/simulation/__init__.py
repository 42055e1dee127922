"""Simulated replica groups: threads of one process, scripted faults, no network, no lighthouse.

``simulate`` runs them. Read ``simulation.py`` first. A replica's manager is that of a group that
trains alone (``replica/single_group.py``), with peers.
"""

from typing import TYPE_CHECKING

from composer_replication.util.lazy import lazily

if TYPE_CHECKING:
    from composer_replication.simulation.simulation import (
        Fault,
        SimulatedManager,
        SimulatedReplica,
        SimulationError,
        simulate,
    )

__all__ = ["Fault", "SimulatedManager", "SimulatedReplica", "SimulationError", "simulate"]

__getattr__ = lazily(__name__, dict.fromkeys(__all__, "composer_replication.simulation.simulation"))
