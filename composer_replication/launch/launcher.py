"""Runs n replica groups, a coordinator and a lighthouse on this machine, and ends all of them."""

from __future__ import annotations

import logging
import math
import secrets
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from composer_replication.coordinator.server import Coordinator
from composer_replication.group.run_folder import CONFIG, make_run_folder
from composer_replication.launch.coordinator_command import (
    TOKEN_FILE,
    write_token_file,
)
from composer_replication.launch.display import Display, print_settings
from composer_replication.launch.job import (
    Job,
    check_launch,
    environment,
    group_command,
    group_environment,
)
from composer_replication.launch.live_run import LiveRun
from composer_replication.launch.outcome import (
    conclude,
    explain_failures,
    explain_interrupt,
    keep_page,
)
from composer_replication.launch.output import BAD_INPUT, FAILED, INTERRUPTED
from composer_replication.launch.page_record import RunRecord
from composer_replication.launch.processes import Interrupts, ReplicaGroups
from composer_replication.launch.run_record import Run
from composer_replication.launch.supervision import (
    MAX_RESTARTS,
    SUPERVISED_HANG_TIMEOUT_S,
    Supervisor,
)
from composer_replication.options import TOKEN, ReplicaEnv
from composer_replication.replica.lighthouse import STRAGGLER_TIMEOUT_S
from composer_replication.training.config import diloco_section, read_diloco, save_config

START_RETRIES = 2
"""How often a command that fails before it has joined is started again.

Jobs that start at the same moment on one machine may disturb each other: StreamingDataset chooses
names for its shared memory that another job may take first.
"""

_LOCAL = "127.0.0.1"
"""The address at which the coordinator listens: all groups are on this machine."""

HEARTBEAT_TIMEOUT_MS = 2_000
"""Milliseconds of silence after which the lighthouse drops a group.

It is short, since no network on one machine loses packets.
"""


def launch_groups(
    job: Job,
    *,
    replicas: int,
    max_restarts: int = MAX_RESTARTS,
    straggler_timeout_s: float = STRAGGLER_TIMEOUT_S,
    hang_timeout_s: float = SUPERVISED_HANG_TIMEOUT_S,
    on_poll: Callable[[Supervisor], object] | None = None,
    make_coordinator: Callable[..., Any] = Coordinator,
) -> int:
    """Train in several replica groups on this machine, and print the result.

    Args:
        job: What the groups run.
        replicas: Number of replica groups.
        max_restarts: How often in a row a group that dies is started again.
        straggler_timeout_s: Seconds that a sync waits for a group that is alive and has not joined
            it. The sync then goes on without the group, which later loads the others' state and
            loses its inner steps since its last sync.
        hang_timeout_s: Seconds without any progress after which a group ends itself, to be started
            again. The callback's ``hang_timeout_s`` has precedence.
        on_poll: Is called several times a second while the groups run.
        make_coordinator: ``Coordinator``, or a replacement for it.

    Returns:
        An exit status: 0, 1 if the run failed, 2 if a group has rejected its input, 130 if the run
        was interrupted.

    Raises:
        ConfigError: The job cannot be launched. Nothing has been started or written.
        ValueError: The run's folder cannot be used. Nothing has been started.
    """
    check_launch(job, replicas)
    run_dir = make_run_folder(job.config, job.name)
    config = job.config | {"run_dir": str(run_dir)}
    save_config(config, run_dir / CONFIG)
    console = Console(highlight=False)
    console.print(f"Run folder: {run_dir}", markup=False, soft_wrap=True)
    settings, group = read_diloco(diloco_section(config))
    print_settings(console, settings, job.source)
    began = time.monotonic()
    tokens_of_env = ReplicaEnv.from_env().tokens
    tokens = tokens_of_env or (secrets.token_hex(16),)
    coordinator = make_coordinator(
        settings,
        job.source,
        num_replicas=replicas,
        min_replicas=group.min_replica_size,
        digest_every=group.digest_every,
        state_dir=run_dir,
        bind=f"{_LOCAL}:0",
        tokens=tokens,
        straggler_timeout_s=straggler_timeout_s,
        lighthouse_heartbeat_ms=HEARTBEAT_TIMEOUT_MS,
        all_start=True,
        model_section=config.get("model"),
        record=RunRecord(run_dir),
    )
    # The display shows the groups. Log lines of the coordinator would be drawn over it.
    logging.getLogger("composer_replication.coordinator").setLevel(logging.WARNING)
    page = f"Page: {coordinator.address}/" + token_hint(tokens[0], bool(tokens_of_env), run_dir)
    console.print(page, markup=False, soft_wrap=True)
    with ExitStack() as opened:
        interrupts = opened.enter_context(Interrupts())
        opened.callback(coordinator.shutdown)
        groups = opened.enter_context(ReplicaGroups(run_dir, interrupts))

        def start(replica_id: int) -> None:
            # Without this a restarted group would be rejected as a duplicate until its
            # predecessor's heartbeats have timed out.
            coordinator.group_has_ended(replica_id)
            environ = environment(replica_id, replicas, job.nproc, coordinator)
            environ |= group_environment(replica_id, run_dir, hang_timeout_s)
            environ |= {TOKEN: ",".join(tokens), **job.environ}
            command = group_command(job.command, job.nproc, run_dir, replica_id)
            groups.start(replica_id, command, environ)

        supervisor = Supervisor(
            groups,
            Run(run_dir, range(replicas)),
            start,
            range(replicas),
            max_restarts,
            start_retries=min(START_RETRIES, max_restarts) if job.is_own else 0,
            start_timeout_s=group.start_timeout_s if job.is_own else math.inf,
        )
        for replica_id in range(replicas):
            start(replica_id)
        display = Display(console, LiveRun(run_dir, range(replicas)))

        def show() -> None:
            for line in supervisor.new_ends():
                display.say(line)
            if on_poll is not None:
                on_poll(supervisor)
            if text := supervisor.late_start():
                console.print(text, style="red", markup=False, soft_wrap=True)

        with display:
            failed = supervisor.watch(show)
        explain_failures(run_dir, failed, supervisor)
        if interrupts.count:
            console.print("Stopping the groups; Ctrl-C again kills them at once")
    if failed or interrupts.count:
        keep_page(run_dir)
    if failed:
        return BAD_INPUT if BAD_INPUT in failed.values() else FAILED
    if interrupts.count:
        explain_interrupt(run_dir, sys.argv[1:])
        return INTERRUPTED
    return conclude(run_dir, supervisor, time.monotonic() - began)


def token_hint(token: str, is_from_env: bool, run_dir: Path) -> str:
    """What a user needs to open the page. A token that would end up in a log is not printed."""
    if is_from_env:
        return f"  (it asks for {TOKEN})"
    if sys.stdout.isatty():
        return f"#token={token}"
    write_token_file(run_dir / TOKEN_FILE, token)
    return f"  (it asks for the token in {run_dir / TOKEN_FILE})"
