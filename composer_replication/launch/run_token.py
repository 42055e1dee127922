"""Reads and writes files that hold the run's secret token."""

from __future__ import annotations

import logging
import os
import secrets
from pathlib import Path

from composer_replication.replica.options import read_tokens
from composer_replication.training.config import ConfigError

log = logging.getLogger(__name__)

TOKEN_FILE = "token"
"""Name of a generated token's file, in a coordinator's state folder or a launch's run folder."""


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


def make_token_file(path: Path) -> tuple[str, ...]:
    """Read the tokens of a file. If it does not exist, generate a token and write it first.

    A coordinator that is restarted thus accepts the token that its groups already have.

    Raises:
        ConfigError: The file exists and is empty.
        OSError: The file cannot be written.
    """
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_token_file(path, secrets.token_hex(16))
    return read_token_file(path)


def write_token_file(path: Path, token: str) -> None:
    """Write a token to a file that only this user can read. The file is never half written.

    Raises:
        OSError: The file cannot be written.
    """
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)  # O_EXCL below refuses a leftover, another user's file or a link
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(token + "\n")
    part.replace(path)
