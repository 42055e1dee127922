"""Makes the torchft Manager of a replica group, with its store, process group and transport."""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Unpack
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
import torchft.manager
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torchft._torchft import ManagerServer

from composer_replication.arguments import check_names, shows
from composer_replication.options import (
    NO_TOKEN,
    TOKEN,
    ManagerKeywords,
    ReplicaEnv,
    ReplicaOptions,
    lighthouse_of,
    read_tokens,
    replica_id_of,
)
from composer_replication.replica.addresses import (
    bracketed,
    check_hostname,
    default_hostname,
    host_and_port,
    is_loopback,
    own_address,
)
from composer_replication.replica.heal.transport import HealTransport
from composer_replication.replica.lighthouse import LastingServer, check_lighthouse, read_status
from composer_replication.replica.manager import ReplicaManager, free_uuids
from composer_replication.replica.peer_server import PeerServer
from composer_replication.replica.process_group import host_store, make_process_group
from composer_replication.replica.quorum import check_ranks
from composer_replication.replica.ranks import ask_on_rank_0
from composer_replication.replica.single_group import SingleGroupManager
from composer_replication.util.connections import raise_file_limit

log = logging.getLogger(__name__)

_OVERRIDES = ("TORCHFT_TIMEOUT_SEC", "TORCHFT_QUORUM_TIMEOUT_SEC", "TORCHFT_CONNECT_TIMEOUT_SEC")


@shows(ManagerKeywords)
def make_manager(
    *,
    rank: int | None = None,
    world_size: int | None = None,
    store_addr: str | None = None,
    store_port: int | None = None,
    token: str | None = None,
    **named: Unpack[ManagerKeywords],
) -> ReplicaManager | SingleGroupManager:
    """Make a torchft Manager that is ready for DiLoCo.

    A joiner fetches the global state in this call.

    With ``num_replicas=1`` and no lighthouse it makes a ``SingleGroupManager``, which needs no
    network and no store. The group's ranks are those of torch.distributed, where it is initialized
    before this call, and all of them make the call.

    Args:
        rank: This process's rank in the group. None: its rank in torch.distributed, or 0 where that
            is not initialized.
        world_size: The number of ranks in the group. None: that of torch.distributed, or 1.
        store_addr: Host of the group's store. None: rank 0 hosts one, and torch.distributed takes
            its address to the other ranks.
        store_port: Port of the group's store.
        token: The run's secret, equal in all groups. Groups exchange state and average only with
            members that prove it. None: ``COMPOSER_REPLICATION_TOKEN``. A token is needed unless
            the lighthouse is on a loopback address or ``COMPOSER_REPLICATION_NO_TOKEN=1`` is set.

    Returns:
        The manager. Call ``shutdown()`` at the end.

    Raises:
        TypeError: A keyword is unknown; the message has the closest one.
        ValueError: An argument is missing or out of range, peers could not reach this machine
            under ``hostname``, or the token is missing.
        SettingsMismatch: The groups in training have another number of ranks.
        ConnectionError: No lighthouse answers, or the state of the groups in training could not be
            fetched (``PeerError``). The other groups have not noticed this one then.
    """
    check_names(named, ManagerKeywords, "make_manager")
    # A loop of one's own asks no coordinator, whatever the environment names.
    options = replace(ReplicaOptions(**named).with_environment(), coordinator_addr=None)
    if (store_addr is None) != (store_port is None):
        raise ValueError(f"store_addr={store_addr!r} and store_port={store_port!r}: give both")
    if (rank is None) != (world_size is None):
        raise ValueError(f"rank={rank} and world_size={world_size}: give both")
    ranks = None if rank is None or world_size is None else (rank, world_size)
    store = None if store_addr is None or store_port is None else (store_addr, store_port)
    return connect(options, ranks, store, token)


def connect(
    options: ReplicaOptions,
    ranks: tuple[int, int] | None = None,
    store_address: tuple[str, int] | None = None,
    token: str | None = None,
) -> ReplicaManager | SingleGroupManager:
    """Make the manager of a group whose options are complete. All else: ``make_manager``.

    Args:
        options: Of the group.
        ranks: This process's rank in the group, and the number of them. None: torch.distributed's.
        store_address: Host and port of the group's store. None: rank 0 hosts one.
        token: The run's secret.
    """
    is_set_up = dist.is_initialized()
    own_rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if is_set_up else (0, 1)
    ranks = ranks or (own_rank, num_ranks)
    rank, world_size = ranks
    tame_torchft_logs()
    if options.is_alone:
        return _train_alone(options, world_size, num_ranks, token)
    if world_size > 1 and store_address is None and not is_set_up:
        raise ValueError(
            f"world_size={world_size} without store_addr and store_port: call "
            "torch.distributed.init_process_group before make_manager, or let rank 0 call "
            "host_store() and send its address to the others"
        )
    raise_file_limit()
    replica_id = replica_id_of(options)
    lighthouse_addr = lighthouse_of(options)
    for name in _OVERRIDES:
        if name in os.environ:
            log.warning("%s=%s overrides the argument (torchft's rule)", name, os.environ[name])
    check_lighthouse(lighthouse_addr)
    hostname = options.hostname or default_hostname(lighthouse_addr)
    options = replace(options, hostname=hostname)
    process_group = make_process_group(options.backend, options.timeout, hostname)
    tokens = _tokens(token, lighthouse_addr)
    store_address, store = _find_store(options, world_size, store_address)
    server = PeerServer(hostname, tokens)
    transport = HealTransport(server, options.timeout, lighthouse_addr, rank, replica_id)
    try:
        check_hostname(*host_and_port(server.address), lighthouse_addr)
        transport.fetch()  # before the groups in training see this one
        own_uuid = free_uuids.pop((replica_id, lighthouse_addr), None) or str(uuid.uuid4())
        with _manager_server_at(own_address(hostname), own_uuid) if rank == 0 else nullcontext():
            return ReplicaManager(options, ranks, store_address, process_group, transport, store)
    except BaseException:
        server.close()
        raise


def _find_store(
    options: ReplicaOptions,
    world_size: int,
    address: tuple[str, int] | None,
) -> tuple[tuple[str, int], TCPStore | None]:
    """The address of the group's store, and the store itself if this process hosts it.

    Raises:
        SettingsMismatch: The groups in training have another number of ranks.
    """
    store = None

    def begin() -> tuple[str, int]:
        check_ranks(read_status(lighthouse_of(options)), replica_id_of(options), world_size)
        if address is not None:
            return address
        nonlocal store
        store = host_store(options.hostname)
        return store.host, store.port

    # The lighthouse's answer may change at any moment, so one rank asks for all.
    hosted = ask_on_rank_0(begin) if world_size > 1 else begin()
    return address or hosted, store


def _train_alone(
    options: ReplicaOptions,
    world_size: int,
    num_ranks: int,
    token: str | None,
) -> SingleGroupManager:
    if world_size != num_ranks:
        raise ValueError(
            f"world_size={world_size}, and torch.distributed has {num_ranks} ranks: a group "
            "that trains alone consists of these. Call init_process_group before make_manager, "
            "and give it the same world_size"
        )
    given = {"hostname": options.hostname, "token": token}
    unused = [name for name, value in given.items() if value is not None]
    log.info(
        "Training alone, without a network: num_replicas is 1, and no lighthouse is named%s",
        f". Not used: {', '.join(unused)}" if unused else "",
    )
    return SingleGroupManager()


def _tokens(token: str | None, lighthouse_addr: str) -> tuple[str, ...]:
    """The run's accepted tokens; empty if the run may be without one."""
    env = ReplicaEnv.from_env()
    tokens = read_tokens(token, "token") if token else env.tokens
    if tokens:
        return tokens
    if env.no_token:
        log.warning(
            "%s is set: everybody who reaches the lighthouse can take this run's state", NO_TOKEN
        )
    elif not is_loopback(urlsplit(lighthouse_addr).hostname or ""):
        raise ValueError(
            f"{TOKEN} is not set, and everybody who reaches the lighthouse at {lighthouse_addr} "
            f"could take this run's state and change its model. In all groups `export {TOKEN}=...` "
            f"the same secret, for example of `openssl rand -hex 16`, or `export {NO_TOKEN}=1` if "
            "only people you trust can reach them"
        )
    return ()


_binding = threading.Lock()


@contextmanager
def _manager_server_at(address: str | None, own_uuid: str) -> Iterator[None]:
    """Have torchft's manager server listen on one address, for good, and use a given uuid.

    torchft always binds it to ``[::]`` (``manager.py``, ``bind``), where anybody who reaches it can
    vote, or end this process. It also always makes a new uuid for the lighthouse (``new_uuid``).
    Remove this when torchft's ``Manager`` takes both as arguments (deploy/upstream/0001).

    Args:
        address: The address. None: every interface.
        own_uuid: The uuid of this group's name at the lighthouse.
    """

    def bound(*, bind: str, **arguments: Any) -> LastingServer:
        port = bind.rpartition(":")[2]
        return LastingServer(
            lambda where: ManagerServer(bind=where, **arguments),
            f"{bracketed(address or '::')}:{port}",
        )

    # The names are replaced for the whole module. Without the lock a manager that another thread
    # builds at the same time would get this one's address and uuid.
    with _binding:
        torchft.manager.ManagerServer = bound  # pyright: ignore[reportAttributeAccessIssue]
        torchft.manager.uuid = SimpleNamespace(uuid4=lambda: own_uuid)  # pyright: ignore[reportAttributeAccessIssue]
        try:
            yield
        finally:
            torchft.manager.ManagerServer = ManagerServer
            torchft.manager.uuid = uuid


class _OneLine(logging.Filter):
    """Reduces torchft's log of an error to one line.

    torchft logs an error that it swallows with its traceback, and again for every collective that
    was under way. On a CPU it also warns at every new quorum that there is no NCCL to trace.
    """

    _last = ""

    def filter(self, record: logging.LogRecord) -> bool:
        record.exc_info = None
        is_news = record.getMessage() != self._last
        self._last = record.getMessage()
        return is_news and "NCCL flight recorder" not in self._last


_one_line = _OneLine()


def tame_torchft_logs() -> None:
    """Keep torchft's warnings and errors, one line each; drop its log line for every step."""
    for name in ("torchft", "torchft_quorums", "torchft_commits", "torchft_errors"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("torchft.manager").addFilter(_one_line)  # once, however often it is called


def backend_for(device: torch.device, wanted: str | None = None) -> str:
    """The backend that averages tensors of a device between groups: gloo, unless asked for NCCL.

    Args:
        device: Where the model is.
        wanted: The user's choice, if there is one.

    Raises:
        ValueError: It cannot average tensors of the device.
    """
    if wanted == "nccl" and device.type != "cuda":
        raise ValueError(f"backend='nccl', but the model is on {device}: use 'gloo'")
    return wanted or "gloo"
