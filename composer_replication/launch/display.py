"""A run as it goes: a live table, or a line now and then where nobody watches."""

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
from composer_replication.launch.run_record import duration, implied_sync_every
from composer_replication.replica.json_files import JsonLineReader, read_json

log = logging.getLogger(__name__)

TABLE_EVERY_S = 0.3
LINE_EVERY_S = 10.0

MAX_DIGESTS = 1000
"""How many of a group's digests are kept, to be compared with those of the groups behind it."""


class Progress:
    """Where one replica group is, by its ``status.json`` and ``metrics.jsonl``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._metrics = JsonLineReader(folder / METRICS)
        self.status: dict[str, Any] = {}
        self.participants: int | None = None
        self.digests: dict[int, str] = {}

    def read(self, exit_status: int | None) -> None:
        """Read what is new; a group that has ended has its exit status for a phase."""
        self.status = read_json(self._folder / STATUS) or self.status
        if exit_status is not None:
            self.status["phase"] = "failed" if exit_status else "finished"
        for line in self._metrics.read():
            self.participants = int(line["diloco/num_participants"])
            if line.get("diloco/global_digest"):
                self.digests.pop(line[OUTER_STEP], None)  # made again after a resume
                self.digests[line[OUTER_STEP]] = line["diloco/global_digest"]
                if len(self.digests) > MAX_DIGESTS:
                    del self.digests[next(iter(self.digests))]

    @property
    def phase(self) -> str:
        return self.status.get("phase", "starting")

    @property
    def round(self) -> str:
        if "round" not in self.status:
            return "-"
        batches, sync_every = self.status.get("max_batches"), implied_sync_every(self.status)
        of = f" / {math.ceil(batches / sync_every)}" if batches and sync_every else ""
        return f"{int(self.status['round'])}{of}"

    @property
    def loss(self) -> str:
        loss = self.status.get("loss")
        return "-" if loss is None else f"{loss:.3f}"

    @property
    def time_left(self) -> str:
        seconds = self.status.get("seconds_left")
        return "-" if seconds is None or self.phase != "training" else duration(seconds)


class Display:
    """The groups' progress: a table on a terminal, else a line every ``LINE_EVERY_S``.

    Args:
        console: Where to.
        run_dir: The run's folder.
        replicas: Number of groups.
        seconds_left: Asked for the time left, where the groups do not know when they end.
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
        # Drawn when we say, by this thread: nothing flickers, and nothing is drawn after the end.
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._groups = [Progress(run_dir / f"replica_{i}") for i in range(replicas)]
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
        """Refresh by itself while something else keeps this thread busy."""
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
        """Show where the groups are, if it is time to."""
        every = TABLE_EVERY_S if self._live else LINE_EVERY_S
        if time.monotonic() < self._shown + every and not is_last:
            return
        self._shown = time.monotonic()
        try:
            for replica_id, group in enumerate(self._groups):
                group.read(exit_statuses.get(replica_id))
                if self._seconds_left is not None:
                    group.status |= {"max_batches": None, "seconds_left": self._seconds_left()}
            self._show()
        except OSError as error:  # the disk of the run's folder or of stdout: the groups train on
            if not self._has_failed:
                log.warning("Cannot show how the groups are doing (%s)", error)
            self._has_failed = True

    def _show(self) -> None:
        if self._live:
            self._live.update(Group(self._table(), Text(self._agreement())), refresh=True)
        else:
            self._console.print(self._line(), markup=False, soft_wrap=True)

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

    def _line(self) -> str:
        groups = [
            f"group {replica_id} {group.phase}, round {group.round}, loss {group.loss}"
            for replica_id, group in enumerate(self._groups)
        ]
        left = [group.time_left for group in self._groups if group.time_left != "-"]
        parts = [*groups, self._agreement(), *(f"{left[0]} left" for _ in left[:1])]
        return f"{duration(time.monotonic() - self._began):>12}  {'; '.join(filter(None, parts))}"

    def _agreement(self) -> str:
        """The outer step, who took part in it, and whether the groups hold the same."""
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
