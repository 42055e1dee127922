"""torchft's process groups, changed so that peers on other machines can reach them."""

from __future__ import annotations

import json
import os
import socket
from datetime import timedelta
from threading import Thread
from typing import Any

import torch
from torch.distributed import ProcessGroup as TorchProcessGroup
from torch.distributed import ProcessGroupGloo as TorchGloo
from torch.distributed import Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torchft.process_group import ProcessGroup, ProcessGroupGloo, ProcessGroupNCCL

from composer_replication.replica.addresses import bracketed, interface_of, listen, own_address


class AdvertisedHost(ProcessGroup):
    """A torchft process group that advertises a given host name to its peers.

    torchft's advertises the machine's own name (``process_group.py``, ``get_reconfigure_handle``),
    whatever the Manager's ``hostname`` is. If peers cannot resolve that name, no sync ever commits.

    Attributes:
        advertised_host: How peers reach this machine. None: its host name.
    """

    advertised_host: str | None = None

    def get_reconfigure_handle(self) -> str:
        """The JSON object with which torchft tells peers where to connect."""
        if self._rendezvous_store is None:
            self._rendezvous_store = host_store(self.advertised_host)
        store = self._rendezvous_store
        handle = json.loads(super().get_reconfigure_handle())
        return json.dumps(handle | {"store": f"{bracketed(store.host)}:{store.port}"})


class Gloo(AdvertisedHost, ProcessGroupGloo):
    """torchft's gloo group, which listens on the address of ``advertised_host``.

    gloo itself listens on the address of the machine's own name, which is often 127.0.1.1. The
    environment variable ``GLOO_SOCKET_IFNAME`` changes that for every gloo group of the process,
    those of the training job included. If it is set, this group follows it. If the host name is not
    of an address of this machine, gloo's own rule applies.
    """

    def abort(self, errored: bool = True) -> None:
        """Drop the connections, without a wait for their collectives.

        The end of a gloo group waits for the collectives that are under way in it, for up to its
        timeout. On the calling thread that would delay the next quorum, and all groups with it. So
        what holds the connections, the backend below the group, ends on a thread of its own.
        """
        backends = [self._pg and self._pg._get_backend(torch.device("cpu"))]
        # torch before 2.8 destroys a group with the interpreter lock held, and its backend without
        # it (pytorch pull request 154976). So the backend goes last: otherwise a thread of the
        # backend that needs the lock, to drop a Python callback, would hang the process for ever.
        # That happened once in some 300 changes of the quorum.
        super().abort(errored=errored)
        Thread(target=backends.clear, name="end_of_gloo", daemon=True).start()

    def shutdown(self) -> None:
        self.abort(errored=False)

    def _create_pg(self, store: Store, rank: int, world_size: int) -> TorchProcessGroup:
        # As torchft, but for the address. torchft also tells gloo the global ranks, which only
        # label traces. gloo before torch 2.8 does not take them: there every configuration would
        # fail, the Manager swallow the error, and no sync ever commit.
        address = own_address(self.advertised_host)
        options: Any = self._timeout  # gloo chooses the address
        if address is not None and "GLOO_SOCKET_IFNAME" not in os.environ:
            options = TorchGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
            options._timeout = self._timeout
            options._devices = [TorchGloo.create_device(hostname=address)]
        backend = TorchGloo(store, rank, world_size, options)
        backend._set_sequence_number_for_group()
        group = TorchProcessGroup(store, rank, world_size)
        group._set_default_backend(TorchProcessGroup.BackendType.GLOO)
        devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        for device in map(torch.device, devices):
            group._register_backend(device, TorchProcessGroup.BackendType.GLOO, backend)
        return group


class Nccl(AdvertisedHost, ProcessGroupNCCL):
    """torchft's NCCL group."""


def make_process_group(
    backend: str | None,
    timeout: float,
    hostname: str | None = None,
) -> AdvertisedHost:
    """Make the process group over which replica groups average.

    Args:
        backend: ``gloo`` or ``nccl``. None: gloo.
        timeout: How long a collective may take, in seconds.
        hostname: How peers reach this machine. None: its host name.

    Raises:
        ValueError: The host name does not resolve.
    """
    kind = Nccl if backend == "nccl" else Gloo
    group = kind(timeout=timedelta(seconds=timeout))
    group.advertised_host = hostname
    interface = interface_of(hostname)  # raises if hostname does not resolve
    if kind is Nccl and interface is not None:
        # The variable applies to all of the process: NCCL has no such option for one group.
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    return group


def host_store(hostname: str | None = None) -> TCPStore:
    """Start the TCPStore of a replica group on a free port; rank 0 of the group calls this.

    A Composer job of one process has no store, and torchrun's store outlives a restart of the
    workers with stale keys.

    Args:
        hostname: How the group's other ranks and the peers reach this machine; the store listens on
            that address. None: its host name, and every interface.
    """
    host = (hostname or socket.gethostname()).strip("[]")
    listener = listen(hostname)
    port = listener.getsockname()[1]
    return TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        use_libuv=False,  # libuv listens on every interface, and takes no socket from us
        master_listen_fd=listener.detach(),
    )
