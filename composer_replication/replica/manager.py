"""A torchft Manager that waits, recovers and leaves where torchft's raises, hangs or stays."""

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
from functools import partial
from threading import Event
from types import SimpleNamespace
from typing import Any

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torchft.manager import MANAGER_ADDR_KEY, REPLICA_ID_KEY
from torchft.process_group import ProcessGroup

from composer_replication.diloco.global_state import GlobalState
from composer_replication.diloco.retry import LOG_EVERY_S, POLL_S, Waiting
from composer_replication.options import ReplicaOptions, lighthouse_of, replica_id_of
from composer_replication.replica.addresses import bracketed
from composer_replication.replica.blame import is_own_failure
from composer_replication.replica.heal.transport import HealTransport
from composer_replication.replica.interruptible_manager import InterruptibleManager
from composer_replication.replica.lighthouse import (
    CONNECT_TIMEOUT_S,
    LastingServer,
    read_status,
)
from composer_replication.replica.missing_members import MissingMembers
from composer_replication.replica.peer_client import PeerClient
from composer_replication.replica.quorum import MemberReport, QuorumConnection, group_name
from composer_replication.replica.quorum_member import (
    QuorumDeclined,
    QuorumFailed,
    QuorumMember,
)
from composer_replication.replica.rendezvous import Rendezvous, SyncAlarm, find_unreachable

log = logging.getLogger(__name__)

QUORUM_TIMEOUT_S = 3600.0
"""How long torchft waits for a quorum, in seconds, before this group asks again."""

QUORUM_RETRIES = 4 * 3600
"""How often in that time a lighthouse that is away is asked: four times a second. After one that
was killed and came back at once, the survivors commit 0.3 s later, and not a second."""

_departed: list[ReplicaManager] = []
"""Managers that have left. Their connections stay open until another manager of this process
commits: a peer may still be receiving this group's part of the last collective."""

free_uuids: dict[tuple[str, str], str] = {}
"""Uuids of managers of this process that have left, by replica id and lighthouse address.

The next manager with the same id uses the uuid again. With another uuid it would be a new member to
the lighthouse, which would also wait for the old one until its heartbeats are old."""


class ReplicaManager(InterruptibleManager):
    """The torchft Manager of one replica group; ``make_manager`` builds it.

    It differs from torchft's Manager (``manager.py``) in what it does when something goes wrong:

    * If a quorum fails, it asks again. torchft raises the same error for ever after.
    * If the lighthouse has been restarted, it notices (``QuorumMember``). The restarted lighthouse
      uses quorum ids again, and torchft would sum two groups and divide by three.
    * If an address of a peer does not answer, it names the peer before gloo waits for it. The
      member because of which syncs fail leaves, and strangers are left out (``QuorumMember``).
    * If one member sees an error in a collective, it ends the collective on all (``SyncAlarm``).
    * While it waits for a quorum, a collective or a vote, signals are handled.

    ``start_quorum`` is a sync's quorum from top to bottom: what the last error was, and then
    torchft's part, which asks, by ``_ask_until_used``, connects and heals.

    Threads: a thread of the executor asks for each quorum, connects and downloads a heal's state;
    the main thread waits for it in ``start_quorum``, and takes the state over. So the methods below
    run on one thread at a time, except ``report_error``, which gloo's threads call too.

    Args:
        options: Of this group, with how peers reach this machine. ``hostname=None``: its host name,
            and every interface.
        ranks: This process's rank in the group, and the number of them.
        store_address: Host and port of the group's store.
        process_group: Averages between groups.
        transport: Serves this rank's state, and has fetched that of the groups in training. Its
            server also has the notices of this rank, and its tokens are the run's.
        store: The group's TCPStore if this process hosts it. The reference keeps it alive.

    Attributes:
        member: This group as a member of quorums.
        settings: What has to be equal in all groups; DiLoCo adds the settings and the model.
        asks_to_gather: Whether this group asks that messages are gathered, and not summed.
    """

    _checkpoint_transport: HealTransport
    _manager: LastingServer | None

    def __init__(
        self,
        options: ReplicaOptions,
        ranks: tuple[int, int],
        store_address: tuple[str, int],
        process_group: ProcessGroup,
        transport: HealTransport,
        store: TCPStore | None,
    ) -> None:
        super().__init__(
            pg=process_group,
            load_state_dict=None,  # DiLoCo and the callback register theirs
            state_dict=None,
            min_replica_size=options.min_replica_size,
            use_async_quorum=False,
            timeout=timedelta(seconds=options.timeout),
            quorum_timeout=timedelta(seconds=QUORUM_TIMEOUT_S),
            connect_timeout=timedelta(seconds=CONNECT_TIMEOUT_S),
            rank=ranks[0],
            world_size=ranks[1],
            store_addr=store_address[0],
            store_port=store_address[1],
            lighthouse_addr=lighthouse_of(options),
            replica_id=replica_id_of(options),
            hostname=bracketed(options.hostname or socket.gethostname()),
            checkpoint_transport=transport,
            init_sync=False,  # DiLoCo starts the groups itself, ADR-006
            quorum_retries=QUORUM_RETRIES,
        )
        self.store = store
        self.num_replicas = options.num_replicas
        self.give_up_after_s = options.give_up_after_s
        self._lighthouse_addr = lighthouse_of(options)
        self._is_shut_down = False
        self.asks_to_gather = False
        self._note_progress: Callable[[], object] = lambda: None
        self._is_syncing = False
        """Whether there has been a quorum without a vote yet."""
        self.settings: dict[str, Any] = {"ranks": ranks[1]}
        report = MemberReport(
            manager=self._store.get(MANAGER_ADDR_KEY).decode(),
            board=transport.server.address,
            settings=self.settings,
        )
        self.member = QuorumMember(
            self._store.get(REPLICA_ID_KEY).decode(),
            report,
            transport.server.tokens,
            MissingMembers(lambda: read_status(self._lighthouse_addr).alive),
            self._find_unreachable,
            options.min_replica_size,
            *ranks,
            self._store,
        )
        # The vote on a commit is among the ranks of a group, through the server of its manager. A
        # single rank has nobody to ask, and saves the milliseconds.
        client = self._client
        self._request_quorum = client._quorum
        self._client = SimpleNamespace(
            _quorum=self._ask_until_used,
            should_commit=client.should_commit
            if ranks[1] > 1
            else lambda rank, step, vote, timeout: vote,
        )

    @property
    def fault(self) -> str | None:
        """Which group made the last sync fail: ``this``, ``another``, or None if nobody knows."""
        return self.member.blame.fault

    @property
    def gathers(self) -> bool:
        """Whether a member of the last quorum asks that messages are gathered."""
        return any(report.gathers for report in self.member.reports.values())

    @property
    def members(self) -> tuple[str, ...]:
        """The lighthouse's names of the groups in the last quorum: ``<replica_id>:<uuid>``."""
        return tuple(self.member.reports)

    @property
    def longest_wait_s(self) -> float:
        """How long one request for a quorum, or one collective, may take, in seconds."""
        return (self._quorum_timeout + self._timeout).total_seconds()

    def on_other_datasets(self) -> list[str]:
        """The groups of the last quorum that divide other datasets, and this one; empty: none."""
        own = set(self.member.own.data)
        found = set()
        for name, report in self.member.reports.items():
            # A group may have divided one more, as where a part of a notebook has run again.
            if own.difference(report.data) and set(report.data) - own:
                found |= {name, self.member.name}
        return sorted(map(group_name, found))

    def serve_state(self, source: GlobalState) -> None:
        """Serve the global state outside of a quorum too, so that joiners can fetch it before one.

        torchft serves it only while the donor waits in a quorum.
        """
        self._checkpoint_transport.serve(self.current_step, source, lambda: self._is_syncing)

    def watch_waits(self, note_progress: Callable[[], object]) -> None:
        """Call this after each request for a quorum that has waited for other groups."""
        self._note_progress = note_progress

    def fetched_state(self) -> dict[str, Any] | None:
        """Return the global state that was fetched before the first quorum; None if there is none.

        If the others have committed since, it waits for their next commit and fetches again, see
        ``HealTransport.newest``.
        """
        return self._checkpoint_transport.newest()

    def start_quorum(
        self,
        allow_heal: bool = True,
        shrink_only: bool = False,
        timeout: timedelta | None = None,
    ) -> None:
        """Ask for a quorum until there is one that its members use, then connect and heal.

        After an error in the last sync it first closes the connections. A peer that has not seen
        the error still waits for this group's part of a collective. With open connections it would
        wait for ``timeout``, and this quorum would wait for that peer.

        Raises:
            SyncError: There is no quorum after ``give_up_after_s``.
            TimeoutError: Another rank of this group has not answered whether it uses the quorum.
            AtFaultError: Syncs have failed because of this group for too long.
            SettingsMismatch: This group has other settings, or another model, than the run.
            DuplicateIdError: Another group of the run has this one's replica id.
        """
        own = self.member.own
        error = self.errored()
        if error is not None:
            own.has_failed |= is_own_failure(error.original_exception)
            self._close_connections()
        own.gathers = self.asks_to_gather
        self._has_given_up = Event()
        try:
            super().start_quorum(allow_heal, shrink_only, timeout)
        except BaseException:
            self._has_given_up.set()
            # torchft keeps the failed future, and would raise its error in every later quorum.
            self._quorum_future = None
            raise
        self._is_syncing = True
        if self.errored():
            # The heal, or a connection, failed on the executor's thread, where torchft swallows the
            # error. Peers are about to send: without the alarm they would wait for our part.
            # A heal comes after the connection, and its failure is always this group's own: no
            # other member can tell what went wrong.
            own.has_failed = own.connection is not None
            self._close_connections()

    def _ask_until_used(self, **request: Any) -> Any:
        """Ask for a quorum until there is one that its members use.

        Args:
            **request: That of torchft's ``Manager._async_quorum``, which calls this in the place of
                its client's ``_quorum``, on the executor's thread.
        """
        has_given_up = self._has_given_up
        while not has_given_up.is_set():
            asked_at = time.monotonic()
            try:
                quorum = self._ask(request)
            except QuorumDeclined:
                self._note_progress()
                self.member.missing.wait()
            except QuorumFailed as error:
                log.warning("No quorum: %s. Asking again", error)
                self.member.missing.deadline = None  # nobody could come meanwhile
                # This group's own server, if it is gone, fails a request at once.
                if time.monotonic() - asked_at > self._quorum_timeout.total_seconds() / 2:
                    self._note_progress()
                # If the lighthouse is away, the request fails at once: do not spin.
                time.sleep(POLL_S)
            else:
                if has_given_up.is_set():  # peers would wait for a group that connects and leaves
                    break
                self._errored = None  # a collective of before may have failed since it was closed
                if self.member.own.connection is None:
                    self._quorum_id = -1  # torchft connects again when the quorum's id has changed
                return quorum
        raise QuorumFailed("nobody waits for it any more")

    def _ask(self, request: dict[str, Any]) -> Any:
        """Ask the lighthouse for a quorum, and decide with its other members whether to use it."""
        handle = self._pg.get_reconfigure_handle()  # pyright: ignore[reportAttributeAccessIssue]
        handle = self.member.add_report(handle, self._step)
        # The lighthouse gives a new quorum id while a member counts failed commits, and all would
        # connect again in every quorum. A member that is left out has no connection to renew.
        failures = 0 if self.member.is_left_out else self._commit_failures
        request = request | {"commit_failures": failures, "reconfigure_handle": handle}
        try:
            if self._manager is not None:  # on rank 0, in whose process it is
                self._manager.restart_if_it_refuses("This group's manager")
            quorum = self._request_quorum(**request)
        except Exception as error:  # torchft's Rust client raises a RuntimeError or a TimeoutError
            raise QuorumFailed((str(error) or repr(error)).splitlines()[0]) from error
        return self.member.use(quorum, self._do_ranks_agree)

    def _do_ranks_agree(self, is_used: bool) -> bool:
        """Whether all ranks of this group use a quorum. Its answers travel as a vote's do."""
        try:
            return self._client.should_commit(
                self._group_rank, self._step, is_used, timeout=self._timeout
            )
        except (RuntimeError, TimeoutError) as error:  # as torchft's Rust client raises
            # No second try: the manager server would count a second answer for the next quorum.
            raise TimeoutError(
                "another rank of this group did not say whether it uses a quorum within timeout="
                f"{self._timeout.total_seconds():g}: it has died, or hangs. End the group, and "
                f"start it again ({str(error).splitlines()[0]})"
            ) from error

    def _close_connections(self) -> None:
        if self._alarm is not None:
            self._alarm.raise_for_all()
        self._pg.abort(errored=False)  # pyright: ignore[reportCallIssue]
        self.member.own.connection = None

    def wait_quorum(self) -> None:
        """Wait until there is a quorum, and torchft has connected and healed."""
        assert self._quorum_future is not None, "wait_quorum comes after start_quorum"
        waiting = Waiting("for a quorum", self.give_up_after_s, log_after_s=LOG_EVERY_S)
        # With a timeout, so that Python handles signals between two waits.
        while not futures.wait([self._quorum_future], timeout=POLL_S).done:
            waiting.go_on(
                lambda: read_status(self._lighthouse_addr).situation,
                "Start the missing replica groups again, or the lighthouse, or raise "
                "give_up_after_s",
            )
        self._quorum_future.result()

    def _reconfigure_pg(self, communicator_id: int, handles: list[str]) -> None:
        """Connect to the members of a new quorum; torchft calls it on the executor's thread.

        The connection's number is a hash of the quorum's id and all handles. With the id alone, a
        restarted lighthouse that counts from 1 again would lead members to the addresses that the
        store still has from the last quorum of that id.

        Raises:
            ConnectionError: A member's address does not answer, or a member does not connect.
        """
        if self._alarm is not None:
            self._alarm.close()
            self._alarm = None
        identity = json.dumps([communicator_id, handles]).encode()
        number = int.from_bytes(hashlib.sha256(identity).digest()[:7], "big")
        limit_s = self._connect_timeout.total_seconds()
        client = PeerClient(self.member.tokens, "", limit_s)
        boards = {
            name: partial(client.ask, report.board) for name, report in self.member.reports.items()
        }
        # Twice the limit: a member takes up to one limit to find out whom it cannot reach, if their
        # names have one IP address each.
        rendezvous = Rendezvous(boards, self.member.name, number, 2 * limit_s)
        places = dict(zip(boards, map(json.loads, handles), strict=True))
        unreachable = self._find_unreachable(places)
        self.member.own.unreachable = unreachable  # the next report names them too
        if unreachable:
            rendezvous.decline(unreachable)
            name = unreachable[0]
            raise ConnectionError(
                f"replica group {group_name(name)} says it is at {places[name]['store']}, which "
                "does not answer here: it has died, or set COMPOSER_REPLICATION_HOSTNAME "
                "(hostname=...) there to a name or address of its machine that this one reaches"
            )
        rendezvous.wait_for_all()
        super()._reconfigure_pg(number, handles)
        self._alarm = SyncAlarm(next(iter(boards.values())), number)
        self.member.own.connection = QuorumConnection(communicator_id, len(handles), number)

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
            self.member.stop()
            super().shutdown(wait=wait)
            if self._group_rank == 0:  # the rank with the manager server
                replica_id, _, uuid = self.member.name.rpartition(":")
                free_uuids[replica_id, self._lighthouse_addr] = uuid
            _departed.append(self)
            self.store = None
            # New ones: a thread of torchft's may be reading these. They hold model and trainer.
            self._load_state_dict_fns = {}
            self._user_state_dicts = {}

    def release(self) -> None:
        """Close what ``shutdown`` has left open: sockets, threads and ports."""
        if self._alarm is not None:
            self._alarm.close()
        self._checkpoint_transport.server.close()
        self._pg.abort(errored=False)  # pyright: ignore[reportCallIssue]
        # Each of these closes its sockets, or frees its memory, when its last reference goes.
        for name in (
            "_pg",
            "_store",
            "_client",
            "member",
            "_manager",
            "_checkpoint_transport",
        ):
            setattr(self, name, None)
