"""Heals and the coordinator over TLS. Run: pytest tests/replica/test_tls_services.py

Real: certificates, heal servers, coordinators with their lighthouse, HTTPS over loopback.
"""

import socket
import ssl
import threading
import time
from datetime import timedelta

import httpx
import pytest
import torch

from composer_replication.coordinator.client import CoordinatorClient
from composer_replication.coordinator.client_http import CoordinatorAwayError
from composer_replication.coordinator.http_service import TlsFiles
from composer_replication.coordinator.server import Coordinator
from composer_replication.diloco.settings import DiLoCoSettings
from composer_replication.replica.certificates import make_certificates
from composer_replication.replica.heal.client import HealError
from composer_replication.replica.heal.transport import HealTransport
from composer_replication.replica.tls import CA, client_context, server_context

STATE = {"theta": {"w": torch.arange(2_000_000.0)}}  # 8 MB: several writes
SENT = {"user": {"diloco": STATE}, "torchft": {"step": 4}}
LIMIT = timedelta(seconds=10)


@pytest.fixture
def certificates(tmp_path):
    """Makes the folder of a member, by default of the same run."""

    def make(name="member", run="run"):
        make_certificates(
            tmp_path / name, ["localhost", "127.0.0.1"], tmp_path / f"{run}-authority", 30
        )
        return str(tmp_path / name)

    return make


@pytest.fixture
def transports():
    made = []

    def make(tls_dir=None, token="secret"):
        made.append(HealTransport([token], "localhost", 5.0, "group", tls_dir))
        return made[-1]

    yield make
    for transport in made:
        transport.shutdown()


@pytest.fixture
def coordinator(certificates, tmp_path):
    running = Coordinator(
        DiLoCoSettings(),
        "test.yaml",
        num_replicas=2,
        state_dir=tmp_path / "state",
        bind="127.0.0.1:0",
        tokens=["secret"],
        tls=TlsFiles.of_folder(certificates()),
    )
    yield running
    running.shutdown()


def receive(joiner, donor):
    return joiner.recv_checkpoint(0, donor.metadata(), 4, LIMIT)


def place_of(address):
    host, _, port = address.rpartition("//")[2].rpartition(":")
    return host, int(port)


# ---- heals ---------------------------------------------------------------------------------------


def test_a_joiner_with_a_certificate_of_the_run_gets_the_state(transports, certificates):
    donor, joiner = transports(certificates("a")), transports(certificates("b"))
    donor.send_checkpoint([1], 4, SENT, LIMIT)
    assert donor.metadata().startswith("https://localhost:")
    got = receive(joiner, donor)["user"]["diloco"]["theta"]["w"]
    assert torch.equal(got, STATE["theta"]["w"])


def test_the_token_alone_is_not_enough(transports, certificates):
    donor = transports(certificates())
    donor.send_checkpoint([1], 4, SENT, LIMIT)
    with pytest.raises(HealError, match="certificate verify failed"):
        receive(transports(certificates("other", run="another-run")), donor)
    with pytest.raises(HealError, match="is a TLS server: set tls_dir"):
        receive(transports(), donor)


def test_a_group_with_tls_takes_no_state_without_it(transports, certificates):
    donor = transports()
    donor.send_checkpoint([1], 4, SENT, LIMIT)
    with pytest.raises(HealError, match="is no TLS server: set tls_dir"):
        receive(transports(certificates()), donor)


@pytest.mark.alone
def test_strangers_that_begin_no_handshake_keep_no_joiner_waiting(transports, certificates):
    donor, joiner = transports(certificates()), transports(certificates("b"))
    donor.send_checkpoint([1], 4, SENT, LIMIT)
    idle = [socket.create_connection(place_of(donor.metadata())) for _ in range(30)]
    began = time.monotonic()
    receive(joiner, donor)
    assert time.monotonic() - began < 4
    for connection in idle:
        connection.close()


def test_a_relay_in_the_middle_gets_no_byte_of_the_state(transports, certificates):
    # A stranger leads a joiner to himself, passes its bytes on to a donor, and keeps what returns.
    donor, joiner = transports(certificates()), transports(certificates("b"))
    donor.send_checkpoint([1], 4, SENT, LIMIT)
    kept = []
    with socket.create_server(("localhost", 0)) as listener:

        def relay():
            while True:
                try:
                    asked, _ = listener.accept()
                except OSError:  # the test is over
                    return
                with asked, socket.create_connection(place_of(donor.metadata())) as given:
                    back = threading.Thread(target=pump, args=(given, asked, kept), daemon=True)
                    back.start()
                    pump(asked, given, [])
                    back.join(5)

        threading.Thread(target=relay, daemon=True).start()
        metadata = f"https://localhost:{listener.getsockname()[1]}"
        with pytest.raises(HealError):
            joiner.recv_checkpoint(0, metadata, 4, LIMIT)
    needle = STATE["theta"]["w"].numpy().tobytes()[4096:4160]
    assert needle not in b"".join(kept)
    assert len(b"".join(kept)) < 20_000


def pump(source, target, kept):
    try:
        while data := source.recv(1 << 16):
            kept.append(data)
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        pass


def test_a_relay_that_ends_the_tls_itself_gets_no_question(transports, certificates):
    # With a certificate of another run, or with one that it has made up.
    joiner, asked = transports(certificates()), []
    context = server_context(certificates("other", run="another-run"))
    context.verify_mode = ssl.CERT_NONE
    with socket.create_server(("localhost", 0)) as listener:

        def serve():
            connection, _ = listener.accept()
            try:
                with context.wrap_socket(connection, server_side=True) as tls:
                    asked.append(tls.recv(1000))
            except OSError as error:
                asked.append(error)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(HealError, match="certificate verify failed"):
            joiner.recv_checkpoint(0, f"https://localhost:{listener.getsockname()[1]}", 4, LIMIT)
        thread.join(5)
    assert isinstance(asked[0], ssl.SSLError)


# ---- the coordinator -----------------------------------------------------------------------------


def test_a_group_asks_the_coordinator_over_tls(coordinator, certificates):
    assert coordinator.address.startswith("https://127.0.0.1:")
    client = CoordinatorClient(coordinator.address, "secret", 0.0, certificates("b"))
    assert client.info().num_replicas == 2
    client.close()


def test_a_group_of_another_run_does_not_send_its_token(coordinator, certificates):
    other = certificates("other", run="another-run")
    client = CoordinatorClient(coordinator.address, "secret", 0.0, other)
    with pytest.raises(CoordinatorAwayError, match="certificate verify failed"):
        client.info()
    client.close()


def test_a_token_is_not_sent_in_the_clear_where_tls_is_wanted(certificates):
    with pytest.raises(ValueError, match="the token would travel unencrypted"):
        CoordinatorClient("http://127.0.0.1:29512", "secret", 0.0, certificates())


def test_a_browser_needs_no_certificate_for_the_page_and_the_token_for_the_run(
    coordinator, certificates
):
    browser = ssl.create_default_context(cafile=f"{certificates()}/{CA}")  # it compares names
    with httpx.Client(
        base_url=coordinator.address, verify=browser, trust_env=False, timeout=5
    ) as ask:
        assert ask.get("/").status_code == 200
        assert ask.get("/v1/info").status_code == 401
        assert ask.get("/v1/info", headers={"Authorization": "Bearer secret"}).status_code == 200


def test_a_certificate_of_another_authority_is_refused_also_where_none_is_needed(
    coordinator, certificates
):
    stranger = client_context(certificates("other", run="another-run"))
    stranger.verify_mode = ssl.CERT_NONE
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{coordinator.address}/", verify=stranger, trust_env=False, timeout=5)


@pytest.mark.alone
@pytest.mark.slow
def test_a_client_that_begins_no_handshake_is_closed_and_keeps_nobody_waiting(
    coordinator, certificates
):
    idle = [socket.create_connection(place_of(coordinator.address)) for _ in range(50)]
    client = CoordinatorClient(coordinator.address, "secret", 0.0, certificates("b"))
    began = time.monotonic()
    client.info()
    assert time.monotonic() - began < 2
    client.close()
    idle[0].settimeout(10)
    assert idle[0].recv(1) == b""  # asyncio's own limit is 60 s
    for connection in idle:
        connection.close()


def test_a_folder_that_cannot_be_used_is_named_before_anything_is_started(tmp_path):
    with pytest.raises(ValueError, match="ca.pem is missing .*composer-replication certificates"):
        TlsFiles.of_folder(str(tmp_path))
