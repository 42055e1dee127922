"""The group over which replicas average: torchft's, made to work and reachable."""

from __future__ import annotations

import json
import os
import socket
from datetime import timedelta
from ipaddress import ip_address
from threading import Thread
from urllib.parse import urlsplit

import psutil
import torch
from torch.distributed import ProcessGroupGloo as TorchGloo
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torchft.process_group import ProcessGroup, ProcessGroupGloo, ProcessGroupNCCL

from composer_replication.lighthouse import can_connect


class AdvertisedHost(ProcessGroup):
    """A torchft process group that tells peers the host it was given.

    torchft's tells the machine's own name (``process_group.py``, ``get_reconfigure_handle``),
    whatever the Manager's ``hostname`` is; where peers cannot resolve it, no sync ever commits.
    """

    advertised_host: str | None = None

    def get_reconfigure_handle(self) -> str:
        host = self.advertised_host
        if host is None:
            return super().get_reconfigure_handle()
        if self._rendezvous_store is None:
            self._rendezvous_store = host_store(host)
        handle = json.loads(super().get_reconfigure_handle())
        bracketed = f"[{host}]" if ":" in host else host
        return json.dumps(handle | {"store": f"{bracketed}:{self._rendezvous_store.port}"})


class Gloo(AdvertisedHost, ProcessGroupGloo):
    """torchft's gloo group, over TLS if it has a tunnel."""

    tunnel: TlsTunnel | None = None
    _relays: Sequence[str] = ()

    def get_reconfigure_handle(self) -> str:
        handle = super().get_reconfigure_handle()
        if self.tunnel is None:
            return handle
        return json.dumps(json.loads(handle) | {"tls": self.tunnel.address})

    def reconfigure(self, opts: ReconfigureOptions) -> Work:
        self._relays = [json.loads(handle).get("tls") for handle in opts.handles]
        return super().reconfigure(opts)

    def _create_pg(self, store: Store, rank: int, world_size: int) -> TorchProcessGroup:
        if self.tunnel is None:
            return super()._create_pg(store, rank, world_size)
        return make_gloo(store, self.tunnel, rank, self._relays, self._timeout)


class GlooOnTorch27(Gloo):
    """torchft's gloo group for torch before 2.8, which needs two things done differently.

    torchft sets ``options.global_ranks_in_group`` (``process_group.py``, ``_create_pg``), which
    gloo's options lack there: every configuration fails, the Manager swallows the error, and no
    sync ever commits. Without rank info torchft leaves the options alone. They only label traces.

    And that torch destroys a gloo group with the interpreter lock in its hands, while it waits for
    the group's threads (pytorch pull request 154976); a thread that needs the lock to drop a Python
    callback then hangs the process for ever, once in some 300 changes of the quorum. The backend
    beneath is destroyed without the lock, so it has to be what goes last.

    Remove it when the lowest supported torch is 2.8.
    """

    def set_rank_info(
        self,
        replica_id: str,
        group_rank: int,
        group_world_size: int,
        global_rank: int | None = None,
    ) -> None:
        del group_rank, group_world_size, global_rank
        super().set_rank_info(replica_id, None, None, None)  # pyright: ignore[reportArgumentType]

    def abort(self, errored: bool = True) -> None:
        backends = [self._backend()]
        super().abort(errored=errored)
        # Its end waits for what is under way in it, which may take until its timeout.
        Thread(target=backends.clear, name="end_of_gloo", daemon=True).start()

    def shutdown(self) -> None:
        backend = self._backend()
        super().shutdown()
        del backend

    def _backend(self) -> object:
        return None if self._pg is None else self._pg._get_backend(torch.device("cpu"))


class Nccl(AdvertisedHost, ProcessGroupNCCL):
    """torchft's NCCL group."""


def make_process_group(backend: str, timeout: float, hostname: str | None = None) -> ProcessGroup:
    """The group over which replicas average, one that works on this torch.

    Args:
        backend: ``gloo`` or ``nccl``.
        timeout: How long a collective may take, in seconds.
        hostname: How peers reach this machine. None: its host name.
    """
    kinds: dict[str, type[AdvertisedHost]] = {"nccl": Nccl, "gloo": Gloo}
    if backend not in kinds:
        raise ValueError(f"backend={backend!r}: use 'gloo' or 'nccl'")
    if backend == "gloo" and not hasattr(TorchGloo._Options, "global_ranks_in_group"):  # pyright: ignore[reportAttributeAccessIssue]
        kinds["gloo"] = GlooOnTorch27
    group = kinds[backend](timeout=timedelta(seconds=timeout))  # pyright: ignore[reportCallIssue]
    group.advertised_host = hostname
    interface = interface_of(hostname)
    if interface is not None:
        # Else both listen where the machine's own name points, often to 127.0.1.1.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    return group


def interface_of(hostname: str | None) -> str | None:
    """The network interface that has the address of a host name; None if it is not of this machine.

    Raises:
        ValueError: The name does not resolve.
    """
    if hostname is None:
        return None
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(hostname, None)}
    except OSError as error:
        raise ValueError(
            f"hostname={hostname!r} does not resolve here ({error}): give a name or an address of "
            "this machine that the other groups can reach"
        ) from error
    for name, addresses in psutil.net_if_addrs().items():
        if found & {address.address.partition("%")[0] for address in addresses}:
            return name
    return None  # behind a gateway: the peers' address is none of ours


def check_hostname(hostname: str, port: int, lighthouse_addr: str, connect_timeout: float) -> None:
    """Check that a name leads back to this machine, and is not one that leads everybody home.

    Args:
        hostname: What this group is going to tell its peers.
        port: Something of ours that listens.
        lighthouse_addr: ``http://host:port``: on which machine the others meet.
        connect_timeout: In seconds.

    Raises:
        ValueError: Peers could not reach this group under it.
    """
    if not can_connect(hostname, port, connect_timeout):
        raise ValueError(
            f"hostname={hostname!r} does not lead to this machine: set hostname "
            "(callbacks.diloco.hostname) to a name or address under which the other groups reach it"
        )
    lighthouse = urlsplit(lighthouse_addr).hostname or ""
    if _is_loopback(hostname) and not _is_loopback(lighthouse) and not _is_local(lighthouse):
        raise ValueError(
            f"hostname={hostname!r} is a loopback address here, and the lighthouse is on another "
            "machine: the other groups would look for this one at home. Set hostname "
            "(callbacks.diloco.hostname) to an address of this machine that they can reach"
        )


def _addresses(hostname: str) -> set[str]:
    try:
        return {str(info[4][0]) for info in socket.getaddrinfo(hostname, None)}
    except OSError:
        return set()


def _is_loopback(hostname: str) -> bool:
    found = _addresses(hostname)
    return bool(found) and all(ip_address(a.partition("%")[0]).is_loopback for a in found)


def _is_local(hostname: str) -> bool:
    own = {a.address.partition("%")[0] for each in psutil.net_if_addrs().values() for a in each}
    return bool(_addresses(hostname) & own)


def host_store(hostname: str | None = None) -> TCPStore:
    """Host the TCPStore of a replica group; its rank 0 does that, on a free port.

    A Composer job of one process has none, and torchrun's outlives a restart with stale keys.

    Args:
        hostname: How the group's other ranks and the peers reach this machine.
    """
    return TCPStore(hostname or socket.gethostname(), 0, is_master=True, wait_for_workers=False)
