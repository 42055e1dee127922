"""A replica group that hangs or becomes unreachable on request.

With the variables of ``unreliable`` in its environment, any Python process that builds a manager
has a thread that reads requests from a file in the group's folder. No signal from outside could
cause these faults. Everything else in the group works as usual.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from composer_replication.util.json_files import read_json, replace_json

REQUEST_FILE = "fault_request.json"
"""In the group's folder: the newest request for a fault."""
BEGAN_FILE = "fault_began.json"
"""In the group's folder: when the newest fault began."""
IN_SYNC_KINDS = ("unreachable", "one_way")
"""Kinds of faults that begin with a sync."""
IN_GROUP_KINDS = ("hang", *IN_SYNC_KINDS)
"""Kinds of faults that a group inflicts on itself."""
AT_START = Path(__file__).parent
"""A folder for ``PYTHONPATH``: its ``sitecustomize.py`` makes a Python process obey requests."""
NOWHERE = "127.0.0.1:9"
"""An address at which nothing listens."""

POLL_S = 0.1


@dataclass(frozen=True)
class FaultRequest:
    """A fault that a group shall inflict on itself.

    Args:
        number: A number that no earlier request had.
        kind: ``hang``: the training thread stops for good. ``unreachable``: the group's connections
            are closed, and no other group can connect to it. ``one_way``: its connections are
            closed, and it cannot connect to ``target``, which can connect to it.
        seconds: Duration from the group's next sync on; None: for good.
        target: Replica id of the other group, for ``one_way``.
    """

    number: int
    kind: str
    seconds: float | None = None
    target: str | None = None


def request_fault(folder: Path, request: FaultRequest) -> None:
    """Write a request for a fault into the folder of a group."""
    replace_json(folder / REQUEST_FILE, asdict(request))


def fault_began_at(folder: Path, number: int) -> float | None:
    """When a group began a requested fault, by ``time.monotonic``; None before."""
    fault = read_json(folder / BEGAN_FILE)
    return fault["at"] if fault.get("number") == number else None


class GroupFaults:
    """The faults that this process inflicts on itself.

    It ignores a request that was there before the process started, which was for an earlier
    process.

    Args:
        folder: The group's folder, in which requests are read.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._request = self._stale_request = self._read_request()
        self._began: float | None = None

    def watch(self) -> None:
        """Start the thread that looks for requests. Call it in the main thread."""
        signal.signal(signal.SIGUSR1, self._hang)
        threading.Thread(target=self._watch, name="fault injection", daemon=True).start()

    def begin(self) -> bool:
        """Begin a requested fault of the network. The training thread calls it before every sync.

        Returns:
            Whether a fault has begun.
        """
        if not any(map(self.is_wanted, IN_SYNC_KINDS)):
            return False
        self._begin()
        return True

    def current(self, kind: str) -> FaultRequest | None:
        """The request of this kind whose fault is active now."""
        request, began = self._request, self._began
        if request is None or began is None or request.kind != kind:
            return None
        is_over = request.seconds is not None and time.monotonic() > began + request.seconds
        return None if is_over else request

    def is_wanted(self, kind: str) -> bool:
        """Whether a fault of this kind is requested and has not begun."""
        request = self._request
        if request is None or request == self._stale_request or self._began is not None:
            return False
        return request.kind == kind

    def _watch(self) -> None:
        while True:
            request = self._read_request()
            if request not in (self._request, self._stale_request):
                self._request, self._began = request, None
            if self.is_wanted("hang"):
                os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(POLL_S)

    def _hang(self, number: int, frame: FrameType | None) -> None:
        """Hang if the main thread trains; in a sync, which has timeouts, wait for its end."""
        if _is_in_sync(frame) or not self.is_wanted("hang"):
            return
        self._begin()
        while True:  # a signal handler runs in the main thread, which trains; others go on
            time.sleep(1.0)

    def _begin(self) -> None:
        assert self._request is not None, "a fault begins only on request"
        self._began = time.monotonic()
        if os.environ.get("RANK", "0") == "0":  # one process of the group is enough
            fault = {"number": self._request.number, "at": self._began}
            replace_json(self._folder / BEGAN_FILE, fault)

    def _read_request(self) -> FaultRequest | None:
        request = read_json(self._folder / REQUEST_FILE)
        return FaultRequest(**request) if request else None


def _is_in_sync(frame: FrameType | None) -> bool:
    """Whether a call of ours is on the stack of this frame: of a sync, or of the callback."""
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(_IN_SYNC):
            return True
        frame = frame.f_back
    return False


_IN_SYNC = tuple(f"composer_replication.{name}." for name in ("callback", "diloco", "replica"))


def install(faults: GroupFaults) -> None:
    """Replace this process's manager class by one that fails on request."""
    from composer_replication.replica.manager import ReplicaManager

    class UnreliableManager(ReplicaManager):
        """A manager whose connections fail while a fault of the network is active."""

        def start_quorum(self) -> None:
            if faults.begin():
                self._close_connections()
            super().start_quorum()

        def _find_unreachable(self, handles: Mapping[str, dict[str, Any]]) -> tuple[str, ...]:
            request = faults.current("one_way")
            target = None if request is None else request.target
            return super()._find_unreachable(
                {
                    name: handle | ({"store": NOWHERE} if _group(name) == target else {})
                    for name, handle in handles.items()
                }
            )

        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            pg: Any = self._pg
            own_handle = pg.get_reconfigure_handle

            def handle() -> str:
                addresses = json.loads(own_handle())
                if faults.current("unreachable"):
                    addresses["store"] = NOWHERE
                return json.dumps(addresses)

            pg.get_reconfigure_handle = handle

    from composer_replication.replica import factory as replica

    replica.ReplicaManager = UnreliableManager


def _group(member: str) -> str:
    """The replica id in a member's name as the lighthouse has it."""
    return member.partition(":")[0]


def listen() -> None:
    """Make this process fail on request. Call it in the main thread, before a manager is built."""
    from composer_replication.options import ReplicaEnv

    env = ReplicaEnv.from_env()
    faults = GroupFaults(Path(env.run_dir or ".") / f"replica_{env.replica_id}")
    install(faults)
    faults.watch()


def unreliable(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables with which a group fails on request, whatever command it runs.

    Python imports a module ``sitecustomize`` at its start, here the one of ``AT_START``.

    Args:
        environ: The environment, with a ``PYTHONPATH`` that stays in force.
    """
    others = environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(AT_START), *([others] if others else [])])}
