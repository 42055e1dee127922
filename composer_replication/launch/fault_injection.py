"""A replica group that hangs, or cannot be reached, when it is ordered to: for ``chaos`` only.

``python -m composer_replication.launch.fault_injection train CONFIG`` is ``composer-replication
train``, with a thread that reads orders from a file in the group's folder. What the group then
does, no signal from outside could make it do. Everything else of a group is as always.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from composer_replication.replica.json_files import read_json, replace_json

ORDER = "order.json"
OBEYED = "obeyed.json"
ORDERED = ("hang", "unreachable", "one_way")
NOWHERE = "127.0.0.1:9"
"""An address at which nothing listens."""

POLL_S = 0.1


@dataclass(frozen=True)
class Order:
    """What a group shall suffer.

    Args:
        number: Different from that of any order before.
        kind: ``hang``: its training thread stands still for good. ``unreachable``: its connections
            are closed, and no other group can connect to it. ``one_way``: its connections are
            closed, and it cannot connect to ``target``, which can connect to it.
        seconds: For how long, from its next sync on; None for good.
        target: The replica id of another group.
    """

    number: int
    kind: str
    seconds: float | None = None
    target: str | None = None


def give_order(folder: Path, order: Order) -> None:
    """Order the group of this folder to fail."""
    replace_json(folder / ORDER, asdict(order))


def obeyed_at(folder: Path, number: int) -> float | None:
    """When the group began to obey an order, by ``time.monotonic``; None before."""
    obeyed = read_json(folder / OBEYED)
    return obeyed["at"] if obeyed.get("number") == number else None


class Faults:
    """The faults of this process.

    An order that was given before the process started is not for it: it was its last life's.

    Args:
        folder: The group's.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._order = self._past = self._read()
        self._began: float | None = None

    def watch(self) -> None:
        """Look for orders, in a thread; call it in the main thread."""
        signal.signal(signal.SIGUSR1, self._hang)
        threading.Thread(target=self._watch, name="fault injection", daemon=True).start()

    def begin(self) -> bool:
        """In the training thread before a sync: whether a fault of the network begins here."""
        if self._order == self._past or self._began is not None:
            return False
        self._begin()
        return True

    def current(self, kind: str) -> Order | None:
        """The order of this kind that holds now."""
        order, began = self._order, self._began
        if order is None or began is None or order.kind != kind:
            return None
        is_over = order.seconds is not None and time.monotonic() > began + order.seconds
        return None if is_over else order

    def _watch(self) -> None:
        while True:
            order = self._read()
            if order not in (self._order, self._past):
                self._order, self._began = order, None
                if order is not None and order.kind == "hang":
                    os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(POLL_S)

    def _hang(self, *signal_and_frame: object) -> None:
        self._begin()
        while True:  # in the main thread, which trains; heartbeats come from others
            time.sleep(1.0)

    def _begin(self) -> None:
        assert self._order is not None, "there is one to obey"
        self._began = time.monotonic()
        if os.environ.get("RANK", "0") == "0":  # one of the group's processes tells
            told = {"number": self._order.number, "at": self._began}
            replace_json(self._folder / OBEYED, told)

    def _read(self) -> Order | None:
        order = read_json(self._folder / ORDER)
        return Order(**order) if order else None


def install(faults: Faults) -> None:
    """Make this process's managers suffer the faults of the network."""
    from composer_replication.replica.manager import ReplicaManager

    class UnreliableManager(ReplicaManager):
        def start_quorum(self, *arguments: Any, **named: Any) -> None:
            if faults.begin():
                self._close_connections()
            super().start_quorum(*arguments, **named)

        def _check_reachable(self, handles: Mapping[str, dict[str, Any]]) -> None:
            order = faults.current("one_way")
            target = None if order is None else order.target
            super()._check_reachable(
                {
                    name: handle | ({"store": NOWHERE} if _group(name) == target else {})
                    for name, handle in handles.items()
                }
            )

        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            pg: Any = self._pg
            own_handle = pg.get_reconfigure_handle

            def handle() -> str:
                told = json.loads(own_handle())
                return json.dumps(
                    told | ({"store": NOWHERE} if faults.current("unreachable") else {})
                )

            pg.get_reconfigure_handle = handle

    from composer_replication.replica import factory as replica

    replica.ReplicaManager = UnreliableManager


def _group(member: str) -> str:
    """The replica id in the lighthouse's name of a member."""
    return member.partition(":")[0]


def main() -> None:
    """Run the command, under faults."""
    from composer_replication.replica.options import ReplicaEnv

    env = ReplicaEnv.from_env()
    faults = Faults(Path(env.run_dir or ".") / f"replica_{env.replica_id}")
    install(faults)
    faults.watch()
    runpy.run_module("composer_replication", run_name="__main__")


if __name__ == "__main__":
    main()
