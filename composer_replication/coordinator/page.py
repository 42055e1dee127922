"""The page of a run: one HTML file, which the service serves and which is saved with its data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from composer_replication.arguments import in_yaml
from composer_replication.settings import DiLoCoSettings
from composer_replication.util.json_files import finite, replace_file

PAGE_DATA = "page.json"
"""In the state folder: the data that the page had when the service ended."""
REPORT = "report.html"
"""The page of a run with its data inside."""


@cache
def page_html() -> str:
    """The page without data. It asks the service for them, with the token that people enter."""
    folder = resources.files("composer_replication.coordinator")
    return (folder / "web" / "page.html").read_text("utf-8")


def write_report_html(folder: Path, data: Mapping[str, Any]) -> Path:
    """Write ``report.html`` into a folder: the page with its data inside, which needs no service.

    Args:
        folder: The folder.
        data: As ``/v1/page`` returns it, and ``report``: when it was written, and which ``files``
            lie beside it.

    Returns:
        The path.

    Raises:
        OSError: It cannot be written.
    """
    text = json.dumps(finite(data), separators=(",", ":"))
    # Inside a script element "</script" or "<!--" would end or hide what follows.
    text = text.replace("<", "\\u003c")
    path = folder / REPORT
    start = 'type="application/json">'
    html = page_html().replace(start, start + text, 1)
    replace_file(path, lambda file: file.write(html.encode()))
    return path


def shown_settings(settings: DiLoCoSettings) -> dict[str, dict[str, Any]]:
    """``settings`` that differ from the defaults, and ``defaults``, the others that have a value.

    Both as people write them.
    """
    usual = asdict(DiLoCoSettings())
    own, others = {}, {}
    for name, value in asdict(settings).items():
        if value != usual[name]:
            own[name] = in_yaml(value)
        elif value is not None:
            others[name] = in_yaml(value)
    return {"settings": own, "defaults": others}


def with_record(status: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    """Add what a run's folder has: it has every sync, and heartbeats do not.

    Args:
        status: As ``/v1/status`` returns it.
        record: Its ``groups`` has columns of each group, for what no heartbeat says, its ``events``
            are added, and ``trained_with`` are the settings of the groups: a loop names its own.
            Other values that it has replace those of the status.
    """
    rest = {name: value for name, value in record.items() if value is not None}
    rows = dict(rest.pop("groups", {}))
    events = rest.pop("events", ())
    trained_with = rest.pop("trained_with", None)
    if trained_with is not None:
        named = shown_settings(trained_with)
        if named["settings"] != status.get("settings"):
            rest |= named | {"settings_source": "as the groups name them"}
    for row in status["replicas"]:
        id = row["replica_id"]
        rows[id] = {**rows.get(id, {}), **row}
    return {
        **status,
        **rest,
        "replicas": [{"replica_id": id, **row} for id, row in rows.items()],
        "events": [*status["events"], *events],
    }
