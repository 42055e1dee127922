"""What a launch prints at its end: the result, or why groups have failed."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from composer_replication.diloco.fence import fence
from composer_replication.group.run_folder import EVENTS, START, last_event, log_path
from composer_replication.group.words import format_duration, listed_groups
from composer_replication.launch.group import FINISHED, LEFT_OUT, NOT_BACK
from composer_replication.launch.output import BAD_INPUT, FAILED
from composer_replication.launch.page_record import write_page
from composer_replication.launch.processes import last_lines
from composer_replication.launch.run_record import describe, open_run, write_summary
from composer_replication.launch.supervision import (
    MISSING_CALLBACK,
    Supervisor,
    describe_end,
)


def conclude(run_dir: Path, supervisor: Supervisor, seconds: float) -> int:
    """Print the result of a run whose groups have all ended, and which of them failed on the way.

    Args:
        run_dir: The run's folder.
        supervisor: Has watched the groups.
        seconds: Duration of the run.

    Returns:
        An exit status: 1 if a group was left out, or for what ``finish`` returns 1, else 0.
    """
    ended: dict[str, list[int]] = {FINISHED: [], LEFT_OUT: [], NOT_BACK: []}
    for id, record in supervisor.records.items():
        ended[record.end].append(id)
    if ended[NOT_BACK]:
        print_error(
            f"Replica groups {', '.join(map(str, ended[NOT_BACK]))} died while the others "
            "finished, and could not rejoin in time. The others' global parameters are complete"
        )
    status = finish(run_dir, ended[FINISHED], seconds, supervisor.restarts)
    for id in ended[LEFT_OUT]:
        deaths = supervisor.records[id].deaths
        explain_failure(run_dir, id, deaths[-1], "the others went on without it")
    return FAILED if ended[LEFT_OUT] else status


def finish(
    run_dir: Path, finished: Sequence[int], seconds: float, restarts: Mapping[str, int]
) -> int:
    """Write the summary and the page, and print the result.

    Args:
        run_dir: The run's folder.
        finished: Ids of the groups that trained to the end.
        seconds: Duration of the run.
        restarts: How often each group was started again, by its id.

    Returns:
        An exit status: 2 if a command has trained without the callback, 1 if a result is missing or
        the groups ended with different parameters, else 0.
    """
    run = open_run(run_dir)
    missing = [id for id in finished if str(id) not in run.results]
    if missing:
        name = f"replica group {missing[0]}"
        if not run.groups[str(missing[0])].has_joined:
            print_error(f"Error: {name} has ended without a result. {MISSING_CALLBACK}")
            return BAD_INPUT
        print_error(f"{log_path(run_dir, missing[0]).parent}/{EVENTS} has no end with a result")
        explain_failure(run_dir, missing[0], 0)
        return FAILED
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
    starts = [last_event(path, START) for path in sorted(run_dir.glob(f"replica_*/{EVENTS}"))]
    links = [start.get("checkpoint") for start in starts]
    saved = [str(Path(link).resolve()) for link in links if link and Path(link).exists()]
    if not saved:
        print("No checkpoint was saved. For a run that can go on: a save_folder and save_interval")
        return
    print(f"Saved: {', '.join(saved)}")
    at, own = len(argv), ["autoresume=true", f"run_dir={run_dir}"]
    if "--" in argv:
        at, own = argv.index("--"), ["--resume", f"--run-dir={run_dir}"]
    if own[0] not in argv:
        before = [word for word in argv[:at] if not word.startswith(("run_dir=", "--run-dir="))]
        argv = [*before, *own, *argv[at:]]
    print(f"To go on: {shlex.join(['composer-replication', *argv])}")


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
        path, here = log_path(run_dir, ids[0]), Path.cwd()
        shown = path.relative_to(here) if path.is_relative_to(here) else path
        print_error(f"Error: {error} ({listed_groups([*map(str, ids)])}, {shown})")


@fence("why a group has failed")
def explain_failure(
    run_dir: Path, replica_id: int, status: int, consequence: str = "the run is stopped"
) -> None:
    """Print how a group ended, what follows from it, and the last lines of its log."""
    path = log_path(run_dir, replica_id)
    print_error(
        f"Replica group {replica_id} {describe_end(status)}, so {consequence}. {path} ends with:"
    )
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


@fence("what has failed")
def print_error(text: str) -> None:
    """Print an error in red on stderr, with its own line breaks only."""
    Console(stderr=True).print(text, style="red", markup=False, highlight=False, soft_wrap=True)
