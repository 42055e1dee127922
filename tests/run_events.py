"""Reads and writes what a replica group records, for the tests."""

import json
from pathlib import Path


def events_of(folder, *kinds):
    """The events of these kinds in a group's folder. A line that is being written is left out."""
    path = Path(folder) / "events.jsonl"
    text = path.read_text() if path.exists() else ""
    lines = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [event for event in map(json.loads, lines) if event["event"] in kinds]


def syncs_of(folder):
    """The committed syncs of a group."""
    return events_of(folder, "sync")


def result_of(folder):
    """The result of a group that has ended."""
    end = events_of(folder, "end")[-1]
    return {name: value for name, value in end.items() if name not in ("time", "event")}


def write_events(folder, kind, *events):
    """Append events of one kind to those of a group."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "events.jsonl").open("a") as file:
        for event in events:
            file.write(json.dumps({"event": kind, **event}) + "\n")
