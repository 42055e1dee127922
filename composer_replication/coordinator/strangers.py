"""Finds members of the lighthouse's quorum that have not registered with the coordinator."""

from __future__ import annotations

import logging
import threading

from composer_replication.coordinator.database import StorageError
from composer_replication.coordinator.journal import Journal
from composer_replication.coordinator.registry import Registry
from composer_replication.replica.lighthouse import read_status

log = logging.getLogger(__name__)


class Strangers:
    """Compares the lighthouse's members with the registered replica groups, in a thread.

    The lighthouse accepts everybody who reaches its port. Every group of the run registers before
    it requests a quorum. A member that never registered is therefore a group that was started
    without the coordinator's address, or an intruder.

    Args:
        lighthouse_addr: ``http://host:port`` of the lighthouse.
        registry: Registered groups of the run.
        journal: Receives each such member once.
    """

    EVERY_S = 5.0
    MAX_REPORTED = 20
    """Most names in the log and on the page. An intruder could join under ever new names."""

    def __init__(self, lighthouse_addr: str, registry: Registry, journal: Journal) -> None:
        self._lighthouse_addr = lighthouse_addr
        self._registry = registry
        self._journal = journal
        self._seen_before: set[str] = set()
        self._reported: set[str] = set()
        self._ended = threading.Event()
        self.names: list[str] = []
        """Unregistered members of the last quorum, for the page."""

    def start(self) -> None:
        """Start the thread, which compares every ``EVERY_S`` seconds."""
        threading.Thread(target=self._run, name="strangers", daemon=True).start()

    def close(self) -> None:
        """End the thread."""
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(self.EVERY_S):
            try:
                self.check()
            except StorageError as error:
                log.warning("%s", error)

    def check(self) -> None:
        """Find the unregistered members of the last quorum.

        Only a member that is found twice in a row counts: the groups of a coordinator
        that has lost its state register again a moment later.
        """
        members = read_status(self._lighthouse_addr).members
        names = {_name_of(member.replica_id) for member in members} - self._registry.names()
        confirmed = names & self._seen_before
        self._seen_before = names
        self.names = sorted(confirmed)[: self.MAX_REPORTED]
        for name in self.names:
            if name not in self._reported and len(self._reported) < self.MAX_REPORTED:
                self._reported.add(name)
                self._journal.add(
                    f"{name!r} takes part in syncs without being registered: start it with "
                    "COMPOSER_REPLICATION_COORDINATOR, or find out who reaches the lighthouse"
                )


def _name_of(replica_id: str) -> str:
    """The name in a lighthouse's ``name:uuid``, cut to the longest name that a group may have."""
    return (replica_id.rpartition(":")[0] or replica_id)[:64]
