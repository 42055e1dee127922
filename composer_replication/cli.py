"""The command ``composer-replication``. It imports heavy packages after checking the input."""

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
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from composer_replication import __version__, named_extra
from composer_replication.coordinator import HEARTBEAT_TIMEOUT_S
from composer_replication.diloco.settings import DiLoCoSettings
from composer_replication.launch.errors import INTERRUPTED, report_error
from composer_replication.launch.lossy_output import ignore_output_errors
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
    """Which weights ``export`` writes."""

    GLOBAL = "global"
    EMA = "ema"


Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="key=value",
        help="Values to replace, such as max_duration=100ba callbacks.diloco.sync_every=50.",
        show_default=False,
    ),
]
Replicas = Annotated[int, typer.Option(help="Number of replica groups.", min=1)]
Nproc = Annotated[int, typer.Option(help="Number of processes in each group.", min=1)]
MaxRestarts = Annotated[
    int,
    typer.Option(help="Most restarts in a row of a group that dies.", min=0),
]
StragglerTimeout = Annotated[
    float,
    typer.Option(
        help="Longest wait of a sync for a group that is alive and late, in seconds.", min=0.1
    ),
]
HangTimeout = Annotated[
    float,
    typer.Option(help="A group ends itself after this time without progress, in seconds.", min=1.0),
]


def main() -> NoReturn:
    """Run the command, and print errors with a known cause as one paragraph without a traceback."""
    quiet_others()
    status = 0
    try:
        app()
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


@app.command()
def train(config: Config, overrides: Overrides = None) -> None:
    """Train one replica group. `composer -n N` and torchrun can start it with several processes."""
    ignore_output_errors()
    checked = load_config(config, overrides or [])
    check_reachable(checked)
    # Imported here: it takes seconds, and errors in the input should be printed before.
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
    """Train in several replica groups on this machine, with a coordinator and a lighthouse."""
    from composer_replication.launch.launcher import launch_groups as run

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


@app.command("coordinator")
@dataclass(kw_only=True)
class CoordinatorCommand:
    """Serve the run's settings to all replica groups, and host the lighthouse."""

    config: Config
    overrides: Overrides = None
    bind: Annotated[
        str,
        typer.Option(
            help="Address of the service. The lighthouse uses the next port.", metavar="ADDR:PORT"
        ),
    ] = "[::]:29512"
    state_dir: Annotated[Path, typer.Option(help="Folder of the run's state.")] = Path(
        "coordinator"
    )
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the run's secret, or with two while it is being replaced. Default: "
            "the environment's secret, else one is generated in the state folder."
        ),
    ] = None
    no_token: Annotated[
        bool,
        typer.Option(
            "--no-token", help="Use no token: everybody who reaches the service can change the run."
        ),
    ] = False
    replicas: Annotated[
        int | None, typer.Option(help="Number of groups that a cold start waits for.", min=1)
    ] = None
    hostname: Annotated[
        str | None,
        typer.Option(help="Name of this machine for the groups. Default: its host name."),
    ] = None
    tls_dir: Annotated[
        str | None,
        typer.Option(help="Folder of certificates for TLS. Default: the environment's."),
    ] = None
    heartbeat_timeout_s: Annotated[
        float, typer.Option(help="A group counts as dead after this silence, in seconds.", min=0.1)
    ] = HEARTBEAT_TIMEOUT_S
    ssl_certfile: Annotated[
        Path | None,
        typer.Option(help="Certificate (PEM) with which to serve HTTPS.", show_default=False),
    ] = None
    ssl_keyfile: Annotated[
        Path | None, typer.Option(help="Private key of the certificate.", show_default=False)
    ] = None
    ssl_ca_certs: Annotated[
        Path | None,
        typer.Option(help="Reject clients without a certificate of this CA.", show_default=False),
    ] = None

    def __post_init__(self) -> None:  # typer calls a command with its options
        from composer_replication.coordinator.http_service import TlsFiles
        from composer_replication.launch.coordinator_command import (
            choose_tokens,
            coordinate,
            tls_dir_of,
        )

        checked = load_config(self.config, self.overrides or [])
        coordinate(
            checked,
            self.config,
            bind=self.bind,
            state_dir=self.state_dir,
            tokens=choose_tokens(self.token_file, self.no_token, self.bind, self.state_dir),
            replicas=self.replicas,
            hostname=self.hostname,
            heartbeat_timeout_s=self.heartbeat_timeout_s,
            tls=TlsFiles.of(self.ssl_certfile, self.ssl_keyfile, self.ssl_ca_certs)
            or TlsFiles.of_folder(self.tls_dir or tls_dir_of(checked)),
        )


@app.command()
def chaos(
    config: Config,
    overrides: Overrides = None,
    replicas: Replicas = 3,
    nproc: Nproc = 1,
    faults_per_minute: Annotated[
        float, typer.Option(help="Mean number of faults in a minute.", min=0.1)
    ] = 2.0,
    duration: Annotated[
        float, typer.Option(help="Length of the training, in seconds.", min=10.0)
    ] = 600.0,
    seed: Annotated[int, typer.Option(help="Seed of kinds, victims and times of the faults.")] = 0,
    kinds: Annotated[
        str | None,
        typer.Option(help="Kinds of faults, such as kill,hang (docs/chaos.md). Default: all."),
    ] = None,
) -> None:
    """Train as `launch` does while injecting faults, check the run, and report what they cost."""
    from composer_replication.launch.chaos import run_chaos as run

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
    """Train the same replica groups in one process, to try DiLoCo without a network."""
    from composer_replication.callback.run_folder import CONFIG, make_run_folder
    from composer_replication.launch.display import Display
    from composer_replication.launch.launcher import finish

    checked = load_config(config, overrides or [])
    run_dir = make_run_folder(checked, config)
    checked["run_dir"] = str(run_dir)
    save_config(checked, run_dir / CONFIG)
    began = time.monotonic()
    from composer_replication.training.trainer import simulate_replicas

    # The display shows one table for all groups. Their log lines would be drawn over it.
    logging.getLogger("composer_replication").setLevel(logging.WARNING)
    with Display(Console(), run_dir, replicas).follow():
        simulate_replicas(checked, replicas)
    raise typer.Exit(finish(run_dir, range(replicas), time.monotonic() - began, restarts={}))


@app.command()
def export(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="File or folder of a checkpoint.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT.safetensors", help="File to write.")],
    weights: Annotated[
        Weights | None,
        typer.Option(
            help="Weights to write, if the run has EMA. Default: those of the checkpoint's model."
        ),
    ] = None,
) -> None:
    """Write the weights of a checkpoint as safetensors: the global ones, or those of EMA."""
    from composer_replication.callback.export import export as run

    exported = run(checkpoint, out, weights)
    step = exported["outer_step"]
    when = f" after outer step {step}" if step is not None else ""
    name = {
        "global": "the global weights",
        "ema": "EMA's weights",
        "local": "this group's own weights",
        "unknown": "the weights",
    }[exported["weights"]]
    print(
        f"{out}: {name}{when}, {exported['num_tensors']} tensors, "
        f"{exported['num_parameters']:,} parameters"
    )
    if exported["weights"] == "local":
        print("They are SWA's average, which becomes the global weights at the next sync.")
    if exported["weights"] == "unknown":
        print("The checkpoint has no DiLoCo state, so these may be local or global weights.")


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
        Path, typer.Argument(metavar="DIR", help="Folder to write, which becomes a tls_dir.")
    ],
    host: Annotated[
        list[str] | None,
        typer.Option(
            help="Name or address for which browsers accept the certificate; can be repeated."
        ),
    ] = None,
    authority: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the run's authority, created if missing. Default: DIR-authority."
        ),
    ] = None,
    days: Annotated[int, typer.Option(help="Validity of the certificate in days.", min=1)] = 365,
) -> None:
    """Create a certificate for TLS within a run, and the run's authority if there is none."""
    from composer_replication.replica.certificates import CA_KEY, make_certificates

    folder = folder.absolute()
    authority = authority or folder.with_name(f"{folder.name}-authority")
    until, is_new = make_certificates(folder, host or [], authority, days)
    print(f"{folder}: certificate valid until {until:%Y-%m-%d}")
    print(f"Set COMPOSER_REPLICATION_TLS_DIR={folder} for a group, launch and the coordinator.")
    print(
        f"{authority / CA_KEY} {'is new' if is_new else 'has signed it'}: whoever has this key can "
        "join the run, so keep it on one machine."
    )


@app.command()
def report(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Folder of a run.")],
) -> None:
    """Draw loss.png from what a run wrote, and print its result."""
    from composer_replication.launch.report import write_report
    from composer_replication.launch.run_record import describe, read_run

    picture = write_report(run_dir)
    for name, value in [*describe(read_run(run_dir)), ("picture", str(picture))]:
        print(f"{name:<24}{value}")


def quiet_others() -> None:
    """Log from INFO on in this package and from WARNING on elsewhere; show only our warnings."""
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
