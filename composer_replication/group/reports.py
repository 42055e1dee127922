"""Reports a group's syncs and its position: to loggers, to its log and into its folder."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import psutil

from composer_replication.diloco.algorithm import DiLoCo, SyncReport
from composer_replication.diloco.fragments import persistent_buffers
from composer_replication.diloco.global_state import digest_of_tensors
from composer_replication.diloco.torchft_api import DiLoCoManager
from composer_replication.group.host import Host
from composer_replication.group.run_folder import (
    RESUME,
    START,
    SYNC,
    WARNING,
    ReplicaFolder,
)
from composer_replication.group.words import listed_groups, plural, why_nothing_was_learned
from composer_replication.options import DuplicateIdError, ReplicaOptions, replica_id_of
from composer_replication.replica.ranks import rank, world_size
from composer_replication.settings import DiLoCoSettings
from composer_replication.util.fence import fence

log = logging.getLogger(__name__)

REPORT_EVERY_S = 0.1
"""How often a group reports its position between syncs, in seconds. A progress bar, which shows
each step, has it at each step."""


class Reporter:
    """Reports the course of a group's fit: to the log, the trainer's loggers and the run's folder.

    Args:
        folder: The group's folder.
        settings: The run's settings.
        host: The group's trainer.

    Attributes:
        folder: The same.
        final_loss: The mean training loss of the last round that had steps; None before.
        fruitless: The number of this fit's last syncs to which no group has contributed.
    """

    def __init__(self, folder: ReplicaFolder, settings: DiLoCoSettings, host: Host) -> None:
        self.folder = folder
        self._settings = settings
        self._host = host
        self._before = folder.reached() or {}  # empty if an error has been logged
        self._began: tuple[int, float, float] | None = None
        self._phase = ""
        self._due = 0.0
        self._done = 0.0
        self._ends_at: int | None = None
        self._last_sync: dict[str, Any] = {}
        self._members: dict[str, str] = {}
        self._num_groups = 1
        self.final_loss: float | None = None
        self.fruitless = 0

    # ---- it has joined ----------------------------------------------------------------------

    @fence("the settings")
    def settings(self, source: str) -> None:
        """Log the settings, and warn of those that are risky.

        Args:
            source: Where the coordinator's settings are from; empty if they are the group's own.
        """
        title = f"The coordinator's settings ({source})" if source else "Settings"
        momentum = self._settings.momentum_warning(self._host.last_step(is_bound=True))
        if not rank():
            log.info("%s: %s", title, self._settings)
            if momentum:
                self.warn(momentum)
        overlap = self._settings.overlap_warning
        if overlap:  # DiLoCo itself logs it
            self.folder.append(WARNING, {"warning": overlap})

    @fence("the start of this group")
    def joined(self, diloco: DiLoCo, manager: DiLoCoManager, is_resumed: bool) -> None:
        """Report that the group has joined the others, or begins with them, and who they are.

        If it resumes, also where, and how many steps of its earlier process are repeated.
        """
        self.folder.append(
            START,
            {
                "settings": asdict(self._settings),
                "started": psutil.Process().create_time(),
                "joined": time.time(),
                "inner_steps": diloco.inner_steps,
                "trained_at": self._before.get("trained_at"),
                "steps_before": self._before.get("inner_steps") or 0,
                "checkpoints": self._host.checkpoints,
                "saves_to": [*self._host.saves_to],
                "to_save": self._host.how_to_save,
                "to_load": self._host.load_checkpoint,
            },
        )
        self._members = members_of(manager)
        self._num_groups = manager.num_participants()
        self._report_data(manager)
        if self._members and self._host.warning:
            self.warn(self._host.warning)
        if not rank() and self._members:  # otherwise it trains alone, which the log says already
            log.info(
                "%s%s with %s; here is group %s, %s",
                "Joined" if diloco.has_joined_others else "Resumed" if is_resumed else "Started",
                f" after {plural(diloco.outer_step, 'outer step')}" if diloco.outer_step else "",
                listed_groups([*self._members]),
                self.folder.replica_id,
                plural(world_size(), "rank"),
            )
        if is_resumed:
            self._report_resume(diloco.outer_step)

    def _report_resume(self, outer_step: int) -> None:
        batch = self._host.steps
        resume = {
            "batch": batch,
            "outer_step": outer_step,
            "batches_again": max(0, self._before.get("batch", 0) - batch),
            "outer_steps_again": max(0, self._before.get("outer_step", 0) - outer_step),
        }
        self.folder.append(RESUME, resume)
        log.info(
            "Resumed at batch %(batch)d, outer step %(outer_step)d; %(batches_again)d batches and "
            "%(outer_steps_again)d outer steps are repeated",
            resume,
        )

    # ---- it syncs ---------------------------------------------------------------------------

    def synced(self, reports: Sequence[SyncReport], manager: DiLoCoManager | None) -> None:
        """Report committed syncs, at least one, and which groups have come and left since.

        Args:
            reports: Of the syncs since the last call.
            manager: This group's; None after it has left.
        """
        loss = self._host.mean_loss()  # it may wait for other ranks, so no fence is around it
        self.final_loss = self.final_loss if loss is None else loss
        self._report_syncs(reports, loss)
        if manager is not None:
            self._report_members(reports[-1], manager)

    @fence("the syncs")
    def _report_syncs(self, reports: Sequence[SyncReport], loss: float | None) -> None:
        for report in reports:
            self.fruitless = 0 if report.total_contribution else self.fruitless + 1
            metrics = numbers_of(report)
            metrics["diloco/round"] = report.outer_step / self._settings.fragment_count
            self._host.log_metrics(metrics)
            self._last_sync["metrics"] = metrics
            event = metrics | {
                "batch": self._host.steps,
                "inner_steps": report.inner_steps,
                "loss": loss,
                "ranks": world_size(),
            }
            if report.global_digest is not None:
                self._last_sync["digest_step"] = report.outer_step
                self._last_sync["global_digest"] = report.global_digest
                event["diloco/global_digest"] = report.global_digest
            if report.equal_samples:
                self.warn(
                    f"{listed_groups(report.equal_samples)} train on the same samples, their first "
                    f"batches are equal: give each its own part with {self._host.data_fix}; if "
                    "they are meant to be the same, set same_samples=True"
                )
            self.folder.append(SYNC, event)
            fragment = f", fragment {report.fragment}" if self._settings.fragment_count > 1 else ""
            log.info(
                "outer step %d%s: %d replica groups, loss %s, blocked %.2f s%s",
                report.outer_step,
                fragment,
                report.num_participants,
                "-" if loss is None else f"{loss:.4f}",
                report.sync_seconds,
                f", {report.retries} retries" if report.retries else "",
            )
            loss = None  # all steps were before the first one

    def warn(self, warning: str) -> None:
        """Warn in the log, and in the group's folder, which ``launch`` reads."""
        log.warning("%s", warning)
        self.folder.append(WARNING, {"warning": warning})

    @fence("what they divide")
    def _report_data(self, manager: DiLoCoManager) -> None:
        odd = manager.on_other_datasets()
        if odd:
            self.warn(
                f"{listed_groups(odd)} divide datasets by replica_shard that differ in samples or "
                "order, so some samples are read twice and others never: give all the same one, "
                "shuffled and split with the same seed"
            )

    @fence("who takes part")
    def _report_members(self, report: SyncReport, manager: DiLoCoManager) -> None:
        self._num_groups = report.num_participants
        before = self._members
        self._members = members_of(manager)
        if before != self._members:
            self._report_data(manager)
        news = changes(before, self._members)
        if news and not rank():
            take_part = plural(self._num_groups, "group takes", "groups take")
            log.info("Outer step %d: %s; %s part", report.outer_step, news, take_part)

    def result(self, diloco: DiLoCo) -> dict[str, Any]:
        """Return the result of the fit. Every rank of the group has to call it.

        Its ``failure`` says why it is no success although nothing failed, as far as this process
        knows; empty if it is one.
        """
        own_buffers = {}
        if self._settings.sync_buffers == "none":  # each group has its own
            for name, buffer in persistent_buffers(self._host.model).items():
                own_buffers[name] = digest_of_tensors({name: buffer})[:8]
        return {
            "replica_id": self.folder.replica_id,
            "inner_steps": diloco.inner_steps,
            "outer_steps": diloco.outer_step,
            "global_digest": diloco.global_digest(),
            "final_loss": self.final_loss,
            "own_buffers": own_buffers,
            "failure": why_nothing_was_learned(
                diloco.outer_step, diloco.inner_steps, self.fruitless
            ),
        }

    # ---- the position in training ------------------------------------------------------------

    def is_due(self, phase: str) -> bool:
        """Whether to report the position in training again: no more often than it can be seen."""
        now = time.monotonic()
        if phase == self._phase and now < self._due and not self._host.shows_position:
            return False
        self._phase = phase
        self._due = now + REPORT_EVERY_S
        return True

    def position(self, phase: str, diloco: DiLoCo, done: float = 0.0) -> dict[str, Any]:
        """Write the position in training to the group's folder, show it, and return it.

        Args:
            phase: ``joining``, ``training`` or ``evaluating``.
            diloco: This group's DiLoCo.
            done: The part of the samples that has been trained on, 0 to 1. If the number of steps
                is not known, it is estimated from this; 0: no estimate.
        """
        step = self._host.steps
        known = self._host.last_step()
        if known is not None:
            self._ends_at = known
        seconds_left = None
        speed = None
        if phase == "training":
            self._began = self._began or (step, time.monotonic(), done)
            began_at, began, done_then = self._began
            steps = step - began_at
            if known is None and done > max(done_then, self._done):  # a sync has changed it
                per_part = steps / (done - done_then)
                self._done = done
                self._ends_at = step + round(per_part * (1 - done))
            if self._ends_at is not None and steps > 0:
                per_step = (time.monotonic() - began) / steps
                seconds_left = per_step * max(0, self._ends_at - step)
                speed = 1 / per_step
        position = {
            "batch": step,
            "max_batches": self._ends_at,
            "inner_steps": diloco.inner_steps,
            "outer_step": diloco.outer_step,
            "loss": self.final_loss if self._host.last_loss is None else self._host.last_loss,
        }
        longest = self._settings.sync_every_at(sys.maxsize)  # a schedule makes rounds longer
        if phase == "training" and self._settings.sync_every_at(diloco.outer_step + 1) < longest:
            phase = "warm-up"
        trained_at = self._before.get("trained_at") if phase == "joining" else time.time()
        self.folder.write_status(
            phase,
            **position,
            seconds_left=seconds_left,
            trained_at=trained_at,
        )
        if phase != "joining" and not rank():
            groups = plural(self._num_groups, "group")
            with fence("the position on the progress bar"):
                self._host.show_position(
                    f"outer step {diloco.outer_step}, {groups}",
                    self._ends_at if done else None,
                )
        return position | {"phase": phase, "steps_per_second": speed} | self._last_sync


def folder_of(options: ReplicaOptions) -> ReplicaFolder:
    """A group's folder, in which its rank 0 alone writes."""
    return ReplicaFolder(None if rank() else options.run_dir, replica_id_of(options))


@contextmanager
def rejections(options: ReplicaOptions) -> Iterator[None]:
    """A context whose error is written into the run's folder, before the group joins.

    A ``ValueError`` rejects the group's input: it would come again. A script's exit status does not
    say so.

    Args:
        options: This group's.
    """
    try:
        yield
    except DuplicateIdError:
        raise  # the name may be free the next time
    except Exception as error:
        with fence("in the run's folder why this group ends"):
            if options.replica_id is not None:
                folder = folder_of(options)
                if isinstance(error, ValueError):
                    folder.write_rejection(error)
                else:
                    folder.write_error(error)
        raise


def numbers_of(report: SyncReport) -> dict[str, Any]:
    """Return a report as metrics: numbers only, since some loggers need that.

    Values that are None are left out.
    """
    values = asdict(report)
    del values["inner_steps"], values["global_digest"], values["equal_samples"]
    return {f"diloco/{name}": +value for name, value in values.items() if value is not None}


def members_of(manager: DiLoCoManager) -> dict[str, str]:
    """The groups of the last quorum by name, each with the uuid of its current process.

    Args:
        manager: This group's manager. A group whose manager has no ``members`` trains alone.
    """
    names = (name.partition(":") for name in manager.members)
    return {name: life for name, _, life in sorted(names)}


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Say who has left, joined or been started again between two quorums; empty if nobody has.

    Args:
        before: From ``members_of``.
        now: The same of the later quorum.
    """
    names_of = {
        "left": before.keys() - now.keys(),
        "joined": now.keys() - before.keys(),
        "been started again": {
            name for name, life in now.items() if before.get(name, life) != life
        },
    }
    news = []
    for what, names in names_of.items():
        if names:
            have = "has" if len(names) == 1 else "have"
            news.append(f"{listed_groups(sorted(names))} {have} {what}")
    return ", ".join(news)
