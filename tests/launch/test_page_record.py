"""What a run's folder adds to the page, and report.html. Run: pytest
tests/launch/test_page_record.py"""

import json
import math
import re

import pytest
from launch import recorded_run
from launch.recorded_run import BACK_AT, BEGAN, JOINED_S, KILLED_AFTER, SYNCS, sync_time
from run_events import events_of, write_events

from composer_replication.coordinator.page import page_html, report_html
from composer_replication.launch.page_record import RunRecord, read_record, write_page


@pytest.fixture
def run_dir(tmp_path):
    return recorded_run.write_run(tmp_path / "run")


EMBEDDED = re.compile(r'<script id="embedded" type="application/json">(.*?)</script>', re.S)


def data_of(html):
    [text] = EMBEDDED.findall(html)
    return json.loads(text)


def test_the_record_has_each_groups_losses_and_the_syncs_with_their_batch(run_dir):
    record = read_record(run_dir)
    assert record["losses"].keys() == {"0", "1", "2"}
    assert len(record["losses"]["0"]) == SYNCS and len(record["losses"]["1"]) < SYNCS
    assert record["losses"]["2"][0] == [10, pytest.approx(5.19)]
    assert [s["outer_step"] for s in record["syncs"]] == list(range(1, SYNCS + 1))
    assert [s["batch"] for s in record["syncs"]] == list(range(10, 10 * SYNCS + 1, 10))


def test_a_group_that_was_killed_has_two_lives(run_dir):
    lives = read_record(run_dir)["lives"]
    assert lives["0"] == [
        {"began": BEGAN, "joined": BEGAN + JOINED_S, "ended": sync_time(SYNCS), "end": "finished"}
    ]
    died = sync_time(KILLED_AFTER) + 0.5
    first, second = lives["1"]
    assert (first["ended"], first["end"]) == (died, "lost")
    assert (second["began"], second["joined"]) == (died + 1.0, sync_time(BACK_AT))


def keep(folder, *kinds):
    events = events_of(folder, *kinds)
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


def test_a_group_without_a_result_may_be_alive(run_dir):
    keep(run_dir / "replica_2", "start", "sync")
    [life] = read_record(run_dir)["lives"]["2"]
    assert (life["ended"], life["end"]) == (None, None)


def test_a_group_that_never_joined_has_no_life(run_dir):
    keep(run_dir / "replica_0", "sync", "end")
    assert read_record(run_dir)["lives"]["0"] == []


def test_a_further_fit_of_a_process_is_the_same_life(run_dir):
    [start] = events_of(run_dir / "replica_0", "start")
    write_events(run_dir / "replica_0", "start", start | {"joined": sync_time(5)})
    assert len(read_record(run_dir)["lives"]["0"]) == 1


def test_faults_retries_and_late_joins_are_marked(run_dir):
    marks = read_record(run_dir)["marks"]
    assert [(m["kind"], m["replica_id"], m["text"]) for m in marks] == [
        ("fault", "1", "injected: kill"),
        ("sync", "0", f"outer step {KILLED_AFTER + 1}: 2 retries of the sync"),
        ("sync", "1", f"outer step {BACK_AT}: loaded the state of the others"),
    ]
    assert marks[0]["until"] is None


def test_before_the_first_sync_there_is_no_record(tmp_path):
    assert read_record(tmp_path) == {}
    (tmp_path / "replica_0").mkdir()
    assert read_record(tmp_path) == {}


def test_the_folder_is_not_read_at_every_question(run_dir):
    record = RunRecord(run_dir)
    first = record()
    (run_dir / "replica_0" / "events.jsonl").unlink()
    assert record() is first
    assert RunRecord(run_dir)()["losses"]["0"] == []


def test_the_report_is_the_page_with_its_data(run_dir):
    html = write_page(run_dir).read_text()
    data = data_of(html)
    [text] = EMBEDDED.findall(html)
    assert html.replace(text, "") == page_html()
    assert data["events"][0]["text"] == "replica group 0 registered from here"
    assert data["report"]["files"][:2] == ["config.yaml", "chaos.json"]
    assert [(g["phase"], g["is_alive"], g["registrations"]) for g in data["replicas"]] == [
        ("finished", False, 1),
        ("finished", False, 2),
        ("finished", False, 1),
    ]


def test_the_report_of_a_run_whose_coordinator_was_killed_has_the_configs_settings(run_dir):
    (run_dir / "page.json").unlink()
    data = data_of(write_page(run_dir).read_text())
    assert data["settings"]["sync_every"] == 10
    (run_dir / "config.yaml").unlink()  # a script of the user's own
    assert data_of(write_page(run_dir).read_text())["settings"] == {}


def test_what_a_report_holds_cannot_end_its_script():
    evil = "</script><script>alert(1)</script><!--"
    html = report_html({"events": [{"time": math.nan, "text": evil}]})
    assert data_of(html) == {"events": [{"time": None, "text": evil}]}
    assert html.count("</script>") == page_html().count("</script>")
