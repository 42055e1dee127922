"""The coordinator: a run's settings, its replica groups, and the samples that each one trains on.

``server`` is the service. Replica groups use ``client`` and ``membership``. Read ``api.py`` first,
and ``work_units.py`` for the samples. This package may import ``replica`` and ``diloco``. The
client's modules import nothing of the service.
"""

HEARTBEAT_TIMEOUT_S = 3.0
"""Seconds of silence after which a replica group counts as dead."""
