"""Runs a coordinator and a lighthouse as processes that can be killed and started again."""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from composer_replication.settings import DiLoCoSettings

LOCAL = "127.0.0.1"


class Service:
    """A coordinator or a lighthouse in a process of its own, always at the same address.

    The process ends with the one that started it, because its standard input then ends.

    Args:
        role: ``coordinator`` or ``lighthouse``.
        arguments: Arguments of ``Coordinator`` or ``start_lighthouse``, as JSON can hold them.

    Raises:
        OSError: The service has not started.
    """

    def __init__(self, role: str, arguments: dict[str, Any]) -> None:
        self._request = json.dumps({"role": role, "arguments": arguments}, default=str)
        self.start()
        assert self._process.stdout is not None, "opened as a pipe"
        self.address = self._process.stdout.readline().strip()
        if not self.address:
            self.kill()
            raise OSError(f"the {role} has not started: standard error says why")

    def start(self) -> None:
        """Start the process, also again after ``kill``. It does not wait for the service."""
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # else the terminal's Ctrl-C would end the service too
        )
        assert self._process.stdin is not None, "opened as a pipe"
        # Not as an argument, which every user of the machine could read: it holds the token.
        self._process.stdin.write(self._request + "\n")
        self._process.stdin.flush()

    def signal(self, number: int) -> None:
        """Send a signal to the service's process."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kill the service's process and wait until it has ended."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


class KillableCoordinator:
    """Replaces ``Coordinator``: coordinator and lighthouse are processes that can be killed.

    Args:
        settings: As for ``Coordinator``.
        source: As for ``Coordinator``.
        **arguments: All other arguments of ``Coordinator``.
    """

    def __init__(self, settings: DiLoCoSettings, source: str, **arguments: Any) -> None:
        ports = _free_ports()
        if arguments.get("record") is not None:  # it travels as JSON, like the others
            arguments["record"] = str(arguments["state_dir"])
        arguments |= {"settings": asdict(settings), "source": source}
        # The coordinator starts a lighthouse of its own on the next port. Nobody uses that one.
        self.services = {
            "coordinator": Service("coordinator", arguments | {"bind": f"{LOCAL}:{ports[0]}"}),
            "lighthouse": Service(
                "lighthouse",
                {
                    "bind": f"{LOCAL}:{ports[2]}",
                    "join_timeout_ms": round(1000 * arguments["straggler_timeout_s"]),
                    "heartbeat_timeout_ms": arguments["lighthouse_heartbeat_ms"],
                },
            ),
        }
        self.address = self.services["coordinator"].address
        self.lighthouse_addr = self.services["lighthouse"].address

    def group_has_ended(self, replica_id: int | str) -> None:
        """Do nothing: as between machines, missing heartbeats have to tell the coordinator."""

    def shutdown(self) -> None:
        """Kill the coordinator and the lighthouse."""
        for service in self.services.values():
            service.kill()


def _free_ports() -> tuple[int, int, int]:
    """Find three free ports in a row.

    They lie below the ports that the kernel assigns to outgoing connections. Else such a connection
    could take the port of a service while that is killed.
    """
    for _ in range(100):
        first = random.randrange(20_000, 30_000)
        ports = first, first + 1, first + 2
        try:
            for port in ports:
                socket.create_server((LOCAL, port)).close()
        except OSError:
            continue
        return ports
    raise OSError(f"no three free ports in a row on {LOCAL} between 20000 and 30000")


def serve(role: str, arguments: dict[str, Any]) -> None:
    """Start the service, print its address, and serve until standard input ends."""
    if role == "lighthouse":
        from composer_replication.replica.lighthouse import start_lighthouse

        lighthouse = start_lighthouse(**arguments)
        address = f"http://{LOCAL}:{lighthouse.address().rpartition(':')[2]}"
    else:
        from composer_replication.coordinator.server import Coordinator
        from composer_replication.launch.outcome import recorder

        arguments["settings"] = DiLoCoSettings(**arguments["settings"])
        arguments["state_dir"] = Path(arguments["state_dir"])
        if arguments.get("record") is not None:
            arguments["record"] = recorder(Path(arguments["record"]))
        coordinator = Coordinator(**arguments)
        address = coordinator.address
    print(address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    serve(**json.loads(sys.stdin.readline()))
