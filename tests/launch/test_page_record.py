"""What a run's folder adds to the page, and report.html. Run: pytest
tests/launch/test_page_record.py"""

import json
import math
import re
from dataclasses import asdict

import pytest
from launch import recorded_run
from launch.recorded_run import BACK_AT, KILLED_AFTER, SYNCS, sync_time
from run_events import write_events

from composer_replication.coordinator.page import page_html, with_record, write_report_html
from composer_replication.launch.outcome import recorder, write_page
from composer_replication.launch.run_record import describe, open_run, read_run
from composer_replication.settings import DiLoCoSettings


@pytest.fixture
def run_dir(tmp_path):
    return recorded_run.write_run(tmp_path / "run")


EMBEDDED = re.compile(r'<script id="embedded" type="application/json">(.*?)</script>', re.S)


def data_of(html):
    [text] = EMBEDDED.findall(html)
    return json.loads(text)


def test_the_record_has_what_the_groups_have_written(run_dir):
    record = recorder(run_dir)()
    assert record["run_name"] == "run"
    assert record["losses"].keys() == {"0", "1", "2"}
    assert len(record["losses"]["0"]) == SYNCS and len(record["losses"]["1"]) < SYNCS
    # The middle of the batches that a group has missed is a gap of its curve.
    gaps = {
        name: [at for at, loss in rows if loss is None] for name, rows in record["losses"].items()
    }
    assert gaps == {"0": [], "1": [5 * (KILLED_AFTER + BACK_AT)], "2": []}
    assert record["losses"]["2"][0] == [10, pytest.approx(5.19)]
    assert 0.5 < record["groups"]["0"]["inner_share"] < 1
    digests = dict.fromkeys("012", "28" * 32)
    assert record["agreement"] == {"outer_step": 40, "digests": digests, "differing": []}
    evaluation = {"time": sync_time(SYNCS), "batch": 400, "eval": {"ppl": 24.5}}
    assert record["evaluations"] == [evaluation]


def test_losses_faults_and_joins_are_events(run_dir):
    events = recorder(run_dir)()["events"]
    died = sync_time(KILLED_AFTER) + 0.5
    assert [(e["time"], e["text"]) for e in events if e["time"] > recorded_run.BEGAN + 20] == [
        (died, "replica group 1 ended with an error: OSError: the link is down"),
        (died, "replica group 1 was lost"),
        (sync_time(13), f"replica group 0, outer step {KILLED_AFTER + 1}: 2 retries of the sync"),
        (sync_time(BACK_AT), "replica group 1 joined"),
        (sync_time(BACK_AT), "replica group 1, outer step 16: loaded the state of the others"),
    ]


def test_an_error_stands_beside_its_group_until_that_starts_again(run_dir):
    assert recorder(run_dir)()["groups"]["1"]["error"] is None
    write_events(run_dir / "replica_1", "error", {"time": sync_time(41), "error": "KeyError: 3"})
    assert recorder(run_dir)()["groups"]["1"]["error"] == "KeyError: 3"


def test_parameters_that_differ_are_shown(run_dir):
    path = run_dir / "replica_2" / "events.jsonl"
    path.write_text(path.read_text().replace(f"{30:02x}" * 32, "ff" * 32))
    agreement = recorder(run_dir)()["agreement"]
    assert (agreement["outer_step"], agreement["differing"]) == (40, [30])


def test_a_run_without_groups_has_no_record_and_one_without_a_sync_no_losses(tmp_path):
    assert recorder(tmp_path)() == {}
    (tmp_path / "replica_0").mkdir()
    record = recorder(tmp_path)()
    assert record["losses"] is None and record["agreement"] is None
    alive = {"replica_id": "0", "is_alive": True}  # heartbeats have the word
    [row] = with_record({"replicas": [alive], "events": []}, record)["replicas"]
    assert row["is_alive"] and row["inner_share"] is None


def test_what_the_groups_write_while_the_page_is_open_is_added(run_dir):
    record = recorder(run_dir)
    assert len(record()["losses"]["0"]) == SYNCS
    write_events(run_dir / "replica_0", "sync", recorded_run.sync(0, SYNCS + 1))
    write_events(run_dir / "replica_7", "error", {"time": sync_time(SYNCS + 1), "error": "no"})
    assert len(record()["losses"]["0"]) == SYNCS + 1
    assert record()["events"][-1]["text"] == "replica group 7 ended with an error: no"


def test_the_report_is_the_page_with_its_data(run_dir):
    html = write_page(open_run(run_dir)).read_text()
    data = data_of(html)
    [text] = EMBEDDED.findall(html)
    assert html.replace(text, "") == page_html()
    assert data["events"][0]["text"].startswith("<img src=x") and len(data["events"]) > 5
    assert data["report"]["files"] == ["config.yaml"]
    assert data["settings"] == {"outer_lr": 0.35} and data["outer_step"] == SYNCS
    assert [
        (g["phase"], g["is_alive"], g["metrics"]["diloco/sync_seconds"]) for g in data["replicas"]
    ] == [("finished", False, 0.25)] * 3


def test_the_report_of_a_run_whose_coordinator_was_killed_has_the_folders_part(run_dir):
    (run_dir / "page.json").unlink()
    data = data_of(write_page(open_run(run_dir)).read_text())
    assert len(data["replicas"]) == 3 and len(data["losses"]["0"]) == SYNCS


def test_what_a_report_holds_cannot_end_its_script(tmp_path):
    evil = "</script><script>alert(1)</script><!--"
    html = write_report_html(tmp_path, {"events": [{"time": math.nan, "text": evil}]}).read_text()
    assert data_of(html) == {"events": [{"time": None, "text": evil}]}
    assert html.count("</script>") == page_html().count("</script>")


def test_the_page_has_at_most_500_lines_and_needs_nothing_from_elsewhere():
    html = page_html()
    assert html.count("\n") <= 500
    assert not re.search(r"""(src|href)=["']?(http|//)|@import|innerHTML|url\(""", html)


ODD = {
    "an end without digest": {"event": "end", "outer_steps": 3},
    "a warning without text": {"event": "warning"},
    "an evaluation without metrics": {"event": "evaluation", "batch": 3},
    "an evaluation of text": {"event": "evaluation", "batch": 3, "eval": "good"},
    "an error without text": {"event": "error"},
    "a resume without batch": {"event": "resume"},
    "an empty start": {"event": "start"},
    "a sync with nothing in it": {"event": "sync", "diloco/outer_step": None},
}


@pytest.mark.parametrize("line", ODD.values(), ids=ODD)
def test_a_line_that_no_group_writes_is_left_out_and_the_others_are_shown(run_dir, line):
    before = open_run(run_dir)
    write_events(run_dir / "replica_0", line["event"], line)
    run = open_run(run_dir)
    is_start = line["event"] == "start"  # after which there is no result yet
    assert run.groups["0"].num_damaged == (0 if is_start else 1)
    assert run.results.keys() == before.results.keys() - ({"0"} if is_start else set())
    assert recorder(run_dir)()["losses"].keys() == {"0", "1", "2"}
    write_page(run)
    assert describe(run) and read_run(run_dir).groups


def test_what_a_loop_of_one_s_own_has_trained_with_is_what_the_page_shows(run_dir):
    start = {"settings": asdict(DiLoCoSettings(sync_every=30, schedule=[]))}
    write_events(run_dir / "replica_0", "start", start)
    shown = {"settings": {}, "defaults": {"sync_every": "100"}, "settings_source": "the defaults"}
    page = with_record({"replicas": [], "events": [], **shown}, recorder(run_dir)())
    assert page["settings"] == {"sync_every": "30", "schedule": "[]"}
    assert "sync_every" not in page["defaults"]
    assert page["settings_source"] == "as the groups name them"
