"""Every statement of the coordinator's database fails once, in turn.

Run: pytest tests/coordinator/test_io_errors.py

Real: FastAPI and SQLite in ``tmp_path``. Faked: the one statement that fails, as it would on a full
disk or a broken one.
"""

import sqlite3

import pytest

from composer_replication.coordinator import database as coordinator_database
from coordinator.test_api import C4, Clock, make, registration


class FailingConnection(sqlite3.Connection):
    """One statement, counted from 0, fails."""

    count, fails_at, code = 0, None, 0

    def cursor(self, factory=None):
        return super().cursor(FailingCursor)


class FailingCursor(sqlite3.Cursor):
    def execute(self, sql, *parameters):
        connection = self.connection
        connection.count += 1
        if connection.count - 1 == connection.fails_at:
            error = sqlite3.OperationalError("cannot write")
            error.sqlite_errorcode = connection.code
            raise error
        return super().execute(sql, *parameters)


def ask_the_coordinator(client, *, again):
    """What groups ask for in a run; the answers. ``again`` is what theirs do after an error."""
    answers = []
    stream = {"name": "0/0", "dataset_id": C4["dataset_id"], "replica_id": "0", "session": "one"}
    for method, path, body in (
        ("POST", "replicas", registration()),
        ("POST", "datasets", C4),
        ("POST", "streams", stream),
        ("POST", "replicas/0/heartbeat", {"session": "one", "batch": 3}),
        ("POST", "commits", {"outer_step": 1, "ledger": [], "present": ["0"], "age_s": 0.0}),
        ("GET", "info", None),
        ("GET", "status", None),
    ):
        for _ in range(1 + again):
            answer = client.request(method, f"/v1/{path}", json=body)
            if answer.status_code < 500:
                break
            assert answer.status_code == 507 and "state.sqlite" in answer.json()["detail"]
        answers.append((path, answer.status_code))
    return answers


@pytest.mark.slow
def test_each_failure_of_the_coordinator_s_database_is_an_error_of_that_call_alone(
    tmp_path, monkeypatch
):
    connect, made = sqlite3.connect, []

    def connect_and_fail(*arguments, **options):
        made.append(connect(*arguments, **options, factory=FailingConnection))
        return made[-1]

    monkeypatch.setattr(coordinator_database.sqlite3, "connect", connect_and_fail)

    def run(name, fails_at):
        folder = tmp_path / name
        folder.mkdir()
        client = make(folder, Clock())
        connection = made[-1]
        connection.code = sqlite3.SQLITE_IOERR if fails_at and fails_at % 2 else sqlite3.SQLITE_FULL
        connection.count, connection.fails_at = 0, fails_at
        answers = ask_the_coordinator(client, again=1)
        count = connection.count
        answers += [
            client.get(f"/v1/{path}").json() for path in ("info", f"datasets/{C4['dataset_id']}")
        ]
        client.database.close()
        return answers, count

    answers, count = run("whole", None)
    assert all(status < 300 for _, status in answers[:-2]) and count > 15
    for fails_at in range(count):
        assert run(str(fails_at), fails_at)[0] == answers, f"statement {fails_at}"
