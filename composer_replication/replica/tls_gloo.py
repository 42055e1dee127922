"""gloo between replica groups, over TLS.

gloo's own TLS transport (``GLOO_DEVICE_TRANSPORT=TCP_TLS``) is not used. As of torch 2.7 it repeats
a write to a full socket without a pause, under the lock that reading needs
(``gloo/transport/tcp/tls/pair.cc``, ``Pair::write``). If two groups send each other more than the
kernel's buffers hold, both wait for ever, and no timeout ends that. On a network with packets of
1500 bytes an allreduce of 4 MB is enough. The transport also applies to every gloo group of the
process or to none, and it loads a ``libssl.so`` that only development packages install.

So gloo's connections go through ``tls_relay``. The members of a quorum report the addresses of
their relays in the handles, which the run's token signs. gloo publishes the address on which it
listens in the rendezvous store. ``TunnelStore`` replaces it there with an address of the relay.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from composer_replication.replica.addresses import bracketed
from composer_replication.replica.tls import check_tls_dir, client_context
from composer_replication.replica.tls_relay import OWN, PING

log = logging.getLogger(__name__)

LOWER, HIGHER = "127.0.0.1", "127.0.0.3"
"""Where the relay listens for gloo, for peers of a lower and of a higher rank.

Of two gloo ends the one with the lower address connects to the other. Each end compares its own
address, ``OWN``, with the one that it sees of the peer, and both ends must come to the same result.
"""

assert LOWER < OWN < HIGHER


class TlsTunnel:
    """Starts the relay of this process when it is needed, and sends it commands.

    Args:
        tls_dir: The folder of certificates.
        host: How peers reach this machine.
        listener: The socket on which the relay accepts peers. A relay that is started again
            inherits it, so the address stays the same.

    Attributes:
        address: ``host:port`` of the relay, as peers reach it.

    Raises:
        ValueError: The folder's certificates cannot be used.
    """

    def __init__(self, tls_dir: str, host: str, listener: socket.socket) -> None:
        check_tls_dir(tls_dir)
        self._context = client_context(tls_dir)
        self.address = f"{bracketed(host)}:{listener.getsockname()[1]}"
        self._listener = listener
        module = "composer_replication.replica.tls_relay"
        self._command = [sys.executable, "-m", module, tls_dir, str(listener.fileno())]
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._end_relay: Callable[[], object] = lambda: None
        weakref.finalize(self, listener.close)  # the relay has a copy

    def start(self) -> None:
        """Start the relay unless it is running."""
        with self._lock:
            if self._process is not None:
                if self._process.poll() is None:
                    return
                log.warning("The TLS relay ended with %s: starting another", self._process.poll())
                self._end_relay()
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                pass_fds=[self._listener.fileno()],
            )
            self._end_relay = weakref.finalize(self, _end, self._process)

    def serve(self, gloo_port: int) -> None:
        """Let peers reach gloo at this port, and no longer at an earlier one."""
        with self._lock:
            self._ask({"serve": gloo_port})

    def reach(self, address: str, gloo_port: int, listen: str) -> int:
        """Open a port that leads to a peer's gloo.

        Args:
            address: ``host:port`` of the peer's relay.
            gloo_port: The port on which the peer's gloo listens.
            listen: The loopback address on which to open the port.

        Returns:
            The port.
        """
        command = {"reach": [*_host_and_port(address), gloo_port], "listen": listen}
        with self._lock:
            return self._ask(command)["port"]

    def answers(self, address: object, timeout: float) -> bool:
        """Whether a relay answers, and both ends accept each other's certificate.

        Args:
            address: ``host:port`` of the relay. Anything that is not a string has no relay.
            timeout: Limit of each wait, in seconds.
        """
        try:
            if not isinstance(address, str):
                raise ConnectionError("it offers no TLS: all groups need a tls_dir, or none")
            with (
                socket.create_connection(_host_and_port(address), timeout) as connection,
                self._context.wrap_socket(connection) as tls,
            ):
                tls.sendall(PING.to_bytes(2))
                if not tls.recv(1):
                    raise ConnectionError("it closed the connection")
        except (OSError, ValueError) as error:  # an SSLError is an OSError
            log.warning("No TLS connection to the replica group at %s: %s", address, error)
            return False
        return True

    def _ask(self, command: dict[str, Any]) -> Any:
        assert self._process is not None, "start comes first"
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the relay has ended, so there is no answer to read
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the TLS relay of this process has ended; its log says why")
        return json.loads(line)


def _end(relay: subprocess.Popen[str]) -> None:
    """Let a relay end, as it does without a stdin, and once it has sent what it was given."""
    assert relay.stdin is not None and relay.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        relay.stdin.close()
    relay.stdout.close()
    if not sys.is_finalizing():  # else init inherits it; here it would stay as a zombie
        threading.Thread(target=relay.wait, name="end_of_tls_relay", daemon=True).start()


class TunnelStore(Store):
    """A rendezvous store that gives gloo an address of the relay instead of each peer's address.

    Args:
        store: The rendezvous store of the quorum.
        tunnel: The tunnel of this process.
        rank: The rank of this group in the quorum.
        relays: Addresses of the members' relays, by rank.
    """

    def __init__(self, store: Store, tunnel: TlsTunnel, rank: int, relays: Sequence[str]) -> None:
        super().__init__()
        self._store = store
        self._tunnel = tunnel
        self._rank = rank
        self._relays = {f"0/{peer}": relay for peer, relay in enumerate(relays)}

    # torch's stubs declare strings and lists where its C++ hands over bytes and vectors.

    def set(self, key: str, value: Any) -> None:
        if key == f"0/{self._rank}":
            self._tunnel.serve(_port(value)[1])
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        value = self._store.get(key)
        if key not in self._relays or key == f"0/{self._rank}":
            return value
        at, gloo_port = _port(value)
        listen = LOWER if int(key[2:]) < self._rank else HIGHER
        port = self._tunnel.reach(self._relays[key], gloo_port, listen)
        return value[:at] + port.to_bytes(2) + socket.inet_aton(listen) + value[at + 6 :]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        if timeout is None:
            self._store.wait(keys)
        else:
            self._store.wait(keys, timeout)

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)  # pyright: ignore[reportAttributeAccessIssue]


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _port(value: bytes) -> tuple[int, int]:
    """Find the port in an address that gloo has written.

    gloo writes the length of its host name, the name, the length of an address, and the address: a
    ``sockaddr_in``, then a number.

    Returns:
        The offset of the port in ``value``, and the port.

    Raises:
        RuntimeError: The gloo of this torch writes another format.
    """
    at = 16 + int.from_bytes(value[:8], sys.byteorder)
    family, address = value[at : at + 2], value[at + 4 : at + 8]
    if family != socket.AF_INET.to_bytes(2, sys.byteorder) or address != socket.inet_aton(OWN):
        raise RuntimeError(
            f"gloo of torch {torch.__version__} writes its address in a form that tls_dir cannot "
            "be used with: use torch 2.7, or a private network instead of tls_dir"
        )
    return at + 2, int.from_bytes(value[at + 2 : at + 4])
