"""The coordinator's HTTP interface. Run: pytest tests/coordinator/test_api.py

Real: FastAPI and SQLite in ``tmp_path``; requests go straight into the application.
"""

import dataclasses

import pytest
import schemathesis
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error

from composer_replication.coordinator.api import create_app
from composer_replication.coordinator.database import Database
from composer_replication.coordinator.journal import Journal
from composer_replication.coordinator.registry import Registry, Versions
from composer_replication.coordinator.run_settings import RefusedError, RunSettings
from composer_replication.diloco.settings import DiLoCoSettings

SETTINGS = DiLoCoSettings(sync_every=20, num_fragments=2, fragment_patterns=[["a*"], ["*"]])
MODEL = [
    {"name": "a.weight", "shape": [2, 3], "dtype": "torch.float32"},
    {"name": "b.weight", "shape": [4], "dtype": "torch.float32"},
]


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def make(tmp_path, clock, *, settings=SETTINGS, token="secret", **arguments):
    database = Database(tmp_path / "state.sqlite")
    journal = Journal(database)
    app = create_app(
        RunSettings(database, journal, settings, "tiny.yaml", **arguments),
        Registry(database, journal, Versions("0.1.0", "2026.10.26"), 3.0, clock),
        journal,
        token=token,
        lighthouse_addr="http://head:1",
        num_replicas=2,
        min_replicas=1,
    )
    headers = {"Authorization": f"Bearer {token}"}
    return TestClient(app, headers=headers, raise_server_exceptions=False), database


@pytest.fixture
def client(tmp_path, clock):
    client, database = make(tmp_path, clock)
    yield client
    database.close()


def registration(replica_id="0", session="one", **changes):
    return {
        "replica_id": replica_id,
        "session": session,
        "host": "here",
        "world_size": 2,
        "composer_replication": "0.1.0",
        "torchft": "2026.10.26",
        "model": MODEL,
    } | changes


def register(client, *arguments, **changes):
    return client.post("/v1/replicas", json=registration(*arguments, **changes))


def beat(client, replica_id="0", session="one", **progress):
    told = {"session": session, **progress}
    return client.post(f"/v1/replicas/{replica_id}/heartbeat", json=told)


# ---- settings --------------------------------------------------------------------------------


def test_info_has_every_setting_and_none_is_left_out(client):
    told = client.get("/v1/info").json()
    assert told["settings_authority"] is True
    assert told["settings"].keys() == {f.name for f in dataclasses.fields(DiLoCoSettings)}
    assert DiLoCoSettings(**told["settings"]) == SETTINGS
    assert (told["num_replicas"], told["min_replicas"]) == (2, 1)
    assert told["lighthouse_addr"] == "http://head:1" and told["heartbeat_timeout_s"] == 3.0
    assert (told["settings_version"], told["settings_source"]) == (1, "tiny.yaml")


def test_a_change_is_a_new_version_which_groups_hear_of_and_can_ask_for(client):
    assert register(client).json() == {"settings_version": 1}
    changed = client.patch("/v1/settings", json={"outer_lr": 0.4, "sync_every": 40})
    assert changed.json() == {"settings_version": 2}
    assert beat(client).json() == {"settings_version": 2}
    assert client.get("/v1/settings/1").json()["outer_lr"] == 0.7
    assert client.get("/v1/settings/2").json()["sync_every"] == 40
    source = client.get("/v1/info").json()["settings_source"]
    assert source == "tiny.yaml; outer_lr 0.7 -> 0.4, sync_every 20 -> 40"
    # The same again is no change.
    assert client.patch("/v1/settings", json={"outer_lr": 0.4}).json() == {"settings_version": 2}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sync_every": 21}, "sync_every=21 is not divisible by num_fragments=2: use 20 or 22"),
        ({"outer_momentum": 1.0}, "outer_momentum=1.0: use a number between 0 and 1, exclusive"),
        ({}, "name the settings to change"),
        ({"outer_lr": None}, "name the settings to change, each with a value"),
    ],
)
def test_a_change_that_cannot_be_is_refused_with_the_fix(client, changes, message):
    answer = client.patch("/v1/settings", json=changes)
    assert answer.status_code == 422 and message in answer.json()["detail"]
    assert client.get("/v1/info").json()["settings_version"] == 1


def test_what_cannot_change_in_mid_run_is_no_field(client):
    assert client.patch("/v1/settings", json={"num_fragments": 1}).status_code == 422


def test_there_is_no_version_to_come(client):
    answer = client.get("/v1/settings/7")
    assert answer.status_code == 422 and "no settings of version 7" in answer.json()["detail"]


# ---- what lasts ------------------------------------------------------------------------------


def test_a_restarted_service_knows_settings_groups_and_model(tmp_path, clock):
    client, database = make(tmp_path, clock)
    register(client)
    client.patch("/v1/settings", json={"outer_lr": 0.4})
    database.close()
    client, database = make(tmp_path, clock)
    assert client.get("/v1/info").json()["settings"]["outer_lr"] == 0.4
    # It has not been heard of yet, and is not taken for dead.
    assert register(client, "0", "two").status_code == 409
    assert beat(client).status_code == 200
    other = [MODEL[0] | {"shape": [3, 3]}, MODEL[1]]
    assert "a.weight" in register(client, "1", model=other).json()["detail"]
    database.close()


def test_a_config_that_has_changed_is_a_new_version_where_groups_can_adopt_it(tmp_path, clock):
    make(tmp_path, clock)[1].close()
    changed = dataclasses.replace(SETTINGS, outer_lr=0.3)
    client, database = make(tmp_path, clock, settings=changed)
    told = client.get("/v1/info").json()
    assert (told["settings_version"], told["settings"]["outer_lr"]) == (2, 0.3)
    database.close()
    other = dataclasses.replace(changed, weight_by="steps")
    with pytest.raises(RefusedError, match="weight_by 'uniform' before, 'steps' now"):
        make(tmp_path, clock, settings=other)
    client, database = make(tmp_path, clock, settings=other, all_start=True)
    assert client.get("/v1/info").json()["settings"]["weight_by"] == "steps"
    database.close()


# ---- replica groups ----------------------------------------------------------------------------


def test_a_registration_asked_for_again_is_answered_again(client):
    for _ in range(2):
        assert register(client).status_code == 201
    assert client.get("/v1/status").json()["replicas"][0]["registrations"] == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": [MODEL[0], MODEL[1] | {"dtype": "torch.bfloat16"}]},
            "b.weight is torch.bfloat16",
        ),
        ({"model": MODEL[:1]}, "b.weight is missing here, and torch.float32 (4,) in this run"),
        ({"torchft": "2026.1.1"}, "torchft 2026.1.1 here, and 2026.10.26 in this run"),
        ({"composer_replication": "0.0.9"}, "composer_replication 0.0.9 here, and 0.1.0 in"),
    ],
)
def test_who_does_not_fit_is_refused_with_the_first_difference(client, changes, message):
    register(client)
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


def test_who_has_left_leaves_its_name(client):
    register(client)
    assert client.delete("/v1/replicas/0", params={"session": "one"}).status_code == 200
    assert register(client, "0", "two").status_code == 201


def test_the_status_shows_where_each_group_stands(client, clock):
    register(client)
    register(client, "1")
    beat(client, inner_steps=20, outer_step=1, loss=3.5, phase="training")
    beat(client, inner_steps=40, outer_step=2, loss=3.25, phase="training")
    clock.now += 5.0
    beat(client, "1", "one", inner_steps=41, outer_step=2)
    status = client.get("/v1/status").json()
    one, other = status["replicas"]
    assert (one["is_alive"], one["last_seen_s"], one["loss"]) == (False, 5.0, 3.25)
    assert (other["is_alive"], other["outer_step"]) == (True, 2)
    assert status["losses"] == {"0": [[20, 3.5], [40, 3.25]]}
    assert status["outer_step"] == 2
    assert [event["text"] for event in status["events"]] == [
        "replica group 0 registered from here",
        "replica group 1 registered from here",
    ]


# ---- the boundary ----------------------------------------------------------------------------


@pytest.mark.parametrize("header", [{"Authorization": ""}, {"Authorization": "Bearer wrong"}])
def test_without_the_token_nothing_is_told(client, header):
    for method, path in (("GET", "/v1/info"), ("GET", "/v1/status"), ("PATCH", "/v1/settings")):
        answer = client.request(method, path, headers=header)
        assert answer.status_code == 401
        assert "COMPOSER_REPLICATION_TOKEN" in answer.json()["detail"]


def test_the_page_needs_no_internet(client):
    page = client.get("/", headers={"Authorization": ""})
    assert page.status_code == 200 and "/v1/status" in page.text
    assert not any(word in page.text for word in ('src="http', 'href="http', "@import", "//cdn"))


def test_nothing_that_the_schema_allows_or_forbids_breaks_it(tmp_path, clock):
    client, database = make(tmp_path, clock, token=None)
    schema = schemathesis.openapi.from_asgi("/openapi.json", client.app)
    seen = set()
    for result in schema.get_all_operations():
        operation = result.ok()

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
    database.close()
    labels = {label for label, _ in seen}
    assert len(labels) == 7
    assert {kind for _, kind in seen} == {2, 4}
