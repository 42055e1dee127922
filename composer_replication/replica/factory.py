"""A replica group's connection to the others: store, process group, torchft Manager."""

from __future__ import annotations

import logging
import os
import socket
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import torch
import torchft.manager
from torchft._torchft import ManagerServer

from composer_replication.replica.addresses import (
    bracketed,
    check_hostname,
    is_loopback,
    own_address,
)
from composer_replication.replica.group_layout import check_ranks
from composer_replication.replica.heal.prefetch import prefetch
from composer_replication.replica.heal.transport import HealTransport
from composer_replication.replica.lighthouse import check_lighthouse, read_status
from composer_replication.replica.manager import ReplicaManager, free_uuids
from composer_replication.replica.options import (
    NO_TOKEN,
    TOKEN,
    ReplicaEnv,
    ReplicaOptions,
    check_replica_id,
    read_tokens,
)
from composer_replication.replica.process_group import host_store, make_process_group

log = logging.getLogger(__name__)

_OVERRIDES = ("TORCHFT_TIMEOUT_SEC", "TORCHFT_QUORUM_TIMEOUT_SEC", "TORCHFT_CONNECT_TIMEOUT_SEC")


def make_manager(
    *,
    replica_id: str | int,
    lighthouse_addr: str,
    min_replica_size: int = ReplicaOptions.min_replica_size,
    timeout: float = ReplicaOptions.timeout,
    quorum_timeout: float = ReplicaOptions.quorum_timeout,
    connect_timeout: float = ReplicaOptions.connect_timeout,
    quorum_retries: int = ReplicaOptions.quorum_retries,
    give_up_after_s: float | None = ReplicaOptions.give_up_after_s,
    rank: int = 0,
    world_size: int = 1,
    store_addr: str | None = None,
    store_port: int | None = None,
    hostname: str | None = None,
    token: str | None = None,
    backend: str = "gloo",
    tls_dir: str | None = None,
) -> ReplicaManager:
    """A torchft Manager that is ready for DiLoCo.

    Args:
        replica_id: Name of the replica group, different in each (``check_replica_id``).
        lighthouse_addr: ``http://host:port`` of the lighthouse.
        min_replica_size: Fewest groups in a quorum that may commit; equal in all groups.
        timeout: Limit of a collective, a vote and a heal's download, in seconds.
        quorum_timeout: Limit of the wait for a quorum, in seconds. It has to exceed the time by
            which groups differ between two syncs.
        connect_timeout: Limit of connecting to the lighthouse, in seconds.
        quorum_retries: How often a quorum is asked for again when the lighthouse is away, spread
            over ``quorum_timeout``.
        give_up_after_s: How long to wait for a quorum before that is an error; None for ever.
        rank: This process's rank in the group.
        world_size: Processes in the group.
        store_addr: Host of the group's store. None: this process hosts one (``world_size`` 1).
        store_port: Its port.
        hostname: How peers reach this machine: its store, manager, process group and heal server,
            which listen on that address if it is one of this machine's. None:
            ``COMPOSER_REPLICATION_HOSTNAME``, else its host name, and every interface.
        token: The run's secret, equal in all groups, without which no state is given or taken.
            None: ``COMPOSER_REPLICATION_TOKEN``. It is needed unless the lighthouse is on a
            loopback address or ``COMPOSER_REPLICATION_NO_TOKEN=1`` is set.
        backend: ``gloo`` or ``nccl``, for the averages between groups.
        tls_dir: The folder of certificates with which the averages and heals go over TLS, in all
            groups or in none. None: ``COMPOSER_REPLICATION_TLS_DIR``, else without TLS.

    Returns:
        The manager; call ``shutdown()`` at the end.

    Raises:
        ValueError: An argument is missing or out of range, ``hostname`` leads nowhere, or the
            token is missing.
        SettingsMismatch: The groups in training have another number of ranks.
        ConnectionError: No lighthouse answers, or the state of the groups in training cannot be
            had (``HealError``). This group has not been seen by the others then.
    """
    check_replica_id(replica_id)
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
    env = ReplicaEnv.from_env()
    tls_dir, hostname = tls_dir or env.tls_dir, hostname or env.hostname
    process_group = make_process_group(backend, timeout, hostname, tls_dir)
    tame_torchft_logs()
    check_lighthouse(lighthouse_addr, connect_timeout)
    tokens = _tokens(token, lighthouse_addr)
    check_ranks(read_status(lighthouse_addr, connect_timeout), str(replica_id), world_size)
    transport = HealTransport(tokens or ("",), hostname, timeout, str(replica_id), tls_dir)
    try:
        own_name = hostname or socket.gethostname()
        check_hostname(own_name, transport.port, lighthouse_addr, connect_timeout)
        prefetch(
            transport,
            lighthouse_addr=lighthouse_addr,
            rank=rank,
            timeout=timeout,
            connect_timeout=connect_timeout,
        )
    except BaseException:
        transport.shutdown()
        raise
    store = None
    if store_addr is None:
        store = host_store(hostname)
        store_addr, store_port = store.host, store.port
    own_uuid = free_uuids.pop((str(replica_id), lighthouse_addr), None) or str(uuid.uuid4())
    with _manager_server_at(own_address(hostname), own_uuid) if rank == 0 else nullcontext():
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
            hostname=hostname,
            checkpoint_transport=transport,
            init_sync=False,  # the cold start is DiLoCo's, ADR-006
            quorum_retries=quorum_retries,
            tokens=tokens,
            give_up_after_s=give_up_after_s,
            store=store,
        )
    return manager


def _tokens(token: str | None, lighthouse_addr: str) -> tuple[str, ...]:
    """The run's accepted tokens; none if the run is to have none."""
    env = ReplicaEnv.from_env()
    tokens = read_tokens(token, "token") if token else env.tokens
    if tokens:
        return tokens
    if env.no_token:
        log.warning("%s is set: whoever reaches the lighthouse can take this run's state", NO_TOKEN)
    elif not is_loopback(urlsplit(lighthouse_addr).hostname or ""):
        raise ValueError(
            f"{TOKEN} is not set, and whoever reaches the lighthouse at {lighthouse_addr} could "
            f"take this run's state and change its model. In all groups `export {TOKEN}=...` the "
            f"same secret, for example of `openssl rand -hex 16`, or `export {NO_TOKEN}=1` if only "
            "people you trust can reach them"
        )
    return ()


_binding = threading.Lock()


@contextmanager
def _manager_server_at(address: str | None, own_uuid: str) -> Iterator[None]:
    """Have torchft's manager server listen on one address; None: on every interface.

    torchft always binds it to ``[::]`` (``manager.py``, ``bind``), where whoever reaches it may
    vote, or end this process; and it always makes a new uuid for the lighthouse (``new_uuid``).
    Remove this when ``Manager`` takes both.
    """

    def bound(*, bind: str, **arguments: Any) -> ManagerServer:
        port = bind.rpartition(":")[2]
        return ManagerServer(bind=f"{bracketed(address or '::')}:{port}", **arguments)

    with _binding:  # two managers of one process may be built at the same time
        torchft.manager.ManagerServer = bound  # pyright: ignore[reportAttributeAccessIssue]
        torchft.manager.uuid = SimpleNamespace(uuid4=lambda: own_uuid)  # pyright: ignore[reportAttributeAccessIssue]
        try:
            yield
        finally:
            torchft.manager.ManagerServer, torchft.manager.uuid = ManagerServer, uuid


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
