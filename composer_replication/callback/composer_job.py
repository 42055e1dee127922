"""A Composer job as the trainer of a replica group."""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import torch
from composer import Event, Logger, State, Timestamp, TimeUnit
from composer.algorithms import SWA
from composer.callbacks import LoadCheckpoint
from composer.loggers import ProgressBarLogger
from composer.utils import dist
from torch import Tensor, nn

from composer_replication.callback.checkpoint_savers import (
    folders_of,
    pattern_of,
    savers_of,
    skip_torn,
)
from composer_replication.callback.trainer_watch import trainer_in_fit
from composer_replication.callback.weight_averages import WeightAverages
from composer_replication.data.loader import ReplicaDataLoader
from composer_replication.group.host import Host, continue_schedule
from composer_replication.group.replica_group import ReplicaGroup
from composer_replication.replica.heal.state_bytes import dump, load
from composer_replication.replica.ranks import ask_on_rank_0
from composer_replication.util.fence import fence

log = logging.getLogger(__name__)

SchedulerState = tuple[str, dict[str, Any]]
"""Class name and state of one of torch's schedulers."""


class ComposerJob(Host):
    """What a replica group asks of Composer's ``Trainer``.

    A joiner gets the position in training, torch's schedulers, and EMA's average beside
    the global state. Its inner optimizer keeps its own state.

    Attributes:
        state: Composer's, of the Trainer that calls the callback.
        logger: Composer's.
        losses: Those of the steps since the last sync, each a mean over the group's ranks.
    """

    name = "composer"
    load_weights_only = "its weights alone (load_weights_only: true)"
    load_checkpoint = "load a checkpoint (load_path, or autoresume: true with a save_folder)"
    tokens_fix = (
        "give the loader's DataSpec a get_num_tokens_in_batch (Composer's own counts input_ids)"
    )
    state: State
    logger: Logger
    group: ReplicaGroup

    def __init__(self) -> None:
        self.averages = WeightAverages()
        self.losses: list[float] = []

    def before_join(self) -> None:
        """Prepare for a fit. Called in ``Trainer.fit``, before the group joins."""
        self.averages.before_join()
        self.losses = []
        self._has_warned = False
        self._is_new = self.steps == 0
        self._ends_by_epoch = self.epochs < math.inf

    # ---- what is trained --------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        model = self.state.model
        return cast(nn.Module, model.module if self.state.is_model_ddp else model)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.state.optimizers[0]  # Composer refuses several

    @property
    def loader(self) -> object:
        return self.state.train_dataloader

    @property
    def is_sharded(self) -> bool:
        return self.state.fsdp_sharded_state_dict_enabled

    def size_of(self, batch: Any, what: str) -> int:
        trainer = trainer_in_fit()  # the State has no DataSpec
        assert trainer is not None and trainer._train_data_spec is not None, "a batch is of a fit"
        return getattr(trainer._train_data_spec, f"get_num_{what}_in_batch")(batch)

    # ---- the position in training ------------------------------------------------------------

    @property
    def steps(self) -> int:
        return self.state.timestamp.batch.value

    def last_step(self, *, is_bound: bool = False) -> int | None:
        state = self.state
        end = state.max_duration
        if end is None:
            return None
        if end.unit is TimeUnit.BATCH:
            return end.value
        if end.unit is not TimeUnit.EPOCH or state.dataloader_len is None:
            return None
        if isinstance(state.train_dataloader, ReplicaDataLoader) and not is_bound:
            return None  # its length is an upper bound
        # A group that has joined others counts their batches, but is at its own position in the
        # epoch.
        now = state.timestamp
        epochs_left = end.value - now.epoch.value
        batches_left = epochs_left * state.dataloader_len.value - now.batch_in_epoch.value
        return now.batch.value + batches_left

    @property
    def epochs(self) -> float:
        end = self.state.max_duration
        return end.value if end is not None and end.unit is TimeUnit.EPOCH else math.inf

    @property
    def checkpoints(self) -> str | None:
        savers = savers_of(self.state)
        return pattern_of(savers[0], self.state) if savers else None

    @property
    def saves_to(self) -> list[str]:
        return [*folders_of(self.state, self.logger)]

    def skip_torn(self) -> None:
        """Before Composer looks for its newest checkpoint: have it find one that is whole."""
        said = ask_on_rank_0(partial(skip_torn, self.state, self.group.hold_folders))
        if said:
            self.group.continuation.skip(said)

    # ---- what it shows ----------------------------------------------------------------------

    @property
    def last_loss(self) -> float | None:
        return self.losses[-1] if self.losses else None

    def mean_loss(self) -> float | None:
        losses = self.losses
        self.losses = []
        return sum(losses) / len(losses) if losses else None

    def log_metrics(self, metrics: Mapping[str, float]) -> None:
        for destination in self.logger.destinations:
            with fence(f"the metrics of a sync in {type(destination).__name__}"):
                destination.log_metrics(dict(metrics), self.steps)

    @property
    def shows_position(self) -> bool:
        return any(isinstance(each, ProgressBarLogger) for each in self.logger.destinations)

    def show_position(self, position: str, estimated_end: int | None) -> None:
        for destination in self.logger.destinations:
            if not isinstance(destination, ProgressBarLogger) or not destination.train_pbar:
                continue
            bar = destination.train_pbar.pbar
            if bar.disable:  # tqdm's own variable TQDM_DISABLE leaves a bar without a format
                continue
            bar.bar_format = short_bar_format(bar.bar_format)
            if estimated_end and self.epochs < math.inf:
                # Each epoch is a bar, which Composer would draw for the whole dataset. Beyond its
                # total it would be drawn without one.
                in_epoch = self.state.timestamp.batch_in_epoch.value
                bar.total = max(bar.n, in_epoch, round(estimated_end / self.epochs))
            bar.set_description_str(position, refresh=False)  # drawn with the next loss

    # ---- what a joiner gets -----------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        is_in_batch = self.group.is_in_step
        return {
            "timestamp": _counts(self.state.timestamp),
            "epoch": self.state.timestamp.epoch.value,
            "is_in_batch": is_in_batch,
            "ends_epoch": is_in_batch and self._ends_epoch(),
            "ends_at": self.last_step(),
            "schedules": self.schedules(),
            "ema": None if dist.get_global_rank() else self.averages.state_dict(),
        }

    def load_state_dict(self, saved: dict[str, Any], is_in_step: bool) -> None:
        """Continue at the donor's position, so that both groups end at the same batch."""
        self._adopt(**saved["timestamp"])
        has_schedules = self.load_schedules(*saved["schedules"])
        is_in_batch = saved["is_in_batch"] or is_in_step
        if is_in_batch:
            # The donor's counters are those before the batch of this sync, which is over by now.
            # Composer steps schedulers before it counts a batch: this group's, if it was in one,
            # have been stepped with the counters that it had then.
            if has_schedules or not is_in_step:
                self._step_schedulers(saved["ends_epoch"] and not is_in_step)
            now = self.state.timestamp
            self.state.previous_timestamp = now
            batches = max(1, now.batch.value)
            after = now.to_next_batch(
                samples=now.sample.value // batches,
                tokens=now.token.value // batches,
            )
            self._adopt(**_counts(after))
        if self._is_new and not is_in_step and not self.state.timestamp.batch_in_epoch.value:
            self._load_epoch(saved)
        self.averages.load_state_dict(saved["ema"], is_in_batch, self.logger)
        log.info("Continuing at batch %d, like the other replica groups", self.steps)

    def schedules(self) -> tuple[list[SchedulerState], int]:
        """The schedulers' states, and for how many groups of parameters they are.

        One whose state is not plain numbers is left out: a heal cannot send it. torch's schedulers
        count their own steps. Composer's are functions of the timestamp, wrapped in a torch
        scheduler whose count they do not read.
        """
        found = []
        for scheduler in self.state.schedulers:
            state = scheduler.state_dict()
            if state and _is_plain(state):
                found.append((type(scheduler).__name__, state))
        return found, len(self.optimizer.param_groups)

    def load_schedules(self, sent: list[SchedulerState], its_groups: int) -> bool:
        """Load the donor's states. If one cannot be loaded, none is, and a warning says why.

        Returns:
            Whether they have been loaded.
        """
        schedulers = self.state.schedulers
        own_groups = len(self.optimizer.param_groups)
        own = [type(each).__name__ for each in schedulers]
        theirs = [kind for kind, _ in sent]
        if own == theirs and own_groups == its_groups:
            for scheduler, (_, state) in zip(schedulers, sent, strict=True):
                continue_schedule(scheduler, self.optimizer, state)
            return True
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "Schedulers keep their own state, not the donor's: it has sent those of %s for %d "
                "groups of parameters, and this group has %s for %d. Use the same, whose states "
                "are numbers and plain containers",
                theirs,
                its_groups,
                own,
                own_groups,
            )
        return False

    def _step_schedulers(self, ends_epoch: bool) -> None:
        """Step the schedulers, as Composer does before it counts a finished batch."""
        vars(self.optimizer)["_opt_called"] = True  # see ``continue_schedule``
        trainer = trainer_in_fit()
        by_epoch = trainer is not None and trainer._scheduler_step_frequency == TimeUnit.EPOCH
        if ends_epoch or not by_epoch:
            for scheduler in self.state.schedulers:
                scheduler.step()

    def _ends_epoch(self) -> bool:
        """Whether the batch that is not counted yet is the last one of its epoch."""
        num_batches = self.state.dataloader_len
        done = self.state.timestamp.batch_in_epoch
        return num_batches is not None and done.value + 1 == num_batches.value

    def _load_epoch(self, saved: dict[str, Any]) -> None:
        """Begin in the donor's epoch, and end at the donor's last batch.

        The donor is in the middle of its epoch, and this group has the whole epoch before it. With
        the same number of epochs left, all others would wait for this group at the end.
        """
        epoch = saved["epoch"] + saved["ends_epoch"]
        ends_at = saved["ends_at"]
        self._adopt(epoch=epoch)
        if self._ends_by_epoch and ends_at is not None:
            self.state.max_duration = f"{ends_at}ba"
            log.info("Beginning in epoch %d, ending at batch %d with the others", epoch, ends_at)

    def _adopt(self, **counts: Any) -> None:
        """Set these counters, in a new timestamp: savers keep references to the old one."""
        self.state.timestamp = self.state.timestamp.copy(**counts)


def _is_plain(state: dict[str, Any]) -> bool:
    """Whether a heal can send this state."""
    try:
        load(memoryview(bytearray().join(dump(state))))
    except Exception:  # what cannot be pickled raises errors of any class
        return False
    return True


def _counts(timestamp: Timestamp) -> dict[str, int]:
    """Return the counters that all groups have in common.

    Its clocks are each group's own, and so is the position within the epoch: with another one,
    Composer would fetch every batch before it.
    """
    return {
        name: value
        for name, value in timestamp.state_dict().items()
        if isinstance(value, int) and name != "epoch" and not name.endswith("_in_epoch")
    }


def short_bar_format(bar_format: str) -> str:
    """Make room in the format of Composer's progress bar, which has 48 columns of bar and spaces.

    Args:
        bar_format: Composer's, or what this returned: then it is returned as it is.
    """
    return re.sub(" {2,}", " ", bar_format).replace("{bar:25}", "{bar:10}")


def name_the_node() -> None:
    """Set NODE_RANK, so that Composer can load a checkpoint under torchrun.

    Composer's own launcher sets NODE_RANK; torchrun sets the same number as GROUP_RANK.
    """
    if "GROUP_RANK" in os.environ:
        os.environ.setdefault("NODE_RANK", os.environ["GROUP_RANK"])


def check_parallelism(state: State) -> None:
    """Reject kinds of parallelism that are not supported.

    Raises:
        ValueError: The job uses FSDP1, whose parameters are views of flat ones.
    """
    if state.fsdp_config_version == 1:
        raise ValueError(
            "FSDP version 1: DiLoCo needs parameters that keep their names and shapes. Use FSDP2: "
            "set FSDP_VERSION=2 in the environment, or pass an FSDP2Config as "
            "parallelism_config['fsdp']"
        )


def check_algorithms(state: State) -> None:
    """Reject an algorithm that puts other weights into the model in the middle of a run.

    Raises:
        ValueError: The job has Composer's SWA.
    """
    if any(isinstance(each, SWA) for each in state.algorithms):
        raise ValueError(
            "SWA puts its average into the model, which the outer optimizer would take for "
            "training: use EMA, which averages the global weights, or train without SWA and "
            "average the saved models (docs/checkpoints.md)"
        )


def check_loads(state: State) -> None:
    """Reject callbacks that load a checkpoint too late.

    The global parameters are those that the model holds when a fit starts. Weights that are loaded
    later would count as this group's training, and whether a checkpoint has a DiLoCo state is
    checked at AFTER_LOAD.

    Raises:
        ValueError: A ``LoadCheckpoint`` loads at a later event.
    """
    for callback in state.callbacks:
        if not isinstance(callback, LoadCheckpoint):
            continue
        in_time = [Event.INIT, Event.BEFORE_LOAD]
        if callback.load_weights_only:
            in_time.append(Event.AFTER_LOAD)
        if callback.event not in in_time:
            what = "" if callback.load_weights_only else " with load_weights_only=False"
            raise ValueError(
                f"LoadCheckpoint({callback.load_path!r}, event={callback.event.name}){what}: this "
                "is too late for DiLoCo, whose global parameters are those at the start of the "
                "fit. Use event=BEFORE_LOAD, its default, or the Trainer's load_path"
            )


def metrics_of(state: State) -> dict[str, float]:
    """Return the metrics of the last evaluation, those that are one number.

    Args:
        state: Composer's state, right after an evaluation. The metrics then keep what they have
            computed, so that nothing is communicated between ranks.
    """
    values = {}
    for label, metrics in state.eval_metrics.items():
        prefix = "" if label == "eval" else f"{label}/"
        for name, metric in metrics.items():
            value = metric.compute() if metric.update_called else None
            if isinstance(value, Tensor) and value.numel() == 1:
                values[prefix + name] = float(value)
    return values
