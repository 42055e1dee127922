"""The command ``coordinator``: a coordinator for the groups of any job, and its token."""

from __future__ import annotations

import logging
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Annotated

import typer

from composer_replication.config_file import ConfigError, diloco_section, load_settings, read_diloco
from composer_replication.coordinator import HEARTBEAT_TIMEOUT_S
from composer_replication.coordinator.page import PAGE_DATA, write_report_html
from composer_replication.launch.commands import OptionalCount, Set
from composer_replication.launch.output import FAILED, print_error
from composer_replication.launch.processes import POLL_S, Interrupts
from composer_replication.options import COORDINATOR, TOKEN, ReplicaEnv, read_tokens
from composer_replication.replica.addresses import is_loopback
from composer_replication.util.fence import fence
from composer_replication.util.json_files import read_json

log = logging.getLogger(__name__)

TOKEN_FILE = "token"
"""Name of a generated token's file, in a coordinator's state folder or a launch's run folder."""


@dataclass(kw_only=True)
class CoordinatorCommand:
    """Serve the run's settings to all replica groups, and host the lighthouse.

    It ends with SIGTERM or Ctrl-C.

    Args:
        file: A YAML file: a config of ours or of llm-foundry, of which callbacks.diloco is read, or
            one with settings alone. Default: the settings' defaults.
        set: A setting in place of the file's, such as sync_every=50; can be repeated.
        bind: Address of the service. The lighthouse uses the next port.
        state_dir: Folder of the run's state.
        new_settings: Serve other settings than before from the state folder. All groups have to be
            stopped, and resume with the new ones.
        token_file: File with the run's secret, or with two while it is being replaced. Default: the
            environment's secret, else one is generated in the state folder, unless --bind is a
            loopback address.
        no_token: Use no token: everybody who reaches the service can change the run.
        replicas: Number of groups that a cold start waits for. Default: num_replicas of the
            settings, else 1.
        hostname: Name of this machine for the groups. Default: the address of --bind; if that is
            every interface, the name under which a group has reached the service.
        heartbeat_timeout_s: A group counts as dead after this silence, in seconds.
        ssl_certfile: Certificate (PEM) with which to serve HTTPS.
        ssl_keyfile: Private key of the certificate.

    Raises:
        ConfigError: The settings or an option cannot be used.
        ValueError: Another process serves the state folder, or the folder belongs to another run.
        StorageError: The state cannot be read or written.
    """

    file: Annotated[Path | None, typer.Argument()] = None
    set: Set = None
    bind: Annotated[str, typer.Option(metavar="ADDR:PORT")] = "[::]:29512"
    state_dir: Path = Path("coordinator")
    new_settings: bool = False
    token_file: Path | None = None
    no_token: bool = False
    replicas: OptionalCount = None
    hostname: str | None = None
    heartbeat_timeout_s: Annotated[float, typer.Option(min=0.1)] = HEARTBEAT_TIMEOUT_S
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None

    def run(self) -> int:
        """Serve until the process is asked to end.

        Returns:
            The exit status: 1 if the service has ended before.
        """
        config, source, left_out = load_settings(self.file, self.set or [])
        tokens = choose_tokens(self.token_file, self.no_token, self.bind, self.state_dir)
        settings, group = read_diloco(diloco_section(config))
        count = self.replicas or group.num_awaited
        from composer_replication.coordinator.server import Coordinator

        with Interrupts() as interrupts:
            try:
                coordinator = Coordinator(
                    settings,
                    source,
                    num_replicas=count,
                    min_replica_size=group.min_replica_size,
                    digest_every=group.digest_every,
                    state_dir=self.state_dir,
                    bind=self.bind,
                    hostname=self.hostname,
                    tokens=tokens,
                    heartbeat_timeout_s=self.heartbeat_timeout_s,
                    model_section=config.get("model"),
                    ssl_certfile=self.ssl_certfile,
                    ssl_keyfile=self.ssl_keyfile,
                    all_start=self.new_settings,
                )
            except OSError as error:  # the address or the folder cannot be used
                raise ConfigError(str(error)) from error
            interrupts.callback(coordinator.shutdown)
            address = coordinator.address
            print(f"{COORDINATOR}={address}  (for {count} replica groups)")
            print(f"page: {address}/")
            state = self.state_dir.absolute()
            print(f"lighthouse: {coordinator.lighthouse_addr}    state: {state}")
            print(f"settings: {settings}  (from {source})")
            if left_out:
                names = ", ".join(left_out)
                print(f"left to the groups: {names}  (callbacks.diloco of {self.file})")
            if not tokens:
                who = "everybody who reaches this address"
                print(f"No token: {who} can change the run. Set {TOKEN}.")
            while not interrupts.count and coordinator.is_serving:
                time.sleep(POLL_S)
        shown = read_json(self.state_dir / PAGE_DATA)
        if shown:
            with fence("the page of the run"):
                report = {"written": shown["time"], "files": []}
                page = write_report_html(self.state_dir, shown | {"report": report})
                print(f"page: {page.absolute()}")
        if interrupts.count:
            return 0
        print_error("Error: the coordinator's service has ended by itself: see the log")
        return FAILED


def choose_tokens(
    token_file: Path | None,
    no_token: bool,
    bind: str,
    state_dir: Path,
) -> tuple[str, ...]:
    """Choose the tokens that a coordinator accepts.

    They come from ``token_file``, else from the environment. If neither has one and other machines
    can reach the service, a token is made and kept in the state folder.

    Args:
        token_file: A file with one or two tokens.
        no_token: Whether to go without a token even if other machines can reach the service.
        bind: The address at which the service listens.
        state_dir: The state folder.

    Returns:
        The tokens; empty if none is needed.

    Raises:
        ConfigError: The file is missing or empty, or ``no_token`` is set and there is a token.
        ValueError: A token is malformed.
    """
    tokens = read_token_file(token_file) if token_file else ReplicaEnv.from_env().tokens
    if no_token and tokens:
        source = f"--token-file {token_file}" if token_file else f"{TOKEN} in the environment"
        raise ConfigError(f"--no-token and {source}: use one of them")
    if tokens or no_token or is_loopback(bind.rpartition(":")[0]):
        return tokens
    path = (state_dir / TOKEN_FILE).absolute()
    if not path.exists():  # a coordinator that is restarted accepts the token that its groups have
        write_token_file(path, secrets.token_hex(16))
    tokens = read_token_file(path)
    print(f"token: {path}  (set {TOKEN} to it in every group; the page asks for it)")
    return tokens


def read_token_file(path: Path) -> tuple[str, ...]:
    """Read the accepted tokens of a run from a file with one or two lines.

    Raises:
        ConfigError: The file is missing or empty.
        ValueError: A token is malformed.
    """
    if not path.is_file():
        raise ConfigError(
            f"{path} does not exist: create it with the run's secret as its only line"
        )
    tokens = read_tokens(path.read_text(errors="replace"), str(path))
    if not tokens:
        raise ConfigError(f"{path} is empty: write the run's secret into it as its only line")
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        log.warning("Others can read the run's token in %s (mode %o): run chmod 600", path, mode)
    return tokens


def write_token_file(path: Path, token: str) -> None:
    """Write a token to a file that only this user can read. The file is never half written.

    Raises:
        OSError: The file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # It makes a file that no other user can read, under a name that nobody can know before.
    with NamedTemporaryFile("w", dir=path.parent, delete=False) as part:
        part.write(token + "\n")
    os.replace(part.name, path)
