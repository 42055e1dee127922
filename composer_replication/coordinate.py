"""The command ``coordinator``: a config becomes a running coordinator."""

from __future__ import annotations

import dataclasses
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from composer_replication.config import ConfigError
from composer_replication.coordinator.server import Coordinator
from composer_replication.diloco.settings import DiLoCoSettings
from composer_replication.options import TOKEN, ReplicaEnv, ReplicaOptions


def coordinate(
    config: Mapping[str, Any],
    config_path: Path,
    bind: str,
    state_dir: Path,
    token_file: Path | None,
    replicas: int | None,
    hostname: str | None,
    tls_dir: str | None,
) -> None:
    """Serve until SIGTERM or Ctrl-C.

    Raises:
        ConfigError: The config or an option cannot be used.
        OSError: Nothing can listen at ``bind``.
        StorageError: The state cannot be read or written.
    """
    token = read_token(token_file)
    section = (config.get("callbacks") or {}).get("diloco") or {}
    count = replicas or section.get("num_replicas") or 1
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    coordinator = Coordinator(
        settings_of(config),
        str(config_path),
        num_replicas=count,
        min_replicas=section.get("min_replica_size", ReplicaOptions.min_replica_size),
        state_dir=state_dir,
        bind=bind,
        hostname=hostname,
        tls_dir=tls_dir or tls_dir_of(config),
        tokens=[token] if token else [],
        model_section=config.get("model"),
    )
    console = Console(highlight=False)
    for line in (
        f"COMPOSER_REPLICATION_COORDINATOR={coordinator.address}  (for {count} replica groups)",
        f"page: {coordinator.address}/" + ("#token=..." if token else ""),
        f"lighthouse: {coordinator.lighthouse_addr}    state: {state_dir.absolute()}",
    ):
        console.print(line, markup=False, soft_wrap=True)
    if token is None:
        console.print(f"No token: whoever reaches it can change the run. Set {TOKEN}.")
    try:
        while not ended.wait(0.5) and coordinator.is_serving:
            pass
    finally:
        coordinator.shutdown()


def settings_of(config: Mapping[str, Any]) -> DiLoCoSettings:
    """The settings of a run, from its config."""
    section = (config.get("callbacks") or {}).get("diloco") or {}
    names = {field.name for field in dataclasses.fields(DiLoCoSettings)}
    return DiLoCoSettings(**{name: value for name, value in section.items() if name in names})


def tls_dir_of(config: Mapping[str, Any]) -> str | None:
    """The folder of certificates that a config names, or else the environment."""
    section = (config.get("callbacks") or {}).get("diloco") or {}
    return section.get("tls_dir") or ReplicaEnv.from_env().tls_dir


def read_token(token_file: Path | None) -> str | None:
    """The run's secret, from a file or from the environment.

    Raises:
        ConfigError: There is no such file, or nothing in it.
    """
    if token_file is None:
        return ReplicaEnv.from_env().token
    token = token_file.read_text().strip() if token_file.is_file() else ""
    if not token:
        raise ConfigError(f"--token-file {token_file}: write the run's secret into it, in one line")
    return token
