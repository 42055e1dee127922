"""The table of metrics. Run: pytest tests/diloco/test_sync_report.py"""

import dataclasses
import re
from pathlib import Path

from own_imports import PACKAGE

from composer_replication.diloco.sync_report import SyncReport

ROW = re.compile(r"^        (\w+): \(([^;)]+)(?:; ([^)]+))?\) ", re.M)
DOCS = Path(__file__).parents[2] / "docs"


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


def test_a_metric_has_a_place_if_something_shows_it():
    shown = (PACKAGE / "group/history.py", PACKAGE / "coordinator/web/page.html")
    text = "".join(path.read_text() for path in shown)
    read = set(re.findall(r"""(?:diloco/|metric\("|event.get\(")(\w+)""", text))
    assert {name for name, where in places().items() if where} == read & places().keys()


def test_what_the_documents_call_a_metric_is_one():
    for page in DOCS.glob("*.md"):
        named = set(re.findall(r"`diloco/(\w+)`", page.read_text()))
        assert named <= places().keys() | {"round"}, page.name
