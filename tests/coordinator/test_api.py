"""The coordinator's HTTP interface. Run: pytest tests/coordinator/test_api.py

Real: FastAPI and SQLite in ``tmp_path``; requests go straight into the application.
"""

import dataclasses
import logging
import re
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from fastapi.testclient import TestClient

from composer_replication.coordinator.api import RunData, create_app
from composer_replication.coordinator.database import Database, RejectedError
from composer_replication.coordinator.events import Events
from composer_replication.coordinator.http_service import HttpService, Listener
from composer_replication.coordinator.registry import Registry
from composer_replication.coordinator.server import store_settings
from composer_replication.coordinator.streams import Streams
from composer_replication.settings import DiLoCoSettings
from composer_replication.util import fence
from coordinator.run_info import INFO, VERSIONS

SETTINGS = DiLoCoSettings(sync_every=20, num_fragments=2, fragment_patterns=[["a*"], ["*"]])
MODEL = "2 tensors, sha256 aa"


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def make(tmp_path, clock, *, settings=SETTINGS, token="secret", record=None, **arguments):
    database = Database(tmp_path / "state.sqlite")
    events = Events(database)
    registry = Registry(database, events, VERSIONS, 3.0, clock)
    store_settings(database, events, settings, "tiny.yaml", **arguments)
    run = RunData(
        info=dataclasses.replace(INFO, settings=settings),
        registry=registry,
        streams=Streams(database, registry, events),
        events=events,
        record=record,
    )
    app = create_app(run, tokens=[token] if token else [])
    headers = {"Authorization": f"Bearer {token}"}
    client = TestClient(app, headers=headers, raise_server_exceptions=False)
    client.database = database
    return client


@pytest.fixture
def start(tmp_path, clock):
    """Starts the service on a folder, in the place of the one before."""
    started = []

    def start(**arguments):
        end()
        started.append(make(tmp_path, clock, **arguments))
        return started[-1]

    def end():
        for client in started:
            client.database.close()

    yield start
    end()


@pytest.fixture
def client(start):
    return start()


def registration(replica_id="0", session="one", **changes):
    return {
        "replica_id": replica_id,
        "session": session,
        "host": "here",
        "world_size": 2,
        "model": MODEL,
        **VERSIONS,
        **changes,
    }


def register(client, *arguments, **changes):
    return client.post("/v1/replicas", json=registration(*arguments, **changes))


def beat(client, replica_id="0", session="one", **progress):
    body = {"session": session, **progress}
    return client.post(f"/v1/replicas/{replica_id}/heartbeat", json=body)


# ---- settings --------------------------------------------------------------------------------


def test_info_has_every_setting_and_none_is_left_out(client):
    info = client.get("/v1/info").json()
    assert info["settings"].keys() == {f.name for f in dataclasses.fields(DiLoCoSettings)}
    assert DiLoCoSettings(**info["settings"]) == SETTINGS
    assert (info["num_replicas"], info["min_replicas"]) == (2, 1)
    assert info["lighthouse_addr"] == "http://head:1" and info["heartbeat_timeout_s"] == 3.0
    assert info["settings_source"] == "tiny.yaml"
    assert info["outer_step"] == 0


def test_the_page_has_the_settings_as_a_config_writes_them(client):
    shown = client.get("/v1/page").json()["settings"]
    assert shown["fragment_patterns"] == '[["a*"], ["*"]]' and shown["schedule"] == (
        "[{outer_step: 1, sync_every: 4, outer_lr: 1.0, outer_momentum: 0.0}, "
        "{outer_step: 41, outer_lr: 0.7, outer_momentum: 0.5}, {outer_step: 121, sync_every: 20}]"
    )
    assert shown["sync_every"] == "20"


def test_the_page_tells_settings_from_defaults_and_shows_none_that_is_not_set(client):
    page = client.get("/v1/page").json()
    assert page["defaults"]["wire_format"] == "float32" and "wire_format" not in page["settings"]
    assert "round_seconds" not in page["settings"] | page["defaults"]
    unset = [name for name, value in dataclasses.asdict(SETTINGS).items() if value is None]
    assert {*page["settings"], *page["defaults"], *unset} == dataclasses.asdict(SETTINGS).keys()


# ---- what lasts ------------------------------------------------------------------------------


def test_a_restarted_service_knows_groups_and_model(start):
    register(start())
    client = start()
    # It has not been heard of yet, and is not taken for dead.
    assert register(client, "0", "two").status_code == 409
    assert beat(client).status_code == 200
    assert "another model" in register(client, "1", model="sha256 bb").json()["detail"]


def test_settings_change_only_between_runs(start):
    start()
    changed = dataclasses.replace(SETTINGS, outer_lr=0.3, weight_by="steps")
    problem = (
        "other settings (outer_lr 0.7 before, 0.3 now, weight_by 'uniform' before, 'steps' now), "
        "and groups in training keep those with which they started. Use the settings of before; or "
        "stop all groups, and start this coordinator with --new-settings before they resume; or "
        "use another state folder for another run"
    )
    with pytest.raises(RejectedError, match=re.escape(problem)):
        start(settings=changed)
    client = start(settings=changed, all_start=True)
    assert client.get("/v1/info").json()["settings"]["outer_lr"] == 0.3
    event = client.get("/v1/status").json()["events"][-1]["text"]
    assert event.startswith("new settings from tiny.yaml: outer_lr 0.7 before, 0.3 now")
    info = start(settings=changed).get("/v1/info").json()
    assert info["settings"]["outer_lr"] == 0.3


def test_a_state_folder_of_a_version_with_fewer_settings_is_served_on(start):
    with start().database.transaction() as cursor:
        cursor.execute("UPDATE settings SET settings = json_remove(settings, '$.weight_by')")
    assert start().get("/v1/info").json()["settings"]["weight_by"] == "uniform"


# ---- replica groups ----------------------------------------------------------------------------


def test_a_registration_asked_for_again_is_answered_again(client):
    for _ in range(2):
        assert register(client).status_code == 201
    assert client.get("/v1/status").json()["replicas"][0]["registrations"] == 1


def test_no_value_of_the_model_section_leaves_the_coordinator(client):
    status = client.get("/v1/status").text + client.get("/v1/page").text
    assert "model_section" not in status and "a-secret" not in status
    info = client.get("/v1/info")
    assert info.json()["model_section"] == INFO.model_section
    assert "a-secret" not in info.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": "sha256 bb"},
            "model: 'sha256 bb' here, '2 tensors, sha256 aa' there. Use the run's model config",
        ),
        (
            {"model": "sha256 bb", "tensors": {"a": "(2,)", "b": "(4,)"}},
            "another model: b: '(4,)' here, '(3,)' there.",
        ),
        ({"torchft": "2026.1.1"}, "this group has torchft 2026.1.1, the run has 2026.10.26"),
        (
            {"composer_replication": "0.0.9"},
            "this group has composer_replication 0.0.9, the run has 0.1.0",
        ),
    ],
)
def test_who_does_not_fit_is_refused_with_the_first_difference(client, changes, message):
    register(client, tensors={"a": "(2,)", "b": "(3,)"} if "tensors" in changes else {})
    answer = register(client, "1", **changes)
    assert answer.status_code == 422 and message in answer.json()["detail"]
    assert len(client.get("/v1/status").json()["replicas"]) == 1


def test_a_name_is_free_again_when_its_group_has_been_silent_for_long_enough(client, clock):
    register(client)
    clock.now += 2.9
    answer = register(client, "0", "two")
    assert answer.status_code == 409 and "'0' is alive" in answer.json()["detail"]
    beat(client)
    clock.now += 3.1
    assert register(client, "0", "two").status_code == 201
    # The one before has been replaced, and hears of it.
    assert beat(client, "0", "one").status_code == 410
    # One that leaves frees its name at once.
    assert client.delete("/v1/replicas/0", params={"session": "two"}).status_code == 200
    assert register(client, "0", "three").status_code == 201


def test_the_status_shows_where_each_group_stands(client, clock):
    register(client)
    register(client, "1")
    beat(client, batch=20, outer_step=1, loss=3.5, phase="training")
    beat(client, batch=40, outer_step=2, loss=3.25, phase="training")
    clock.now += 5.0
    beat(client, "1", "one", inner_steps=41, outer_step=2)
    status = client.get("/v1/status").json()
    one, other = status["replicas"]
    assert (one["is_alive"], one["last_seen_s"], one["loss"]) == (False, 5.0, 3.25)
    assert (other["is_alive"], other["outer_step"]) == (True, 2)
    assert status["losses"] == {"0": [[20, 3.5], [40, 3.25]]}
    assert client.get("/v1/info").json()["outer_step"] == 2
    assert status["outer_step"] == 2
    assert events_of(client) == [
        "replica group 0 has connected from here (testclient)",
        "replica group 1 has connected from here (testclient)",
    ]


# ---- samples -----------------------------------------------------------------------------------

C4 = {"dataset_id": "data/c4 é", "length": 20, "seed": 7, "unit_size": 8}


def post(client, path, **body):
    return client.post(f"/v1/{path}", json=body)


def open_stream(client, name="one/0", **changes):
    body = {"name": name, "dataset_id": C4["dataset_id"], "replica_id": "0", "session": "one"}
    return post(client, "streams", **body | changes)


@pytest.fixture
def stream(client):
    register(client)
    post(client, "datasets", **C4)
    return open_stream(client).json()["stream"]


def dataset(client):
    return client.get("/v1/datasets/data/c4 é").json()


def test_a_dataset_is_made_once(client):
    for _ in range(2):
        answer = post(client, "datasets", **C4)
        assert (answer.status_code, answer.json()) == (201, {"dataset_id": C4["dataset_id"]})
    assert dataset(client) == C4 | {"epochs": [], "trained_in_part": 0, "trained_twice": 0}
    answer = post(client, "datasets", **C4 | {"seed": 8})
    assert answer.status_code == 409 and "seed 7, not 8" in answer.json()["detail"]
    answer = post(client, "datasets", dataset_id="d", length=2**40, seed=0, unit_size=1)
    assert answer.status_code == 422 and "unit_size of 65536 or more" in answer.json()["detail"]
    answer = open_stream(client, "x", dataset_id="other")
    unknown = "There is no dataset 'other': create it first."
    assert (answer.status_code, answer.json()["detail"]) == (422, unknown)


def test_samples_from_a_lease_into_the_model(client, stream):
    assert open_stream(client).json() == {"stream": stream}
    assert open_stream(client, replica_id="1").status_code == 422
    answers = [post(client, f"streams/{stream}/leases", number=n, epoch=0) for n in (0, 1, 2, 9)]
    assert {answer.status_code for answer in answers} == {201}
    leases = [answer.json() for answer in answers]
    assert leases.pop()["is_open"] is False
    sizes, before = [4 if lease["unit"] == 2 else 8 for lease in leases], 0
    for number, (lease, size) in enumerate(zip(leases, sizes, strict=True)):
        expected = {"number": number, "epoch": 0, "unit": lease["unit"], "start": 0, "stop": size}
        assert lease == expected | {"stream_start": before, "is_open": True}
        before += size

    report = {"outer_step": 3, "ledger": [[stream, 12, 16], [5, 1, 1]], "present": [stream]}
    for _ in range(2):
        answer = post(client, "commits", **report, age_s=0.5)
        assert (answer.status_code, answer.json()) == (200, {"unknown": [5]})
    (epoch,) = dataset(client)["epochs"]
    assert (epoch["done"], epoch["leased"], epoch["available"]) == (12, 8, 0)
    assert client.get("/v1/info").json()["outer_step"] == 3
    answer = post(client, "commits", **report | {"ledger": [[stream, 21, 23], [5, 2, 2]]}, age_s=0)
    assert (answer.status_code, answer.json()) == (200, {"unknown": [stream, 5]})
    assert client.get("/v1/status").json()["samples_gap"] == {"outer_step": 0, "samples": 5}


def test_a_stream_is_released_and_reopened_and_the_run_rewound(client, stream):
    for number in range(3):
        post(client, f"streams/{stream}/leases", number=number, epoch=0)
    answer = post(client, f"streams/{stream}/release", ledger=[[stream, 4, 6], [5, 0, 1]])
    assert (answer.status_code, answer.json()) == (200, {"unknown": [5]})
    assert dataset(client)["trained_in_part"] == 2

    reopen, own = f"streams/{stream}/reopen", {"session": "one"}
    assert post(client, reopen, position=6, **own).json() == {"stream": stream}
    answer = post(client, reopen, position=3, **own)
    assert answer.status_code == 422 and "4 samples are committed" in answer.json()["detail"]

    answer = post(client, "rewind", outer_step=2, ledger=[[stream, 1, 2]])
    assert (answer.status_code, answer.json()) == (200, {"outer_step": 2})
    status = client.get("/v1/status").json()
    assert status["outer_step"] == 2 and status["datasets"] == [dataset(client)]
    beat(client, outer_step=4)
    assert client.get("/v1/status").json()["outer_step"] == 4

    post(client, f"streams/{stream}/release", ledger=[])
    other = open_stream(client, "two/0").json()["stream"]
    post(client, f"streams/{other}/leases", number=0, epoch=0)
    answer = post(client, reopen, position=1, **own)
    assert answer.status_code == 410 and "leased to others or done" in answer.json()["detail"]


def test_a_stream_of_another_state_folder_is_not_found(client, stream):
    for path, body in (
        (f"streams/{stream + 1}/reopen", {"position": 0, "session": "one"}),
        ("rewind", {"outer_step": 1, "ledger": [[stream + 1, 1, 1]]}),
    ):
        answer = post(client, path, **body)
        assert answer.status_code == 404
        assert f"all leases of stream {stream + 1}" in answer.json()["detail"]


@pytest.mark.parametrize(
    "body",
    [
        {"ledger": [[1, 2, 2], [1, 3, 3]]},
        {"ledger": [[1, -1, 2]]},
        {"ledger": [[1, 2, 1]]},
        {"age_s": -1},
    ],
)
def test_a_report_of_no_sense_is_refused(client, body):
    report = {"outer_step": 1, "ledger": [], "present": [], "age_s": 0.0}
    assert post(client, "commits", **report).status_code == 200
    assert post(client, "commits", **report | body).status_code == 422


# ---- the boundary ----------------------------------------------------------------------------


def test_a_dead_disk_is_one_line_and_ends_no_heartbeat(client, caplog, monkeypatch):
    monkeypatch.setattr(fence, "_logged", set())
    register(client)
    client.database.close()
    for outer_step in range(5):
        assert beat(client, outer_step=outer_step).status_code == 200
    (line,) = [text for text in caplog.messages if "to a coordinator that starts again" in text]
    assert "closed database" in line


@pytest.mark.slow
def test_heartbeats_are_answered_while_the_disk_stands_still(client):
    """Also when as many other requests wait for it as there are threads."""
    register(client)
    listening = Listener("127.0.0.1:0")
    service = HttpService(client.app, listening)
    address = f"http://127.0.0.1:{listening.port}/v1"
    request = {"headers": client.headers, "timeout": 20, "trust_env": False, "verify": False}
    with ThreadPoolExecutor(60) as pool:
        with client.database.transaction():
            waiting = [pool.submit(httpx.get, f"{address}/status", **request) for _ in range(60)]
            progress = {"session": "one", "outer_step": 4}
            for _ in range(3):
                answer = httpx.post(f"{address}/replicas/0/heartbeat", json=progress, **request)
                assert answer.json() == {"replica_id": "0"}
            assert not any(request.done() for request in waiting)
        assert all(request.result().status_code == 200 for request in waiting)
    service.close()


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("commits", '{"outer_step":1,"ledger":[],"present":[],"age_s":NaN}', "body.age_s: "),
        ("replicas/0/heartbeat", '{"session":"s","oops":NaN}', "body.oops: Extra inputs"),
        ("replicas/0/heartbeat", r'{"session":"s","phase":"\ud800secret"}', "body.phase: "),
        ("replicas/0/heartbeat", r'{"session":"s","\ud800":1}', "body: Input should be"),
        ("replicas", '{"replica_id":"secret value"}', "body.replica_id: "),
        ("replicas", r'{"host":"a\u202eb"}', "body.host: Value error, use printable characters"),
        ("commits", "[" * 200_000, "body"),
    ],
    ids=range(7),
)
def test_an_invalid_request_is_explained_without_its_values(client, path, body, message):
    headers = {"Content-Type": "application/json"}
    answer = client.post(f"/v1/{path}", content=body, headers=headers)
    assert answer.status_code in (400, 422)
    detail = answer.json()["detail"]
    assert message in detail and "secret" not in detail and len(detail) <= 500


def events_of(client):
    return [event["text"] for event in client.get("/v1/status").json()["events"]]


def test_who_changes_a_run_or_tries_to_is_written_down(client, caplog):
    caplog.set_level(logging.INFO, "composer_replication.coordinator")  # launch raises it
    register(client)
    register(client, "0", "two")
    client.post("/v1/rewind", json={"outer_step": 0, "ledger": []})
    for _ in range(5):
        client.get("/v1/info", headers={"Authorization": "Bearer guessed"})
    texts = events_of(client)
    assert texts[0] == "replica group 0 has connected from here (testclient)"
    refused = "replica group 0, from here (testclient), was refused: a replica group '0' is alive"
    assert texts[1].startswith(refused)
    # A fresh start is none.
    assert texts[2:] == ["requests with a wrong token: 1, the last one from testclient"]
    logged = [each.message for each in caplog.records if each.name.endswith("events")]
    assert [text.lower() for text in logged] == [text.lower() for text in texts]


@pytest.mark.slow
def test_nothing_that_the_schema_allows_or_forbids_breaks_it(start):
    import schemathesis  # here, since that takes a second
    from hypothesis import HealthCheck, given
    from hypothesis import settings as hypothesis_settings
    from hypothesis import strategies as st
    from schemathesis import GenerationMode
    from schemathesis.checks import not_a_server_error

    client = start(token=None)
    # Something to hit: few of the names and keys that are drawn would be known else.
    post(client, "datasets", dataset_id="0", length=5, seed=0, unit_size=2)
    post(client, "streams", name="0", dataset_id="0", replica_id="0", session="0")
    with client.database.transaction() as cursor:
        cursor.execute("UPDATE streams SET key = 1")
    schema = schemathesis.openapi.from_asgi("/openapi.json", client.app)
    seen = set()
    operations = [result.ok() for result in schema.get_all_operations()]
    for operation in operations:

        @hypothesis_settings(
            max_examples=40, deadline=None, database=None, suppress_health_check=list(HealthCheck)
        )
        @given(case=st.one_of(*(operation.as_strategy(mode) for mode in GenerationMode)))
        def check(case):
            answer = case.call()
            seen.add((case.operation.label, answer.status_code // 100))
            assert answer.status_code < 500, answer.text
            if answer.status_code != 405:
                case.validate_response(answer, checks=[not_a_server_error])

        check()
    labels = {label for label, _ in seen}
    assert len(labels) == len(operations) > 10
    assert {kind for _, kind in seen} == {2, 4}


def test_the_page_keeps_the_token_out_of_the_address_bar(client):
    page = client.get("/").text
    assert page.index("if (encoded) keepToken()") < page.index("history.replaceState(")


def test_the_page_has_what_heartbeats_tell_and_what_the_folder_adds(start):
    record = {
        "run_name": "quickstart",
        "groups": {"0": {"inner_share": 0.5, "error": "OSError: no"}, "1": {"phase": "finished"}},
        "losses": {"0": [[20, 3.0]]},
        "events": [{"time": 1.0, "text": "replica group 0: OSError: no"}],
    }
    client = start(record=lambda: record)
    register(client)
    beat(
        client,
        batch=20,
        loss=3.5,
        metrics={"diloco/bytes_float32": 1.5},
        digest_step=2,
        global_digest="ab" * 32,
    )
    status, page = (client.get(f"/v1/{name}").json() for name in ("status", "page"))
    [group] = status["replicas"]
    assert group["metrics"] == {"diloco/bytes_float32": 1.5}
    assert status["losses"] == {"0": [[20, 3.5]]}
    with_folder, other = page["replicas"]
    assert (with_folder["loss"], with_folder["inner_share"]) == (3.5, 0.5)
    assert (
        with_folder["error"] == "OSError: no"
        and other == {"replica_id": "1"} | record["groups"]["1"]
    )
    assert page["losses"] == record["losses"] and page["run_name"] == "quickstart"
    assert page["events"] == status["events"] + record["events"]
