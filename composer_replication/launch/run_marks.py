"""When the groups of a run lived, and what happened to them, from the run's folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any

from composer_replication.callback.run_folder import CHAOS, STATUS, log_path
from composer_replication.callback.words import plural
from composer_replication.launch.run_record import Run
from composer_replication.replica.json_files import read_json

MAX_MARKS = 300
"""Most marks on the time line; of more, the newest ones."""


def lives_of(run: Run, replica_id: str) -> list[dict[str, Any]]:
    """When the processes of a group lived.

    Args:
        run: The run.
        replica_id: The group.

    Returns:
        Rows of ``began``, ``joined`` and ``ended`` in seconds since 1970, and ``end``:
        ``finished``, ``lost``, or None for the last one if it may be alive.
    """
    starts: list[Mapping[str, Any]] = []
    for start in run.starts[replica_id]:
        # A further fit of the same process is the same life.
        if not starts or start["started"] != starts[-1]["started"]:
            starts.append(start)
    lives = []
    for start, following in zip_longest(starts, starts[1:]):
        life = {"began": start["started"], "joined": start["joined"]}
        if following is not None:
            ended = following["trained_at"] or _last_sync(run, replica_id, following["started"])
            life |= {"ended": max(ended or 0.0, start["joined"]), "end": "lost"}
        elif replica_id in run.results:
            status = read_json(log_path(run.run_dir, replica_id).with_name(STATUS))
            ended = status.get("trained_at") or run.metrics[replica_id].ended_at
            life |= {"ended": ended, "end": "finished"}
        else:
            life |= {"ended": None, "end": None}
        lives.append(life)
    return lives


def _last_sync(run: Run, replica_id: str, before: float) -> float | None:
    times = [line["time"] for line in run.metrics[replica_id] if line.get("time", before) < before]
    return max(times, default=None)


def marks_of(run: Run) -> list[dict[str, Any]]:
    """What happened to the groups, in the order of time.

    Args:
        run: The run.

    Returns:
        Rows of ``time`` and ``until`` in seconds since 1970, ``replica_id`` (None: it concerns no
        one group), ``kind`` (``fault``, ``sync`` or ``resume``) and ``text``. ``until`` is None
        for what took no time.
    """
    marks = [*_faults(read_json(run.run_dir / CHAOS))]
    for id, lines in run.resumes.items():
        for line in lines:
            if "time" in line:
                marks.append(_mark(line["time"], id, "resume", f"resumed at batch {line['batch']}"))
    for id, lines in run.metrics.items():
        for line in lines:
            text = _trouble_of(line)
            if text and "time" in line:
                marks.append(_mark(line["time"], id, "sync", text))
    marks.sort(key=lambda mark: mark["time"])
    return marks[-MAX_MARKS:]


def _faults(chaos: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    began = chaos.get("began_at") or 0.0
    for fault in chaos.get("injected", ()):
        lasts = max(fault["ends_at"] or 0.0, fault["at"] + (fault["seconds"] or 0.0))
        until = began + lasts if lasts > fault["at"] else None
        for id in fault["victims"] or [None]:
            yield _mark(began + fault["at"], id, "fault", f"injected: {fault['kind']}", until)


def _trouble_of(line: Mapping[str, Any]) -> str:
    """What was unusual about a sync; empty if nothing was."""
    retries, lost = int(line.get("diloco/retries", 0)), int(line.get("diloco/steps_lost", 0))
    parts = [
        "loaded the state of the others" if line.get("diloco/healed") else "",
        f"{plural(retries, 'retry', 'retries')} of the sync" if retries else "",
        f"{plural(lost, 'inner step')} thrown away" if lost else "",
    ]
    text = ", ".join(filter(None, parts))
    return f"outer step {line['diloco/outer_step']}: {text}" if text else ""


def _mark(
    at: float, id: object, kind: str, text: str, until: float | None = None
) -> dict[str, Any]:
    replica_id = None if id is None else str(id)
    return {"time": at, "until": until, "replica_id": replica_id, "kind": kind, "text": text}
