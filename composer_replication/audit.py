"""The audit log: who did what to a run, and from where; one logger for all of it."""

from __future__ import annotations

import logging

log = logging.getLogger("composer_replication.audit")
"""Not below INFO, whatever other loggers are set to: an operator may send it to a file."""


def record(who: str, where: str, what: str) -> None:
    """Write one line; the logging handler adds when.

    Args:
        who: The replica group, or another name by which the caller is known. It is printed as a
            Python literal, since a stranger may have chosen it.
        where: The address it called from, or is reached at.
        what: What it did, or was refused.
    """
    log.info("%s: by %r from %s", what, who, where)
