"""The coordinator as a whole. Run: pytest tests/coordinator/test_server.py

Real: HTTP, SQLite, torchft's lighthouse, and a member of its quorum.
"""

import os
from contextlib import ExitStack
from dataclasses import replace

import httpx
import pytest
from harness.certificate import make_certificate
from harness.coordinators import coordinator_in
from waiting import stop_accepting, wait_until

from composer_replication.coordinator.client import (
    CoordinatorAwayError,
    CoordinatorClient,
    NameTakenError,
)
from composer_replication.coordinator.database import StorageError
from composer_replication.coordinator.page import PAGE_DATA, write_report_html
from composer_replication.coordinator.wire_types import DatasetSpec
from composer_replication.replica.lighthouse import read_status
from composer_replication.util.json_files import read_json


@pytest.fixture
def start(tmp_path):
    """Starts coordinators, and ends them with the test."""
    with ExitStack() as started:

        def start(folder="state", **arguments):
            arguments = {"tokens": ["secret"]} | arguments
            return started.enter_context(coordinator_in(tmp_path / folder, **arguments))

        yield start


@pytest.mark.slow
def test_a_second_coordinator_on_one_state_folder_is_refused(start, tmp_path):
    first = start()
    message = f"{tmp_path / 'state'} is in use by process {os.getpid()} on "
    with pytest.raises(ValueError, match=message):
        start()
    start("other")
    first.shutdown()
    start()


def test_what_a_failed_start_has_opened_is_closed(start, tmp_path):
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "coordinator.sqlite").write_text("no database, but a text " * 100)
    for _ in range(2):  # the second one would find the folder locked
        with pytest.raises(StorageError, match="file is not a database"):
            start()


def test_groups_hear_of_the_options_and_no_file_has_a_secret_of_them(start, tmp_path):
    model = {"d_model": 8, "hub": {"token": "hub-secret"}}
    options = {"model_section": model, "digest_every": 5, "heartbeat_timeout_s": 7.5}
    coordinator = start(tokens=["run-secret"], **options)
    client = CoordinatorClient(coordinator.address, "run-secret")
    info = client.info()
    client.close()
    assert info.model_section.keys() == model.keys()
    assert (info.digest_every, info.heartbeat_timeout_s) == (5, 7.5)
    coordinator.shutdown()
    shown = read_json(tmp_path / "state" / PAGE_DATA)
    assert "round_seconds" not in shown["settings"] | shown["defaults"]  # it is not set
    write_report_html(tmp_path / "state", shown)
    for file in (tmp_path / "state").iterdir():
        assert not {word for word in (b"hub-", b"run-") if word + b"secret" in file.read_bytes()}


@pytest.mark.parametrize(
    "change", [{"length": 9}, {"seed": 1}, {"unit_size": 4}, {"shuffle": False}]
)
def test_a_dataset_that_differs_in_anything_is_refused_by_its_name(start, change):
    client = CoordinatorClient(start().address, "secret")
    dataset = DatasetSpec("c4", 8, seed=0, unit_size=2)
    for _ in range(2):
        client.create_dataset(dataset)
    (name,) = change
    with pytest.raises(NameTakenError, match=f"'c4' exists with {name} "):
        client.create_dataset(replace(dataset, **change))
    client.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "reached_by", "host"),
    [
        ({"bind": "[::]:0"}, "127.0.0.1", "127.0.0.1"),
        ({"bind": "[::]:0"}, "[::1]", "[::1]"),
        ({"bind": "[::]:0", "hostname": "head"}, "127.0.0.1", "head"),
        ({"bind": "127.0.0.1:0"}, "localhost", "127.0.0.1"),
        ({"bind": "[::1]:0", "hostname": "::1"}, None, "[::1]"),
        ({"bind": "[::1]:0", "hostname": "[::1]"}, None, "[::1]"),
    ],
)
def test_the_lighthouse_is_where_the_coordinator_was_reached(start, arguments, reached_by, host):
    own, _, port = start(**arguments).address.rpartition(":")
    client = CoordinatorClient(f"{f'http://{reached_by}' if reached_by else own}:{port}", "secret")
    assert client.info().lighthouse_addr.rpartition(":")[0] == f"http://{host}"
    client.close()


def test_a_lighthouse_that_has_stopped_accepting_is_started_again(start):
    coordinator = start()
    address = coordinator.lighthouse_addr
    stop_accepting(int(address.rpartition(":")[2]))
    wait_until(lambda: "participants" in read_status(address).situation, 60.0)
    coordinator.shutdown()
    assert "is away" in read_status(address).situation


def test_on_loopback_without_a_token_a_web_page_cannot_read_the_run(start):
    coordinator = start(tokens=[], hostname="MyBox")
    port = coordinator.address.rpartition(":")[2]
    for host, status in (("127.0.0.1", 200), ("mybox", 200), ("MyBox", 200), ("evil.example", 421)):
        answer = httpx.get(
            f"http://127.0.0.1:{port}/v1/info", headers={"Host": host}, timeout=5, trust_env=False
        )
        assert answer.status_code == status


# ---- TLS ---------------------------------------------------------------------------------------


@pytest.fixture
def certificate(tmp_path):
    return make_certificate(tmp_path)


def test_a_client_trusts_the_ca_that_ssl_cert_file_names(start, certificate, monkeypatch):
    coordinator = start(**certificate)
    assert coordinator.address.startswith("https://127.0.0.1:")
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate["ssl_certfile"]))
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:1")
    client = CoordinatorClient(coordinator.address, "secret", retry_s=0.0)
    assert client.info().num_replicas == 2
    client.close()
    monkeypatch.delenv("SSL_CERT_FILE")
    client = CoordinatorClient(coordinator.address, "secret", retry_s=0.0)
    with pytest.raises(CoordinatorAwayError, match="certificate verify failed"):
        client.info()
    client.close()


@pytest.mark.slow
def test_a_certificate_that_cannot_be_used_is_named(start, certificate, tmp_path):
    with pytest.raises(ValueError, match="the certificate cannot be used .*missing.pem"):
        start(**certificate | {"ssl_keyfile": tmp_path / "missing.pem"})
    with pytest.raises(ValueError, match="--ssl-keyfile is missing: HTTPS needs a certificate"):
        start(ssl_certfile=certificate["ssl_certfile"])
