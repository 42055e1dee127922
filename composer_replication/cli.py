"""The command ``composer-replication``. It imports heavy packages after checking the input."""

from __future__ import annotations

import gc
import logging
import os
import sys
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from composer_replication import __version__
from composer_replication.config_file import ConfigError
from composer_replication.launch.commands import (
    Config,
    Count,
    JobOptions,
    Overrides,
    TakesCommand,
    command,
)
from composer_replication.launch.coordinator_command import CoordinatorCommand
from composer_replication.launch.display import Display, LiveRun
from composer_replication.launch.doctor import doctor
from composer_replication.launch.job import job_of
from composer_replication.launch.launcher import (
    LaunchOptions,
    begin_run,
    launch_groups,
    run_group,
)
from composer_replication.launch.outcome import finish, print_rows, write_page
from composer_replication.launch.output import (
    BAD_INPUT,
    FAILED,
    INTERRUPTED,
    ignore_output_errors,
    let_rank_0_end_first,
    print_error,
    quiet_others,
    report_error,
)
from composer_replication.launch.run_record import describe, open_run
from composer_replication.plan import (
    HOST_S_PER_PARAM,
    PlannedRun,
    parse_link,
    parse_params,
    plan_table,
)
from composer_replication.settings import DEFAULTS, DiLoCoSettings
from composer_replication.training import load_config, simulate_replicas
from composer_replication.training import train as train_group
from composer_replication.util.lazy import named_extra

app = typer.Typer(
    help="DiLoCo for MosaicML Composer and Hugging Face's Trainer: several replica groups train "
    "one model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> NoReturn:
    """Run the command, and print errors with a known cause as one paragraph without a traceback."""
    ignore_output_errors()
    quiet_others()
    try:
        ended = app(prog_name="composer-replication", standalone_mode=False)
        status = ended if isinstance(ended, int) else 0
    except SystemExit as error:  # typer's ends, and Composer's for SIGTERM and Ctrl-C
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except KeyboardInterrupt:
        status = INTERRUPTED
    except ModuleNotFoundError as error:
        command = " ".join(["composer-replication", *sys.argv[1:2]])
        status = report_error(named_extra(command, error))
    except Exception as error:
        status = report_error(error)
    if status == 0:
        sys.exit(0)
    sys.stdout.flush()
    sys.stderr.flush()
    if status == BAD_INPUT:
        let_rank_0_end_first()
    # Not sys.exit: Python would join torchft's threads, which may wait for a quorum for an hour.
    # The Trainer has been closed by now, so that its atexit handlers have nothing left to do.
    os._exit(status)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        print(f"composer-replication {__version__}")
        raise typer.Exit


@command(app)
def train(config: Config, overrides: Overrides = None) -> int:
    """Train one replica group. `composer -n N` and torchrun can start it with several processes.

    Args:
        config: A YAML file.
        overrides: Values to replace, such as max_duration=100ba callbacks.diloco.sync_every=50.
    """
    checked = load_config(config, overrides or [])
    # Imported here: it takes seconds, and errors in the input should be printed before. The garbage
    # collector would take one of these seconds, to find a million objects in use.
    gc.disable()
    import_module("composer_replication.callback.callback")
    gc.freeze()
    gc.enable()
    if failure := train_group(checked)["failure"]:
        print_error(f"Error: {failure}")
        return FAILED
    return 0


@command(app, "launch", cls=TakesCommand)
@dataclass(kw_only=True)
class LaunchCommand(LaunchOptions, JobOptions):
    """Train in several replica groups on this machine, with a coordinator and a lighthouse.

    They train a config, or run the command after --, whose script has the callback.
    """

    def run(self) -> int:
        """Train until all groups have ended, and return the exit status."""
        return launch_groups(job_of(self), self)


command(app, "run", cls=TakesCommand)(run_group)
command(app, "coordinator")(CoordinatorCommand)


@command(app)
def simulate(config: Config, overrides: Overrides = None, replicas: Count = 2) -> int:
    """Train the same replica groups in one process, to try DiLoCo without a network.

    Args:
        config: A YAML file.
        overrides: Values to replace, such as max_duration=100ba callbacks.diloco.sync_every=50.
        replicas: Number of replica groups.
    """
    run_dir, checked = begin_run(load_config(config, overrides or []), config, config)
    began = time.monotonic()
    # The display shows one table for all groups. Their log lines would be drawn over it.
    logging.getLogger("composer_replication").setLevel(logging.WARNING)
    with Display(Console(highlight=False), LiveRun(run_dir, range(replicas))):
        simulate_replicas(checked, replicas)
    return finish(run_dir, range(replicas), time.monotonic() - began, restarts={})


@command(app)
def plan(
    params: str | None = None,
    step_time: float | None = None,
    groups: int | None = None,
    link: str = "1Gbit",
    rtt: float = 0.0,
    host_s_per_param: float = HOST_S_PER_PARAM,
    sync_every: int = DEFAULTS["sync_every"],
    num_fragments: int = 2,
    fragment_sync_delay: int = 5,
    share: float = 0.95,
) -> None:
    """Compute what rounds of a run take and send, and which link they need.

    Args:
        params: Trainable parameters: 7B or 124M.
        step_time: Seconds of an inner step, measured in one group alone.
        groups: Number of replica groups.
        link: Rate at which a group can send to the others, e.g. 100Mbit.
        rtt: Seconds of a round trip between two groups.
        host_s_per_param: Seconds a parameter that a sync takes: benchmarks/sync.py.
        sync_every: Inner steps in a round (H).
        num_fragments: Fragments of the streaming run.
        fragment_sync_delay: Inner steps that overlap a sync of the streaming run (tau).
        share: Share of the time in inner steps, for the last two columns.
    """
    if params is None or step_time is None or groups is None:
        given = f"--params {params} --step-time {step_time} --groups {groups}"
        raise ConfigError(
            f"{given}: all three are needed, e.g. composer-replication plan --params 7B "
            "--step-time 1.5 --groups 4 --link 100Mbit"
        )
    planned = PlannedRun(
        params=parse_params(params),
        step_s=step_time,
        groups=groups,
        link_bits_per_s=parse_link(link),
        rtt_s=rtt,
        host_s_per_param=host_s_per_param,
        settings=DiLoCoSettings(
            sync_every=sync_every,
            num_fragments=num_fragments,
            fragment_sync_delay=fragment_sync_delay,
        ),
    )
    Console(highlight=False).print(plan_table(planned, share))


command(app)(doctor)


@command(app)
def report(run_dir: Annotated[Path, typer.Argument()]) -> None:
    """Write report.html from what a run wrote, and print its result.

    Args:
        run_dir: Folder of a run.
    """
    run = open_run(run_dir)
    print_rows([*describe(run), ("page", str(write_page(run)))])
    if run.failure:
        print_error(f"Error: {run.failure}")
