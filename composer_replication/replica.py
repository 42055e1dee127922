"""A replica group's connection to the others: store, process group, torchft Manager."""

from __future__ import annotations

import logging
import os
import socket
from datetime import timedelta

import torch
from torch.distributed import ProcessGroupGloo as TorchGloo
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torchft.manager import Manager
from torchft.process_group import ProcessGroup, ProcessGroupGloo, ProcessGroupNCCL

from composer_replication.lighthouse import check_lighthouse
from composer_replication.options import ReplicaOptions

log = logging.getLogger(__name__)

_OVERRIDES = ("TORCHFT_TIMEOUT_SEC", "TORCHFT_QUORUM_TIMEOUT_SEC", "TORCHFT_CONNECT_TIMEOUT_SEC")


_left: list[object] = []
"""Process groups of managers that have left, kept until the process ends."""


class GlooOnTorch27(ProcessGroupGloo):
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
        backend = self._backend()
        super().abort(errored=errored)
        del backend

    def shutdown(self) -> None:
        backend = self._backend()
        super().shutdown()
        del backend

    def _backend(self) -> object:
        return None if self._pg is None else self._pg._get_backend(torch.device("cpu"))


def make_process_group(backend: str, timeout: float) -> ProcessGroup:
    """The group over which replicas average, one that works on this torch.

    Args:
        backend: ``gloo`` or ``nccl``.
        timeout: How long a collective may take, in seconds.
    """
    if backend == "nccl":
        return ProcessGroupNCCL(timeout=timedelta(seconds=timeout))
    if backend != "gloo":
        raise ValueError(f"backend={backend!r}: use 'gloo' or 'nccl'")
    has_option = hasattr(TorchGloo._Options, "global_ranks_in_group")  # type: ignore[attr-defined]
    kind = ProcessGroupGloo if has_option else GlooOnTorch27
    return kind(timeout=timedelta(seconds=timeout))


def host_store(hostname: str | None = None) -> TCPStore:
    """Host the TCPStore of a replica group; its rank 0 does that, on a free port.

    A Composer job of one process has none, and torchrun's outlives a restart with stale keys.

    Args:
        hostname: How the group's other ranks and the peers reach this machine.
    """
    return TCPStore(hostname or socket.gethostname(), 0, is_master=True, wait_for_workers=False)


class ReplicaManager(Manager):
    """A torchft Manager that owns its store and process group, and can be shut down twice."""

    store: TCPStore | None = None
    _is_shut_down = False

    def start_quorum(
        self, allow_heal: bool = True, shrink_only: bool = False, timeout: timedelta | None = None
    ) -> None:
        """Ask for a quorum, as torchft does; after an error, first close what the error left.

        A peer that has not seen the error still waits for this group's part of the allreduce. While
        the connections stand it would wait for ``timeout``, and this quorum for the peer.
        """
        if self.errored():
            self._pg.abort(errored=False)  # pyright: ignore[reportCallIssue]
        super().start_quorum(allow_heal, shrink_only, timeout)

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


def make_manager(
    *,
    replica_id: str | int,
    lighthouse_addr: str,
    min_replica_size: int = ReplicaOptions.min_replica_size,
    timeout: float = ReplicaOptions.timeout,
    quorum_timeout: float = ReplicaOptions.quorum_timeout,
    connect_timeout: float = ReplicaOptions.connect_timeout,
    quorum_retries: int = ReplicaOptions.quorum_retries,
    rank: int = 0,
    world_size: int = 1,
    store_addr: str | None = None,
    store_port: int | None = None,
    hostname: str | None = None,
    backend: str = "gloo",
) -> ReplicaManager:
    """A torchft Manager that is ready for DiLoCo.

    Args:
        replica_id: Name of the replica group, different in each.
        lighthouse_addr: ``http://host:port`` of the lighthouse.
        min_replica_size: Fewest groups in a quorum that may commit.
        timeout: Limit of a collective, a vote and a heal's download, in seconds.
        quorum_timeout: Limit of the wait for a quorum, in seconds. It has to exceed the time by
            which groups differ between two syncs.
        connect_timeout: Limit of connecting to the lighthouse, in seconds.
        quorum_retries: How often a quorum is asked for again when the lighthouse is away.
        rank: This process's rank in the group.
        world_size: Processes in the group.
        store_addr: Host of the group's store. None: this process hosts one (``world_size`` 1).
        store_port: Its port.
        hostname: How peers reach this machine. None: its host name.
        backend: ``gloo`` or ``nccl``, for the averages between groups.

    Returns:
        The manager; call ``shutdown()`` at the end.

    Raises:
        ValueError: An argument is missing or out of range.
        ConnectionError: No lighthouse answers.
    """
    if isinstance(replica_id, bool) or str(replica_id).strip() == "":
        raise ValueError(f"replica_id={replica_id!r}: give each replica group a name of its own")
    if (store_addr is None) != (store_port is None):
        raise ValueError(f"store_addr={store_addr!r} and store_port={store_port!r}: give both")
    if world_size > 1 and store_addr is None:
        raise ValueError(
            f"world_size={world_size} needs store_addr and store_port: let rank 0 call "
            "host_store() and send its address to the others"
        )
    for name in _OVERRIDES:
        if name in os.environ:
            log.warning("%s=%s overrides the argument (torchft's rule)", name, os.environ[name])
    process_group = make_process_group(backend, timeout)
    tame_torchft_logs()
    check_lighthouse(lighthouse_addr, connect_timeout)
    store = None
    if store_addr is None:
        store = host_store(hostname)
        store_addr, store_port = store.host, store.port
    manager = ReplicaManager(
        pg=process_group,
        load_state_dict=None,  # DiLoCo and the callback register theirs
        state_dict=None,
        min_replica_size=min_replica_size,
        use_async_quorum=False,
        timeout=timedelta(seconds=timeout),
        quorum_timeout=timedelta(seconds=quorum_timeout),
        connect_timeout=timedelta(seconds=connect_timeout),
        rank=rank,
        world_size=world_size,
        store_addr=store_addr,
        store_port=store_port,
        lighthouse_addr=lighthouse_addr,
        replica_id=str(replica_id),
        hostname=hostname or socket.gethostname(),
        init_sync=False,  # the cold start is DiLoCo's, ADR-006
        quorum_retries=quorum_retries,
    )
    manager.store = store
    return manager


class _OneLine(logging.Filter):
    """torchft logs an error that it swallows with its traceback, and again for every message that
    was under way; one line says as much here. On a CPU it also warns at every new quorum that
    there is no NCCL to trace."""

    def __init__(self) -> None:
        super().__init__()
        self._last = ""

    def filter(self, record: logging.LogRecord) -> bool:
        record.exc_info = record.exc_text = None
        is_news = record.getMessage() != self._last
        self._last = record.getMessage()
        return is_news and "NCCL flight recorder" not in self._last


def tame_torchft_logs() -> None:
    """Keep torchft's warnings and errors, one line each; drop its line for every step."""
    logging.getLogger("torchft").setLevel(logging.WARNING)
    for name in ("torchft_quorums", "torchft_commits", "torchft_errors"):
        logging.getLogger(name).setLevel(logging.WARNING)
    torchft_manager = logging.getLogger("torchft.manager")
    if not any(isinstance(f, _OneLine) for f in torchft_manager.filters):
        torchft_manager.addFilter(_OneLine())


def backend_for(device: torch.device) -> str:
    """The backend that averages tensors of a device between groups."""
    return "nccl" if device.type == "cuda" else "gloo"
