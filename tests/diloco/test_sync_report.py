"""The table of metrics. Run: pytest tests/diloco/test_sync_report.py"""

import dataclasses
import io
import re
from pathlib import Path

import pytest
from own_imports import PACKAGE
from recorded_groups import run_of, sync_line, write_group
from rich.console import Console
from run_events import write_events

from composer_replication.diloco.sync_report import SyncReport
from composer_replication.group.history import COSINES
from composer_replication.launch.display import live_table
from composer_replication.launch.outcome import _record_of as page_record
from composer_replication.launch.run_record import describe

ROW = re.compile(r"^        (\w+): \(([^;)]+)(?:; ([^)]+))?\) ", re.M)
DOCS = Path(__file__).parents[2] / "docs"
PAGE = (PACKAGE / "coordinator/web/page.html").read_text()
COLUMNS = re.findall(r'\(g\) => .*g(?:\.metrics\?\.\["diloco/|\.)(\w+)', PAGE)
"""What the page's table of groups shows of a group."""
OWN_OF_PAGE = ("agreement", "events", "failure", "groups")
"""What it shows of the syncs in a run's folder, beside that table and the result."""
USUAL = {"diloco/group_cosine": 0.25, "diloco/steps_lost": 0}
UNUSUAL = {
    "outer_step": 99,
    "fragment": 1,
    "num_participants": 1,
    "contribution": 0.0,
    "total_contribution": 0.0,
    "inner_steps": 999,
    "pseudo_gradient_norm": float("inf"),
    "steps_lost": 3,
    "retries": 2,
    "healed": 1,
    "global_digest": "cd" * 32,
}
"""Values that are shown if the metric is."""
ONE_SYNC = {"outer_step", "fragment", "inner_steps"}
"""Metrics that differ from sync to sync."""
ENDS = {"outer_steps": "outer_step", "global_digest": "global_digest"}
"""What the end of a group says of its last sync."""


def places():
    """Where each metric is shown, by the table."""
    return {name: where.split(", ") if where else [] for name, _, where in rows()}


def rows():
    return ROW.findall(SyncReport.__doc__ or "")


def test_each_number_of_a_sync_has_a_row_with_its_unit_and_none_is_left():
    fields = [field.name for field in dataclasses.fields(SyncReport)]
    assert [name for name, _, _ in rows()] == fields
    assert all(unit.strip() for _, unit, _ in rows())
    assert {place for each in places().values() for place in each} == {"page", "terminal", "result"}


def shown(folder, name=None, value=None, usual=None):
    """What page, terminal and result show of a run of two groups, in which a metric has a value.

    Args:
        folder: For the run.
        name: Of the metric. None: all are usual.
        value: In the last sync, or in all syncs if ``ONE_SYNC`` does not have the metric.
        usual: Metrics of all syncs.
    """
    steps = range(1, COSINES + 2)
    syncs = [sync_line(step, time=1000.0 + step, **USUAL) | (usual or {}) for step in steps]
    for sync in syncs[-1:] if name in ONE_SYNC else syncs if name else []:
        sync[name if name == "inner_steps" else f"diloco/{name}"] = value
    newest = syncs[-1]
    end = {name: newest[f"diloco/{of}"] for name, of in ENDS.items()} | {"inner_steps": 1}
    for group in range(2):
        write_group(folder, group, syncs=syncs)
        write_events(folder / f"replica_{group}", "end", end)
    run = run_of(folder, 2)
    # The page shows the result too, which is a place of its own.
    record = {name: each for name, each in page_record(run).items() if name in OWN_OF_PAGE}
    # Of a group's metrics the page shows its columns.
    own = record["groups"].items()
    record["groups"] = {name: (each["inner_share"], each["error"]) for name, each in own}
    columns = {name: newest.get(f"diloco/{name}", newest.get(name)) for name in COLUMNS}
    console = Console(width=150, record=True, file=io.StringIO())
    console.print(live_table(run, height=50))
    return {
        "page": (record, columns),
        "terminal": console.export_text(),
        "result": describe(run),
    }


@pytest.mark.parametrize("name", [name for name, _, _ in rows()])
def test_the_table_has_each_place_that_shows_a_metric_and_no_other(name, tmp_path):
    usual = {"diloco/steps_lost": 3} if name == "pseudo_gradient_norm" else None  # it says why
    before = shown(tmp_path / "usual" / "run", usual=usual)
    after = shown(tmp_path / name / "run", name, UNUSUAL.get(name, 0.125), usual)
    assert [place for place in before if before[place] != after[place]] == places()[name]


def test_what_the_documents_call_a_metric_is_one():
    for page in DOCS.glob("*.md"):
        named = set(re.findall(r"`diloco/(\w+)`", page.read_text()))
        assert named <= places().keys() | {"round"}, page.name
