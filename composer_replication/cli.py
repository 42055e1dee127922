"""The command ``composer-replication``. What is heavy is imported once the input is known good."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
import warnings
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from composer_replication import __version__
from composer_replication.coordinator import HEARTBEAT_TIMEOUT_S
from composer_replication.diloco.arguments import takes
from composer_replication.diloco.settings import DiLoCoSettings
from composer_replication.launch.errors import INTERRUPTED, report_error
from composer_replication.launch.lossy_output import lose_what_cannot_be_printed
from composer_replication.launch.supervision import HANG_TIMEOUT_S, MAX_RESTARTS
from composer_replication.plan import (
    HOST_S_PER_PARAM,
    PlannedRun,
    parse_link,
    plan_as_json,
    print_plan,
)
from composer_replication.replica.lighthouse import STRAGGLER_TIMEOUT_S
from composer_replication.training.config import ConfigError, load_config, save_config
from composer_replication.training.preflight import check_reachable

app = typer.Typer(
    help="DiLoCo for MosaicML Composer: several replica groups train one model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Weights(StrEnum):
    """What an export may choose."""

    GLOBAL = "global"
    EMA = "ema"


Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="key=value",
        help="Replace values of it, e.g. max_duration=100ba callbacks.diloco.sync_every=50.",
        show_default=False,
    ),
]
Replicas = Annotated[int, typer.Option(help="Replica groups.", min=1)]
Nproc = Annotated[int, typer.Option(help="Processes in each group.", min=1)]
MaxRestarts = Annotated[
    int,
    typer.Option(help="How often in a row a group that dies is started again.", min=0),
]
StragglerTimeout = Annotated[
    float,
    typer.Option(help="Seconds that a sync waits for a group that is alive.", min=0.1),
]
HangTimeout = Annotated[
    float,
    typer.Option(help="Seconds without any progress after which a group ends itself.", min=1.0),
]


def main() -> NoReturn:
    """Run the command; errors of which we know the cause are one paragraph, not a traceback."""
    quiet_others()
    status = 0
    try:
        app()
    except SystemExit as error:  # typer's ends, and Composer's for SIGTERM and Ctrl-C
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except KeyboardInterrupt:
        status = INTERRUPTED
    except Exception as error:
        status = report_error(error)
    if status == 0:
        sys.exit(0)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: Python would wait for torchft's threads, and those for a quorum, for up to an
    # hour. A Trainer has closed itself by now; its atexit handlers have nothing left to do.
    os._exit(status)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print(f"composer-replication {__version__}")
        raise typer.Exit


@app.command()
def train(config: Config, overrides: Overrides = None) -> None:
    """Train one replica group; also under `composer -n N` or torchrun."""
    lose_what_cannot_be_printed()
    checked = load_config(config, overrides or [])
    check_reachable(checked)
    # Here: importing Composer takes seconds, and what is wrong should be said before.
    from composer_replication.training.trainer import train as run

    run(checked)


@app.command()
def launch(
    config: Config,
    overrides: Overrides = None,
    replicas: Replicas = 2,
    nproc: Nproc = 1,
    max_restarts: MaxRestarts = MAX_RESTARTS,
    straggler_timeout_s: StragglerTimeout = STRAGGLER_TIMEOUT_S,
    hang_timeout_s: HangTimeout = HANG_TIMEOUT_S,
) -> None:
    """Train in several replica groups on this machine, with a lighthouse of its own."""
    from composer_replication.launch.launcher import launch as run

    checked = load_config(config, overrides or [])
    status = run(
        checked,
        config,
        replicas=replicas,
        nproc=nproc,
        max_restarts=max_restarts,
        straggler_timeout_s=straggler_timeout_s,
        hang_timeout_s=hang_timeout_s,
    )
    raise typer.Exit(status)


@dataclass(frozen=True)
class CoordinatorOptions:
    """What the command ``coordinator`` takes."""

    config: Config
    overrides: Overrides = None
    bind: Annotated[
        str, typer.Option(help="Where to listen; the lighthouse: next port.", metavar="ADDR:PORT")
    ] = "[::]:29512"
    state_dir: Annotated[Path, typer.Option(help="Where the state is kept.")] = Path("coordinator")
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="A file with the run's secret; two lines while it is replaced. Else: the "
            "environment's, else one is made in the state folder."
        ),
    ] = None
    no_token: Annotated[
        bool, typer.Option("--no-token", help="Make none: whoever reaches it can change the run.")
    ] = False
    replicas: Annotated[
        int | None, typer.Option(help="Replica groups that a cold start waits for.", min=1)
    ] = None
    hostname: Annotated[
        str | None, typer.Option(help="How groups reach this machine; else its host name.")
    ] = None
    tls_dir: Annotated[
        str | None,
        typer.Option(help="The folder of its certificates, for TLS. Else: the environment's."),
    ] = None
    heartbeat_timeout_s: Annotated[
        float, typer.Option(help="Seconds of silence after which a group is dead.", min=0.1)
    ] = HEARTBEAT_TIMEOUT_S
    ssl_certfile: Annotated[
        Path | None, typer.Option(help="A certificate (PEM): serve HTTPS.", show_default=False)
    ] = None
    ssl_keyfile: Annotated[
        Path | None, typer.Option(help="Its private key.", show_default=False)
    ] = None
    ssl_ca_certs: Annotated[
        Path | None,
        typer.Option(help="Refuse clients without a certificate of this CA.", show_default=False),
    ] = None


@app.command(help="Say to all replica groups what the settings are, and bring the lighthouse.")
@takes(CoordinatorOptions)
def coordinator(**options: Any) -> None:
    """Serve until SIGTERM or Ctrl-C."""
    from composer_replication.coordinator.http_service import TlsFiles
    from composer_replication.launch.coordinator_command import (
        choose_tokens,
        coordinate,
        tls_dir_of,
    )

    given = CoordinatorOptions(**options)
    checked = load_config(given.config, given.overrides or [])
    coordinate(
        checked,
        given.config,
        bind=given.bind,
        state_dir=given.state_dir,
        tokens=choose_tokens(given.token_file, given.no_token, given.bind, given.state_dir),
        replicas=given.replicas,
        hostname=given.hostname,
        heartbeat_timeout_s=given.heartbeat_timeout_s,
        tls=TlsFiles.of(given.ssl_certfile, given.ssl_keyfile, given.ssl_ca_certs)
        or TlsFiles.of_folder(given.tls_dir or tls_dir_of(checked)),
    )


@app.command()
def chaos(
    config: Config,
    overrides: Overrides = None,
    replicas: Replicas = 3,
    nproc: Nproc = 1,
    faults_per_minute: Annotated[float, typer.Option(help="How often.", min=0.1)] = 2.0,
    duration: Annotated[float, typer.Option(help="Seconds of training.", min=10.0)] = 600.0,
    seed: Annotated[int, typer.Option(help="Of what strikes whom, and when.")] = 0,
    kinds: Annotated[
        str | None,
        typer.Option(help="Which faults, e.g. kill,hang; docs/chaos.md lists them. None: all."),
    ] = None,
) -> None:
    """Train as launch does under faults of all kinds, check it meanwhile, and tell the cost."""
    from composer_replication.launch.chaos import chaos as run

    checked = load_config(config, overrides or [])
    status = run(
        checked,
        config,
        replicas=replicas,
        nproc=nproc,
        faults_per_minute=faults_per_minute,
        duration_s=duration,
        seed=seed,
        kinds=None if kinds is None else kinds.split(","),
    )
    raise typer.Exit(status)


@app.command()
def simulate(config: Config, overrides: Overrides = None, replicas: Replicas = 2) -> None:
    """Train the same groups in one process, to try DiLoCo before renting anything."""
    from composer_replication.callback.run_folder import CONFIG, make_run_folder
    from composer_replication.launch.display import Display
    from composer_replication.launch.launcher import finish

    checked = load_config(config, overrides or [])
    run_dir = make_run_folder(checked, config)
    checked["run_dir"] = str(run_dir)
    save_config(checked, run_dir / CONFIG)
    began = time.monotonic()
    from composer_replication.training.trainer import simulate_replicas

    # One table for all of them, instead of every group's line for every sync.
    logging.getLogger("composer_replication").setLevel(logging.WARNING)
    with Display(Console(), run_dir, replicas).follow():
        simulate_replicas(checked, replicas)
    raise typer.Exit(finish(run_dir, range(replicas), time.monotonic() - began, restarts={}))


@app.command()
def export(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="A checkpoint's file or folder.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT.safetensors", help="Where to write it.")],
    weights: Annotated[
        Weights | None,
        typer.Option(help="Whose: of a run with EMA either. Without it: the checkpoint's model."),
    ] = None,
) -> None:
    """Write the weights of a checkpoint alone, as safetensors: the global ones, or EMA's."""
    from composer_replication.callback.export import export as run

    told = run(checkpoint, out, weights)
    when = f" after outer step {told['outer_step']}" if told["outer_step"] is not None else ""
    whose = {
        "global": "the global weights",
        "ema": "EMA's weights",
        "local": "this group's own weights",
        "unknown": "the weights",
    }[told["weights"]]
    print(
        f"{out}: {whose}{when}, {told['num_tensors']} tensors, "
        f"{told['num_parameters']:,} parameters"
    )
    if told["weights"] == "local":
        print("They are to become the global ones at the next sync, as SWA's average.")
    if told["weights"] == "unknown":
        print("The checkpoint has no DiLoCo state, so these may be any weights.")


@app.command("plan")
@dataclass(kw_only=True)
class PlanCommand:
    """Compute what rounds of a run would take, send and hold, before anything is rented."""

    params: Annotated[float, typer.Option(help="Trainable parameters, e.g. 7e9.")]
    link: Annotated[
        str,
        typer.Option(
            help="The rate at which a group can send to the others, e.g. 1Gbit, 100Mbit or 250MB/s."
        ),
    ]
    step_time: Annotated[
        float, typer.Option(help="Seconds of an inner step, measured in one group alone.")
    ]
    groups: Annotated[int, typer.Option(help="Number of replica groups.")]
    round_trip: Annotated[
        float, typer.Option(help="Seconds of a round trip between two groups.")
    ] = 0.0
    host_s_per_param: Annotated[
        float,
        typer.Option(
            help="Seconds a parameter that a sync takes on the host. Measure it with "
            "benchmarks/sync.py; the default is from 2 CPU cores."
        ),
    ] = HOST_S_PER_PARAM
    ranks: Annotated[
        int, typer.Option(help="Processes in each group that hold the same model, as under DDP.")
    ] = 1
    sync_every: Annotated[int, typer.Option(help="Inner steps in a round (H).")] = (
        DiLoCoSettings.sync_every
    )
    num_fragments: Annotated[
        int, typer.Option(help="Fragments of the streaming run. 1 without a delay is vanilla.")
    ] = 2
    fragment_sync_delay: Annotated[
        int, typer.Option(help="Inner steps that overlap a sync of the streaming run (tau).")
    ] = 5
    utilisation: Annotated[
        float,
        typer.Option(help="The share of the time to train. The table has the shortest round."),
    ] = 0.95
    json_out: Annotated[
        Path | None, typer.Option("--json", metavar="OUT", help="Write the numbers to this file.")
    ] = None

    def __post_init__(self) -> None:  # typer calls a command with its options
        if not math.isfinite(self.params):
            raise ConfigError(f"params={self.params}: write how many there are, e.g. 7e9")
        run = PlannedRun(
            params=int(self.params),
            link_bits_per_s=parse_link(self.link),
            step_s=self.step_time,
            groups=self.groups,
            round_trip_s=self.round_trip,
            host_s_per_param=self.host_s_per_param,
            ranks=self.ranks,
            sync_every=self.sync_every,
            num_fragments=self.num_fragments,
            fragment_sync_delay=self.fragment_sync_delay,
        )
        print_plan(run, self.utilisation, Console())
        if self.json_out is not None:
            planned = plan_as_json(run, self.utilisation)
            self.json_out.write_text(json.dumps(planned, indent=2) + "\n")


@app.command()
def certificates(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Where to write them: a group's tls_dir.")
    ],
    host: Annotated[
        list[str] | None,
        typer.Option(help="A name or address for which a browser accepts it; several times."),
    ] = None,
    authority: Annotated[
        Path | None,
        typer.Option(help="The run's authority, made if it is not there. Else: DIR-authority."),
    ] = None,
    days: Annotated[int, typer.Option(help="How long the certificate is valid.", min=1)] = 365,
) -> None:
    """Make a certificate for TLS within a run, and the run's authority if there is none."""
    from composer_replication.replica.certificates import CA_KEY, make_certificates

    folder = folder.absolute()
    authority = authority or folder.with_name(f"{folder.name}-authority")
    until, is_new = make_certificates(folder, host or [], authority, days)
    print(f"{folder}: certificate valid until {until:%Y-%m-%d}")
    print(f"Set COMPOSER_REPLICATION_TLS_DIR={folder} for a group, launch and the coordinator.")
    print(
        f"{authority / CA_KEY} {'is new' if is_new else 'has signed it'}: it makes members of this "
        "run, so keep it on one machine."
    )


@app.command()
def report(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run's folder.")],
) -> None:
    """Draw loss.png from what a run wrote, and say what came out."""
    from composer_replication.launch.report import write_report
    from composer_replication.launch.run_record import describe, read_run

    picture = write_report(run_dir)
    for name, value in [*describe(read_run(run_dir)), ("picture", str(picture))]:
        print(f"{name:<24}{value}")


def quiet_others() -> None:
    """Our log lines from INFO on, everybody else's from WARNING on; no warnings but ours."""
    is_first = os.environ.get("RANK", "0") == "0"
    logging.basicConfig(
        level=logging.WARNING,
        format="%(asctime)s %(levelname).1s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
    )
    ours = logging.getLogger("composer_replication")
    ours.setLevel(logging.INFO if is_first else logging.WARNING)
    warnings.filterwarnings("ignore")
    warnings.filterwarnings("default", module=r"composer_replication(\.|$)")
