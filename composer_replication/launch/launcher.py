"""Runs n replica groups, a coordinator and a lighthouse on this machine, and ends all of them."""

from __future__ import annotations

import logging
import secrets
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from composer_replication.callback.run_folder import (
    CONFIG,
    METRICS,
    RESULT,
    log_path,
    make_run_folder,
)
from composer_replication.callback.words import format_duration, plural
from composer_replication.coordinator.http_service import TlsFiles
from composer_replication.coordinator.server import Coordinator
from composer_replication.diloco.arguments import pick
from composer_replication.launch.auto_numbers import with_numbers
from composer_replication.launch.coordinator_command import settings_of, tls_dir_of
from composer_replication.launch.display import Display
from composer_replication.launch.errors import BAD_INPUT, FAILED, INTERRUPTED
from composer_replication.launch.group_process import environment, place
from composer_replication.launch.job import Job, check_launch
from composer_replication.launch.processes import Interrupts, ReplicaGroups
from composer_replication.launch.report import write_report
from composer_replication.launch.run_record import (
    describe,
    last_lines,
    read_run,
    write_summary,
)
from composer_replication.launch.run_token import TOKEN_FILE, write_token_file
from composer_replication.launch.start_watch import StartWatch
from composer_replication.launch.supervision import (
    HANG_TIMEOUT_S,
    MAX_RESTARTS,
    FaultInjector,
    Supervisor,
)
from composer_replication.replica.lighthouse import STRAGGLER_TIMEOUT_S
from composer_replication.replica.options import TOKEN, ReplicaEnv, ReplicaOptions
from composer_replication.training.config import diloco_section, save_config

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
    hang_timeout_s: float = HANG_TIMEOUT_S,
    fault_injector: FaultInjector | None = None,
    make_coordinator: Callable[..., Any] = Coordinator,
) -> int:
    """Train in several replica groups on this machine, and print the result.

    Args:
        job: What the groups run.
        replicas: Number of replica groups.
        max_restarts: How often in a row a group that dies is started again.
        straggler_timeout_s: Seconds that a sync waits for a group that is alive and has not joined
            it. The sync then goes on without the group, which later loads the others' state and
            loses its own inner steps.
        hang_timeout_s: Seconds without any progress after which a group ends itself, to be started
            again. The callback's ``hang_timeout_s`` has precedence.
        fault_injector: Injects faults. None: nobody does.
        make_coordinator: ``Coordinator``, or a replacement for it.

    Returns:
        An exit status: 0, 1 if the run failed, 2 if a group has rejected its input, 130 if the run
        was interrupted.

    Raises:
        ConfigError: The job cannot be launched. Nothing has been started or written.
        ValueError: The run's folder cannot be used. Nothing has been started.
    """
    check_launch(job, replicas)
    tls = TlsFiles.of_folder(tls_dir_of(job.config))
    run_dir = make_run_folder(job.config, job.name)
    config, auto = with_numbers(job.config | {"run_dir": str(run_dir)}, run_dir, replicas)
    save_config(config, run_dir / CONFIG)
    console = Console(highlight=False)
    console.print(f"Run folder: {run_dir}", markup=False, soft_wrap=True)
    if auto:
        console.print(auto, markup=False, soft_wrap=True)
    say = partial(console.print, style="red", markup=False, soft_wrap=True)
    began = time.monotonic()
    tokens_of_env = ReplicaEnv.from_env().tokens
    tokens = tokens_of_env or (secrets.token_hex(16),)
    group = pick(ReplicaOptions, diloco_section(config))
    coordinator = make_coordinator(
        settings_of(config),
        f"{job.source}; {auto}" if auto else job.source,
        num_replicas=replicas,
        min_replicas=group.min_replica_size,
        state_dir=run_dir,
        bind=f"{_LOCAL}:0",
        tls=tls,
        tokens=tokens,
        straggler_timeout_s=straggler_timeout_s,
        lighthouse_heartbeat_ms=HEARTBEAT_TIMEOUT_MS,
        all_start=True,
        model_section=config.get("model"),
    )
    # The display shows the groups. Log lines of the coordinator would be drawn over it.
    logging.getLogger("composer_replication.coordinator").setLevel(logging.WARNING)
    logging.getLogger("composer_replication.replica.audit").setLevel(logging.WARNING)
    page = f"Page: {coordinator.address}/" + _token_hint(tokens[0], bool(tokens_of_env), run_dir)
    console.print(page, markup=False, soft_wrap=True)
    with Interrupts() as interrupts:
        try:
            with ReplicaGroups(run_dir, interrupts) as groups:

                def start(replica_id: int) -> None:
                    # Without this a restarted group would be rejected as a duplicate until its
                    # predecessor's heartbeats have timed out.
                    coordinator.group_has_ended(replica_id)
                    environ = environment(replica_id, replicas, job.nproc, coordinator)
                    environ |= place(replica_id, run_dir, hang_timeout_s)
                    environ |= {TOKEN: ",".join(tokens), **job.environ}
                    groups.start(replica_id, job.command(run_dir, replica_id), environ)

                ids = range(replicas)
                supervisor = Supervisor(
                    groups,
                    run_dir,
                    start,
                    ids,
                    max_restarts,
                    interrupts,
                    start_retries=min(job.start_retries, max_restarts),
                )
                for replica_id in ids:
                    start(replica_id)
                seconds_left = None if fault_injector is None else fault_injector.seconds_left
                display = Display(console, run_dir, replicas, seconds_left)
                starts = StartWatch(run_dir, ids, group.start_timeout_s, job.advice, say)
                failed = _watch(supervisor, display, starts, fault_injector)
                for replica_id, status in failed.items():
                    _explain_failure(run_dir, replica_id, status)
                if interrupts.count:
                    console.print("Stopping the groups; Ctrl-C again kills them at once")
        finally:
            coordinator.shutdown()
    if failed or interrupts.count:
        is_bad_input = BAD_INPUT in failed.values()
        return BAD_INPUT if is_bad_input else FAILED if failed else INTERRUPTED
    given_up = [id for id, record in supervisor.records.items() if record.is_given_up]
    if given_up:
        _print_error(
            f"Replica groups {', '.join(map(str, given_up))} died while the others finished, and "
            "could not rejoin in time. The others' global parameters are complete"
        )
    left_out = {id: r.deaths[-1] for id, r in supervisor.records.items() if r.is_left_out}
    finished = [id for id in range(replicas) if id not in given_up and id not in left_out]
    seconds = time.monotonic() - began
    status = finish(run_dir, finished, seconds, supervisor.restarts, job.advice)
    for replica_id, exit_status in left_out.items():
        _explain_failure(run_dir, replica_id, exit_status, "the others went on without it")
    return FAILED if left_out else status


def _token_hint(token: str, is_from_env: bool, run_dir: Path) -> str:
    """What a user needs to open the page. A token that would end up in a log is not printed."""
    if is_from_env:
        return f"  (it asks for {TOKEN})"
    if sys.stdout.isatty():
        return f"#token={token}"
    write_token_file(run_dir / TOKEN_FILE, token)
    return f"  (it asks for the token in {run_dir / TOKEN_FILE})"


def _watch(
    supervisor: Supervisor,
    display: Display,
    starts: StartWatch,
    fault_injector: FaultInjector | None = None,
) -> dict[int, int]:
    """Show the groups, and inject faults, until all groups have ended.

    Returns:
        The exit statuses of the groups that failed for good.
    """

    def show(statuses: dict[int, int | None], is_last: bool) -> None:
        display.refresh(statuses, is_last=is_last)
        starts.look()
        if fault_injector is not None and not is_last:
            fault_injector(supervisor)

    with display:
        return supervisor.watch(show)


def finish(
    run_dir: Path,
    finished: Sequence[int],
    seconds: float,
    restarts: Mapping[str, int],
    advice: str = "",
) -> int:
    """Write the summary and the picture, and print the result.

    Args:
        run_dir: The run's folder.
        finished: Ids of the groups that trained to the end.
        seconds: Duration of the run.
        restarts: How often each group was started again, by its id.
        advice: What is probably wrong with a group that has no result. Empty: nobody knows.

    Returns:
        An exit status: 1 if a result is missing or the groups ended with different parameters, else
        0.
    """
    run = read_run(run_dir)
    missing = [id for id in finished if str(id) not in run.results]
    if missing:
        _print_error(f"{log_path(run_dir, missing[0]).parent}/{RESULT} is missing")
        _explain_failure(run_dir, missing[0], 0)
        if advice:
            _print_error(advice)
        return FAILED
    write_summary(run, restarts)
    try:
        picture = write_report(run_dir)
    except ValueError as error:
        _print_error(str(error))
        return FAILED
    rows = describe(run)
    if any(restarts.values()):
        each = ", ".join(f"group {id} {plural(n, 'time')}" for id, n in restarts.items() if n)
        rows.append(("started again", each))
    rows += [("time", format_duration(seconds)), ("picture", str(picture))]
    for name, value in [*rows, ("all files", str(run_dir))]:
        print(f"{name:<24}{value}")
    if len(set(run.digests.values())) > 1:
        _print_error(
            "The groups ended with different global parameters, so their last syncs differ. "
            f"Compare diloco/num_participants at the end of replica_<id>/{METRICS}"
        )
        return FAILED
    return 0


def _explain_failure(
    run_dir: Path, replica_id: int, status: int, consequence: str = "the run is stopped"
) -> None:
    end = f"ended with exit status {status}"
    if status < 0:
        end = f"was ended by {signal.Signals(-status).name}"
    path = log_path(run_dir, replica_id)
    _print_error(f"Replica group {replica_id} {end}, so {consequence}. {path} ends with:")
    _print_error("\n".join(f"  {line}" for line in last_lines(path)) or "  (nothing)")


def _print_error(text: str) -> None:
    Console(stderr=True).print(text, style="red", markup=False, highlight=False, soft_wrap=True)
