"""The command ``doctor``: checks a machine, its way to the others and a config, before a run.

A check is a generator of rows: a state, a name, and a text that says what was found and, if
something is wrong, what to do. An error with which a run would end becomes a row too.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer
from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Table

from composer_replication import __version__
from composer_replication.arguments import in_yaml
from composer_replication.config_file import (
    TARGET,
    diloco_section,
    read_diloco,
    read_unresolved,
    with_values,
)
from composer_replication.launch.commands import OptionalConfig, Overrides
from composer_replication.launch.output import FAILED
from composer_replication.options import (
    NO_TOKEN,
    TOKEN,
    ReplicaEnv,
    ReplicaOptions,
    unread_variables,
)
from composer_replication.replica import addresses, lighthouse
from composer_replication.training import load_config, save_folder_of

OK, WARNING, ERROR = "ok", "warning", "error"
STYLES = {OK: "green", WARNING: "yellow", ERROR: "bold red"}
Row = tuple[str, str, str]

CONNECT_TIMEOUT_S = 3.0
LITTLE_SPACE_GB = 1.0
SHORT_TOKEN = 16
PACKAGES = ("composer-replication", "torch", "torchvision", "torchft-nightly", "mosaicml")
VARIABLES = re.compile("COMPOSER_REPL|TORCH|GLOO|NCCL|REPLICA_GROUP|NUM_REP|FSDP|RUST_LOG|CUDA_")
"""How the names of variables begin that this package, torchft, torch or Composer read."""


@dataclass
class Job:
    """The configuration with which a group would start. The checks fill it, in their order.

    Attributes:
        path: The config's file, if one is named.
        overrides: Values to replace in it.
        given: Options of the command line.
        options: Of the group.
        config: The config; empty for a file of settings alone.
        section: Its DiLoCo settings and options.
        is_ours: Whether ``train`` and ``launch`` can train it.
    """

    path: Path | None
    overrides: Sequence[str]
    given: Mapping[str, Any]
    options: ReplicaOptions = ReplicaOptions()
    config: Mapping[str, Any] = field(default_factory=dict)
    section: Mapping[str, Any] = field(default_factory=dict)
    is_ours: bool = False

    @property
    def is_beyond_this_machine(self) -> bool:
        """Whether the coordinator, or else the lighthouse, has no loopback address."""
        address = self.options.coordinator_addr or self.options.lighthouse_addr
        return address is not None and not addresses.is_loopback(urlsplit(address).hostname or "")


def doctor(
    config: OptionalConfig = None,
    overrides: Overrides = None,
    coordinator: Annotated[str | None, typer.Option(metavar="URL")] = None,
    hostname: str | None = None,
) -> int:
    """Find what is wrong on this machine, on the way to the coordinator, or in a config.

    Args:
        config: A YAML file with callbacks.diloco.
        overrides: Values to replace, such as max_duration=100ba callbacks.diloco.sync_every=50.
        coordinator: The run's coordinator, if nothing else names it.
        hostname: Name under which the others reach this machine.

    Returns:
        The exit status: 0, or 1 if there is an error.
    """
    given = {"coordinator_addr": coordinator, "hostname": hostname}
    job = Job(config, overrides or [], given)
    table = Table("", "check", "found, and what to do")
    status = 0
    for check in CHECKS:
        for state, name, text in _tried(check.__name__.removeprefix("check_"), check, job):
            table.add_row(f"[{STYLES[state]}]{state}", name, text.replace("[", r"\["))
            if state == ERROR:
                status = FAILED
    Console(highlight=False).print(table)
    return status


def _tried(name: str, check: Callable[..., Iterable[Row] | None], *given: object) -> Iterator[Row]:
    try:
        yield from check(*given) or ()
    except (ValueError, OSError, RuntimeError) as error:  # torch raises the last one, of a device
        yield ERROR, name, str(error)


def check_versions(_: Job) -> Iterator[Row]:
    """What is installed, and whether it goes together."""
    found: dict[str, str] = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    listed = ", ".join(f"{name} {number}" for name, number in found.items())
    yield OK, "versions", f"{listed}, Python {platform.python_version()} on {platform.platform()}"
    if "mosaicml" not in found:
        yield WARNING, "versions", "no Composer: run pip install '.[composer]' in a clone"
    for owner in found:
        for needed in map(Requirement, requires(owner) or ()):
            own = found.get(needed.name)
            is_asked = needed.marker is None or needed.marker.evaluate({"extra": "composer"})
            if own and is_asked and not needed.specifier.contains(own, prereleases=True):
                state = WARNING if owner == "mosaicml" else ERROR  # it runs beside a newer torch
                pin = f"{needed.name}{needed.specifier}"
                text = f"{owner} needs {pin}, not {own}: pip install '{pin}' (docs/newer-torch.md)"
                yield state, "versions", text


def check_settings(job: Job) -> Iterator[Row]:
    """The config: one of ours, another program's with ``callbacks.diloco``, or settings alone."""
    if job.path is None:
        return
    # Another program may have resolvers of its own for ${...}.
    values = read_unresolved(job.path, job.overrides)
    job.section = values
    if "callbacks" in values:
        job.is_ours = TARGET in (values.get("model") or ())
        job.config = load_config(job.path, job.overrides) if job.is_ours else values
        job.section = diloco_section(job.config)
    settings, job.options = read_diloco(job.section)
    listed = ", ".join(f"{name}={in_yaml(value)}" for name, value in job.section.items())
    yield OK, "settings", f"{job.path}: {listed or 'no callbacks.diloco, so the defaults'}"
    length = re.fullmatch(r"(\d+)ba", str(job.config.get("max_duration")))
    batches = int(length[1]) if length else None
    warnings = settings.overlap_warning, settings.momentum_warning(batches)
    for text in filter(None, warnings):
        yield WARNING, "settings", text


def check_variables(job: Job) -> Iterator[Row]:
    """Show the variables except the token; the command line's options have precedence."""
    named = sorted(filter(VARIABLES.match, os.environ))
    unread = unread_variables(named)
    hidden = {TOKEN: "(set)"} | dict.fromkeys(unread, "(nothing reads it)")  # it may be a token too
    shown = ", ".join(f"{name}={hidden.get(name, os.environ[name])}" for name in named)
    state = WARNING if unread else OK
    yield state, "variables", shown or "none of those that are read here is set"
    given = {key: value for key, value in job.given.items() if value}
    job.options = replace(job.options, **given).with_environment()


def check_gpu(job: Job) -> Iterator[Row]:
    """Each device can be used, and groups can average over the backend that a run would use."""
    import torch
    import torch.distributed as dist

    backends = [name for name in ("gloo", "nccl", "nccl2") if dist.is_backend_available(name)]
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(count):
        (torch.ones(1, device=f"cuda:{index}") + 1).item()  # a torch without code for it raises
    devices = ", ".join(map(torch.cuda.get_device_name, range(count))) or "none"
    yield OK, "gpu", f"{devices}; backends of this torch: {', '.join(backends)}"
    if "nccl2" in backends:
        default = "1" if torch.__version__ >= "2.15" else "0"
        own = "nccl2" if os.environ.get("TORCH_DIST_USE_NCCL2", default) != "0" else "nccl-legacy"
        fix = "TORCH_DIST_USE_NCCL2=0 goes back; between groups it is always nccl-legacy"
        yield OK, "nccl", f"of a group's ranks: {own}; torch 2.15's default is nccl2, {fix}"
    if not count and any(Path("/dev").glob("nvidia[0-9]*")):
        yield ERROR, "gpu", f"torch {torch.__version__} cannot use this machine's: run nvidia-smi"
    if job.options.backend == "nccl" and (not count or "nccl" not in backends):
        yield ERROR, "gpu", "backend='nccl' cannot be used here: set callbacks.diloco.backend: gloo"


def check_folders(job: Job) -> Iterator[Row]:
    """The run's folder and that of the checkpoints can be written, and have space."""
    run_dir = job.options.run_dir or job.config.get("run_dir")
    saved = job.config.get("save_folder")
    if job.is_ours:
        run_dir = run_dir or "runs"  # where `launch` makes a folder for the run
        in_run = with_values(job.config, run_dir=run_dir)
        saved = save_folder_of(in_run, job.options.replica_id or 0)
    for key, folder in (("run_dir", run_dir), ("save_folder", saved)):
        if folder is None or "://" in folder:
            continue
        path = Path(folder.partition("{")[0].rstrip("$")).absolute()
        while not path.exists():
            path = path.parent
        try:
            tempfile.TemporaryFile(dir=path).close()
        except OSError:
            yield ERROR, key, f"{folder} cannot be written: set {key} to another folder"
            continue
        free = shutil.disk_usage(path).free / 1e9
        state, fix = (OK, "") if free > LITTLE_SPACE_GB else (WARNING, ": make some room")
        yield state, key, f"{folder} can be written, {free:.3g} GB are free{fix}"


def check_coordinator(job: Job) -> Iterator[Row]:
    """The coordinator answers, accepts the token, and has the config's settings."""
    if (address := job.options.coordinator_addr) is None:
        return
    from composer_replication.coordinator.client import CoordinatorClient

    with closing(CoordinatorClient(address, ReplicaEnv.from_env().token)) as client:
        asking = client.with_limits(retry_s=0.0, timeout_s=15.0)
        run = asking.info()
        yield OK, "coordinator", f"{address} answers: settings from {run.settings_source}"
        # Of this package and of torchft.
        here = __version__, version("torchft-nightly")
        there = run.version, run.torchft
        if here != there:
            yield ERROR, "coordinator", f"versions {here} here, {there} there: install the same"
        named = job.options.lighthouse_addr
        job.options = replace(job.options, lighthouse_addr=named or run.lighthouse_addr)
        yield from _tried("settings", run.check_settings, job.section, address)


def check_lighthouse(job: Job) -> Iterator[Row]:
    """The lighthouse can be reached, and so can each group that is in training."""
    address = job.options.lighthouse_addr
    if address is None:
        if not (job.options.is_alone or job.options.coordinator_addr):
            yield WARNING, "lighthouse", "none is named: set COMPOSER_REPLICATION_COORDINATOR"
        return
    lighthouse.check_lighthouse(address, CONNECT_TIMEOUT_S)
    yield OK, "lighthouse", f"{address} can be reached"
    status = lighthouse.read_status(address)
    for member in status.members:
        text = f"replica group {member.replica_id.partition(':')[0]} at {member.manager_addr}"
        if addresses.does_answer(member.manager_addr, CONNECT_TIMEOUT_S):
            yield OK, "peers", f"{text} can be reached"
        elif member.replica_id in status.alive:
            text += f" cannot be reached from here: there, {addresses.HOSTNAME_FIX}"
            yield ERROR, "peers", text


def check_name(job: Job) -> Iterator[Row]:
    """The name that this machine advertises leads to it, from other machines too."""
    given, address = job.options.hostname, job.options.lighthouse_addr
    if job.options.is_alone:
        return
    name = given or addresses.default_hostname(address or "") or socket.gethostname()
    own = addresses.own_address(name)
    with addresses.listen(given) as listening:
        port = listening.getsockname()[1]
        addresses.check_hostname(name, port, address or "http://127.0.0.1")
    way = addresses.address_towards(job.options.coordinator_addr or address or "")
    state, fix = WARNING, addresses.HOSTNAME_FIX
    if addresses.is_loopback(name):
        state = OK if address and not job.is_beyond_this_machine else WARNING
        text = f"{name} is loopback, enough on one machine; beyond, {fix}"
    elif own is None:
        text = f"{name} is no address of this machine (NAT?): {fix}"
    elif way not in (None, own) and job.is_beyond_this_machine:
        text = f"{name} is {own}, and the way out begins at {way}: {fix}"
    else:
        must = "" if name == own else "; the other machines have to find it under this name"
        state, text = OK, f"{name} is {own} on {addresses.interface_of(name)}{must}"
    yield state, "name", text


def check_token(job: Job) -> Iterator[Row]:
    """The run's secret is set where other machines can reach the run, and cannot be guessed."""
    env, fix = ReplicaEnv.from_env(), f"export {TOKEN}=$(openssl rand -hex 16), equal in all groups"
    if any(len(token) < SHORT_TOKEN for token in env.tokens):
        yield WARNING, "token", f"it has fewer than {SHORT_TOKEN} characters: {fix}"
    elif not env.tokens and job.is_beyond_this_machine:
        text = f"none{f', as {NO_TOKEN} says' if env.no_token else ''}: anybody can join; {fix}"
        yield WARNING if env.no_token else ERROR, "token", text


CHECKS = (
    check_versions, check_settings, check_variables, check_gpu, check_folders, check_coordinator,
    check_lighthouse, check_name, check_token,
)  # fmt: skip
"""In their order: later ones use what earlier ones have found. Each is named ``check_...``."""
