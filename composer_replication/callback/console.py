"""What a group says in its log, and on Composer's progress bar: who is in the run, and how far."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any

from composer import Logger
from composer.loggers import ProgressBarLogger
from composer.utils import dist

from composer_replication.diloco.algorithm import DiLoCo, SyncReport
from composer_replication.diloco.fence import fence
from composer_replication.group.words import listed_groups, plural
from composer_replication.replica.options import ReplicaOptions, replica_id_of

log = logging.getLogger(__name__)


class Console:
    """Says how a replica group's run goes, on its rank 0.

    Args:
        options: This group's options.
    """

    def __init__(self, options: ReplicaOptions) -> None:
        self._options = options
        self._is_on = dist.get_global_rank() == 0
        self._members: dict[str, str] = {}
        self._num_groups = 1

    @fence("who has joined")
    def joined(self, diloco: DiLoCo, manager: Any, is_resumed: bool) -> None:
        """This group has joined the others, or begins with them.

        Args:
            diloco: This group's DiLoCo.
            manager: Connects it with the others.
            is_resumed: Whether it continues from a checkpoint.
        """
        self._members, self._num_groups = members_of(manager), manager.num_participants()
        if self._is_on and self._members:  # else it trains alone, which the log says already
            log.info(
                "%s%s with %s; here is group %s, %s",
                "Joined" if diloco.has_joined_others else "Resumed" if is_resumed else "Started",
                f" after {plural(diloco.outer_step, 'outer step')}" if diloco.outer_step else "",
                listed_groups([*self._members]),
                replica_id_of(self._options),
                plural(dist.get_world_size(), "rank"),
            )

    @fence("who takes part")
    def synced(self, reports: Iterable[SyncReport], manager: Any) -> None:
        """Syncs have been committed. Say who has come and who has left since the last one."""
        step = None
        for report in reports:
            step, self._num_groups = report.outer_step, report.num_participants
        if step is None or manager is None:
            return
        before, self._members = self._members, members_of(manager)
        if self._is_on and (news := changes(before, self._members)):
            take_part = plural(self._num_groups, "group takes", "groups take")
            log.info("Outer step %d: %s; %s part", step, news, take_part)

    @fence("the position on the progress bar")
    def show_position(
        self, progress: Mapping[str, Any], epochs: int, in_epoch: int, logger: Logger
    ) -> None:
        """Put the round, the outer step and the number of groups before Composer's progress bar.

        Args:
            progress: What ``SyncLog.report_phase`` has returned.
            epochs: The number of epochs, each a bar of its own, if the number of their batches is
                an estimate. Composer would draw a bar for the whole dataset. 0: it knows it.
            in_epoch: Batches of this epoch so far.
            logger: Composer's logger.
        """
        groups, batches = plural(self._num_groups, "group"), progress["max_batches"]
        position = f"round {progress['round']:.1f}, outer step {progress['outer_step']}, {groups}"
        for destination in logger.destinations if self._is_on else ():
            if not isinstance(destination, ProgressBarLogger) or not destination.train_pbar:
                continue
            bar = destination.train_pbar.pbar
            if not bar.disable:  # tqdm's own variable TQDM_DISABLE leaves a bar without a format
                bar.bar_format = short_bar_format(bar.bar_format)
                if epochs and batches:  # a bar beyond its total would be drawn without one
                    bar.total = max(bar.n, in_epoch, round(batches / epochs))
                bar.set_description_str(position, refresh=False)  # drawn with the next loss


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
