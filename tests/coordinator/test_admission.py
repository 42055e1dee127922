"""What a request passes before its body is read. Run: pytest tests/coordinator/test_admission.py

Requests go straight into the middleware, around the real application where that matters.
"""

import asyncio
import json

import pytest
from fastapi.testclient import TestClient

from composer_replication.coordinator.admission import MAX_BODY, Admission
from composer_replication.coordinator.database import Database
from composer_replication.coordinator.events import Events
from coordinator.test_api import make


async def answer_ok(scope, receive, send):
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"{}"})


def ask(headers, chunks=(b"",), *, path="/v1/replicas", tokens=("secret",), hosts=None):
    """Send a request; the status, the answer, and how many chunks of the body were read."""
    left, sent = list(chunks), []

    async def receive():
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    async def send(message):
        sent.append(message)

    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    scope = {"type": "http", "method": "POST", "path": path, "headers": raw}
    events = Events(Database(":memory:"))
    asyncio.run(Admission(answer_ok, tokens, hosts, events)(scope, receive, send))
    return sent[0]["status"], json.loads(sent[1]["body"]), len(chunks) - len(left)


@pytest.mark.parametrize(
    "given", [None, "Bearer wrong", "Bearer", "Basic secret", "secret", "Bearer s\u00e9cret"]
)
def test_without_the_token_no_byte_of_the_body_is_read(given):
    headers = {} if given is None else {"authorization": given}
    status, answer, num_read = ask(headers | {"content-length": "5"}, [b"1", b"2"])
    assert (status, num_read) == (401, 0)
    which = "no" if given is None else "wrong"
    assert answer["detail"].startswith(f"{which} token: set COMPOSER_REPLICATION_TOKEN")


@pytest.mark.parametrize("path", ["/v1/info", "//v1/info", "/V1/info", "/docs", "/other"])
def test_only_the_page_and_the_description_are_without_a_token(path):
    assert ask({}, path=path)[0] == 401
    assert ask({}, path="/")[0] == ask({}, path="/openapi.json")[0] == 200


def test_while_a_token_is_replaced_both_are_accepted():
    for given, status in (("new", 200), ("old", 200), ("older", 401)):
        assert ask({"authorization": f"bearer {given}"}, tokens=("new", "old"))[0] == status


def test_the_application_answers_413_to_a_chunked_body(tmp_path):
    client = make(tmp_path, lambda: 0.0)

    def chunks():
        for _ in range(MAX_BODY // 2**20 + 1):
            yield bytes(2**20)

    answer = client.post("/v1/replicas", content=chunks())
    assert (answer.status_code, answer.json()["detail"]) == (413, "the body is larger than 32 MiB")
    client.database.close()


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *((own, 200) for own in ("localhost:29512", "127.0.0.1", "[::1]:29512", "LOCALHOST")),
        # The name of a web page that leads to this machine.
        *((other, 421) for other in ("evil.example:29512", "", "localhost.evil.example")),
    ],
)
def test_on_loopback_without_a_token_this_machines_names_alone_are_accepted(host, status):
    local = ("localhost", "127.0.0.1", "[::1]")
    found, answer, num_read = ask({"host": host}, tokens=(), hosts=local)
    assert found == status
    if status == 421:
        assert num_read == 0 and "use localhost or 127.0.0.1" in answer["detail"]


def test_the_description_loads_nothing_from_elsewhere(tmp_path):
    client = make(tmp_path, lambda: 0.0)
    assert client.get("/docs").status_code == client.get("/redoc").status_code == 404
    assert TestClient(client.app).get("/openapi.json").status_code == 200
    client.database.close()
