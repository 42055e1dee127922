"""A torchft Manager that waits, recovers and leaves where torchft's own raises, hangs or stays."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable
from concurrent import futures
from datetime import timedelta
from threading import Thread
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp
from torchft.manager import Manager

from composer_replication.heal_transport import STATE, HealTransport
from composer_replication.lighthouse import can_connect, read_status

log = logging.getLogger(__name__)

_left: list[object] = []
"""Process groups of managers that have left, kept until the process ends."""


class ReplicaManager(Manager):
    """A torchft Manager that owns its store and process group; ``make_manager`` builds it.

    It differs from torchft's in what happens when something goes wrong:

    * a quorum that fails is asked for again (torchft raises the same error for ever after);
    * a quorum with other members under an id that was used before is noticed, which a restarted
      lighthouse gives (torchft then adds up two groups and divides by three);
    * peers whose address cannot be reached are named;
    * signals are handled while it waits for a quorum, an allreduce or a vote, and a process may end
      meanwhile.
    """

    SAY_EVERY_S = 30.0

    store: object = None
    give_up_after_s: float | None = None
    _lighthouse_addr = ""
    _is_shut_down = False
    _members: tuple[str, ...] = ()
    _replica_names: list[str]
    _max_step = 0

    def take_over(self, lighthouse_addr: str, give_up_after_s: float | None) -> ReplicaManager:
        """Put our parts in the place of torchft's; once, after construction."""
        self._lighthouse_addr = lighthouse_addr
        self.give_up_after_s = give_up_after_s
        self._executor = DaemonExecutor()
        self._client = _WatchedClient(self._client, self._note_quorum)
        return self

    def _note_quorum(self, quorum: Any) -> None:
        """Make torchft reconfigure when an id it knows comes with other members."""
        members = tuple(quorum.reconfigure_handles)
        if quorum.quorum_id == self._quorum_id and members != self._members:
            log.warning(
                "Quorum id %d came again with other members: the lighthouse has been restarted",
                quorum.quorum_id,
            )
            self._quorum_id = -1
        self._members = members
        self._replica_names = [name.partition(":")[0] for name in quorum.replica_ids]
        self._max_step = quorum.max_step

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
        if self.errored():
            self._pg.abort(errored=False)  # pyright: ignore[reportCallIssue]
        began = time.monotonic()
        while True:
            try:
                super().start_quorum(allow_heal, shrink_only, timeout)
                break
            except QuorumFailed as error:
                self._quorum_future = None  # torchft would raise its error again
                log.warning("No quorum: %s. Asking again", error)
                self._check_patience(began)
                time.sleep(1.0)
            except BaseException:
                self._quorum_future = None
                raise
        if self.errored():  # a heal or a connection failed: peers need not wait for our part
            self._pg.abort(errored=False)  # pyright: ignore[reportCallIssue]

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
        hosts = [json.loads(handle)["store"] for handle in handles]
        for name, address in zip(self._replica_names, hosts, strict=True):
            host, _, port = address.rpartition(":")
            if not can_connect(host.strip("[]"), int(port), self._connect_timeout.total_seconds()):
                raise ConnectionError(
                    f"replica group {name} says it is at {address}, which does not answer here: "
                    "it has died, or set hostname (callbacks.diloco.hostname) in that group to a "
                    "name or address of its machine that this one can reach"
                )
        identity = json.dumps([communicator_id, self._max_step, handles]).encode()
        unique = int.from_bytes(hashlib.sha256(identity).digest()[:7], "big")
        super()._reconfigure_pg(unique, handles)

    def allreduce(
        self,
        tensor: Tensor,
        should_quantize: bool = False,
        reduce_op: ReduceOp = ReduceOp.AVG,  # pyright: ignore[reportArgumentType]
    ) -> Any:
        """torchft's, with a wait on the CPU that a signal can interrupt."""
        work = super().allreduce(tensor, should_quantize, reduce_op)
        return _InterruptibleWork(work) if tensor.device.type == "cpu" else work

    def should_commit(self, timeout: timedelta | None = None) -> bool:
        """torchft's vote, awaited so that a signal can interrupt it.

        It waits for the other ranks of the group, one of which may have died.
        """
        if torch.accelerator.is_available():  # it synchronises the device of the calling thread
            return super().should_commit(timeout)
        return self._executor.submit(super().should_commit, timeout).result()

    def shutdown(self, wait: bool = False) -> None:
        """Leave: heartbeats stop, so that the peers go on without this group.

        Connections stay until the process ends: a peer may still be receiving this group's part
        of the last allreduce, and would fail there.
        """
        if not self._is_shut_down:
            self._is_shut_down = True
            super().shutdown(wait=wait)
            _left.append(self._pg)
            self.store = None


class QuorumFailed(ConnectionError):
    """The lighthouse, or the group's own manager server, gave no quorum."""


class _WatchedClient:
    """The part of torchft's ManagerClient that a Manager calls, with an eye on the quorums."""

    def __init__(self, client: Any, note_quorum: Callable[[Any], None]) -> None:
        self._client = client
        self._note_quorum = note_quorum
        self.should_commit = client.should_commit

    def _quorum(self, **request: Any) -> Any:
        try:
            quorum = self._client._quorum(**request)
        except Exception as error:  # Rust's own: a RuntimeError or a TimeoutError
            raise QuorumFailed(str(error).splitlines()[0]) from error
        self._note_quorum(quorum)
        return quorum


class _InterruptibleWork:
    """Waits for an allreduce in small sleeps: gloo's own wait holds signals up for ``timeout``."""

    LONGEST_NAP_S = 0.01

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self, timeout: timedelta | None = None) -> bool:
        sent = getattr(self._work, "_work", None)  # none if the manager had failed before
        began = time.monotonic()
        while sent is not None and not sent.is_completed():
            time.sleep(min(self.LONGEST_NAP_S, (time.monotonic() - began) / 20))
        return self._work.wait() if timeout is None else self._work.wait(timeout)


class DaemonExecutor(futures.Executor):
    """Runs each call on a thread of its own that does not hold up the end of the process.

    Python waits for the threads of a ThreadPoolExecutor, here for a quorum of up to an hour.
    """

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> futures.Future[Any]:
        future: futures.Future[Any] = futures.Future()

        def run() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:  # noqa: B036 - raised where the result is read
                future.set_exception(error)

        Thread(target=run, name="torchft", daemon=True).start()
        return future
