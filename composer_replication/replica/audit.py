"""The audit log: one logger for who did what to a run, from where and when."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any

log = logging.getLogger("composer_replication.replica.audit")
log.setLevel(logging.INFO)  # also in a program that logs warnings only


def record(what: str, who: str | None, source: str | None, **details: Any) -> str:
    """Log one line of JSON.

    Args:
        what: What was done: ``heal``, ``registration``, ``settings`` or ``rewind``.
        who: The replica group, if it is known. A stranger may have chosen the name.
        source: The address from which the group called, or at which it was reached.
        **details: Further keys and values of the line. They must not contain secrets.

    Returns:
        The line.
    """
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    line = json.dumps({"time": now, "what": what, "who": who, "from": source} | details)
    log.info("%s", line)
    return line
