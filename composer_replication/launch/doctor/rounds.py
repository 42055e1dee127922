"""Checks of a planned round: which share of it trains, and whether the timeouts leave it time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from composer_replication.diloco.averaging.wire_sizes import BYTES_PER_PARAMETER
from composer_replication.diloco.settings import DiLoCoSettings
from composer_replication.launch.doctor.results import Result, failure, ok, skipped, warning
from composer_replication.plan import PlannedRun
from composer_replication.replica.lighthouse import STRAGGLER_TIMEOUT_S
from composer_replication.replica.options import ReplicaOptions

UTILISATION = 0.95
LEAST_UTILISATION = 0.8
"""Below this share of training a round is warned of."""
STATE_BYTES = 8
"""What a joiner fetches for each parameter: it and its outer momentum, in fp32."""
SPREAD = 0.1
"""By how much the times of equal groups for a round differ, as a share; more on mixed machines."""


def planned(
    settings: DiLoCoSettings, params: float | None, groups: int, **known: Any
) -> PlannedRun | None:
    """The run, as far as it is known; None without a number of parameters.

    Args:
        settings: Of the run.
        params: Number of trainable parameters.
        groups: Number of replica groups.
        **known: Further arguments of ``PlannedRun``: what has been measured.
    """
    if params is None:
        return None
    arguments = {"link_bits_per_s": 1e9, "step_s": 1.0, **known}  # of no effect on memory
    return PlannedRun(
        params=int(params),
        groups=max(2, groups),
        sync_every=settings.sync_every,
        num_fragments=settings.fragment_count,
        fragment_sync_delay=settings.fragment_sync_delay,
        wire_format=settings.wire_format,
        **arguments,
    )


def check_round(run: PlannedRun | None) -> Iterator[Result]:
    """How much of a round trains over the measured link, and how long it had to be.

    Args:
        run: With the measured link; None if something of it is not known.
    """
    if run is None:
        yield skipped(
            "round", "give --params and --step-time, and a coordinator to measure the link to"
        )
        return
    share, least = run.sync_every * run.step_s / run.round_s, run.shortest_round(UTILISATION)
    value = f"a round of {run.sync_every} steps trains {share:.0%} of its time"
    if share < LEAST_UTILISATION:
        smaller = [name for name, size in BYTES_PER_PARAMETER.items()
                   if size < BYTES_PER_PARAMETER[run.wire_format]]  # fmt: skip
        formats = f", or wire_format: {' or '.join(smaller)}" if smaller else ""
        fix = f"sync_every: {least} for {UTILISATION:.0%}{formats} (composer-replication plan)"
        yield warning("round", value, fix)
    elif share < UTILISATION:
        yield ok("round", f"{value}; {least} for {UTILISATION:.0%}")
    else:
        yield ok("round", value)


def check_step_times(
    options: ReplicaOptions, sync_every: int, step_s: float | None
) -> Iterator[Result]:
    """The timeouts leave a group the time for its inner steps."""
    if step_s is None:
        yield skipped("timeouts", "give --step-time, the seconds of an inner step")
        return
    hang_s = options.hang_timeout_s
    if hang_s is not None and hang_s < 2 * step_s:
        yield failure(
            "hang_timeout_s",
            f"{hang_s:g} s, and an inner step takes {step_s:g} s: a healthy group would end itself",
            f"at least {10 * step_s:g}",
        )
    round_s = sync_every * step_s
    value = f"a round of {sync_every} steps lasts {round_s:g} s"
    if options.quorum_timeout < round_s:
        yield warning(
            "quorum_timeout",
            f"{options.quorum_timeout:g} s, and {value}: who waits for a group that is a round "
            "late asks again and again",
            f"quorum_timeout: at least {2 * round_s:g}, in all groups",
        )
    elif SPREAD * round_s > STRAGGLER_TIMEOUT_S:
        yield warning(
            "straggler timeout",
            f"{value}, of which {SPREAD:.0%} are more than the {STRAGGLER_TIMEOUT_S:g} s that a "
            "sync waits for a late group: groups of unequal speed would sync without each other",
            f"a smaller sync_every, or launch --straggler-timeout-s {2 * SPREAD * round_s:.0f}",
        )
    else:
        yield ok("timeouts", f"{value}, quorum_timeout is {options.quorum_timeout:g} s")


def check_transfer_times(
    options: ReplicaOptions, settings: DiLoCoSettings, run: PlannedRun | None
) -> Iterator[Result]:
    """``timeout`` leaves a message of a sync, and a joiner's download, their time on the link.

    Args:
        options: Of the group.
        settings: Of the run.
        run: With the measured link; None if something of it is not known.
    """
    if run is None:
        return
    bucket = min(settings.bucket_cap_mb * 2**18 * BYTES_PER_PARAMETER[run.wire_format],
                 run.params * BYTES_PER_PARAMETER[run.wire_format] / run.num_fragments)  # fmt: skip
    message_s = 2 * 8 * bucket / run.link_bits_per_s
    if message_s > options.timeout:
        yield failure(
            "timeout",
            f"{options.timeout:g} s, and a message of {bucket / 2**20:.3g} MiB takes "
            f"{message_s:.0f} s on this link: no sync would commit",
            f"timeout: {2 * message_s:.0f} in all groups, or a smaller bucket_cap_mb",
        )
    heal_s = 8 * STATE_BYTES * run.params / run.link_bits_per_s
    if heal_s > options.timeout / 4 and heal_s > run.round_s:
        yield warning(
            "joining",
            f"a joiner fetches {STATE_BYTES} bytes a parameter in {heal_s:.0f} s on this link, "
            f"longer than a round ({run.round_s:.0f} s) and a quarter of timeout="
            f"{options.timeout:g}: it could never catch up",
            f"timeout: {4.5 * heal_s:.0f} in all groups, or a larger sync_every",
        )
    else:
        yield ok("joining", f"a joiner fetches the state in {heal_s:.1f} s on this link")
