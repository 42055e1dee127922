"""The coordinator: a run's settings, who takes part, and which samples each group trains on."""

HEARTBEAT_TIMEOUT_S = 3.0
"""After how long a silent replica group is dead to the coordinator, in seconds."""
