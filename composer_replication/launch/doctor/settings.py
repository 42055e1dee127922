"""Checks of ``callbacks.diloco`` and of what a config says beside it: known traps of settings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from composer_replication.diloco.arguments import pick
from composer_replication.diloco.outer_table import TABLE, resolve
from composer_replication.diloco.settings import AUTO, DiLoCoSettings
from composer_replication.launch.doctor.results import (
    Result,
    failure,
    from_error,
    ok,
    skipped,
    warning,
)
from composer_replication.replica.options import ReplicaOptions
from composer_replication.training.config import ConfigError, check_keys

KEYS = [field.name for kind in (DiLoCoSettings, ReplicaOptions) for field in fields(kind)]
"""What ``callbacks.diloco`` may hold."""

FEWEST_ROUNDS = 60
"""Six times the ten outer steps that a momentum of 0.9 remembers."""
FEWEST_STEPS = 10
"""The shortest round that is proposed for more outer steps."""
SHORT_ROUND, LARGE_MOMENTUM = min(row.sync_every for row in TABLE), 0.9
"""The table has a momentum of 0.9 from this round length on. With shorter rounds the study of this
package has 0.5 (docs/learning.md), and published runs have 0.5 or none."""


def read_settings(
    section: Mapping[str, Any],
) -> tuple[DiLoCoSettings | None, ReplicaOptions | None, list[Result]]:
    """Check the section as a run would.

    Args:
        section: ``callbacks.diloco``.

    Returns:
        The settings and the options, each None if it cannot be used, and failures.
    """
    failures = []
    try:
        check_keys(section, KEYS, "callbacks.diloco")
    except ConfigError as error:
        failures.append(from_error("settings", error))
    made: list[Any] = []
    for kind in (DiLoCoSettings, ReplicaOptions):
        try:
            made.append(pick(kind, section))
        except (TypeError, ValueError) as error:
            made.append(None)
            failures.append(from_error("settings", error))
    return made[0], made[1], failures


def check_outer(settings: DiLoCoSettings, groups: int | None) -> Iterator[Result]:
    """The outer optimizer's numbers, as far as the settings tell.

    Args:
        settings: With ``auto`` or numbers.
        groups: How many replica groups the run begins with; None if that is not known.
    """
    if groups is None and AUTO in (settings.outer_lr, settings.outer_momentum):
        yield skipped("outer optimizer", "give --replicas, by which auto becomes numbers")
        return
    settings, auto = resolve(settings, groups)
    momentum = settings.outer_momentum
    assert momentum != AUTO, "resolve has put numbers there"
    value = f"outer_lr {settings.outer_lr:g}, outer_momentum {momentum:g}"
    if settings.sync_every < SHORT_ROUND and momentum >= LARGE_MOMENTUM:
        yield warning(
            "outer optimizer",
            f"{value} with rounds of {settings.sync_every} inner steps: much momentum for rounds "
            "that short",
            f"sync_every: {SHORT_ROUND} or more, or outer_momentum: 0.5 (docs/outer-settings.md)",
        )
    else:
        yield ok("outer optimizer", auto or value)


def check_overlap(settings: DiLoCoSettings) -> Iterator[Result]:
    """What travels in a round, and that no inner step is thrown away by it."""
    if settings.overlap_warning:
        value, _, fix = settings.overlap_warning.partition(": ")
        yield warning("syncs", value, fix)
    else:
        delay, count = settings.fragment_sync_delay, settings.fragment_count
        overlapped = f", overlapped with {delay} inner steps" if delay else ""
        yield ok(
            "syncs",
            f"{settings.sync_every} inner steps, {count} fragment{'s' if count > 1 else ''} in "
            f"{settings.wire_format}{overlapped}",
        )


def check_duration(duration: object, settings: DiLoCoSettings) -> Iterator[Result]:
    """The run has enough rounds, and ends with one.

    Args:
        duration: ``max_duration``; None if the config has none.
        settings: The run's settings.
    """
    batches = re.fullmatch(r"(\d+)(ba)?", str(duration))
    if batches is None:
        what = "has no max_duration" if duration is None else f"says {duration}"
        yield skipped("rounds", f"the config {what}; in batches (400ba) rounds can be counted")
        return
    sync_every, short = settings.sync_every, (settings.warmup_outer_steps or 0)
    warmup = short * settings.at(0).steps_between_syncs if short else 0
    rounds, rest = divmod(max(0, int(batches[1]) - warmup), sync_every)
    value = f"max_duration={duration} is {rounds} rounds of {sync_every} inner steps"
    if warmup:
        value += f" after a warm-up of {warmup}"
    if rounds + short // settings.fragment_count < FEWEST_ROUNDS:
        shorter = int(batches[1]) // FEWEST_ROUNDS
        instead = f", or sync_every: {shorter} or less" if shorter >= FEWEST_STEPS else ""
        yield warning(
            "rounds",
            f"{value}: fewer than {FEWEST_ROUNDS} outer steps leave the outer optimizer no time",
            f"max_duration: {FEWEST_ROUNDS * sync_every}ba or more{instead}",
        )
    else:
        yield ok("rounds", value)
    if rest:
        yield warning(
            "last round",
            f"{value} and {rest}: the last checkpoint is from before the final sync",
            f"max_duration: {warmup + (rounds + 1) * sync_every}ba",
        )


def check_saving(config: Mapping[str, Any], has_default_folder: bool) -> Iterator[Result]:
    """Checkpoints that are asked for are saved somewhere.

    Args:
        config: The config.
        has_default_folder: Whether they have a folder in any case, as in a config of ours.
    """
    if has_default_folder:
        return
    fix = "save_folder: checkpoints/{run_name}, one in each group"
    interval, resumes = config.get("save_interval"), config.get("autoresume")
    if resumes and not config.get("run_name"):
        yield failure(
            "autoresume", "true without run_name, which Composer rejects", "run_name: group-0, ..."
        )
    if config.get("save_folder"):
        if not resumes and not config.get("save_overwrite"):
            yield warning(
                "save_folder",
                f"{config['save_folder']}, without autoresume: a group that is started again ends "
                "with FileExistsError",
                "autoresume: true",
            )
    elif resumes:
        yield failure("autoresume", "true without save_folder, which Composer rejects", fix)
    elif interval is not None:
        yield failure(
            "save_interval", f"{interval} without save_folder: Composer saves nothing", fix
        )
