"""Says which replica groups have died, and what follows from it."""

from __future__ import annotations

import signal
import time
from collections import defaultdict
from collections.abc import Mapping

from composer_replication.launch.processes import ReplicaId
from composer_replication.launch.supervision import GroupRecord, Supervisor


class GroupEnds:
    """Says of each early end of a group how it ended, and what follows, once.

    Args:
        supervisor: Watches the groups.
    """

    def __init__(self, supervisor: Supervisor) -> None:
        self._records: Mapping[ReplicaId, GroupRecord] = supervisor.records
        self._max_restarts = supervisor.max_restarts
        self._num_said: defaultdict[ReplicaId, int] = defaultdict(int)

    def new(self) -> list[str]:
        """Return a line for each end since the last call."""
        lines = []
        for replica_id, record in self._records.items():
            for status in record.deaths[self._num_said[replica_id] :]:
                lines.append(f"group {replica_id} {describe_end(status)}{self._then(record)}")
            self._num_said[replica_id] = len(record.deaths)
        return lines

    def _then(self, record: GroupRecord) -> str:
        if record.due is not None:
            pause_s = max(0.0, record.due - time.monotonic())
            restart = f"restart {record.in_a_row + 1} of {self._max_restarts}"
            return f", starts again in {pause_s:.0f} s ({restart})"
        if record.is_left_out:
            return "; the others go on without it"
        if record.is_given_up:
            return "; it is too late to join the others again"
        return ", and is not started again"


def describe_end(status: int) -> str:
    """Say how a process ended.

    Args:
        status: Its exit status; negative if a signal ended it.
    """
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:  # a real-time signal has no name
        return f"was ended by signal {-status}"
