"""A group's side of the coordinator, when something else answers at its address, or nothing.

Run: pytest tests/coordinator/test_client.py. Real: HTTP over loopback, the client and its thread.
"""

import asyncio
import json
import math
import threading
import time
from dataclasses import replace

import pytest
import torch
from waiting import wait_until

from composer_replication.coordinator.api import Heartbeat
from composer_replication.coordinator.client import (
    CoordinatorAwayError,
    CoordinatorClient,
    RejectedByCoordinatorError,
)
from composer_replication.coordinator.http_service import HttpService, Listener
from composer_replication.coordinator.membership import Membership
from composer_replication.coordinator.wire_types import SIGN, CommitReport, digests_of
from composer_replication.options import ReplicaOptions
from composer_replication.settings import SettingsMismatch
from composer_replication.util import fence
from coordinator.run_info import INFO

GOOD = b'{"replica_id": "0", "unknown": []}'
ODD = {
    "a login page": (200, {"Content-Type": "text/html"}, b"<html>Log in</html>"),
    "an empty object": (200, {}, b"{}"),
    "a field of another type": (200, {}, b'{"replica_id": 7, "unknown": 3}'),
    "a list": (200, {}, b"[]"),
    "nothing": (200, {}, b""),
    "no content": (204, {}, b""),
    "a redirect": (302, {"Location": "http://127.0.0.1:1/"}, GOOD),
    "bad gzip": (200, {"Content-Encoding": "gzip"}, GOOD),
    "deep JSON": (200, {}, b"[" * 100_000),
    "another service's 404": (404, {"Content-Type": "text/html"}, b"<html>Not found</html>"),
    "another service's refusal": (404, {}, b'{"detail": "Not Found"}'),
    "a proxy's 502": (502, {"Content-Type": "text/html"}, b"<html>Bad gateway</html>"),
}


SIGNED = {SIGN: "0"}
ALIVE = (409, SIGNED, b'{"detail": "a replica group \'0\' is alive"}')
WRONG_TOKEN = (401, SIGNED, b'{"detail": "wrong token"}')
HEARTBEAT = "/v1/replicas/0/heartbeat"


class Service:
    """Answers every request with ``answer``: status, headers, body; or as ``by_path`` says."""

    def __init__(self) -> None:
        self.answer = (200, SIGNED, GOOD)
        self.by_path = {}
        self.is_closed = threading.Event()
        self.hangs = ""
        """The path that is answered at the end of the test."""
        self.requests: list[tuple[float, str, dict]] = []
        """When, where and what each one was."""
        listening = Listener("127.0.0.1:0")
        self.http = HttpService(self, listening)
        self.address = f"http://127.0.0.1:{listening.port}"
        # What is signed, the answers say.
        server = self.http._server
        server.config.encoded_headers = server.server_state.default_headers = []

    async def __call__(self, scope, receive, send) -> None:
        path, body = scope["path"], (await receive())["body"]
        self.requests.append((time.monotonic(), path, json.loads(body or "{}")))
        if path == self.hangs:
            await asyncio.to_thread(self.is_closed.wait, 60)
        status, headers, body = self.by_path.get(path, self.answer)
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": raw})
        await send({"type": "http.response.body", "body": body})

    def bodies(self, path: str) -> list[dict]:
        return [body for _, asked, body in self.requests if asked == path]

    def close(self) -> None:
        self.is_closed.set()
        self.http.close()


@pytest.fixture
def service():
    service = Service()
    yield service
    service.close()


@pytest.mark.parametrize(("one", "other"), [
    ({"dropout": 0}, {"dropout": 0.0}),
    ({"labels": {0: "no", "other": "yes"}}, {"labels": {"other": "yes", "0": "no"}}),
    ({"sizes": [1, 2]}, {"sizes": (1, 2.0)}),
])  # fmt: skip
def test_equal_values_of_a_config_have_equal_digests(one, other):
    assert digests_of(one) == digests_of(other)
    assert digests_of(one) != digests_of(dict.fromkeys(one, "another"))


@pytest.fixture
def member_of(service, monkeypatch):
    """Registers a group, which leaves at the end of the test."""
    monkeypatch.setattr(Membership, "HEARTBEATS_IN_LIMIT", 300)
    members = []

    def make(**changes) -> Membership:
        options = ReplicaOptions(replica_id="0", coordinator_addr=service.address)
        info = replace(INFO, **changes)
        members.append(Membership(options, info, [{"w": torch.zeros(1)}], world_size=1))
        return members[-1]

    yield make
    for member in members:
        member.leave()


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.slow
def test_what_is_not_the_coordinators_json_is_no_answer(service, odd):
    client = CoordinatorClient(service.address, "secret", retry_s=0.0)
    service.answer = ODD[odd]
    for ask in (
        client.info,
        lambda: client.register({}),
        lambda: client.heartbeat("0", {}),
        lambda: client.progress("c4"),
        lambda: client.lease(1, 0, 0),
        lambda: client.commit(CommitReport(1, [], [])),
    ):
        with pytest.raises(CoordinatorAwayError, match=service.address):
            ask()
    client.close()


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.slow
def test_heartbeats_and_reports_go_on_after_an_odd_answer(service, member_of, odd):
    member = member_of()
    service.answer = ODD[odd]
    service.requests.clear()
    wait_until(lambda: service.bodies(HEARTBEAT))  # the one before may have been answered well
    member.report_commit(CommitReport(1, [[1, 2, 2]], [1]))
    wait_until(lambda: len(service.bodies(HEARTBEAT)) >= 3)
    assert not service.bodies("/v1/commits"), "a coordinator that is away is asked once a heartbeat"
    member.report_commit(CommitReport(2, [[1, 4, 4]], [1]))
    service.answer = (200, SIGNED, GOOD)
    wait_until(lambda: service.bodies("/v1/commits"))
    member.check()
    wait_for_heartbeats(service, 3)
    (report,) = service.bodies("/v1/commits")
    assert report.pop("age_s") >= 0
    assert report == {"outer_step": 2, "ledger": [[1, 4, 4]], "present": [1]}


def wait_for_heartbeats(service, count):
    before = len(service.bodies(HEARTBEAT))
    wait_until(lambda: len(service.bodies(HEARTBEAT)) >= before + count)


def test_a_coordinator_that_comes_back_with_another_token_counts_as_away(
    service, member_of, caplog
):
    member = member_of()
    service.answer = ODD["nothing"]
    wait_until(lambda: "Training goes on without the coordinator" in caplog.text)
    service.answer = WRONG_TOKEN
    wait_until(lambda: "has another token than before: start it again" in caplog.text)
    wait_for_heartbeats(service, 3)
    assert caplog.text.count("has another token") == 1
    member.check()
    with pytest.raises(CoordinatorAwayError, match="has another token"):  # it is asked again
        member.client.with_limits(retry_s=0.0).lease(1, 0, 0)
    member.report_commit(CommitReport(1, [[1, 2, 2]], [1]))
    service.answer = (200, SIGNED, GOOD)
    wait_until(lambda: service.bodies("/v1/commits"))


def test_a_wrong_token_is_an_error_at_the_first_registration(service, member_of):
    service.answer = WRONG_TOKEN
    with pytest.raises(RejectedByCoordinatorError, match="rejects: wrong token"):
        member_of()
    assert len(service.requests) == 1


NOT_FINITE = {"diloco/pseudo_gradient_norm": math.nan, "diloco/outer_momentum_norm": math.inf}


def test_numbers_that_json_does_not_have_are_left_out_of_heartbeats(service, member_of):
    member = member_of()
    metrics = NOT_FINITE | {"diloco/retries": 2}
    member.report_progress({"outer_step": 3, "loss": math.nan, "metrics": metrics})
    wait_until(
        lambda: service.bodies(HEARTBEAT)[-1:] and "outer_step" in service.bodies(HEARTBEAT)[-1]
    )
    beat = service.bodies(HEARTBEAT)[-1]
    assert beat == {
        "session": member.session,
        "outer_step": 3,
        "loss": None,
        "metrics": dict.fromkeys(NOT_FINITE) | {"diloco/retries": 2},
    }
    Heartbeat(**beat)  # the coordinator takes it


def test_heartbeats_go_on_after_an_error_that_nobody_has_foreseen(
    service, member_of, caplog, monkeypatch
):
    monkeypatch.setattr(fence, "_logged", set())
    member = member_of()
    member.report_progress({"loss": object()})  # which JSON does not have either
    wait_until(lambda: "Cannot show the coordinator how this group is doing" in caplog.text)
    member.report_progress({"loss": 2.5})
    wait_until(lambda: any(beat.get("loss") == 2.5 for beat in service.bodies(HEARTBEAT)))
    member.check()


def test_a_report_that_was_not_answered_is_repeated(service, member_of):
    service.by_path["/v1/commits"] = ODD["a proxy's 502"]
    member_of().report_commit(CommitReport(1, [[1, 2, 2]], [1]))
    wait_until(lambda: len(service.bodies("/v1/commits")) >= 3)
    del service.by_path["/v1/commits"]
    wait_for_heartbeats(service, 3)
    sent = len(service.bodies("/v1/commits"))
    wait_for_heartbeats(service, 3)
    assert len(service.bodies("/v1/commits")) == sent


@pytest.mark.slow
def test_each_attempt_of_a_report_says_how_old_the_sync_is_by_then(service):
    service.answer = ODD["nothing"]
    client = CoordinatorClient(service.address, "secret", retry_s=0.3)
    with pytest.raises(CoordinatorAwayError):
        client.commit(CommitReport(1, [], []))
    client.close()
    ages = [body["age_s"] for body in service.bodies("/v1/commits")]
    assert len(ages) >= 2 and all(b - a >= 0.1 for a, b in zip(ages, ages[1:], strict=False))


@pytest.mark.slow
def test_a_request_that_takes_up_all_of_the_time_is_repeated(service):
    service.hangs = "/v1/commits"
    client = CoordinatorClient(service.address, "secret").with_limits(retry_s=0.2, timeout_s=0.3)
    with pytest.raises(CoordinatorAwayError, match="timed out"):
        client.commit(CommitReport(1, [], []))
    client.close()
    assert len(service.bodies("/v1/commits")) == CoordinatorClient.ATTEMPTS


@pytest.mark.slow
def test_a_database_that_stands_still_delays_no_heartbeat_past_the_limit(service, member_of):
    member = member_of()
    service.hangs = "/v1/commits"
    member.report_commit(CommitReport(1, [[1, 2, 2]], [1]))
    wait_until(lambda: len(service.bodies("/v1/commits")) >= 2)
    wait_for_heartbeats(service, 1)
    times = [when for when, path, _ in service.requests if path == HEARTBEAT]
    gaps = [after - before for before, after in zip(times, times[1:], strict=False)]
    assert max(gaps) < INFO.heartbeat_timeout_s


@pytest.mark.slow
def test_a_group_waits_until_its_predecessor_looks_dead(service, member_of):
    service.by_path["/v1/replicas"] = ALIVE

    def die():
        wait_until(lambda: len(service.bodies("/v1/replicas")) >= 2)
        del service.by_path["/v1/replicas"]

    threading.Thread(target=die).start()
    member_of().check()


def test_a_closed_connection_ends_the_wait_of_another_thread(service):
    service.answer = ODD["nothing"]
    client = CoordinatorClient(service.address, "secret").with_limits(retry_s=math.inf)
    errors = []

    def ask():
        try:
            client.lease(1, 0, 0)
        except CoordinatorAwayError as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    wait_until(lambda: len(service.requests) >= 2)
    client.close()
    thread.join(5.0)
    assert not thread.is_alive() and len(errors) == 1


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"num_replicas": 3}, "num_replicas: 3 here, 2 there"),
        ({"min_replica_size": 2}, "min_replica_size: 2 here, 1 there"),
        ({"sync_every": 7}, "sync_every: 7 here, 100 there"),
    ],
)
def test_a_config_that_names_another_value_than_the_coordinator_is_refused(named, message):
    with pytest.raises(SettingsMismatch, match=message):
        INFO.check_settings(named, "http://head:2")


@pytest.mark.parametrize(
    ("section", "differing"),
    [
        ({"d_model": 8, "hub": {"token": "a-secret"}, "dropout": 0.1}, ""),
        ({"d_model": 8, "hub": {"token": "another-secret"}}, "model.hub"),
        ({"d_model": 16, "hub": {"token": "another-secret"}}, "model.d_model, model.hub"),
    ],
)
def test_a_model_that_differs_is_named_by_its_keys_without_values(section, differing):
    assert "secret" not in str(INFO)
    if not differing:
        return INFO.check_model(section)
    with pytest.raises(ValueError, match=f"another model: {differing} of this config") as caught:
        INFO.check_model(section)
    assert "secret" not in str(caught.value) and "16" not in str(caught.value)


def test_the_digests_of_the_run_are_those_of_the_coordinator_unless_a_group_names_its_own():
    options = ReplicaOptions(replica_id="0", coordinator_addr="http://head:2")
    assert INFO.adopt(options, {}).digest_every == 10
    assert INFO.adopt(options, {"digest_every": 3}).digest_every == 3


def test_a_config_that_names_the_same_or_nothing_is_accepted():
    INFO.check_settings({"num_replicas": 2, "min_replica_size": 1}, "http://head:2")
    INFO.check_settings({"num_replicas": None, "timeout": 5.0}, "http://head:2")
    INFO.check_settings({"fragment_update_alpha": None}, "http://head:2")
    rows = [{"outer_step": 3, "sync_every": 200}]  # a list, as in a YAML file
    with_schedule = replace(INFO, settings=replace(INFO.settings, schedule=rows))
    with_schedule.check_settings({"schedule": rows}, "http://head:2")
