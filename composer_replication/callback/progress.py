"""The reports of a replica group in training: to Composer's loggers, its log and its folder."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import psutil
from composer import Logger, State, TimeUnit
from composer.utils import dist

from composer_replication.callback.composer_job import latest_checkpoint_of
from composer_replication.data.loader import ReplicaDataLoader
from composer_replication.diloco.algorithm import DiLoCo, SyncReport
from composer_replication.diloco.fence import fence
from composer_replication.diloco.settings import DiLoCoSettings
from composer_replication.group.run_folder import RESUME, START, SYNC, WARNING, ReplicaFolder
from composer_replication.group.words import on_same_samples

log = logging.getLogger(__name__)


class SyncLog:
    """Logs syncs, resumes and the position in training.

    Args:
        folder: The group's folder.
        settings: The run's settings.

    Attributes:
        final_loss: The mean training loss of the last round that had batches; None before.
    """

    def __init__(self, folder: ReplicaFolder, settings: DiLoCoSettings) -> None:
        self._folder = folder
        self._reached = folder.reached() or {}  # empty if an error has been logged
        self._before = folder.read_status()
        self._settings = settings
        self._losses: list[float] = []
        self._began: tuple[int, float, float] | None = None
        self._done = 0.0
        self._ends_at: int | None = None
        self._last_sync: dict[str, Any] = {}
        self.final_loss: float | None = None

    def count_batch(self, state: State, diloco: DiLoCo) -> None:
        """Record the loss of a finished batch, a mean over the group's ranks."""
        loss = state.total_loss_dict.get("loss/train/total")
        if loss is not None:
            self._losses.append(float(loss))

    @fence("the syncs")
    def log_syncs(self, reports: Iterable[SyncReport], state: State, logger: Logger) -> None:
        """Log committed syncs, with the mean loss of the batches since the previous one."""
        for report in reports:
            loss = sum(self._losses) / len(self._losses) if self._losses else None
            self._losses.clear()
            self.final_loss = self.final_loss if loss is None else loss
            metrics = numbers_of(report)
            self._last_sync |= {
                "num_participants": report.num_participants,
                "sync_seconds": report.sync_seconds,
                "inner_share": report.compute_fraction,
            }
            if report.global_digest is not None:
                self._last_sync["digest_step"] = report.outer_step
                self._last_sync["global_digest"] = report.global_digest
            at = self._round(report.inner_steps, report.outer_step)
            step = state.timestamp.batch.value
            for destination in logger.destinations:
                with fence(f"the metrics of a sync in {type(destination).__name__}"):
                    destination.log_metrics(metrics | {"diloco/round": at}, step)
            if report.global_digest is not None:
                metrics["diloco/global_digest"] = report.global_digest
            place = {"batch": step, "inner_steps": report.inner_steps, "loss": loss}
            place["ranks"] = dist.get_world_size()
            if report.equal_samples:
                warning = on_same_samples(report.equal_samples)
                log.warning("%s", warning)
                self._folder.append(WARNING, {"warning": warning})
            self._folder.append(SYNC, metrics | place)
            log.info(
                "outer step %d, fragment %d: %d replica groups, loss %s, blocked %.2f s%s",
                report.outer_step,
                report.fragment,
                report.num_participants,
                "-" if loss is None else f"{loss:.4f}",
                report.sync_seconds,
                f", {report.retries} retries" if report.retries else "",
            )

    @property
    def _steps_of_all(self) -> int | None:
        """The inner steps of a round in every group; None if a round is a time."""
        return None if self._settings.round_seconds is not None else self._settings.sync_every

    def _round(self, inner_steps: int, outer_step: int) -> float:
        """Rounds so far. Where they have another length in each group, whole turns count."""
        steps = self._steps_of_all
        return inner_steps / steps if steps else outer_step / self._settings.fragment_count

    @fence("the start of this group")
    def log_start(self, state: State, diloco: DiLoCo) -> None:
        """Log that the group has joined, and what its earlier process had trained by its end."""
        latest = latest_checkpoint_of(state)
        self._folder.append(
            START,
            {
                "started": psutil.Process().create_time(),
                "joined": time.time(),
                "inner_steps": diloco.inner_steps,
                "trained_at": self._before.get("trained_at"),
                "steps_before": self._before.get("inner_steps") or 0,
                "checkpoint": None if latest is None else str(latest),
            },
        )

    @fence("where this group resumes")
    def log_resume(self, state: State, diloco: DiLoCo) -> None:
        """Log where the group resumes, and how many steps after that point are repeated."""
        batch, reached = state.timestamp.batch.value, self._reached
        again = {
            "batches_again": max(0, reached.get("batch", 0) - batch),
            "outer_steps_again": max(0, reached.get("outer_step", 0) - diloco.outer_step),
        }
        self._folder.append(RESUME, {"batch": batch, "outer_step": diloco.outer_step, **again})
        log.info(
            "Resumed at batch %d, outer step %d; %d batches and %d outer steps are repeated",
            batch,
            diloco.outer_step,
            *again.values(),
        )

    def report_phase(
        self, phase: str, state: State, diloco: DiLoCo, done: float = 0.0
    ) -> dict[str, Any]:
        """Write the position in training to the group's folder, and return it.

        Cheap enough for every batch.

        Args:
            phase: ``joining``, ``training`` or ``evaluating``.
            state: Composer's state.
            diloco: This group's DiLoCo.
            done: The part of the samples that has been trained on, 0 to 1. Where nobody knows the
                number of batches, it is estimated from this; 0: it is not.
        """
        batch, known = state.timestamp.batch.value, max_batches(state)
        if known is not None:
            self._ends_at = known
        seconds_left = speed = None
        if phase == "training":
            self._began = self._began or (batch, time.monotonic(), done)
            began_at, began, done_then = self._began
            if known is None and done > max(done_then, self._done):  # a sync has changed it
                per_part = (batch - began_at) / (done - done_then)
                self._done, self._ends_at = done, batch + round(per_part * (1 - done))
            if self._ends_at is not None and batch > began_at:
                per_batch = (time.monotonic() - began) / (batch - began_at)
                seconds_left = per_batch * max(0, self._ends_at - batch)
                speed = 1 / per_batch
        position = {
            "batch": batch,
            "max_batches": self._ends_at,
            "inner_steps": diloco.inner_steps,
            "outer_step": diloco.outer_step,
            "round": self._round(diloco.inner_steps, diloco.outer_step),
            "loss": self._losses[-1] if self._losses else self.final_loss,
        }
        trained_at = self._before.get("trained_at") if phase == "joining" else time.time()
        self._folder.write_status(
            phase,
            **position,
            sync_every=self._steps_of_all,
            seconds_left=seconds_left,
            trained_at=trained_at,
        )
        more = {"phase": phase, "steps_per_second": speed}
        return position | more | self._last_sync


def numbers_of(report: SyncReport) -> dict[str, Any]:
    """Return a report as Composer metrics: numbers only, since some of its loggers need that.

    What a sync cannot tell is left out.
    """
    values = asdict(report)
    del values["inner_steps"], values["global_digest"], values["equal_samples"]
    return {f"diloco/{name}": +value for name, value in values.items() if value is not None}


def max_batches(state: State, *, is_bound: bool = False) -> int | None:
    """Return the batch at which training ends; None if that is not known.

    Args:
        state: Composer's state.
        is_bound: Whether an upper bound will do, as if this group got all samples that groups
            share.
    """
    end = state.max_duration
    if end is None:
        return None
    if end.unit == TimeUnit.BATCH:
        return end.value
    # The length of such a loader is a bound.
    is_shared = isinstance(state.train_dataloader, ReplicaDataLoader) and not is_bound
    if end.unit == TimeUnit.EPOCH and state.dataloader_len is not None and not is_shared:
        # A group that has joined others counts their batches, but is at its own position in the
        # epoch.
        now = state.timestamp
        epochs_left = end.value - now.epoch.value
        in_epochs = epochs_left * state.dataloader_len.value - now.batch_in_epoch.value
        return now.batch.value + in_epochs
    return None
