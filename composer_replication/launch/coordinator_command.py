"""The command ``coordinator``: a coordinator for the groups of any job, and its token."""

from __future__ import annotations

import logging
import os
import secrets
import time
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from composer_replication.coordinator.page import PAGE_DATA, write_report_html
from composer_replication.coordinator.server import Coordinator
from composer_replication.diloco.fence import fence
from composer_replication.launch.commands import CoordinatorOptions
from composer_replication.launch.processes import POLL_S, Interrupts
from composer_replication.options import TOKEN, ReplicaEnv, read_tokens
from composer_replication.replica.addresses import is_loopback
from composer_replication.replica.json_files import read_json
from composer_replication.training.config import (
    ConfigError,
    diloco_section,
    load_settings,
    read_diloco,
)

log = logging.getLogger(__name__)

TOKEN_FILE = "token"
"""Name of a generated token's file, in a coordinator's state folder or a launch's run folder."""


def coordinate(options: CoordinatorOptions) -> None:
    """Serve a coordinator until SIGTERM or Ctrl-C.

    Raises:
        ConfigError: The settings or an option cannot be used.
        ValueError: Another process serves the state folder, or the folder belongs to another run.
        StorageError: The state cannot be read or written.
    """
    config, source = load_settings(options.file, options.set or [])
    bind, state_dir = options.bind, options.state_dir
    tokens = choose_tokens(options.token_file, options.no_token, bind, state_dir)
    settings, group = read_diloco(diloco_section(config))
    count = options.replicas or group.num_replicas or 1
    console = Console(highlight=False)
    with Interrupts() as interrupts, ExitStack() as opened:
        try:
            coordinator = Coordinator(
                settings,
                source,
                num_replicas=count,
                min_replicas=group.min_replica_size,
                digest_every=group.digest_every,
                state_dir=state_dir,
                bind=bind,
                hostname=options.hostname,
                tokens=tokens,
                heartbeat_timeout_s=options.heartbeat_timeout_s,
                model_section=config.get("model"),
                ssl_certfile=options.ssl_certfile,
                ssl_keyfile=options.ssl_keyfile,
                all_start=options.new_settings,
            )
        except OSError as error:  # the address or the folder cannot be used
            raise ConfigError(str(error)) from error
        opened.callback(coordinator.shutdown)
        lines = [
            f"COMPOSER_REPLICATION_COORDINATOR={coordinator.address}  (for {count} replica groups)",
            f"page: {coordinator.address}/",
            f"lighthouse: {coordinator.lighthouse_addr}    state: {state_dir.absolute()}",
            f"settings: {settings}  (from {source})",
        ]
        if left_out := ", ".join(config["left_out"]):
            lines.append(f"left to the groups: {left_out}  (callbacks.diloco of {options.file})")
        if not tokens:
            who = "everybody who reaches this address"
            lines.append(f"No token: {who} can change the run. Set {TOKEN}.")
        for line in lines:
            console.print(line, markup=False, soft_wrap=True)
        while not interrupts.count and coordinator.is_serving:
            time.sleep(POLL_S)
    shown = read_json(state_dir / PAGE_DATA)
    if shown:
        with fence("the page of the run"):
            report = {"written": shown["time"], "files": []}
            page = write_report_html(state_dir, shown | {"report": report})
            console.print(f"page: {page.absolute()}", markup=False, soft_wrap=True)


def choose_tokens(
    token_file: Path | None, no_token: bool, bind: str, state_dir: Path
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
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)  # O_EXCL below refuses a leftover, another user's file or a link
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(token + "\n")
    part.replace(path)
