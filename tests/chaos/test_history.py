"""What must never happen to a run under faults is seen.

Run: pytest tests/chaos/test_history.py.

Metrics and orders are files, as groups write them; stood in for: the groups, and the clock.
"""

import json
import sqlite3
import time
from types import SimpleNamespace

import pytest
from chaos.history import History, InjectedFault, samples_trained_twice
from run_events import write_events


class Run:
    """Two or more groups, whose commits and deaths are given by hand."""

    def __init__(self, folder, replicas=2):
        self.folder = folder
        self.records = {i: SimpleNamespace(deaths=[]) for i in range(replicas)}
        self.history = History(folder, replicas, {"seed": 7})
        self.history.began, self.clock = 0.0, 0.0
        self.history.now = lambda: self.clock
        for i in range(replicas):
            (folder / f"replica_{i}").mkdir()

    def look(self):
        self.history.check(SimpleNamespace(records=self.records))

    def commit(self, at, step, *groups, digest="a", lost=0):
        self.clock = at
        for i in groups or self.records:
            line = {"diloco/outer_step": step, "diloco/steps_lost": lost}
            line["diloco/global_digest"] = f"{digest}{step}"
            write_events(self.folder / f"replica_{i}", "sync", line)
        self.look()

    def die(self, at, replica_id, status=-9):
        self.clock = at
        self.records[replica_id].deaths.append(status)
        self.look()

    def fault(self, at, kind, *victims, **about):
        self.clock = at
        fault = InjectedFault(len(self.history.faults) + 1, kind, victims, **about)
        self.history.record(fault)
        return fault

    def violations(self):
        return [violation["what"] for violation in self.history.violations]

    def verdict(self, ends="xx"):
        return self.history.verdict(dict(enumerate(ends)))


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path)


def test_a_clean_run_with_a_kill(run):
    run.commit(10.0, 1)
    fault = run.fault(10.5, "kill", 1)
    run.die(10.6, 1)
    run.commit(12.5, 2, 0)
    assert run.history.open_faults(1) == [fault] and run.history.open_faults(0) == []
    run.commit(20.0, 3)
    verdict = run.verdict()
    assert verdict["is_clean"] and run.violations() == []
    assert (verdict["faults"], verdict["commits"], verdict["outer_steps"]) == (1, 5, 3)
    assert verdict["seconds_to_survivors_next_commit"] == {
        "kill": {"median": 2.0, "max": 2.0, "count": 1}
    }
    assert verdict["seconds_to_recovery"]["kill"]["max"] == 9.5
    record = json.loads((run.folder / "chaos.json").read_text())
    assert record["seed"] == 7 and record["injected"][0]["victims"] == [1]
    whats = [event["what"] for event in record["events"]]
    assert whats == ["kill group 1", "group 1 ended with status -9", "recovered from fault 1"]


def test_the_end_of_a_fault_is_by_the_clock_of_the_groups(run):
    # The group began the fault 4 s after the request, at its next sync; ``began`` is 0 here.
    fault = run.fault(10.0, "unreachable", 1, seconds=3.0)
    run.commit(12.0, 1)
    assert fault.ends_at is None and fault.recovered_s is None
    began = {"number": 1, "at": 14.0}
    (run.folder / "replica_1" / "fault_began.json").write_text(json.dumps(began))
    run.commit(16.0, 2)
    assert fault.recovered_s is None
    run.commit(18.0, 3)
    assert fault.ends_at == 17.0 and fault.recovered_s == 8.0
    before = time.time()
    History.begin(run.history)
    run.history.write({})
    record = json.loads((run.folder / "chaos.json").read_text())
    assert before <= record["began_at"] <= time.time()
    assert record["injected"][0]["ends_at"] == 17.0


def test_groups_that_differ(run):
    run.commit(1.0, 1, 0)
    run.commit(1.1, 1, 1, digest="b")
    assert run.violations() == ["groups 0 and 1 differ after outer step 1"]
    assert not run.verdict()["is_clean"]


def test_a_death_that_nobody_caused(run):
    run.fault(1.0, "kill", 1)
    run.die(1.1, 1)
    run.die(1.2, 0, status=1)
    assert run.violations() == ["group 0 ended with status 1 without a fault"]


def test_a_group_that_has_recovered_may_not_die_of_what_is_past(run):
    run.fault(1.0, "stop", 1, seconds=2.0)
    run.commit(2.0, 1)  # still stopped, as far as anybody knows
    run.die(2.5, 1)
    assert run.violations() == []
    run.commit(4.0, 2)
    run.die(5.0, 1)
    assert run.violations() == ["group 1 ended with status -9 without a fault"]


def test_no_group_may_die_when_a_service_is_struck(run):
    fault = run.fault(1.0, "lighthouse", seconds=3.0, how="killed")
    run.commit(5.0, 1, 0)
    assert fault.recovered_s is None
    run.commit(6.0, 1, 1)
    assert fault.recovered_s == 5.0
    run.fault(7.0, "coordinator", seconds=3.0, how="stopped")
    run.die(8.0, 0, status=1)
    assert run.violations() == ["group 0 ended with status 1 without a fault"]


def test_steps_that_a_survivor_loses_and_those_of_a_group_that_was_stopped(run):
    run.commit(1.0, 1)
    run.fault(2.0, "stop", 1, seconds=5.0)
    run.commit(8.0, 2, 1, lost=9)  # left behind
    assert run.violations() == []
    run.commit(8.0, 2, 0, lost=3)
    run.commit(9.0, 3, 1, lost=1)  # long after it came back
    assert run.violations() == [
        "group 0 lost 3 inner steps before 2 without a fault",
        "group 1 lost 1 inner steps before 3 without a fault",
    ]


def test_a_group_that_goes_back_and_outer_steps_that_are_missing(run):
    run.commit(1.0, 1)
    run.commit(2.0, 3, 0)
    run.commit(3.0, 1, 1)
    assert run.violations() == ["group 1 is at outer step 1 again"]
    assert run.verdict()["outer_steps_missing"] == 1


def test_a_group_that_does_not_come_back_and_other_ends(run):
    run.fault(1.0, "kill", 1)
    run.die(1.1, 1)
    run.commit(3.0, 1, 0)
    assert run.verdict()["not_recovered"] == 1 and not run.verdict()["is_clean"]
    run.commit(4.0, 1, 1)
    assert run.verdict()["is_clean"]
    assert not run.verdict(ends="xy")["is_clean"]


def test_what_lasts_for_good_takes_a_new_life_to_recover_from(run):
    fault = run.fault(1.0, "unreachable", 1, seconds=None)
    began_at = {"number": fault.number, "at": 1.5}
    (run.folder / "replica_1" / "fault_began.json").write_text(json.dumps(began_at))
    run.commit(5.0, 1, 1)
    assert fault.recovered_s is None
    run.die(40.0, 1, status=1)
    run.commit(60.0, 2)
    assert fault.recovered_s == 59.0 and run.violations() == []


def test_samples_that_are_trained_on_twice(run):
    database = run.folder / "coordinator.sqlite"
    assert samples_trained_twice(database) == 0
    with sqlite3.connect(database) as connection:
        connection.execute("CREATE TABLE epochs (trained_twice INTEGER NOT NULL)")
        connection.execute("INSERT INTO epochs VALUES (0), (5)")
    connection.close()
    run.look(), run.look()
    assert run.violations() == ["5 leased samples were trained on twice"]
