"""gloo between replica groups, over TLS.

gloo has a TLS transport of its own (``GLOO_DEVICE_TRANSPORT=TCP_TLS``), which is not used. As of
torch 2.7 a write to a full socket is tried again without a pause, under the lock that reading needs
(``gloo/transport/tcp/tls/pair.cc``, ``Pair::write``). When two groups send each other more than the
kernel's buffers hold, both wait for ever, and no timeout ends it: on a network with packets of 1500
bytes an allreduce of 4 MB. It would also apply to every gloo group of the process, or to none, and
it loads a ``libssl.so`` that only development packages install.

So gloo's connections go through ``tls_relay``. gloo tells its peers where it listens through the
rendezvous store; here that is rewritten on its way.
"""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroup as TorchProcessGroup
from torch.distributed import ProcessGroupGloo as TorchGloo
from torch.distributed import Store

from composer_replication.tls import HANDSHAKE_TIMEOUT_S, check_tls_dir
from composer_replication.tls_relay import OWN

log = logging.getLogger(__name__)

LOWER, HIGHER = "127.0.0.1", "127.0.0.3"
"""Where the relay listens for gloo, for peers of a lower and of a higher rank. Of two gloo ends the
one with the lower address connects, so the addresses that each end sees have to agree on which."""

assert LOWER < OWN < HIGHER


class TlsTunnel:
    """A process's relay.

    Args:
        tls_dir: The folder of certificates.
        host: How peers reach this machine.
        bind: The address at which the relay listens for them; empty for all.

    Raises:
        ValueError: The folder's certificates cannot be used.
    """

    def __init__(self, tls_dir: str, host: str, bind: str) -> None:
        check_tls_dir(tls_dir)
        self._command = [sys.executable, "-m", "composer_replication.tls_relay", tls_dir, bind]
        self._host = f"[{host}]" if ":" in host else host
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self.address = ""
        """``host:port``, where peers reach the relay."""

    def serve(self, gloo_port: int) -> None:
        """Let peers reach gloo at a port, and no longer where it listened before."""
        with self._lock:
            self._start()
            self._ask({"serve": gloo_port})

    def reach(self, address: str, gloo_port: int, listen: str) -> int:
        """The port at a loopback address that leads to a peer's gloo."""
        host, _, port = address.rpartition(":")
        with self._lock:
            command = {"reach": [host.strip("[]"), int(port), gloo_port], "listen": listen}
            return self._ask(command)["port"]

    def close(self) -> None:
        """Let the relay end once it has sent everything; gloo's connections have to be closed."""
        with self._lock:
            if self._process is not None and self._process.stdin is not None:
                self._process.stdin.close()
                self._process = None

    def _start(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        if self._process is not None:
            log.warning("The TLS relay has ended with %s: starting another", self._process.poll())
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.address = f"{self._host}:{self._answer()['port']}"

    def _ask(self, command: dict[str, Any]) -> Any:
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the answer says so
        return self._answer()

    def _answer(self) -> Any:
        assert self._process is not None and self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ConnectionError("the TLS relay of this process has ended, its log says why")
        return json.loads(line)


class TunnelStore(Store):
    """A rendezvous store in which gloo finds the relay in the place of its peers.

    Args:
        store: What the groups share.
        tunnel: This process's.
        rank: Of this group in the quorum.
        world_size: Groups in the quorum.
    """

    def __init__(self, store: Store, tunnel: TlsTunnel, rank: int, world_size: int) -> None:
        super().__init__()
        self._store = store
        self._tunnel = tunnel
        self._rank = rank
        self._peers = {f"0/{peer}": peer for peer in range(world_size) if peer != rank}

    def set(self, key: str, value: bytes) -> None:
        if key == f"0/{self._rank}":
            self._tunnel.serve(_port(value)[1])
            self._store.set(_relay(key), self._tunnel.address)
            self._store.set(key, value)
            self._wait_for_relays()
        else:
            self._store.set(key, value)

    def get(self, key: str) -> bytes:
        value = self._store.get(key)
        if key not in self._peers:
            return value
        at, gloo_port = _port(value)
        listen = LOWER if self._peers[key] < self._rank else HIGHER
        address = self._store.get(_relay(key)).decode()
        port = self._tunnel.reach(address, gloo_port, listen)
        return value[:at] + port.to_bytes(2) + socket.inet_aton(listen) + value[at + 6 :]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        if timeout is None:
            self._store.wait(keys)
        else:
            self._store.wait(keys, timeout)

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def check(self, keys: Sequence[str]) -> bool:
        return self._store.check(keys)

    def _wait_for_relays(self) -> None:
        """Before gloo waits for a member without TLS as long as for an allreduce."""
        for key, peer in self._peers.items():
            try:
                self._store.wait([_relay(key)], timedelta(seconds=2 * HANDSHAKE_TIMEOUT_S))
            except torch.distributed.DistError as error:
                raise ConnectionError(
                    f"member {peer} of the quorum offers no TLS: it is not of this run, or it has "
                    "no tls_dir (COMPOSER_REPLICATION_TLS_DIR); all groups need one, or none"
                ) from error


def make_gloo(
    store: Store, tunnel: TlsTunnel, rank: int, world_size: int, timeout: timedelta
) -> TorchProcessGroup:
    """A gloo group whose connections go through the tunnel, for tensors in host memory."""
    options = TorchGloo._Options()
    options._timeout = timeout
    options._devices = [TorchGloo.create_device(hostname=OWN)]
    backend = TorchGloo(TunnelStore(store, tunnel, rank, world_size), rank, world_size, options)
    backend._set_sequence_number_for_group()
    group = TorchProcessGroup(store, rank, world_size)
    group._set_default_backend(TorchProcessGroup.BackendType.GLOO)
    devices = ["cpu"] + ["cuda"] * torch.cuda.is_available()
    for device in devices:
        group._register_backend(
            torch.device(device), TorchProcessGroup.BackendType.GLOO, backend
        )
    return group


def _relay(key: str) -> str:
    return f"tls/{key}"


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
