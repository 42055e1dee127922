"""gloo between replica groups, over TLS.

gloo has a TLS transport of its own (``GLOO_DEVICE_TRANSPORT=TCP_TLS``), which is not used. As of
torch 2.7 a write to a full socket is tried again without a pause, under the lock that reading needs
(``gloo/transport/tcp/tls/pair.cc``, ``Pair::write``). When two groups send each other more than the
kernel's buffers hold, both wait for ever, and no timeout ends it: on a network with packets of 1500
bytes an allreduce of 4 MB. It would also apply to every gloo group of the process, or to none, and
it loads a ``libssl.so`` that only development packages install.

So gloo's connections go through ``tls_relay``. The members of a quorum report the addresses of
their relays in the handles that the run's token signs. Where gloo itself listens, it tells its
peers through the rendezvous store; ``TunnelStore`` replaces that by where the relay listens.
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
"""Where the relay listens for gloo, for peers of a lower and of a higher rank. Of two gloo ends the
one with the lower address connects, so the addresses that each end sees have to agree on which."""

assert LOWER < OWN < HIGHER


class TlsTunnel:
    """A process's relay, which is started when it is needed.

    Args:
        tls_dir: The folder of certificates.
        host: How peers reach this machine.
        listener: The socket at which they do. A relay that is started again takes it over.

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
        """Start the relay, if it does not run."""
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
        """Let peers reach gloo at a port, and no longer where it listened before."""
        with self._lock:
            self._ask({"serve": gloo_port})

    def reach(self, address: str, gloo_port: int, listen: str) -> int:
        """The port at a loopback address that leads to a peer's gloo."""
        command = {"reach": [*_host_and_port(address), gloo_port], "listen": listen}
        with self._lock:
            return self._ask(command)["port"]

    def answers(self, address: object, timeout: float) -> bool:
        """Whether a relay is there and accepts this process's certificate, as this one does its."""
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
        assert self._process is not None, "see start"
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # there is no answer then
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
    """A rendezvous store in which gloo finds the relay in the place of its peers.

    Args:
        store: What the groups share.
        tunnel: This process's.
        rank: Of this group in the quorum.
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
    """Where a gloo address has its port, and the port.

    gloo writes the length of its host name, the name, the length of an address, and the address: a
    ``sockaddr_in``, then a number.

    Raises:
        RuntimeError: This torch's gloo writes something else.
    """
    at = 16 + int.from_bytes(value[:8], sys.byteorder)
    family, address = value[at : at + 2], value[at + 4 : at + 8]
    if family != socket.AF_INET.to_bytes(2, sys.byteorder) or address != socket.inet_aton(OWN):
        raise RuntimeError(
            f"gloo of torch {torch.__version__} writes its address in a form that tls_dir cannot "
            "be used with: use torch 2.7, or a private network instead of tls_dir"
        )
    return at + 2, int.from_bytes(value[at + 2 : at + 4])
