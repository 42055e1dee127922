"""What a replica group has recorded, read from its ``events.jsonl`` as that grows."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from composer_replication.coordinator.page import Curve
from composer_replication.group import run_folder
from composer_replication.group.run_folder import EVENTS, OUTER_STEP, SYNC
from composer_replication.group.words import plural
from composer_replication.replica.json_files import JsonLineReader

MAX_DIGESTS = 1000
"""Digests of a group that are kept, for comparison with those of slower groups."""

MAX_EVENTS = 100
"""Most events of a run on its page, and so of a group: the newest."""


class GroupEvents:
    """The events of a replica group: its committed syncs, over which one can iterate, and others.

    What the display, the page and the summary show of syncs is kept while they are read. Iterating
    reads them from the file, since millions do not fit into memory.

    Args:
        folder: The group's folder, ``replica_<id>``.

    Attributes:
        name: The group's id.
        others: By kind, its events that are no syncs.
        result: Its final result; empty if it has none.
        newest: Its newest sync; empty before the first.
        outer_steps: The highest outer step.
        digests: Digest of the global parameters by outer step, of the newest ``MAX_DIGESTS`` steps.
        losses: Rows of batch and loss at evenly spaced syncs.
        troubles: Syncs that were unusual: when they were over, and what happened.
    """

    def __init__(self, folder: Path) -> None:
        self.name = folder.name.removeprefix("replica_")
        self._path = folder / EVENTS
        self._reader = JsonLineReader(self._path)
        self._length = self.outer_steps = 0
        self._position = self._inner_s = self._all_s = 0.0
        self.others: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self.result: dict[str, Any] = {}
        self.newest: dict[str, Any] = {}
        self.digests: dict[int, str] = {}
        self.troubles: deque[tuple[float, str]] = deque(maxlen=MAX_EVENTS)
        self.losses = Curve()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (line for line in JsonLineReader(self._path).read() if line.get("event") == SYNC)

    def __len__(self) -> int:
        return self._length

    @property
    def errors(self) -> list[dict[str, Any]]:
        """The errors with which it ended, and the rejections."""
        errors = self.others[run_folder.ERROR] + self.others[run_folder.REJECTION]
        return sorted(errors, key=lambda error: error.get("time", 0.0))

    @property
    def num_damaged(self) -> int:
        """Lines that cannot be read. They are left out."""
        return self._reader.num_damaged

    @property
    def inner_share(self) -> float | None:
        """The share of time in inner steps, from the group's first start to its last sync.

        The time in which the run was stopped is left out. None: the group has made no sync.
        """
        return self._inner_s / self._all_s if self._all_s else None

    def read(self) -> None:
        """Read what the group has written since the last call.

        Raises:
            OSError: The file cannot be read.
        """
        for line in self._reader.read():
            self._add(line)

    def _add(self, line: dict[str, Any]) -> None:
        kind, at = line.get("event", ""), line.get("time", 0.0)
        if kind in (run_folder.START, run_folder.CONTINUED):
            self.result = {}
        elif kind == run_folder.END:
            self.result = {k: v for k, v in line.items() if k not in ("time", "event")}
        if kind == run_folder.CONTINUED:
            self._position = 0.0
        if kind == SYNC:
            self._add_sync(line, at)
        else:
            self.others[kind].append(line)
        if kind in (run_folder.START, SYNC):
            since = max(0.0, at - self._position) if self._position else 0.0  # clocks are set back
            self._all_s, self._position = self._all_s + since, at
            other_s = line.get("diloco/sync_seconds", 0.0) if kind == SYNC else since
            self._inner_s += max(0.0, since - other_s)

    def _add_sync(self, line: dict[str, Any], at: float) -> None:
        self.newest, step = line, int(line.get(OUTER_STEP, 0))
        self._length += 1
        self.outer_steps = max(self.outer_steps, step)
        if "batch" in line:
            self.losses.add(step, [line["batch"], line.get("loss")])
        if digest := line.get("diloco/global_digest"):
            self.digests.pop(step, None)  # repeated after a resume
            self.digests[step] = digest
            if len(self.digests) > MAX_DIGESTS:
                del self.digests[next(iter(self.digests))]
        if trouble := _trouble_of(line):
            self.troubles.append((at, f"outer step {step}: {trouble}"))


def _trouble_of(line: Mapping[str, Any]) -> str:
    """What was unusual about a sync; empty if nothing was."""
    retries, lost = int(line.get("diloco/retries", 0)), int(line.get("diloco/steps_lost", 0))
    parts = [
        "loaded the state of the others" if line.get("diloco/healed") else "",
        f"{plural(retries, 'retry', 'retries')} of the sync" if retries else "",
        f"{plural(lost, 'inner step')} thrown away" if lost else "",
    ]
    return ", ".join(filter(None, parts))
