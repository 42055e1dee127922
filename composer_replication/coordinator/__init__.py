"""The coordinator: a run's settings, who takes part, and which samples each group trains on.

``server`` is the service, and ``client`` and ``membership`` are what replica groups use of it. Read
``api.py`` first. This package may import ``replica`` and ``diloco``; the client's modules import
nothing of the service.
"""

HEARTBEAT_TIMEOUT_S = 3.0
"""After how long a silent replica group is dead to the coordinator, in seconds."""
