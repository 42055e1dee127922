"""The status page as one HTML file. The service serves it, and a report has its data inside."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from composer_replication.replica.json_files import replace_text

PAGE_DATA = "page.json"
"""In the state folder: the data that the page had when the service ended."""
REPORT = "report.html"
"""The page of a run with its data inside."""

_SCRIPTS = (
    "nodes.js",
    "values.js",
    "groups.js",
    "charts.js",
    "spread.js",
    "loss.js",
    "outer_loop.js",
    "data.js",
    "timeline.js",
    "settings.js",
    "page.js",
)
"""In the order in which they are run: each uses what those before it define."""


@cache
def page_html() -> str:
    """The page without data. It asks the service for them, with the token that people enter."""
    folder = resources.files("composer_replication.coordinator") / "web"

    def read(name: str) -> str:
        return (folder / name).read_text("utf-8")

    page = read("page.html").replace("/* page.css */", read("page.css"))
    return page.replace("/* scripts */", "\n".join(map(read, _SCRIPTS)))


def report_html(data: Mapping[str, Any]) -> str:
    """The page with its data inside, which needs no service and no network.

    Args:
        data: As ``/v1/page`` returns it. Numbers that are not finite become null.
    """
    text = json.dumps(_finite(data), separators=(",", ":"))
    # Inside a script element "</script" or "<!--" would end or hide what follows.
    text = text.replace("<", "\\u003c")
    return page_html().replace('type="application/json">', f'type="application/json">{text}', 1)


def write_report_html(folder: Path, data: Mapping[str, Any]) -> Path:
    """Write ``report.html`` into a folder, and return its path.

    Raises:
        OSError: It cannot be written.
    """
    path = folder / REPORT
    replace_text(path, report_html(data))
    return path


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
