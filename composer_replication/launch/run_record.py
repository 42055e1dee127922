"""Reads a run folder and writes ``summary.json`` and the closing text.

It reads that folder only, so it also works for a run that goes on or was killed.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_replication.coordinator.page import PAGE_DATA
from composer_replication.group import run_folder
from composer_replication.group.run_folder import EVENTS, OUTER_STEP, SUMMARY, SYNC
from composer_replication.group.words import format_bytes, plural
from composer_replication.replica.json_files import JsonLineReader, read_json, replace_json

# Colours, and the rank that torch writes before every line of a traceback.
_DECORATION = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|^\[rank\d+\]: ?", re.MULTILINE)

# Lines that Composer's launcher adds below the error of a rank.
_LAUNCHERS_OWN = re.compile(r"(ERROR:__main__:|-{10}|Waiting up to|Global rank \d+ \(PID)")


# As our command prints an error, or as Python does, with our own classes' modules left out.
_ERROR = re.compile(
    r"Error: (.+)|(?:composer_replication[.\w]*\.)?(\w[.\w]*(?:Error|Exception|Mismatch): .+)"
)

_SHARE = "share_of_time_in_inner_steps"
_KEPT = {
    run_folder.START: "starts",
    run_folder.RESUME: "resumes",
    run_folder.EVALUATION: "evaluations",
    run_folder.ERROR: "errors",
    run_folder.REJECTION: "errors",
}


class GroupEvents(Collection[dict[str, Any]]):
    """What a replica group has recorded: a collection of its committed syncs, and its other events.

    The syncs are read from the file at every iteration, since millions do not fit into memory.

    Args:
        path: The group's ``events.jsonl``.

    Attributes:
        starts: Each start of a process, or of a further fit.
        resumes: Each resume from a checkpoint and what it repeated.
        evaluations: Each evaluation: its batch, and what it found.
        errors: The errors with which it ended.
        result: Its final result; empty if it has none.
        num_damaged: Lines that cannot be read. They are left out.
        outer_steps: The highest outer step.
        ended_at: When the last sync was over, in seconds since the epoch; 0 without one.
        inner_share: The share of time in inner steps, from the group's first start to its last
            sync, without the time in which the run was stopped; None if it has made none.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._length = self.outer_steps = 0
        self.ended_at = 0.0
        self.starts: list[dict[str, Any]] = []
        self.resumes: list[dict[str, Any]] = []
        self.evaluations: list[dict[str, Any]] = []
        self.errors: list[dict[str, Any]] = []
        self.result: dict[str, Any] = {}
        reader = JsonLineReader(path)
        position, inner_s, all_s = 0.0, 0.0, 0.0
        for line in reader.read():
            kind, at = line.get("event"), line.get("time", 0.0)
            if kind in (run_folder.START, run_folder.CONTINUED):
                self.result = {}
            if kind == run_folder.CONTINUED:
                position = 0.0
            elif kind == run_folder.END:
                self.result = {k: v for k, v in line.items() if k not in ("time", "event")}
            elif kind in _KEPT:
                getattr(self, _KEPT[kind]).append(line)
            if kind not in (run_folder.START, SYNC):
                continue
            since = max(0.0, at - position) if position else 0.0  # a clock may be set back
            all_s, position = all_s + since, at
            if kind == SYNC:
                self._length += 1
                self.outer_steps = max(self.outer_steps, int(line[OUTER_STEP]))
                self.ended_at = max(self.ended_at, at)
                inner_s += max(0.0, since - line.get("diloco/sync_seconds", 0.0))
        self.inner_share = inner_s / all_s if all_s else None
        self.num_damaged = reader.num_damaged

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (line for line in JsonLineReader(self._path).read() if line.get("event") == SYNC)

    def __len__(self) -> int:
        return self._length

    def __contains__(self, line: object) -> bool:
        return any(line == other for other in self)


@dataclass(frozen=True)
class Run:
    """The contents of a run folder.

    Attributes:
        run_dir: The folder.
        metrics: By replica group, its committed syncs in their order, and its other events.
    """

    run_dir: Path
    metrics: Mapping[str, GroupEvents]

    @property
    def outer_steps(self) -> int:
        """Outer steps of the group that made most."""
        return max(group.outer_steps for group in self.metrics.values())

    @property
    def results(self) -> dict[str, dict[str, Any]]:
        """Final result by replica group, of the groups that have one."""
        return {id: group.result for id, group in self.metrics.items() if group.result}

    @property
    def evaluation(self) -> dict[str, float]:
        """The evaluation of the first group. All groups hold the same global parameters."""
        return next((result.get("eval") or {} for result in self.results.values()), {})

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
        own = [result.get("own_buffers") or {} for result in self.results.values()]
        names = dict.fromkeys(name for digests in own for name in digests)
        return [name for name in names if len({digests.get(name) for digests in own}) > 1]


def read_run(run_dir: str | Path) -> Run:
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
    folders = {path.name.removeprefix("replica_"): path for path in run_dir.glob("replica_*/")}
    if not folders:
        raise FileNotFoundError(
            f"{run_dir} holds no replica_<id> folder, so no run was made in it: give a run folder, "
            "or start one with `composer-replication launch CONFIG --replicas 2`"
        )
    ids = sorted(folders, key=lambda id: (not id.isdecimal(), int(id) if id.isdecimal() else id))
    groups = {id: GroupEvents(folders[id] / EVENTS) for id in ids}
    return Run(run_dir, groups)


def thin_out(
    lines: Iterable[dict[str, Any]], keys: Collection[str], most: int
) -> list[dict[str, Any]]:
    """Select evenly spaced syncs of a group, without those that a resume repeated.

    However many syncs there are, no more than ``most`` of them are held in memory.

    Args:
        lines: The group's syncs.
        keys: What to keep of each sync, and ``diloco/outer_step``.
        most: Most syncs to select.
    """
    kept: list[dict[str, Any]] = []
    every = 1
    for index, line in enumerate(lines):
        while kept and kept[-1][OUTER_STEP] >= line[OUTER_STEP]:
            kept.pop()
        if index % every:
            continue
        kept.append({key: line[key] for key in (OUTER_STEP, *keys) if key in line})
        if len(kept) > most:
            kept = kept[::2]
            every *= 2
    return kept


def last_lines(path: Path, limit: int = 12) -> list[str]:
    """The last informative lines of a log, without traceback frames and without duplicates.

    Args:
        path: The log file.
        limit: Most lines to return.
    """
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 2**16))
        text = _DECORATION.sub("", file.read().decode(errors="replace"))
    lines: dict[str, None] = {}  # a set that keeps the order
    in_traceback = False
    for line in text.splitlines():
        in_traceback = line.startswith("Traceback (") or (in_traceback and line.startswith(" "))
        if line.strip() and not in_traceback and not _LAUNCHERS_OWN.match(line):
            lines[line.rstrip()] = None
    return list(lines)[-limit:]


def last_error(path: Path) -> str:
    """Return the last error in a log, in the one line in which Python or our command prints it.

    Args:
        path: The log file.

    Returns:
        The line; empty if there is none, or no such file.
    """
    with contextlib.suppress(OSError):
        for line in reversed(last_lines(path, limit=100)):
            if found := _ERROR.match(line):
                return found[1] or found[2]
    return ""


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
        "outer_steps": max((r["outer_steps"] for r in run.results.values()), default=0),
        "replicas": [
            {"replica_id": id, **{name: result.get(name) for name in fields}}
            | {"restarts": restarts.get(id, 0), _SHARE: run.metrics[id].inner_share}
            for id, result in run.results.items()
        ],
        "differing_buffers": run.differing_buffers,
        "eval": run.evaluation,
        "samples_gap": run.samples_gap,
    }
    replace_json(run.run_dir / SUMMARY, summary, survives_power_cut=True, indent=2)
    return summary


def describe(run: Run) -> list[tuple[str, str]]:
    """The closing text of a run, as pairs of a name and a value.

    Raises:
        ValueError: The run has committed no sync yet.
    """
    if not any(run.metrics.values()):
        raise ValueError(
            f"{run.run_dir} has no committed sync in replica_<id>/{EVENTS}, so there is nothing "
            "to tell. The first comes after sync_every inner steps; if the run failed before, "
            "replica_<id>/log.txt says why"
        )
    rows = []
    bits = run.evaluation
    if "bits_per_byte" in bits:
        others = [
            n for n in ("data_parallel", "unigram", "uniform") if f"{n}_bits_per_byte" in bits
        ]
        beside = ", ".join(
            f"{name.replace('_', ' ')} {bits[f'{name}_bits_per_byte']:.3f}" for name in others
        )
        rows.append(("held-out bits per byte", f"{bits['bits_per_byte']:.3f}   ({beside})"))
    elif bits:
        rows.append(("evaluation", ", ".join(f"{name} {bits[name]:.4g}" for name in bits)))
    if run.digests:
        rows.append(("global parameters", describe_digests(run)))
    if names := ", ".join(run.differing_buffers):
        rows.append(("buffers", f"DIFFERENT, by sync_buffers=none: the models differ in {names}"))
    if gap := run.samples_gap:
        text = f"the record is complete up to outer step {gap['outer_step']} only: of later leases "
        text += f"the coordinator has lost {plural(gap['samples'], 'sample')} that are in the model"
        rows.append(("samples", text))
    for id, group in run.metrics.items():
        rows += [("resumed", f"group {id} {_describe_resume(resume)}") for resume in group.resumes]
        rows += [("error", f"group {id}: {error['error']}") for error in group.errors]
        if group.num_damaged:
            damaged = plural(group.num_damaged, "line")
            rows.append(("damaged", f"{damaged} of replica_{id}/{EVENTS} left out"))
    rows += _describe_traffic(run)
    shares = {id: group.inner_share for id, group in run.metrics.items()}
    each = ", ".join(f"group {id} {share:.0%}" for id, share in shares.items() if share is not None)
    rows += [("time in inner steps", each)] if each else []
    return rows


def _describe_resume(resume: Mapping[str, Any]) -> str:
    again = plural(resume["batches_again"], "batch", "batches")
    steps = plural(resume["outer_steps_again"], "outer step")
    at = f"at batch {resume['batch']}, outer step {resume['outer_step']}"
    return f"{at}; repeated: {again}, {steps}"


def describe_digests(run: Run) -> str:
    """Say whether the global parameters of all groups are bitwise identical at the end."""
    digests = run.digests
    if len(set(digests.values())) == 1:
        groups = "in 1 group" if len(digests) == 1 else f"equal in {len(digests)} groups"
        steps = plural(run.outer_steps, "outer step")
        return f"{groups} after {steps}: {next(iter(digests.values()))[:8]}"
    each = ", ".join(
        f"group {id} {digest[:8]} ({plural(run.results[id]['outer_steps'], 'outer step')})"
        for id, digest in digests.items()
    )
    return f"DIFFERENT: {each}"


def _describe_traffic(run: Run) -> list[tuple[str, str]]:
    lines = max(run.metrics.values(), key=len)
    sent = inner_steps = 0
    per_fragment = {}
    for line in lines:
        ranks = line.get("ranks", 1)  # each sends a share of equal size
        sent += ranks * line["diloco/bytes_sent"]
        inner_steps = max(inner_steps, line["inner_steps"])
        per_fragment[line["diloco/fragment"]] = ranks * line["diloco/bytes_float32"]
    if not sent:
        return []
    # Data parallel averages every parameter in every inner step: each fragment once.
    data_parallel = inner_steps * sum(per_fragment.values())
    text = (
        f"{format_bytes(sent)} in {plural(len(lines), 'sync')}; "
        f"data parallel: {format_bytes(data_parallel)} in {inner_steps} inner steps "
        f"({data_parallel / sent:.0f} times as much)"
    )
    return [("sent by each group", text)]
