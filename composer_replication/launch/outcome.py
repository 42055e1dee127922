"""What a run has come to: the result or why groups have failed, and the page with all of it."""

from __future__ import annotations

import shlex
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from composer_replication import __version__
from composer_replication.coordinator.page import (
    PAGE_DATA,
    with_record,
    write_report_html,
)
from composer_replication.group.checkpoint_files import newest_whole
from composer_replication.group.history import MAX_TROUBLES
from composer_replication.group.run_folder import (
    CONFIG,
    EVENTS,
    SUMMARY,
    log_path,
)
from composer_replication.group.words import format_duration, listed_groups
from composer_replication.launch.group import (
    FINISHED,
    LEFT_OUT,
    NOT_BACK,
    TRAINING,
    Group,
)
from composer_replication.launch.output import BAD_INPUT, FAILED, print_error
from composer_replication.launch.processes import last_lines
from composer_replication.launch.run_record import (
    Run,
    describe,
    open_run,
    result_of,
    write_summary,
)
from composer_replication.launch.supervision import (
    MISSING_CALLBACK,
    Supervisor,
    describe_end,
)
from composer_replication.util.curves import agreement_of
from composer_replication.util.fence import fence
from composer_replication.util.json_files import finite, read_json


def conclude(run_dir: Path, supervisor: Supervisor, seconds: float) -> int:
    """Print the result of a run whose groups have all ended, and which of them failed on the way.

    Args:
        run_dir: The run's folder.
        supervisor: Has watched the groups.
        seconds: Duration of the run.

    Returns:
        An exit status: 1 if a group was left out, or for what ``finish`` returns 1, else 0.
    """
    records = supervisor.records.values()
    if late := [str(each.id) for each in records if each.end == NOT_BACK]:
        print_error(
            f"Replica groups {', '.join(late)} died while the others finished, and could not "
            "rejoin in time. The others' global parameters are complete"
        )
    finished = [each.id for each in records if each.end == FINISHED]
    status = finish(run_dir, finished, seconds, supervisor.restarts)
    for record in records:
        if record.end == LEFT_OUT:
            then = "so the others went on without it"
            explain_failure(run_dir, record.id, record.deaths[-1], then)
            status = FAILED
    return status


def finish(
    run_dir: Path,
    finished: Sequence[int],
    seconds: float,
    restarts: Mapping[str, int],
) -> int:
    """Write the summary and the page, and print the result.

    Args:
        run_dir: The run's folder.
        finished: Ids of the groups that trained to the end.
        seconds: Duration of the run.
        restarts: How often each group was started again, by its id.

    Returns:
        An exit status: 2 if a command has trained without the callback, 1 if a result is missing,
        nothing was learned or the groups ended with different parameters, else 0.
    """
    run = open_run(run_dir)
    for id in finished:
        group = run.groups[str(id)]
        if group.result:
            continue
        if group.has_joined:
            events = f"{run_dir}/replica_{id}/{EVENTS}"
            explain_failure(run_dir, id, 0, f"and {events} has no end with a result")
            return FAILED
        print_error(f"Error: replica group {id} has ended without a result. {MISSING_CALLBACK}")
        return BAD_INPUT
    with fence("the summary of the run"):
        write_summary(run, restarts)
    try:
        rows = describe(run)
    except ValueError as error:
        print_error(str(error))
        return FAILED
    rows.append(("time", format_duration(seconds)))
    with fence("the page of the run"):
        rows.append(("page", str(write_page(run))))
    print_rows([*rows, ("all files", str(run_dir))])
    if run.failure:
        print_error(f"Error: {run.failure}")
        return FAILED
    if len(set(run.digests.values())) > 1:
        print_error(
            "The groups ended with different global parameters, so their last syncs differ. "
            f"Compare diloco/num_participants at the end of replica_<id>/{EVENTS}"
        )
        return FAILED
    return 0


def keep_page(run_dir: Path) -> None:
    """Write the page of a run that has failed or was interrupted, if any group has written."""
    with fence("the page of the run"), suppress(FileNotFoundError):
        print(f"Page: {write_page(open_run(run_dir))}")


@fence("what was saved")
def explain_interrupt(run_dir: Path, argv: Sequence[str]) -> None:
    """Print what an interrupted run has saved, and the command with which it goes on.

    Args:
        run_dir: The run's folder.
        argv: The arguments of the command that was interrupted.
    """
    run = open_run(run_dir)
    saved = _each_once(map(_saved_by, run))
    if not saved:
        fixes = _each_once(group.start.get("to_save") for group in run)
        fix = " or ".join(fixes) or "a save_folder and save_interval"
        print(f"No checkpoint was saved. For a run that can go on: {fix}")
        return
    print(f"Saved: {', '.join(saved)}")
    print(f"To go on: {shlex.join(['composer-replication', *_going_on(run_dir, argv)])}")
    to_load = _each_once(group.start.get("to_load") for group in run)
    if "--" in argv and to_load:
        print(f"The script itself has to {' or '.join(to_load)}")


def _each_once(texts: Iterable[str | None]) -> list[str]:
    """The texts in their order, without repetitions and empty ones."""
    return [*dict.fromkeys(filter(None, texts))]


def _saved_by(group: Group) -> str:
    """Say where a group's newest checkpoint is; empty if it has saved none."""
    folders = group.start.get("saves_to") or ()
    if remote := [folder for folder in folders if "://" in folder]:
        return ", ".join(remote)
    if newest := newest_whole(group.start.get("checkpoints") or ""):
        return str(newest)
    # A loop of one's own alone knows where.
    return f"by group {group.name} at step {group.saved_at}" if group.saved_at else ""


def _going_on(run_dir: Path, argv: Sequence[str]) -> list[str]:
    """The arguments with which a run goes on in its folder, given those that began it."""
    at = argv.index("--") if "--" in argv else len(argv)
    old = ("run_dir=", "--run-dir", "autoresume=", "--resume")
    kept = [
        word
        for before, word in pairwise(["", *argv[:at]])
        if before != "--run-dir" and not word.startswith(old)
    ]
    if "--" in argv:
        return [*kept, "--resume", f"--run-dir={run_dir}", *argv[at:]]
    return [*kept, "autoresume=true", f"run_dir={run_dir}"]


def explain_failures(run_dir: Path, failed: Mapping[int, int], supervisor: Supervisor) -> None:
    """Print why groups have failed for good: an error before they joined in one line, and once.

    Args:
        run_dir: The run's folder.
        failed: The exit statuses of the groups.
        supervisor: Has watched them.
    """
    groups: dict[str, list[int]] = {}
    for replica_id, status in failed.items():
        if error := supervisor.records[replica_id].error:
            groups.setdefault(error, []).append(replica_id)
        else:
            explain_failure(run_dir, replica_id, status)
    for error, ids in groups.items():
        here = Path.cwd()
        path = log_path(run_dir, ids[0])
        shown = path.relative_to(here) if path.is_relative_to(here) else path
        print_error(f"Error: {error} ({listed_groups([*map(str, ids)])}, {shown})")


@fence("why a group has failed")
def explain_failure(
    run_dir: Path,
    replica_id: int,
    status: int,
    then: str = "so the run is stopped",
) -> None:
    """Print how a group ended, what follows from it, and the last lines of its log."""
    path = log_path(run_dir, replica_id)
    print_error(f"Replica group {replica_id} {describe_end(status)}, {then}. {path} ends with:")
    print_error("\n".join(f"  {line}" for line in last_lines(path)) or "  (nothing)")


@fence("the result of the run")
def print_rows(rows: Sequence[tuple[str, str]]) -> None:
    """Print names and values below each other, on a terminal with values wrapped in their column.

    Elsewhere each is one line, whatever its length.
    """
    console = Console(highlight=False)
    if not console.is_terminal:
        for name, value in rows:
            print(f"{name:<24}{value}")
        return
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(Text(name), Text(value))
    console.print(table)


# ---- the page ----------------------------------------------------------------------------------


def recorder(run_dir: Path) -> Callable[[], dict[str, Any]]:
    """Make a function that reads a run's folder for the page: each time only what is new.

    Args:
        run_dir: The run's folder.

    Returns:
        It returns what the folder adds to the page's data, see ``with_record``: ``run_name``,
        ``result`` (rows of a name and a value), ``failure`` (see ``Run``), ``groups``, ``losses``
        (means over a round), ``agreement``, ``evaluations`` and ``events``; empty if no group has
        written anything.
    """
    run = Run(run_dir)
    lock = threading.Lock()  # several pages may ask at once

    def record() -> dict[str, Any]:
        with lock:
            run.read()
            return finite(_record_of(run)) if run.groups else {}

    return record


def _record_of(run: Run) -> dict[str, Any]:
    # All groups evaluate the same global parameters.
    evaluations = max((group.evaluations for group in run), key=len)
    events = sorted(
        (at, f"replica group {group.name}{text}")
        for group in run
        for at, text in group.for_people()
    )
    # What the folder does not know yet, heartbeats may know.
    losses = {group.name: group.losses.points for group in run}
    return {
        "run_name": run.run_dir.resolve().name,
        "result": result_of(run),
        "failure": run.failure,
        "groups": {group.name: _columns_of(group) for group in run},
        "losses": losses if any(losses.values()) else None,
        "agreement": agreement_of(run.groups),
        "evaluations": evaluations[-50:],
        "trained_with": run.settings,
        "events": [{"time": at, "text": text} for at, text in events[-MAX_TROUBLES:]],
    }


def _columns_of(group: Group) -> dict[str, Any]:
    """What a group's folder knows of it. It may send no heartbeats, as a plain loop."""
    errors = group.open_errors
    return {
        **group.status,
        "metrics": group.newest,
        "is_alive": group.phase in ("joining", "evaluating", *TRAINING),
        "last_seen_s": None,
        "inner_share": group.inner_share,
        "error": errors[-1].text if errors else None,
    }


def write_page(run: Run) -> Path:
    """Write ``report.html``: the page of a run with its data inside.

    It has what the page showed last, if the coordinator served this folder, and what the groups
    have written.

    Args:
        run: The run.

    Returns:
        The path of the page.

    Raises:
        OSError: The page cannot be written.
    """
    record = _record_of(run)
    shown = read_json(run.run_dir / PAGE_DATA) or {"version": __version__}  # it was killed, or away
    data = with_record({"replicas": [], "events": [], **shown}, record)
    for row in data["replicas"]:  # newer than their last heartbeats
        id = row["replica_id"]
        row |= record["groups"].get(id, {}) | {"is_alive": False}
        if id in run.results:
            row["phase"] = FINISHED
    data["outer_step"] = run.outer_steps
    names = (SUMMARY, CONFIG, *(f"replica_{id}/log.txt" for id in run.groups))
    files = [name for name in names if (run.run_dir / name).exists()]
    data["report"] = {"written": time.time(), "files": files}
    return write_report_html(run.run_dir, data)
