"""Shows a run while it goes on: a live table on a terminal, else a line every few seconds."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from composer_replication.callback.run_folder import METRICS, OUTER_STEP, STATUS
from composer_replication.callback.words import format_duration
from composer_replication.launch.run_record import implied_sync_every
from composer_replication.replica.json_files import JsonLineReader, read_json

log = logging.getLogger(__name__)

TABLE_EVERY_S = 0.3
LINE_EVERY_S = 10.0

MAX_DIGESTS = 1000
"""Digests of a group that are kept, for comparison with those of slower groups."""


class GroupView:
    """What the display shows of one replica group, from its ``status.json`` and ``metrics.jsonl``.

    Args:
        folder: The group's folder.

    Attributes:
        status: The newest ``status.json``.
        participants: Groups in the newest sync; None before any.
        digests: Digest of the global parameters by outer step, of the newest ``MAX_DIGESTS`` steps.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._metrics = JsonLineReader(folder / METRICS)
        self.status: dict[str, Any] = {}
        self.participants: int | None = None
        self.digests: dict[int, str] = {}

    def update(self, exit_status: int | None) -> None:
        """Read what the group has written since the last call.

        Args:
            exit_status: The group's exit status, which becomes its phase; None while it runs.
        """
        self.status = read_json(self._folder / STATUS) or self.status
        if exit_status is not None:
            self.status["phase"] = "failed" if exit_status else "finished"
        for line in self._metrics.read():
            self.participants = int(line["diloco/num_participants"])
            if line.get("diloco/global_digest"):
                self.digests.pop(line[OUTER_STEP], None)  # repeated after a resume
                self.digests[line[OUTER_STEP]] = line["diloco/global_digest"]
                if len(self.digests) > MAX_DIGESTS:
                    del self.digests[next(iter(self.digests))]

    @property
    def phase(self) -> str:
        """What the group does now."""
        return self.status.get("phase", "starting")

    @property
    def round(self) -> str:
        """The group's round, and the number of rounds if it is known."""
        if "round" not in self.status:
            return "-"
        batches, sync_every = self.status.get("max_batches"), implied_sync_every(self.status)
        of = f" / {math.ceil(batches / sync_every)}" if batches and sync_every else ""
        return f"{int(self.status['round'])}{of}"

    @property
    def loss(self) -> str:
        """The newest training loss."""
        loss = self.status.get("loss")
        return "-" if loss is None else f"{loss:.3f}"

    @property
    def time_left(self) -> str:
        """The time until the group has trained all batches."""
        seconds = self.status.get("seconds_left")
        return "-" if seconds is None or self.phase != "training" else format_duration(seconds)


class Display:
    """Shows the groups: a table on a terminal, else a line every ``LINE_EVERY_S`` seconds.

    Args:
        console: Where the display is written.
        run_dir: The run's folder.
        replicas: Number of groups.
        seconds_left: Returns the seconds of training that are left, if the groups do not know when
            they end.
    """

    def __init__(
        self,
        console: Console,
        run_dir: Path,
        replicas: int,
        seconds_left: Callable[[], float | None] | None = None,
    ) -> None:
        self._console = console
        self._seconds_left = seconds_left
        # Without auto_refresh rich starts no thread of its own, so that the table does not flicker
        # and nothing is drawn after the end.
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._groups = [GroupView(run_dir / f"replica_{i}") for i in range(replicas)]
        self._began = self._shown = time.monotonic()
        self._has_failed = False

    def __enter__(self) -> Display:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live:
            self._live.stop()

    @contextmanager
    def follow(self) -> Iterator[None]:
        """Refresh the display from a thread while the caller's thread is busy."""
        over = threading.Event()

        def keep_refreshing() -> None:
            while not over.wait(TABLE_EVERY_S):
                self.refresh({})

        thread = threading.Thread(target=keep_refreshing, daemon=True)
        with self:
            thread.start()
            try:
                yield
            finally:
                over.set()
                thread.join()
                self.refresh({}, is_last=True)

    def refresh(self, exit_statuses: Mapping[int, int | None], *, is_last: bool = False) -> None:
        """Show the groups, if the last time was long enough ago.

        Args:
            exit_statuses: Exit status of each group; None or missing while it runs.
            is_last: Whether the run is over. The display is then refreshed in any case.
        """
        every = TABLE_EVERY_S if self._live else LINE_EVERY_S
        if time.monotonic() < self._shown + every and not is_last:
            return
        self._shown = time.monotonic()
        try:
            for replica_id, group in enumerate(self._groups):
                group.update(exit_statuses.get(replica_id))
                if self._seconds_left is not None:
                    group.status |= {"max_batches": None, "seconds_left": self._seconds_left()}
            self._show()
        except OSError as error:  # a full or broken disk must not end the groups, which go on
            if not self._has_failed:
                log.warning("Cannot show how the groups are doing, training goes on: %s", error)
            self._has_failed = True

    def _show(self) -> None:
        if self._live:
            self._live.update(Group(self._table(), Text(self._agreement())), refresh=True)
        else:
            self._console.print(self._status_line(), markup=False, soft_wrap=True)

    def _table(self) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0))
        for name, justify in (("group", "left"), ("phase", "left"), ("round", "right")):
            table.add_column(name, justify=justify, no_wrap=True, min_width=7)  # pyright: ignore
        table.add_column("")
        table.add_column("loss", justify="right", no_wrap=True)
        table.add_column("time left", justify="right", no_wrap=True)
        for replica_id, group in enumerate(self._groups):
            batches = group.status.get("max_batches")
            done = group.status.get("batch", 0)
            bar = (
                ProgressBar(batches, done, width=30, complete_style="cyan", finished_style="green")
                if batches
                else ""
            )
            table.add_row(
                str(replica_id), group.phase, group.round, bar, group.loss, group.time_left
            )
        return table

    def _status_line(self) -> str:
        groups = [
            f"group {replica_id} {group.phase}, round {group.round}, loss {group.loss}"
            for replica_id, group in enumerate(self._groups)
        ]
        left = [group.time_left for group in self._groups if group.time_left != "-"]
        parts = [*groups, self._agreement(), *(f"{left[0]} left" for _ in left[:1])]
        elapsed = format_duration(time.monotonic() - self._began)
        return f"{elapsed:>12}  {'; '.join(filter(None, parts))}"

    def _agreement(self) -> str:
        """The outer step, its number of participants, and whether the groups' digests are equal."""
        outer_step = max(group.status.get("outer_step", 0) for group in self._groups)
        counts = [group.participants for group in self._groups if group.participants is not None]
        if not counts:
            return ""
        text = f"outer step {outer_step}, {min(counts)} participants"
        common = set.intersection(*(set(group.digests) for group in self._groups))
        if common and len(self._groups) > 1:
            digests = {group.digests[max(common)] for group in self._groups}
            equal = f": {digests.pop()[:8]}" if len(digests) == 1 else ""
            text += f", {'equal' if equal else 'DIFFERENT'} at outer step {max(common)}{equal}"
        return text
