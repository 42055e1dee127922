"""The group over which replicas average. Run: pytest tests/replica/test_process_group.py

Real: process group objects, stores, this machine's interfaces.
"""

import json
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import psutil
import pytest
import torch
from replica.listening import listening_addresses
from torch.distributed.distributed_c10d import AllreduceOptions
from torchft.process_group import ProcessGroupGloo, ProcessGroupNCCL, reconfigure_with_store
from waiting import wait_until

from composer_replication.replica.addresses import interface_of
from composer_replication.replica.factory import make_manager
from composer_replication.replica.process_group import host_store, make_process_group


@pytest.fixture(autouse=True)
def no_interface_stays_set(monkeypatch):
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "restored after the test")
        monkeypatch.delenv(name)


def test_the_backends_are_torchft_s_and_others_are_refused():
    for backend in ("gloo", None):
        assert isinstance(make_process_group(backend, timeout=10.0), ProcessGroupGloo)
    assert isinstance(make_process_group("nccl", timeout=10.0), ProcessGroupNCCL)
    with pytest.raises(ValueError, match="backend='mpi'.*gloo.*nccl"):
        make_manager(backend="mpi")


def test_peers_get_the_host_it_was_given_or_else_this_machine_s_name(monkeypatch):
    handle = json.loads(make_process_group("gloo", 10.0).get_reconfigure_handle())
    assert handle["store"].startswith(f"{socket.gethostname()}:")
    # torchft tells socket.gethostname() for the store, whatever Manager(hostname=) says.
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    group = make_process_group("gloo", 10.0, "127.0.0.1")
    handle = json.loads(group.get_reconfigure_handle())
    host, _, port = handle["store"].rpartition(":")
    assert host == "127.0.0.1"
    socket.create_connection((host, int(port)), timeout=5).close()


@pytest.mark.parametrize("hostname", ["127.0.0.2", "::1"])
def test_gloo_listens_on_the_address_and_the_job_s_own_groups_where_they_did(hostname, monkeypatch):
    own = [SimpleNamespace(address=address) for address in ("127.0.0.1", "127.0.0.2", "::1")]
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"lo": own})
    group = make_process_group("gloo", 10.0, hostname)
    assert "GLOO_SOCKET_IFNAME" not in os.environ and "NCCL_SOCKET_IFNAME" not in os.environ
    store = host_store("localhost")
    before = listening_addresses()
    reconfigure_with_store(group, f"localhost:{store.port}/one", 0, 1)
    assert {each[0] for each in listening_addresses() - before} == {hostname}
    group.abort()


def test_gloo_follows_the_variable_of_the_user(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    group = make_process_group("gloo", 10.0, "127.0.0.1")
    store = host_store("localhost")
    with pytest.raises(RuntimeError, match="no-such-interface"):
        reconfigure_with_store(group, f"localhost:{store.port}/one", 0, 1)


def test_nccl_s_interface_is_that_of_the_address():
    make_process_group("nccl", 10.0, "127.0.0.1")
    assert os.environ["NCCL_SOCKET_IFNAME"] == interface_of("127.0.0.1") == "lo"


def test_a_host_name_that_does_not_resolve_is_refused_with_the_fix():
    with pytest.raises(ValueError, match="hostname='no-such-host.invalid' does not resolve here"):
        make_process_group("gloo", 10.0, "no-such-host.invalid")


@pytest.mark.parametrize("way", ["abort", "shutdown"])
def test_giving_up_the_connections_waits_for_no_collective(way):
    store = host_store("localhost")
    ranks = [make_process_group("gloo", 5.0, "127.0.0.1") for _ in range(2)]
    address = f"localhost:{store.port}/both"
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda r: reconfigure_with_store(ranks[r], address, r, 2), range(2)))
    work = ranks[0].allreduce([torch.ones(4)], AllreduceOptions())  # rank 1 takes no part in it
    getattr(ranks[0], way)()
    assert not work.is_completed()
    ranks[1].abort()
    wait_until(work.is_completed, 60)  # no thread of gloo outlives the test
