"""gloo over TLS, and the relay that carries it. Run: pytest tests/replica/test_tls_gloo.py

Real: relays in processes of their own, certificates, gloo, stores, all on loopback.
"""

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.distributed import AllreduceOptions
from torch.distributed.distributed_c10d import AllgatherOptions
from torchft.process_group import reconfigure_with_store

from composer_replication.replica.addresses import listen
from composer_replication.replica.certificates import make_certificates
from composer_replication.replica.process_group import Gloo, host_store, make_process_group
from composer_replication.replica.tls import client_context
from composer_replication.replica.tls_gloo import HIGHER, LOWER, TlsTunnel, _port
from composer_replication.replica.tls_relay import OWN

pytestmark = pytest.mark.integration


@pytest.fixture
def certificates(tmp_path):
    """Makes the folder of a member, by default of the same run."""

    def make(name="member", run="run"):
        make_certificates(tmp_path / name, [], tmp_path / f"{run}-authority", 30)
        return str(tmp_path / name)

    return make


@pytest.fixture
def tunnel(certificates):
    made = []

    def make(run="run"):
        folder = certificates(f"member of {run}", run)
        made.append(TlsTunnel(folder, "127.0.0.1", listen("127.0.0.1")))
        made[-1].start()
        return made[-1]

    yield make
    for each in made:
        if each._process is not None:
            each._process.stdin.close()
            each._process.wait(10)


@pytest.fixture
def gloo(certificates):
    """Connected process groups, one a thread."""
    made = []

    def make(*tls_dirs):
        store = host_store("127.0.0.1")
        groups = [make_process_group("gloo", 20.0, "127.0.0.1", folder) for folder in tls_dirs]
        made.extend(groups)

        def connect(rank):
            address = f"127.0.0.1:{store.port}/test"
            reconfigure_with_store(groups[rank], address, rank, len(groups))
            return groups[rank]

        with ThreadPoolExecutor(len(groups)) as pool:
            return list(pool.map(connect, range(len(groups))))

    yield make
    for group in made:
        group.shutdown()
        if group.tunnel is not None and group.tunnel._process is not None:
            group.tunnel._process.kill()
            group.tunnel._process.wait(10)


def in_threads(function, *arguments):
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(function, *arguments))


def read_all(connection):
    parts = []
    while part := connection.recv(1 << 20):
        parts.append(part)
    return b"".join(parts)


# ---- gloo ----------------------------------------------------------------------------------------


def test_groups_send_each_other_more_than_the_kernel_s_buffers_hold(gloo, certificates):
    # gloo's own TLS hangs here for ever, and its timeout does not end it.
    groups = gloo(certificates(), certificates(), certificates())
    # 32 MB each, which all of them send at the same time.
    values = [torch.full((2**23,), float(rank)) for rank in range(3)]
    gathered = [[torch.empty(2**23) for _ in range(3)] for _ in range(3)]

    def exchange(rank):
        groups[rank].allgather([gathered[rank]], [values[rank]], AllgatherOptions()).wait()
        groups[rank].allreduce([values[rank]], AllreduceOptions()).wait()

    in_threads(exchange, range(3))
    assert all(float(value.min()) == float(value.max()) == 3.0 for value in values)
    assert [[float(part[-1]) for part in each] for each in gathered] == [[0.0, 1.0, 2.0]] * 3


def test_gloo_itself_is_reached_on_this_machine_alone(gloo, certificates):
    gloo(certificates(), certificates())
    listening = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    ours = {line[1].partition(":")[0] for line in listening if line[3] == "0A"}
    assert socket.inet_aton(OWN)[::-1].hex().upper() in ours


def test_a_member_without_tls_is_told_to_set_it_and_one_with_it_finds_none_there(certificates):
    with_tls = make_process_group("gloo", 5.0, "127.0.0.1", certificates())
    without = make_process_group("gloo", 5.0, "127.0.0.1")
    assert isinstance(with_tls, Gloo) and isinstance(without, Gloo)
    handles = [json.loads(group.get_reconfigure_handle()) for group in (with_tls, without)]
    assert with_tls.is_secured(handles[0], 5.0)
    assert not with_tls.is_secured(handles[1], 5.0)
    with pytest.raises(RuntimeError, match="set callbacks.diloco.tls_dir or COMPOSER_REPLICATION"):
        without.is_secured(handles[0], 5.0)
    assert without.is_secured(handles[1], 5.0)
    with_tls.tunnel._process.kill()


def test_nccl_has_no_tls_and_is_refused_with_it():
    with pytest.raises(ValueError, match="backend='nccl', which has no TLS: set backend: gloo"):
        make_process_group("nccl", 5.0, tls_dir="/certificates")


def test_another_form_of_gloo_s_address_is_an_error_and_not_a_wrong_port():
    host = b"\2" + bytes(7) + b"vm" + b"\x88" + bytes(7)
    assert _port(host + b"\2\0\x1f\x90\x7f\0\0\2" + bytes(120)) == (20, 8080)
    with pytest.raises(RuntimeError, match="use torch 2.7, or a private network"):
        _port(host + b"\x0a\0\x1f\x90\x7f\0\0\2" + bytes(120))


# ---- the relay -----------------------------------------------------------------------------------


def test_members_accept_each_other_and_nobody_else(tunnel):
    own, peer, other = tunnel(), tunnel(), tunnel("another run")
    assert own.answers(peer.address, 5.0) and own.answers(own.address, 5.0)
    assert not own.answers(other.address, 5.0)
    assert not other.answers(own.address, 5.0)
    assert not own.answers(None, 5.0)
    assert not own.answers("no address", 5.0)


@pytest.mark.alone
def test_a_peer_that_is_silent_costs_the_time_limit_and_no_more(tunnel):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        assert not tunnel().answers(f"127.0.0.1:{silent.getsockname()[1]}", 0.5)
        assert time.monotonic() - began < 3


@pytest.mark.alone
def test_strangers_that_begin_no_handshake_keep_no_member_out(tunnel):
    own, peer = tunnel(), tunnel()
    port = int(own.address.rpartition(":")[2])
    idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]
    assert peer.answers(own.address, 2.0)
    idle[0].settimeout(10)
    assert idle[0].recv(1) == b""  # closed after the handshake's time limit
    for connection in idle:
        connection.close()


def test_nobody_is_let_through_to_another_port_than_gloo_s(tunnel, certificates):
    own = tunnel()
    with socket.create_server((OWN, 0)) as secret, socket.create_server((OWN, 0)) as gloo:
        own.serve(gloo.getsockname()[1])
        wanted = secret.getsockname()[1]
        port = int(own.address.rpartition(":")[2])
        context = client_context(certificates())
        with context.wrap_socket(socket.create_connection(("127.0.0.1", port))) as connection:
            connection.sendall(wanted.to_bytes(2))
            connection.settimeout(5)
            with pytest.raises(OSError):
                assert not connection.recv(1)
                raise ConnectionError("closed in order")
        secret.settimeout(0.2)
        with pytest.raises(TimeoutError):
            secret.accept()


def test_what_was_sent_arrives_after_the_sender_s_process_has_ended(tunnel):
    # stdin of the relay is closed as if by the end of the training process.
    sender, receiver = tunnel(), tunnel()
    content = bytes(range(256)) * (1 << 14)  # 4 MiB: all of it fits into buffers on the way
    with socket.create_server((OWN, 0)) as gloo:
        gloo_port = gloo.getsockname()[1]
        receiver.serve(gloo_port)
        entry = sender.reach(receiver.address, gloo_port, HIGHER)
        with socket.create_connection((HIGHER, entry)) as connection:
            accepted, _ = gloo.accept()
            connection.sendall(content)
        sender._process.stdin.close()
        assert read_all(accepted) == content
        accepted.close()
    assert sender._process.wait(10) == 0


def test_a_relay_that_was_killed_is_started_again_at_the_same_address(tunnel):
    own, peer = tunnel(), tunnel()
    own._process.kill()
    own._process.wait(10)
    with pytest.raises(RuntimeError, match="the TLS relay of this process has ended"):
        own.serve(1)
    own.start()
    assert peer.answers(own.address, 5.0)


def test_the_relay_goes_with_the_group_that_had_it(certificates):
    tunnel = TlsTunnel(certificates(), "127.0.0.1", listen("127.0.0.1"))
    tunnel.start()
    process = tunnel._process
    del tunnel
    assert process.wait(10) == 0


def test_the_end_of_a_peer_reaches_gloo_at_once(tunnel):
    sender, receiver = tunnel(), tunnel()
    with socket.create_server((OWN, 0)) as gloo:
        gloo_port = gloo.getsockname()[1]
        receiver.serve(gloo_port)
        entry = sender.reach(receiver.address, gloo_port, LOWER)
        with socket.create_connection((LOWER, entry)) as connection:
            accepted, _ = gloo.accept()
            receiver._process.kill()
            connection.settimeout(5)
            assert connection.recv(1) == b""
            accepted.settimeout(5)
            assert accepted.recv(1) == b""
            accepted.close()
