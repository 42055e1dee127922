"""Members of the lighthouse's quorum that have not registered with the coordinator."""

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

    The lighthouse takes everybody who reaches its port. Every group of a run registers before it
    asks for a quorum, so a member that never did is none of them: a group that was started without
    the coordinator's address, or an intruder.

    Args:
        lighthouse_addr: ``http://host:port``.
        registry: Of the run's groups.
        journal: Told once of each stranger.
    """

    EVERY_S = 5.0
    MAX_TOLD = 20
    """Names in the log and on the page. Somebody may join under ever new ones."""

    def __init__(self, lighthouse_addr: str, registry: Registry, journal: Journal) -> None:
        self._lighthouse_addr = lighthouse_addr
        self._registry = registry
        self._journal = journal
        self._seen_before: set[str] = set()
        self._told: set[str] = set()
        self._ended = threading.Event()
        self.names: list[str] = []
        """Those in the last quorum, for people."""

    def start(self) -> None:
        """Look every ``EVERY_S`` seconds from now on."""
        threading.Thread(target=self._run, name="strangers", daemon=True).start()

    def close(self) -> None:
        """Look no more."""
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(self.EVERY_S):
            try:
                self.look()
            except StorageError as error:
                log.warning("%s", error)

    def look(self) -> None:
        """Find the strangers of the last quorum.

        Only who is there twice in a row counts: a coordinator that has lost its state hears of its
        groups a moment later.
        """
        members = read_status(self._lighthouse_addr).members
        names = {_name_of(member.replica_id) for member in members} - self._registry.names()
        found = names & self._seen_before
        self._seen_before = names
        self.names = sorted(found)[: self.MAX_TOLD]
        for name in self.names:
            if name not in self._told and len(self._told) < self.MAX_TOLD:
                self._told.add(name)
                self._journal.tell(
                    f"{name!r} takes part in syncs and has not registered here: start it with "
                    "COMPOSER_REPLICATION_COORDINATOR, or find out who reaches the lighthouse"
                )


def _name_of(replica_id: str) -> str:
    """The name in a lighthouse's ``name:uuid``, as short as ours are at most."""
    return (replica_id.rpartition(":")[0] or replica_id)[:64]
