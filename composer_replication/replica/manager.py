"""A torchft Manager that waits, recovers and leaves where torchft's own raises, hangs or stays."""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import socket
import time
from collections.abc import Callable, Mapping
from concurrent import futures
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torchft.manager import MANAGER_ADDR_KEY, REPLICA_ID_KEY

from composer_replication.diloco.torchft_api import HealSource
from composer_replication.replica.addresses import bracketed
from composer_replication.replica.group_layout import GroupLayout
from composer_replication.replica.heal.prefetch import Prefetch
from composer_replication.replica.heal.transport import HealTransport
from composer_replication.replica.interruptible_manager import InterruptibleManager
from composer_replication.replica.lighthouse import read_status
from composer_replication.replica.peer_client import Notices
from composer_replication.replica.peer_server import PeerServer
from composer_replication.replica.process_group import check_is_torchft_s
from composer_replication.replica.quorum_members import (
    MissingMembers,
    UnreachableMembers,
    is_own_failure,
)
from composer_replication.replica.quorum_watch import QuorumDeclined, QuorumFailed, QuorumWatch
from composer_replication.replica.rendezvous import Rendezvous, SyncAlarm, find_unreachable

log = logging.getLogger(__name__)

_departed: list[ReplicaManager] = []
"""Managers that have left. Their connections stay open until another one of this process commits:
a peer may still be receiving this group's part of the last collective."""

free_uuids: dict[tuple[str, str], str] = {}
"""Uuids of managers of this process that have left, by replica id and lighthouse address.

The next manager with the same id uses the uuid again. With another uuid it would be a new member to
the lighthouse, which would also wait for the old one until its heartbeats are old."""


class ReplicaManager(InterruptibleManager):
    """The torchft Manager of one replica group; ``make_manager`` builds it.

    It differs from torchft's Manager (``manager.py``) in what it does when something goes wrong:

    * If a quorum fails, it asks again. torchft raises the same error for ever after.
    * If the lighthouse has been restarted, it notices (``QuorumWatch``). The restarted lighthouse
      uses quorum ids again, and torchft would add up two groups and divide by three.
    * If an address of a peer does not answer, it names the peer before gloo waits for it. The
      member because of which syncs fail leaves, and strangers are left out (``QuorumWatch``).
    * If one member sees an error in a collective, it ends the collective on all (``SyncAlarm``).
    * While it waits for a quorum, a collective or a vote, signals are handled.

    Threads: torchft asks for each quorum on a thread of the executor, and connects and heals there;
    the main thread waits for it in ``start_quorum``. So the methods below run on one thread at a
    time, but for ``report_error``, which gloo's threads call too.

    Args:
        replica_id: Name of this group.
        lighthouse_addr: ``http://host:port`` of the lighthouse.
        hostname: How peers reach this machine. None: its host name, and every interface.
        server: Where peers find the state and the notices of this rank. Its tokens are the run's.
        give_up_after_s: How long to wait for a quorum before that is an error, in seconds. None:
            for ever.
        store: The group's TCPStore if this process hosts it, so that it lives as long as this.
        prefetch: Has downloaded the global state of the groups in training, if there are any.
        **arguments: torchft's own (``Manager.__init__``).

    Attributes:
        connection: How often the members of a quorum have connected so far.
        wants_to_gather: Says whether this group asks that messages are gathered, and not summed.

    Raises:
        ValueError: ``pg`` is a process group of torch's own, or torchft's Manager rejects it.
    """

    LOG_EVERY_S = 30.0
    """How often a group that waits for a quorum logs what it waits for, in seconds."""

    def __init__(
        self,
        *,
        replica_id: str,
        lighthouse_addr: str,
        hostname: str | None,
        server: PeerServer,
        give_up_after_s: float | None = None,
        store: object = None,
        prefetch: Prefetch | None = None,
        **arguments: Any,
    ) -> None:
        check_is_torchft_s(arguments["pg"])
        super().__init__(
            replica_id=replica_id,
            lighthouse_addr=lighthouse_addr,
            hostname=bracketed(hostname or socket.gethostname()),
            **arguments,
        )
        self.store, self._prefetch = store, prefetch
        self.give_up_after_s = give_up_after_s
        self.replica_name = replica_id
        self._lighthouse_addr = lighthouse_addr
        self._server = server
        self._is_shut_down = False
        self.connection = 0
        self.wants_to_gather: Callable[[], bool] = lambda: False
        self._waits_since = time.monotonic()
        """Since when this group waits for a quorum."""
        self._is_syncing = False
        """Whether there has been a quorum without a vote yet."""
        self.layout = GroupLayout(self._group_world_size, self._group_rank, self._store)
        self._client = self._watch = QuorumWatch(
            self._client,
            self._store.get(REPLICA_ID_KEY).decode(),
            self._store.get(MANAGER_ADDR_KEY).decode(),
            server.address,
            self._forget_quorum,
            self._timeout,
            self.layout,
            MissingMembers(lambda: read_status(lighthouse_addr).alive),
            UnreachableMembers(self._find_unreachable, self._min_replica_size),
            server.tokens,
        )

    @property
    def fault(self) -> str | None:
        """Where the reason lies why the last sync failed: ``this`` group, ``another``, or None."""
        return self._watch.faults.blamed

    @property
    def gathers(self) -> bool:
        """Whether a member of the last quorum asks that messages are gathered."""
        return self._watch.gathers

    @property
    def members(self) -> tuple[str, ...]:
        """The lighthouse's names of the groups in the last quorum: ``<replica_id>:<uuid>``."""
        return self._watch.members

    def _forget_quorum(self) -> None:
        """Have torchft connect anew, which it does when the quorum's id is new to it."""
        self._quorum_id = -1

    def serve_state(self, source: HealSource) -> None:
        """Serve the global state outside of a quorum too, so that joiners can fetch it before one.

        torchft serves it only while the donor waits in a quorum.
        """
        if isinstance(self._checkpoint_transport, HealTransport):
            transport = self._checkpoint_transport
            transport.serve(self.current_step, source, lambda: self._is_syncing)

    def fetched_state(self) -> dict[str, Any] | None:
        """Return the global state that was fetched before the first quorum; see ``Prefetch``."""
        return None if self._prefetch is None else self._prefetch.newest()

    def start_quorum(
        self, allow_heal: bool = True, shrink_only: bool = False, timeout: timedelta | None = None
    ) -> None:
        """Ask for a quorum, as torchft does, until there is one that may be used.

        After an error in the last sync it first closes the connections. A peer that has not seen
        the error still waits for this group's part of a collective. With open connections it would
        wait for ``timeout``, and this quorum would wait for the peer.

        Raises:
            TimeoutError: There is no quorum after ``give_up_after_s``.
        """
        if error := self.errored():
            self._watch.faults.has_failed |= is_own_failure(error.original_exception)
            self._close_connections()
        self._watch.wants_to_gather = self.wants_to_gather()
        self._waits_since = began = time.monotonic()
        while True:
            try:
                super().start_quorum(allow_heal, shrink_only, timeout)
                break
            except QuorumDeclined:
                # torchft keeps the failed future, and would raise its error in every later quorum.
                self._quorum_future = None
                self._watch.missing.wait(began)
            except QuorumFailed as error:
                self._quorum_future = None
                log.warning("No quorum: %s. Asking again", error)
                self._check_give_up()
                time.sleep(1.0)  # a lighthouse that is away fails at once: do not spin
            except BaseException:
                self._quorum_future = None
                raise
        self._is_syncing = True
        if self.errored():
            # The heal, or a connection, failed on the executor's thread, where torchft swallows the
            # error. Peers are about to send: without the alarm they would wait for our part.
            # A heal comes after the connection, and its failure is always this group's own: no
            # other member can tell what went wrong.
            self._watch.faults.has_failed = self._watch.is_connected
            self._close_connections()

    def _close_connections(self) -> None:
        if self._alarm is not None:
            self._alarm.raise_for_all()
        self._pg.abort(errored=False)  # pyright: ignore[reportCallIssue]
        self._watch.disconnected()

    def wait_quorum(self) -> None:
        """Wait for the quorum, and log every ``LOG_EVERY_S`` what the lighthouse waits for."""
        future, logged_at = self._quorum_future, time.monotonic()
        assert future is not None, "wait_quorum comes after start_quorum"
        # With a timeout, so that Python handles signals between two waits.
        while not futures.wait([future], timeout=min(1.0, self.LOG_EVERY_S)).done:
            self._check_give_up()
            if time.monotonic() - logged_at >= self.LOG_EVERY_S:
                logged_at = time.monotonic()
                situation = read_status(self._lighthouse_addr).situation
                waited = logged_at - self._waits_since
                log.warning("Waiting for a quorum for %.0f s: %s", waited, situation)
        super().wait_quorum()

    def _check_give_up(self) -> None:
        waited = time.monotonic() - self._waits_since
        if self.give_up_after_s is not None and waited > self.give_up_after_s:
            raise TimeoutError(
                f"no quorum after {waited:.0f} s, above give_up_after_s={self.give_up_after_s:g}: "
                f"{read_status(self._lighthouse_addr).situation}. Start the missing replica groups "
                "again, or the lighthouse, or raise give_up_after_s"
            )

    def _reconfigure_pg(self, communicator_id: int, handles: list[str]) -> None:
        """Connect to the members of a new quorum; torchft calls it on the executor's thread.

        The connection's number is a hash of the quorum's id, its highest step and all handles. With
        the id alone, a restarted lighthouse that counts from 1 again would lead members to the
        addresses that the store still has from the last quorum of that id.
        """
        self._watch.disconnected()
        self.connection += 1
        if self._alarm is not None:
            self._alarm.close()
            self._alarm = None
        identity = json.dumps([communicator_id, self._watch.max_step, handles]).encode()
        number = int.from_bytes(hashlib.sha256(identity).digest()[:7], "big")
        limit_s = self._connect_timeout.total_seconds()
        boards = {
            name: Notices(address, self._server.tokens, limit_s)
            for name, address in self._watch.boards.items()
        }
        # Twice the limit: a member takes up to one limit to find out whom it cannot reach.
        rendezvous = Rendezvous(boards, self._watch.name, number, 2 * limit_s)
        try:
            self._check_reachable(dict(zip(boards, map(json.loads, handles), strict=True)))
        except ConnectionError:
            rendezvous.decline(self._watch.faults.unreachable)
            raise
        if len(handles) > 1:
            rendezvous.wait_for_all()
        super()._reconfigure_pg(number, handles)
        if len(handles) > 1:
            self._alarm = SyncAlarm(next(iter(boards.values())), number)
        self._watch.connected(communicator_id, number)

    def _check_reachable(self, handles: Mapping[str, dict[str, Any]]) -> None:
        """Check that every member's address answers, and note which do not, for the next report.

        Args:
            handles: By the lighthouse's name of the member.

        Raises:
            ConnectionError: One of them does not.
        """
        unreachable = self._find_unreachable(handles)
        self._watch.faults.unreachable = unreachable
        if unreachable:
            name = unreachable[0]
            raise ConnectionError(
                f"replica group {name.partition(':')[0]} says it is at {handles[name]['store']}, "
                "which does not answer here: it has died, or set COMPOSER_REPLICATION_HOSTNAME "
                "(hostname=...) there to a name or address of its machine that this one reaches"
            )

    def _find_unreachable(self, handles: Mapping[str, dict[str, Any]]) -> tuple[str, ...]:
        return find_unreachable(handles, self._connect_timeout.total_seconds())

    def should_commit(self, timeout: timedelta | None = None) -> bool:
        """Vote, as torchft does; after a commit, close what departed managers have left open.

        The commit proves that this group's peers are through with every earlier sync.
        """
        try:
            commits = super().should_commit(timeout)
        finally:
            self._is_syncing = False
        if commits and _departed:
            with suppress(IndexError):  # another group of this process may empty the list too
                while True:
                    _departed.pop().release()
            gc.collect()  # sockets in reference cycles would stay open for long
        return commits

    def shutdown(self, wait: bool = False) -> None:
        """Leave: heartbeats stop, so that the peers go on without this group.

        Connections stay open for now: a peer may still be receiving this group's part of the last
        collective, and would fail there.
        """
        if not self._is_shut_down:
            self._is_shut_down = True
            self._watch.unreachable.stop()
            super().shutdown(wait=wait)
            if self._group_rank == 0:  # the rank with the manager server
                uuid = self._watch.name.rpartition(":")[2]
                free_uuids[self.replica_name, self._lighthouse_addr] = uuid
            _departed.append(self)
            self.store = None

    def release(self) -> None:
        """Close what ``shutdown`` has left open: sockets, threads and ports."""
        if self._alarm is not None:
            self._alarm.close()
        self._server.close()
        self._pg.abort(errored=False)  # pyright: ignore[reportCallIssue]
        # Each of these closes its sockets when its last reference goes.
        names = "_pg _store _client _watch _manager _checkpoint_transport _prefetch"
        for name in names.split():
            setattr(self, name, None)
        self.layout = GroupLayout(self._group_world_size)  # the old one holds the store
        self._load_state_dict_fns.clear()
        self._user_state_dicts.clear()
