"""Reads a run folder: for ``summary.json``, for the closing text, and for ``read_run``.

It reads that folder only, so it also works for a run that goes on or was killed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from textwrap import shorten
from typing import Any

from composer_replication.coordinator.page import PAGE_DATA
from composer_replication.group.history import COSINES
from composer_replication.group.run_folder import EVENTS, SUMMARY
from composer_replication.group.words import format_bytes, listed_groups, plural
from composer_replication.launch.group import Group
from composer_replication.settings import DiLoCoSettings
from composer_replication.util.json_files import finite, read_json, replace_json

LONGEST_ERROR = 200
"""Most characters of an error in the result. The group's log has the rest."""


class Run:
    """What the groups of a run have recorded in its folder. Iterating gives them.

    Args:
        run_dir: The folder.
        ids: Groups that are known before they write anything.

    Attributes:
        run_dir: The same.
        groups: The replica groups by their ids.
    """

    def __init__(self, run_dir: Path, ids: Iterable[int | str] = ()) -> None:
        self.run_dir = run_dir
        self.groups = {str(id): Group(run_dir / f"replica_{id}") for id in ids}

    def __iter__(self) -> Iterator[Group]:
        return iter(self.groups.values())

    def read(self) -> None:
        """Read what the groups have written since the last call.

        Raises:
            OSError: A file cannot be read.
        """
        for group in map(Group, self.run_dir.glob("replica_*/")):
            self.groups.setdefault(group.name, group)
        self.groups = dict(sorted(self.groups.items(), key=_by_number))
        for group in self:
            group.read()

    @property
    def settings(self) -> DiLoCoSettings | None:
        """The settings of its groups; None before any has joined."""
        known = [group.start["settings"] for group in self if "settings" in group.start]
        return DiLoCoSettings(**known[-1]) if known else None

    @property
    def outer_steps(self) -> int:
        """Outer steps of the group with the most."""
        return max(group.outer_step for group in self)

    @property
    def results(self) -> dict[str, dict[str, Any]]:
        """Final result by replica group, of the groups that have one."""
        return {group.name: group.result for group in self if group.result}

    @property
    def failure(self) -> str:
        """Why the run is no success although nothing failed, as its most advanced groups saw it.

        Empty if it is one, or goes on. Without an end of any group it tells of the run so far.
        """
        known = [group for group in self if group.result]
        known = known or [group for group in self if group.num_syncs]
        newest = max((group.outer_step for group in known), default=0)
        each = [group.failure for group in known if group.outer_step == newest]
        return each[0] if each and all(each) else ""

    @property
    def evaluation(self) -> dict[str, float]:
        """The newest evaluation of the first group that has one. All evaluate the same."""
        each = (group.evaluation for group in self)
        return next(filter(None, each), {})

    @property
    def samples_gap(self) -> dict[str, int] | None:
        """What the coordinator's record of trained samples lacks; None if that is not known."""
        return read_json(self.run_dir / PAGE_DATA).get("samples_gap")

    @property
    def digests(self) -> dict[str, str]:
        """The digest of each group's global parameters at its end."""
        return {id: result["global_digest"] for id, result in self.results.items()}

    @property
    def differing_buffers(self) -> list[str]:
        """Names of the buffers in which the groups' models differ, with ``sync_buffers: none``."""
        each = [result.get("own_buffers", {}) for result in self.results.values()]
        names = each[0] if each else ()  # all groups have the same model
        return [name for name in names if len({own.get(name) for own in each}) > 1]


def open_run(run_dir: str | Path) -> Run:
    """Read a run folder.

    Args:
        run_dir: The folder.

    Raises:
        FileNotFoundError: The folder does not exist, or no replica group has written into it.
    """
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise FileNotFoundError(
            f"{run_dir} is not a folder: give the run folder that `composer-replication launch` "
            "printed, e.g. runs/<config>-<time>"
        )
    run = Run(run_dir)
    run.read()
    if not run.groups:
        raise FileNotFoundError(
            f"{run_dir} holds no replica_<id> folder, so no run was made in it: give a run folder, "
            "or start one with `composer-replication launch CONFIG --replicas 2`"
        )
    return run


def _by_number(item: tuple[str, object]) -> tuple[bool, int | str]:
    id, _ = item
    return (False, int(id)) if id.isdecimal() else (True, id)


def write_summary(run: Run, restarts: Mapping[str, int]) -> dict[str, Any]:
    """Write ``summary.json``.

    Args:
        run: The run.
        restarts: How often each group was started again.

    Returns:
        The contents of the file.
    """
    fields = ("inner_steps", "outer_steps", "global_digest", "final_loss")
    summary = {
        "outer_steps": run.outer_steps,
        "replicas": [
            {
                "replica_id": id,
                **{name: result.get(name) for name in fields},
                "restarts": restarts.get(id, 0),
                "share_of_time_in_inner_steps": run.groups[id].inner_share,
                "steps_lost": run.groups[id].steps_lost,
            }
            for id, result in run.results.items()
        ],
        "failure": run.failure or None,
        "differing_buffers": run.differing_buffers,
        "eval": run.evaluation,
        "samples_gap": run.samples_gap,
    }
    replace_json(run.run_dir / SUMMARY, finite(summary), survives_power_cut=True, indent=2)
    return summary


def result_of(run: Run) -> list[tuple[str, str]]:
    """The result of a run, as pairs of a name and a value, the most important first.

    Terminal, page and report show the same. For a run that goes on it is the result so far.
    """
    evaluation = (f"{name} {value:.4g}" for name, value in run.evaluation.items())
    lost = (
        f"group {group.name} {plural(group.steps_lost, 'inner step')}"
        for group in run
        if group.steps_lost
    )
    came_back = (
        f"group {group.name} ({plural(group.num_starts - 1, 'time')})"
        for group in run
        if group.num_starts > 1
    )
    rows = (
        ("evaluation", ", ".join(evaluation)),
        ("sent by each group", _describe_traffic(run)),
        ("global parameters", _describe_digests(run)),
        ("outer loop", _describe_cosine(run)),
        ("thrown away", ", ".join(lost)),
        ("lost and came back", ", ".join(came_back)),
    )
    return [row for row in rows if row[1]]


def describe(run: Run) -> list[tuple[str, str]]:
    """Return the closing text of a run, as pairs of a name and a value.

    Raises:
        ValueError: The run has committed no sync yet.
    """
    if not any(group.result or group.num_syncs for group in run):
        raise ValueError(
            f"{run.run_dir} has no committed sync in replica_<id>/{EVENTS}, so there is nothing "
            "to tell. The first comes after sync_every inner steps; if the run failed before, "
            "replica_<id>/log.txt says why"
        )
    rows = result_of(run)
    if names := ", ".join(run.differing_buffers):
        rows.append(("buffers", f"DIFFERENT, by sync_buffers=none: the models differ in {names}"))
    if gap := run.samples_gap:
        text = (
            f"the record is complete up to outer step {gap['outer_step']} only: of later leases "
            f"the coordinator has lost {plural(gap['samples'], 'sample')} that are in the model"
        )
        rows.append(("samples", text))
    for group in run:
        for resume in group.resumes:
            rows.append(("resumed", f"group {group.name} {_describe_resume(resume)}"))
        if group.num_damaged:
            damaged = plural(group.num_damaged, "line")
            rows.append(("damaged", f"{damaged} of replica_{group.name}/{EVENTS} left out"))
    rows += _describe_errors(run)
    measured = (group for group in run if group.inner_share is not None)
    if shares := [f"group {group.name} {group.inner_share:.0%}" for group in measured]:
        rows.append(("time in inner steps", ", ".join(shares)))
    return rows


def _describe_errors(run: Run) -> list[tuple[str, str]]:
    """The errors after which a group has not trained on, each once with the groups that had it."""
    groups_of: dict[str, dict[str, None]] = {}
    for group in run:
        for error in group.open_errors:
            groups_of.setdefault(error.text, {})[group.name] = None
    return [
        ("error", shorten(f"{listed_groups([*ids])}: {text}", LONGEST_ERROR, placeholder=" ..."))
        for text, ids in groups_of.items()
    ]


def _describe_resume(resume: Mapping[str, Any]) -> str:
    again = plural(resume["batches_again"], "batch", "batches")
    steps = plural(resume["outer_steps_again"], "outer step")
    at = f"at batch {resume['batch']}, outer step {resume['outer_step']}"
    return f"{at}; repeated: {again}, {steps}"


def _describe_digests(run: Run) -> str:
    """Say whether the global parameters of all groups are bitwise identical at the end."""
    digests = run.digests
    if not digests:
        return ""
    first, *others = set(digests.values())
    if others:
        each = (
            f"group {id} {digest[:8]} ({plural(run.results[id]['outer_steps'], 'outer step')})"
            for id, digest in digests.items()
        )
        return f"DIFFERENT: {', '.join(each)}"
    groups = "in 1 group" if len(digests) == 1 else f"equal in {len(digests)} groups"
    return f"{groups} after {plural(run.outer_steps, 'outer step')}: {first[:8]}"


def _describe_traffic(run: Run) -> str:
    group = max(run, key=lambda group: group.num_syncs)
    if not group.bytes_sent:
        return ""
    return (
        f"{format_bytes(group.bytes_sent)} in {plural(group.num_syncs, 'sync')}; "
        f"data parallel: {format_bytes(group.data_parallel_bytes)} in {group.inner_steps} inner "
        f"steps ({group.data_parallel_bytes / group.bytes_sent:.0f} times as much)"
    )


def _describe_cosine(run: Run) -> str:
    cosines = max((group.cosines for group in run), key=len)
    return f"cosine between groups {mean(cosines):.2f}" if len(cosines) == COSINES else ""


# ---- plain values for programs -----------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class GroupResult:
    """A replica group of a run.

    Attributes:
        replica_id: Its id.
        starts: Processes of it that have joined since the run was begun or continued.
        syncs: Its committed syncs.
        inner_steps: Its inner steps until its newest sync.
        outer_step: The newest outer step that it has taken or taken over.
        steps_lost: Those of its inner steps that were thrown away, because its pseudo-gradient was
            not sound or because it took over the others' state.
        bytes_sent: What all its ranks have sent in syncs, in the wire format.
        data_parallel_bytes: What data parallel would send in as many inner steps, in float32.
        inner_share: The share of its time in inner steps; None before its first sync.
        final_loss: The mean training loss of its last round; None before its end.
        global_digest: Digest of its global parameters at its end; None before.
        errors: The errors with which its processes have ended.
    """

    replica_id: str
    starts: int
    syncs: int
    inner_steps: int
    outer_step: int
    steps_lost: int
    bytes_sent: int
    data_parallel_bytes: int
    inner_share: float | None
    final_loss: float | None
    global_digest: str | None
    errors: list[str]


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """A run, read from its folder.

    Attributes:
        settings: Of the run; None before any group has joined.
        groups: Its replica groups, in the order of their ids.
        syncs: A row for each committed sync of each group: ``replica_id``, and the keys that
            ``sync`` has in ``events.jsonl``. ``pandas.DataFrame`` takes it as it is.
        evaluations: A row for each evaluation of each group: ``replica_id``, ``time``, ``batch``,
            and its metrics.
        failure: Why it is no success although nothing failed: it has made no outer step, or no
            group has contributed to its last syncs. Empty if it is one.
    """

    settings: DiLoCoSettings | None
    groups: list[GroupResult]
    syncs: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    failure: str


def read_run(folder: str | Path) -> RunResult:
    """Read a run's folder. The run may have ended, go on, or have been killed.

    Example::

        run = read_run("runs/mine")
        syncs = pandas.DataFrame(run.syncs)
        syncs.pivot(index="diloco/outer_step", columns="replica_id", values="loss").plot()

    Args:
        folder: The folder, ``run_dir``.

    Raises:
        FileNotFoundError: The folder does not exist, or no replica group has written into it.
    """
    run = open_run(folder)
    return RunResult(
        settings=run.settings,
        groups=[
            GroupResult(
                replica_id=group.name,
                starts=group.num_starts,
                syncs=group.num_syncs,
                inner_steps=group.inner_steps,
                outer_step=group.outer_step,
                steps_lost=group.steps_lost,
                bytes_sent=group.bytes_sent,
                data_parallel_bytes=group.data_parallel_bytes,
                inner_share=group.inner_share,
                final_loss=group.result.get("final_loss"),
                global_digest=group.result.get("global_digest"),
                errors=[error.text for error in group.errors],
            )
            for group in run
        ],
        syncs=[
            {"replica_id": group.name} | {k: v for k, v in line.items() if k != "event"}
            for group in run
            for line in group
        ],
        evaluations=[
            {
                "replica_id": group.name,
                "time": row["time"],
                "batch": row["batch"],
                **row["eval"],
            }
            for group in run
            for row in group.evaluations
        ],
        failure=run.failure,
    )
