"""What a run has come to, as plain values for programs: ``read_run``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_replication.group.run_folder import EVALUATION, START
from composer_replication.launch.run_record import open_run
from composer_replication.settings import DiLoCoSettings


@dataclass(frozen=True, kw_only=True)
class GroupResult:
    """A replica group of a run.

    Attributes:
        replica_id: Its id.
        starts: Processes of it that have joined since the run was begun or continued.
        syncs: Its committed syncs.
        inner_steps: Its inner steps until its newest sync.
        outer_step: The newest outer step that it has taken or taken over.
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
    """

    settings: DiLoCoSettings | None
    groups: list[GroupResult]
    syncs: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]


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
    starts = [start for group in run.groups.values() for start in group.others[START]]
    settings = [start["settings"] for start in starts if "settings" in start]
    return RunResult(
        settings=DiLoCoSettings(**settings[-1]) if settings else None,
        groups=[
            GroupResult(
                replica_id=id,
                starts=group.num_starts,
                syncs=len(group),
                inner_steps=group.inner_steps,
                outer_step=group.outer_step,
                bytes_sent=group.bytes_sent,
                data_parallel_bytes=group.data_parallel_bytes,
                inner_share=group.inner_share,
                final_loss=group.result.get("final_loss"),
                global_digest=group.result.get("global_digest"),
                errors=[error["error"] for error in group.errors],
            )
            for id, group in run.groups.items()
        ],
        syncs=[
            {"replica_id": id} | {name: value for name, value in line.items() if name != "event"}
            for id, group in run.groups.items()
            for line in group
        ],
        evaluations=[
            {"replica_id": id, "time": event["time"], "batch": event["batch"], **event["eval"]}
            for id, group in run.groups.items()
            for event in group.others[EVALUATION]
        ],
    )
