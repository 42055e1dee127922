"""What a replica group says on the console: who is in the run, who comes and goes, what it cost."""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from composer import Logger
from composer.loggers import ConsoleLogger, ProgressBarLogger
from composer.utils import dist
from tqdm import tqdm

from composer_replication.callback.words import (
    format_bytes,
    format_duration,
    listed_groups,
    plural,
)
from composer_replication.diloco.algorithm import DiLoCo, SyncReport
from composer_replication.diloco.averaging.wire_sizes import BYTES_PER_PARAMETER
from composer_replication.diloco.settings import AUTO, DiLoCoSettings
from composer_replication.replica.options import ReplicaOptions, replica_id_of

log = logging.getLogger(__name__)
package_log = logging.getLogger("composer_replication")

SHOWN = (
    __name__,
    "composer_replication.callback.callback",
    "composer_replication.diloco.fragment_sizes",
    "composer_replication.replica.factory",
)
"""Loggers whose information is shown. Of all others, warnings are shown."""


class ConsoleHandler(logging.Handler):
    """Writes the few lines that are meant for people to stderr, where Composer's own go.

    Python shows warnings alone where a script configures no logging. Where it does, this handler
    does nothing: the same lines are ordinary records of the logger ``composer_replication``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.addFilter(self._shows)

    def _shows(self, record: logging.LogRecord) -> bool:
        handlers = (*package_log.handlers, *logging.getLogger().handlers)
        is_configured = any(handler is not self for handler in handlers)
        return not is_configured and (record.levelno >= logging.WARNING or record.name in SHOWN)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            kind = "" if record.levelno == logging.INFO else f"{record.levelname}: "
            # tqdm writes above its progress bars, as Composer does.
            tqdm.write(f"[diloco] {kind}{self.format(record)}", file=sys.stderr)
        except Exception:
            self.handleError(record)


_handler = ConsoleHandler()


class Console:
    """Says how a replica group's run goes, on its rank 0.

    Args:
        settings: The run's settings.
        options: This group's options; without ``verbose`` it says nothing.
    """

    def __init__(self, settings: DiLoCoSettings, options: ReplicaOptions) -> None:
        self._settings, self._options = settings, options
        self._is_on = options.verbose and dist.get_global_rank() == 0
        self._members: dict[str, str] = {}
        self._num_groups = 1
        self._blocked_s = 0.0
        self._bytes_sent = 0
        self._began = time.monotonic()
        if self._is_on:
            package_log.addHandler(_handler)

    # ---- the start --------------------------------------------------------------------------

    def connecting(self) -> None:
        """This group is about to wait for the others."""
        address = self._options.coordinator_addr or self._options.lighthouse_addr
        if self._is_on and address is not None:
            count, me = self._options.num_replicas, replica_id_of(self._options)
            of_all = "" if count is None else f" of {count}"
            log.info("Replica group %s%s meets the others at %s", me, of_all, address)

    def joined(self, diloco: DiLoCo, manager: Any, sizes: Sequence[int], is_resumed: bool) -> None:
        """This group has joined the others, or begins with them.

        Args:
            diloco: This group's DiLoCo.
            manager: Connects it with the others.
            sizes: Elements of each fragment.
            is_resumed: Whether it continues from a checkpoint.
        """
        self._began = time.monotonic()
        self._members, self._num_groups = members_of(manager), manager.num_participants()
        if not self._is_on:
            return
        if self._members:  # else it trains alone, which the log says already
            how = "Joined" if diloco.has_joined_others else "Resumed" if is_resumed else "Started"
            at = f" after {plural(diloco.outer_step, 'outer step')}" if diloco.outer_step else ""
            here = f"group {replica_id_of(self._options)}"
            ranks = plural(dist.get_world_size(), "rank")
            log.info(
                "%s%s with %s; here is %s, %s",
                how,
                at,
                listed_groups([*self._members]),
                here,
                ranks,
            )
        log.info("A round is %s", self._round(len(sizes)))
        if self._members:
            log.info("%s", self._traffic(sum(sizes)))

    def _round(self, num_fragments: int) -> str:
        steps, delay = self._settings.sync_every, self._settings.fragment_sync_delay
        length, seconds = plural(steps, "inner step"), self._settings.round_seconds
        if seconds == AUTO:
            length = f"as long as the fastest group takes for {length},"
        elif seconds is not None:
            length = f"{seconds:g} s, at most {length},"
        rows = [row for row in self._settings.schedule or () if "sync_every" in row]
        if rows:
            later = (f"{row['sync_every']} from outer step {row['outer_step']}" for row in rows)
            length += f" ({', '.join(later)})"
        ends_with = "a sync" if self._members else "an outer step"
        of = "the whole model" if num_fragments == 1 else f"each of {num_fragments} fragments"
        overlap = f", overlapped with {plural(delay, 'inner step')}" if delay else ""
        return f"{length} and {ends_with} of {of}{overlap}"

    def _traffic(self, num_elements: int) -> str:
        wire_format, steps = self._settings.wire_format, self._settings.sync_every
        sent = num_elements * BYTES_PER_PARAMETER[wire_format]
        data_parallel = 4 * num_elements * steps  # it averages every parameter in every inner step
        return (
            f"A round sends {format_bytes(sent)} ({wire_format}); data parallel would send "
            f"{format_bytes(data_parallel)} in its {plural(steps, 'step')}, "
            f"{data_parallel / sent:.0f} times as much"
        )

    # ---- during training --------------------------------------------------------------------

    def synced(self, reports: Iterable[SyncReport], manager: Any) -> None:
        """Syncs have been committed. Say who has come and who has left since the last one."""
        step = None
        for report in reports:
            self._blocked_s += report.sync_seconds
            self._bytes_sent += report.bytes_sent * dist.get_world_size()
            step, self._num_groups = report.outer_step, report.num_participants
        if step is None or manager is None:
            return
        before, self._members = self._members, members_of(manager)
        if self._is_on and (news := changes(before, self._members)):
            take_part = plural(self._num_groups, "group takes", "groups take")
            log.info("Outer step %d: %s; %s part", step, news, take_part)

    def show_position(self, rounds: float, outer_step: int, logger: Logger) -> None:
        """Put the round, the outer step and the number of groups on Composer's console.

        Its progress bar has them before the bar, and its console logger beside the other metrics
        of each batch that it prints.

        Args:
            rounds: How many rounds this group has trained.
            outer_step: Of this group.
            logger: Composer's logger.
        """
        if not self._is_on:
            return
        groups = plural(self._num_groups, "group")
        for destination in logger.destinations:
            if isinstance(destination, ProgressBarLogger) and destination.train_pbar:
                bar = destination.train_pbar.pbar
                bar.bar_format = short_bar_format(bar.bar_format)
                # It is drawn with the next loss.
                bar.set_description_str(
                    f"round {rounds:.1f}, outer step {outer_step}, {groups}", refresh=False
                )
            elif isinstance(destination, ConsoleLogger):
                destination.log_metrics(
                    {
                        "diloco/round": rounds,
                        "diloco/outer_step": outer_step,
                        "diloco/num_participants": self._num_groups,
                    }
                )

    # ---- the end ----------------------------------------------------------------------------

    def ended(self, result: Mapping[str, Any]) -> None:
        """This group has trained to the end.

        Args:
            result: What the callback reports.
        """
        if not self._is_on:
            return
        seconds = time.monotonic() - self._began
        sent = f"{format_bytes(self._bytes_sent)} sent, " if self._members else ""
        log.info(
            "Ended after %s: global parameters %s, %straining blocked for %.1f s of %s (%.0f %%)",
            plural(result["outer_steps"], "outer step"),
            result["global_digest"][:8],
            sent,
            self._blocked_s,
            format_duration(seconds),
            100 * self._blocked_s / max(seconds, 1e-9),
        )


def short_bar_format(bar_format: str) -> str:
    """Make room in the format of Composer's progress bar, which has 48 columns of bar and spaces.

    Args:
        bar_format: Composer's, or what this returned: then it is returned as it is.
    """
    return re.sub(" {2,}", " ", bar_format).replace("{bar:25}", "{bar:10}")


def members_of(manager: Any) -> dict[str, str]:
    """The groups of the last quorum by name, with what differs between two lives of one group.

    Args:
        manager: Of this group. One without ``members`` trains alone.
    """
    names = (name.partition(":") for name in getattr(manager, "members", ()))
    return {name: life for name, _, life in sorted(names)}


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Say who has left, joined or been started again between two quorums; empty if nobody has.

    Args:
        before: From ``members_of``.
        now: The same of the later quorum.
    """
    again = [name for name in now if name in before and now[name] != before[name]]
    names_of = {
        "left": [name for name in before if name not in now],
        "joined": [name for name in now if name not in before],
        "been started again": again,
    }
    return ", ".join(
        f"{listed_groups(names)} {'has' if len(names) == 1 else 'have'} {what}"
        for what, names in names_of.items()
        if names
    )
