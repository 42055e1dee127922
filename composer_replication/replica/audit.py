"""The audit log: who did what to a run, from where and when; one logger for all of it."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any

log = logging.getLogger("composer_replication.replica.audit")
log.setLevel(logging.INFO)  # it is to be read later, however little the rest of a program logs


def record(what: str, who: str | None, source: str | None, **details: Any) -> str:
    """Log one line of JSON.

    Args:
        what: ``heal``, ``registration``, ``settings``, ``rewind``.
        who: The replica group, if it is known. A stranger may have chosen the name.
        source: The address it called from, or was reached at.
        **details: To be logged as well; no secrets.

    Returns:
        The line.
    """
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    line = json.dumps({"time": now, "what": what, "who": who, "from": source} | details)
    log.info("%s", line)
    return line
