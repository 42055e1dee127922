"""What has happened to a replica group: the one reader of its events.

``reports.py`` writes them; the page, the terminal, the report and ``read_run`` show what is here.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from composer_replication.group import run_folder
from composer_replication.group.words import FRUITLESS_SYNCS, plural, why_nothing_was_learned
from composer_replication.util.curves import Course

MAX_TROUBLES = 100
"""The most unusual syncs that are kept: the newest ones."""

COSINES = 20
"""Syncs over which the cosine between groups is averaged."""

SPEEDS = "_runtime", "_per_second"
"""How the names of an evaluation's times end, which are no result. Trainers write them beside it.
"""


class Error(NamedTuple):
    """An error with which a process of the group has ended.

    Attributes:
        time: When that was, in seconds since 1970.
        kind: Its type's name.
        text: What it says.
    """

    time: float
    kind: str
    text: str


class History(Course):
    """What has happened to a replica group, from its events.

    Attributes:
        starts: The events of its processes that have joined.
        resumes: The events of its resumes from a checkpoint.
        evaluations: Rows of ``time``, ``batch`` and the metrics in ``eval``.
        errors: The errors with which it has ended, rejections of its settings among them.
        warnings: What is odd about its settings or samples, since the run was last continued.
        saved_at: The step whose state a loop of one's own has taken last, to save it; None before.
        result: Its final result; empty if it has none.
        num_syncs: Its committed syncs.
        newest: The event of its newest sync; empty before the first.
        synced_step: The outer step of that sync.
        inner_steps: Its inner steps until then.
        bytes_sent: What all its ranks have sent in syncs.
        steps_lost: Those of its inner steps that were thrown away.
        steps_lost_lately: Those since the run was last continued.
        why_lost: Why it has thrown some away last.
        fruitless: The number of its last syncs to which no group has contributed.
        contributed_at: When the newest sync to which it has contributed was over.
        continued_at: When the run was last continued; 0 if it never was.
        troubles: Rows of a time and what was unusual about a sync.
        cosines: Those between groups, of the newest syncs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.starts: list[dict[str, Any]] = []
        self.resumes: list[dict[str, Any]] = []
        self.evaluations: list[dict[str, Any]] = []
        self.errors: list[Error] = []
        self.warnings: list[str] = []
        self.saved_at: int | None = None
        self.result: dict[str, Any] = {}
        self.num_syncs = 0
        self.newest: dict[str, Any] = {}
        self.synced_step = 0
        self.inner_steps = 0
        self.bytes_sent = 0
        self.steps_lost = 0
        self.steps_lost_lately = 0
        self.why_lost = ""
        self.fruitless = 0
        self.contributed_at = 0.0
        self.continued_at = 0.0
        self.troubles = deque[tuple[float, str]](maxlen=MAX_TROUBLES)
        self.cosines = deque[float](maxlen=COSINES)
        self._fragment_bytes: dict[int, int] = {}
        self._position = 0.0
        self._inner_s = 0.0
        self._all_s = 0.0

    # ---- the events -------------------------------------------------------------------------

    def add(self, event: dict[str, Any]) -> None:
        """Add the next event of ``events.jsonl``.

        Raises:
            KeyError: It lacks something; nothing of it has been added.
            AttributeError, TypeError, ValueError: A value is of another type.
        """
        at = event.get("time", 0.0)
        match event.get("event"):
            case run_folder.SYNC:
                self._add_sync(event, at)
            case run_folder.START:
                self.result = {}
                self.starts.append(event)
                self._account(at, None)
            case run_folder.CONTINUED:
                self.result = {}
                self.continued_at = at
                self.warnings.clear()
                self.steps_lost_lately = 0
                self._position = 0.0  # the time in which the run was stopped does not count
                self.forget_digests()
            case run_folder.END:
                self.add_digest(event["outer_steps"], event["global_digest"])
                self.result = event | {"eval": _measured(event.get("eval"))}
            case run_folder.EVALUATION:
                row = {"time": at, "batch": event["batch"], "eval": _measured(event["eval"])}
                self.evaluations.append(row)
            case run_folder.ERROR | run_folder.REJECTION:
                self.errors.append(Error(at, event.get("type", ""), event["error"]))
            case run_folder.WARNING:
                self.warnings.append(event["warning"])
            case run_folder.RESUME:
                self.resumes.append(event | {"batch": event["batch"]})  # it has to have one
            case run_folder.SAVED:
                self.saved_at = event["batch"]

    def _add_sync(self, event: dict[str, Any], at: float) -> None:
        def metric(name: str, default: Any = 0) -> Any:
            return event.get(f"diloco/{name}", default)

        step = int(metric("outer_step"))
        ranks = event.get("ranks", 1)  # each sends a share of equal size
        if 0 < self.synced_step < step - 1:
            self._add_gap(event.get("batch", 0))
        if "batch" in event and event.get("loss") is not None:  # a joiner has none at first
            self.losses.add(event["batch"], event["loss"])
        self.newest = event
        self.synced_step = step
        self.num_syncs += 1
        self.inner_steps = max(self.inner_steps, event.get("inner_steps", 0))
        self.bytes_sent += ranks * metric("bytes_sent")
        self._fragment_bytes[metric("fragment")] = ranks * metric("bytes_float32")
        if digest := metric("global_digest"):
            self.add_digest(step, digest)
        cosine = metric("group_cosine", None)
        if cosine is not None:
            self.cosines.append(cosine)
        if metric("contribution", 1.0):
            self.contributed_at = at
        self.fruitless = 0 if metric("total_contribution", 1.0) else self.fruitless + 1
        lost = int(metric("steps_lost"))
        retries = int(metric("retries"))
        why = ""
        if lost:
            is_finite = math.isfinite(metric("pseudo_gradient_norm"))
            why = f"pseudo-gradient {'left out' if is_finite else 'not finite'}"
        if metric("healed"):
            why = "loaded the state of the others"
        texts = [why] if why else []
        if retries:
            texts.append(f"{plural(retries, 'retry', 'retries')} of the sync")
        if lost:
            texts.append(f"{plural(lost, 'inner step')} thrown away")
            self.steps_lost += lost
            self.steps_lost_lately += lost
            self.why_lost = why
        if texts:
            self.troubles.append((at, f"outer step {step}: {', '.join(texts)}"))
        self._account(at, metric("sync_seconds"))

    def _add_gap(self, batch: int) -> None:
        """The group was away before this batch: the page draws no line from its loss before."""
        before = self.newest.get("batch", batch)
        middle = (before + batch) // 2
        if self.losses.points and before < middle:
            self.losses.add(middle, None)

    def _account(self, at: float, blocked_s: float | None) -> None:
        """Divide the time since the event before: until a sync the group has trained."""
        since = max(0.0, at - self._position) if self._position else 0.0  # clocks are set back
        self._position = at
        self._all_s += since
        if blocked_s is not None:
            self._inner_s += max(0.0, since - blocked_s)

    # ---- what they come to --------------------------------------------------------------------

    @property
    def outer_step(self) -> int:
        """The newest outer step that the group has taken or taken over."""
        return max(self.synced_step, self.result.get("outer_steps", 0))

    @property
    def participants(self) -> int | None:
        """Groups in its newest sync; None before it."""
        return self.newest.get("diloco/num_participants")

    @property
    def evaluation(self) -> dict[str, float]:
        """The metrics of its newest evaluation; empty before any."""
        until_now = self.evaluations[-1]["eval"] if self.evaluations else {}
        return self.result.get("eval") or until_now

    @property
    def failure(self) -> str:
        """Why the run is no success, as this group has seen it; empty if it is one, or goes on."""
        if not self.result and self.fruitless < FRUITLESS_SYNCS:
            return ""
        inner_steps = max(self.inner_steps, self.result.get("inner_steps", 0))
        return why_nothing_was_learned(self.outer_step, inner_steps, self.fruitless)

    @property
    def open_errors(self) -> list[Error]:
        """The errors since it has joined or synced last: after others it has trained on."""
        joined_at = self.start.get("time", 0.0)
        since = max(self.continued_at, joined_at, self.newest.get("time", 0.0))
        return [error for error in self.errors if error.time >= since]

    @property
    def num_starts(self) -> int:
        """Processes in which it has joined, since the run was begun or continued."""
        return len(
            {
                start.get("started")
                for start in self.starts
                if start.get("time", 0.0) >= self.continued_at
            }
        )

    @property
    def start(self) -> Mapping[str, Any]:
        """The event of its newest start; empty before any."""
        return self.starts[-1] if self.starts else {}

    @property
    def inner_share(self) -> float | None:
        """The share of time in inner steps, from the group's first start to its last sync.

        The time in which the run was stopped is left out. None: the group has made no sync.
        """
        return self._inner_s / self._all_s if self._all_s else None

    @property
    def data_parallel_bytes(self) -> int:
        """What data parallel would send in as many inner steps: every fragment once in each."""
        return self.inner_steps * sum(self._fragment_bytes.values())

    def for_people(self) -> Iterator[tuple[float, str]]:
        """What has happened, for people: times, and texts to put behind the group's name."""
        before: Mapping[str, Any] = {}
        for start in self.starts:
            trained_at = start.get("trained_at")
            if trained_at is not None and start.get("started") != before.get("started"):
                yield trained_at, " was lost"
            yield start.get("joined", 0.0), " joined"
            before = start
        for resume in self.resumes:
            yield resume.get("time", 0.0), f" resumed at batch {resume['batch']}"
        for error in self.errors:
            yield error.time, f" ended with an error: {error.text}"
        for at, trouble in self.troubles:
            yield at, f", {trouble}"


def _measured(metrics: Mapping[str, float] | None) -> dict[str, float]:
    """The metrics of an evaluation, without how long it took."""
    return {name: each for name, each in (metrics or {}).items() if not name.endswith(SPEEDS)}
