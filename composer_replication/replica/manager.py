"""A torchft Manager that waits, recovers and leaves where torchft's own raises, hangs or stays."""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import AllgatherOptions, AllToAllOptions  # pyright: ignore[reportPrivateImportUsage]
from torchft.manager import MANAGER_ADDR_KEY, REPLICA_ID_KEY, Manager, _ManagedWork
from torchft.process_group import ProcessGroup
from torchft.work import _DummyWork

from composer_replication.replica.group_layout import GroupLayout
from composer_replication.replica.heal.transport import STATE, HealTransport
from composer_replication.replica.lighthouse import STRAGGLER_TIMEOUT_S, can_connect, read_status
from composer_replication.replica.notice_board import NoticeBoard, Notices
from composer_replication.replica.process_group import Gloo, check_is_torchft_s
from composer_replication.replica.quorum_watch import QuorumDeclined, QuorumFailed, QuorumWatch
from composer_replication.replica.rendezvous import Rendezvous
from composer_replication.replica.sync_alarm import SyncAlarm
from composer_replication.replica.waiting import DaemonExecutor, InterruptibleWork

log = logging.getLogger(__name__)

_left: list[ReplicaManager] = []
"""Managers that have left. Their connections stay until the next one of this process commits."""

free_uuids: dict[tuple[str, str], str] = {}
"""The uuids of managers of this process that have left, by replica id and lighthouse: the next one
that takes their place takes theirs. A lighthouse would wait for a member with another uuid until
its heartbeats are old, though it has just gone. It waits for this one too, which comes."""


class ReplicaManager(Manager):
    """A torchft Manager that owns its store and process group; ``make_manager`` builds it.

    It differs from torchft's in what happens when something goes wrong:

    * a quorum that fails is asked for again (torchft raises the same error for ever after);
    * a restarted lighthouse is noticed (``QuorumWatch``), which uses quorum ids again (torchft then
      adds up two groups and divides by three);
    * peers whose address cannot be reached are named, the member that syncs fail because of leaves
      and the others go on, and strangers are left out (``QuorumWatch``);
    * an error that one member sees in an allreduce ends it for all at once (``SyncAlarm``);
    * signals are handled while it waits for a quorum, an allreduce or a vote, and a process may end
      meanwhile.

    Args:
        pg: The group over which replicas average, one of torchft's.
        arguments: Those of torchft's Manager.

    Raises:
        ValueError: ``pg`` is a process group of torch's own, or torchft's Manager refuses it.
    """

    SAY_EVERY_S = 30.0
    HEARD_WITHIN_S = 5.0
    BROKEN_AFTER_S = 0.5
    """How long after an alarm an allreduce may still end: what is under way in the network comes,
    and the members then agree on whether it has ended well."""

    store: object = None
    replica_name = ""
    give_up_after_s: float | None = None
    _lighthouse_addr = ""
    _is_shut_down = False
    _watch: QuorumWatch
    layout: GroupLayout
    _alarm: SyncAlarm | None = None

    def __init__(self, pg: ProcessGroup, **arguments: Any) -> None:
        check_is_torchft_s(pg)
        super().__init__(pg, **arguments)

    def take_over(
        self,
        replica_name: str,
        lighthouse_addr: str,
        give_up_after_s: float | None,
        tokens: Sequence[str],
        board: NoticeBoard,
    ) -> ReplicaManager:
        """Put our parts in the place of torchft's; once, after construction."""
        self.replica_name = replica_name
        self._lighthouse_addr = lighthouse_addr
        self.give_up_after_s = give_up_after_s
        self._executor = DaemonExecutor()
        self._tokens = tuple(tokens)
        self._board = board
        self._client = self._watch = QuorumWatch(
            self._client,
            self._store.get(REPLICA_ID_KEY).decode(),
            self._store.get(MANAGER_ADDR_KEY).decode(),
            board.address,
            self._forget_quorum,
            self._group_world_size,
            self._timeout,
            tokens,
        )
        self.layout = GroupLayout(self._group_world_size, self._group_rank, self._store)
        self._watch.layout = self.layout
        self._watch.alive = lambda: read_status(lighthouse_addr).alive
        return self

    @property
    def fault(self) -> str | None:
        """Where the reason lies why the last sync failed: ``this`` group, ``another``, or None."""
        return self._watch.fault

    def _forget_quorum(self) -> None:
        """Have torchft connect anew, which it does when the quorum's id is new to it."""
        self._quorum_id = -1

    def _wait_for_the_awaited(self, began: float) -> None:
        """Give a restarted lighthouse time to hear of the groups that it should wait for.

        Those that it does not hear of have died, and are awaited no longer; nor is, in the end, one
        that lives and does not ask for a quorum.
        """
        watch = self._watch
        deadline = time.monotonic() + self.HEARD_WITHIN_S
        time.sleep(0.1)  # they have to ask too, and this group's next quorum comes at once
        while not watch.awaits <= (alive := read_status(self._lighthouse_addr).alive):
            if time.monotonic() > deadline:
                if alive:
                    self._await_no_longer(watch.awaits - alive, "has not heard of")
                else:  # the lighthouse is away again, or its page cannot be read from here
                    self._await_stragglers_no_longer(began)
                return
            time.sleep(0.1)
        self._await_stragglers_no_longer(began)

    def _await_stragglers_no_longer(self, began: float) -> None:
        now, until = time.monotonic(), self._watch.awaits_until
        if now - began > STRAGGLER_TIMEOUT_S or (until is not None and now > until):
            self._await_no_longer(self._watch.awaits, "was not asked for a quorum by")

    def _await_no_longer(self, names: frozenset[str], why: str) -> None:
        if names:
            groups = ", ".join(sorted(name.partition(":")[0] for name in names))
            log.warning("Going on without those that the lighthouse %s: %s", why, groups)
            self._watch.awaits = self._watch.awaits - names

    def register_state_dict_fn(
        self,
        key: str,
        load_state_dict: Callable[[Any], None],
        state_dict: Callable[[], Any],
    ) -> None:
        """torchft's; and what is large can be fetched before this group waits in a quorum."""
        super().register_state_dict_fn(key, load_state_dict, state_dict)
        if key == STATE and isinstance(self._checkpoint_transport, HealTransport):
            self._checkpoint_transport.source = (self.current_step, state_dict)

    def start_quorum(
        self, allow_heal: bool = True, shrink_only: bool = False, timeout: timedelta | None = None
    ) -> None:
        """Ask for a quorum, as torchft does; after an error, first close what the error left.

        A peer that has not seen the error still waits for this group's part of the allreduce. While
        the connections stand it would wait for ``timeout``, and this quorum for the peer.

        Raises:
            TimeoutError: There is none after ``give_up_after_s``.
        """
        if error := self.errored():
            self._watch.has_failed |= _is_own_failure(error.original_exception)
            self._close_connections()
        began = time.monotonic()
        while True:
            try:
                super().start_quorum(allow_heal, shrink_only, timeout)
                break
            except QuorumDeclined:
                self._quorum_future = None
                self._wait_for_the_awaited(began)
            except QuorumFailed as error:
                self._quorum_future = None  # torchft would raise its error again
                log.warning("No quorum: %s. Asking again", error)
                self._check_patience(began)
                time.sleep(1.0)
            except BaseException:
                self._quorum_future = None
                raise
        if self.errored():  # a heal or a connection failed: peers need not wait for our part
            # Those of a heal are always this group's own: no other one can tell what went wrong.
            self._watch.has_failed = self._watch.is_connected
            self._close_connections()

    def _close_connections(self) -> None:
        if self._alarm is not None:
            self._alarm.raise_for_all()
        self._pg.abort(errored=False)  # pyright: ignore[reportCallIssue]
        self._watch.disconnected()

    def report_error(self, e: Exception) -> None:
        """torchft's; and the peers hear of it, who would wait for this group's part."""
        super().report_error(e)
        if self._alarm is not None:
            self._alarm.raise_for_all()

    def _is_broken(self) -> bool:
        """Whether the collectives under way can never end well."""
        if self.errored():
            return True
        age = None if self._alarm is None else self._alarm.age_s()
        if age is None or age < self.BROKEN_AFTER_S:
            return False
        self.report_error(ConnectionError("another replica group reports that this sync failed"))
        return True

    def wait_quorum(self) -> None:
        """Wait for the quorum, and say every ``SAY_EVERY_S`` what it is waiting for."""
        began = time.monotonic()
        future = self._quorum_future
        assert future is not None, "wait_quorum comes after start_quorum"
        while not futures.wait([future], timeout=self.SAY_EVERY_S).done:
            waited = time.monotonic() - began
            situation = read_status(self._lighthouse_addr).situation
            log.warning("Waiting for a quorum for %.0f s: %s", waited, situation)
            self._check_patience(began)
        super().wait_quorum()

    def _check_patience(self, began: float) -> None:
        waited = time.monotonic() - began
        if self.give_up_after_s is not None and waited > self.give_up_after_s:
            raise TimeoutError(
                f"no quorum after {waited:.0f} s, above give_up_after_s={self.give_up_after_s:g}: "
                f"{read_status(self._lighthouse_addr).situation}. Start the missing replica groups "
                "again, or the lighthouse, or raise give_up_after_s"
            )

    def _reconfigure_pg(self, communicator_id: int, handles: list[str]) -> None:
        """Connect to the members of a new quorum.

        Under an id made of all that is known of it: a restarted lighthouse counts from 1 again, and
        the store would still hold the addresses that the last quorum of that number left in it.
        """
        self._watch.disconnected()
        if self._alarm is not None:
            self._alarm.close()
            self._alarm = None
        identity = json.dumps([communicator_id, self._watch.max_step, handles]).encode()
        unique = int.from_bytes(hashlib.sha256(identity).digest()[:7], "big")
        found = [json.loads(handle) for handle in handles]
        limit_s = self._connect_timeout.total_seconds()
        boards = {
            name: Notices(address, self._tokens, limit_s)
            for name, address in self._watch.boards.items()
        }
        rendezvous = Rendezvous(boards, self._watch.name, unique, 2 * limit_s)
        try:
            self._check_reachable(dict(zip(boards, found, strict=True)))
        except ConnectionError:
            rendezvous.decline(self._watch.unreachable)
            raise
        if len(handles) > 1:
            rendezvous.wait_for_all()
        super()._reconfigure_pg(unique, handles)
        if len(handles) > 1:
            self._alarm = SyncAlarm(next(iter(boards.values())), unique)
        self._watch.connected(communicator_id, unique)

    def _check_reachable(self, handles: Mapping[str, dict[str, Any]]) -> None:
        """Check that every member's address answers, and note for the others which do not.

        Raises:
            ConnectionError: One of them does not.
        """
        with futures.ThreadPoolExecutor(min(16, len(handles))) as pool:
            answers = dict(zip(handles, pool.map(self._answers, handles.values()), strict=True))
        self._watch.unreachable = tuple(name for name, answer in answers.items() if not answer)
        if self._watch.unreachable:
            name = self._watch.unreachable[0]
            raise ConnectionError(
                f"replica group {name.partition(':')[0]} says it is at {handles[name]['store']}, "
                "which does not answer here: it has died, or set hostname (callbacks.diloco."
                "hostname) in that group to a name or address of its machine that this one can "
                "reach"
            )

    def _answers(self, handle: Mapping[str, Any]) -> bool:
        host, _, port = handle["store"].rpartition(":")
        limit = self._connect_timeout.total_seconds()
        if not can_connect(host.strip("[]"), int(port), limit):
            return False
        return not isinstance(self._pg, Gloo) or self._pg.is_secured(handle, limit)

    def allreduce(
        self,
        tensor: Tensor,
        should_quantize: bool = False,
        reduce_op: ReduceOp = ReduceOp.AVG,  # pyright: ignore[reportArgumentType]
    ) -> Any:
        """torchft's, with a wait on the CPU that a signal can interrupt."""
        work = super().allreduce(tensor, should_quantize, reduce_op)
        return InterruptibleWork(work, self._is_broken) if tensor.device.type == "cpu" else work

    def all_to_all(self, received: Tensor, sent: Tensor) -> Any:
        """Send each group its part of ``sent``, 1-D in equal parts; errors as in ``allreduce``."""
        return self._started(
            lambda: self._pg.alltoall_base(received, sent, [], [], AllToAllOptions()), received
        )

    def all_gather(self, gathered: Tensor, own: Tensor) -> Any:
        """Send ``own`` to all groups; ``gathered`` is 1-D, in the order of the groups."""
        parts = list(gathered.chunk(gathered.numel() // own.numel()))
        return self._started(
            lambda: self._pg.allgather([parts], [own], AllgatherOptions()), gathered
        )

    def _started(self, start: Callable[[], Any], result: Tensor) -> Any:
        """A collective that torchft's Manager does not have, with what it does around its own."""
        if self.errored():
            return _DummyWork(result)
        try:
            work = _ManagedWork(self, start(), result)
        except Exception as error:
            self.report_error(error)
            return _DummyWork(result)
        return InterruptibleWork(work, self._is_broken) if result.device.type == "cpu" else work

    def should_commit(self, timeout: timedelta | None = None) -> bool:
        """torchft's vote, awaited so that a signal can interrupt it.

        It waits for the other ranks of the group, one of which may have died.
        """
        if torch.accelerator.is_available():  # it synchronises the device of the calling thread
            commits = super().should_commit(timeout)
        else:
            commits = self._executor.submit(super().should_commit, timeout).result()
        if commits and _left:
            with suppress(IndexError):  # another group of this process may be at it too
                while True:
                    _left.pop().release()
            gc.collect()  # some of it is in cycles, which Python leaves alone for long
        return commits

    def shutdown(self, wait: bool = False) -> None:
        """Leave: heartbeats stop, so that the peers go on without this group.

        Connections stay for now: a peer may still be receiving this group's part of the last
        allreduce, and would fail there.
        """
        if not self._is_shut_down:
            self._is_shut_down = True
            super().shutdown(wait=wait)
            if self._group_rank == 0:  # which has the manager server
                uuid = self._watch.name.rpartition(":")[2]
                free_uuids[self.replica_name, self._lighthouse_addr] = uuid
            _left.append(self)
            self.store = None

    def release(self) -> None:
        """Close what ``shutdown`` has left open: sockets, threads and ports.

        The group has taken part in a sync since, so its peers are through with the one before.
        """
        if self._alarm is not None:
            self._alarm.close()
        self._board.close()
        self._pg.abort(errored=False)  # pyright: ignore[reportCallIssue]
        # Each of these ends with its last reference.
        for name in ("_pg", "_store", "_client", "_watch", "_manager", "_checkpoint_transport"):
            setattr(self, name, None)
        self.layout = GroupLayout(self._group_world_size)  # it had the store
        self._load_state_dict_fns.clear()
        self._user_state_dicts.clear()


def _is_own_failure(error: Exception) -> bool:
    """Whether an error in a sync is this group's own, and not what a peer's end looks like here."""
    if isinstance(error, ConnectionError | TimeoutError | torch.distributed.DistError):
        return False
    of_peers = ("gloo", "nccl")  # torch raises their errors as plain RuntimeErrors
    return isinstance(error, OSError | RuntimeError | MemoryError) and not any(
        name in str(error).lower() for name in of_peers
    )
