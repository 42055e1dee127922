"""The run's secret in a file: read for a coordinator, or made where there is none."""

from __future__ import annotations

import logging
import os
import secrets
from pathlib import Path

from composer_replication.replica.options import read_tokens
from composer_replication.training.config import ConfigError

log = logging.getLogger(__name__)

TOKEN_FILE = "token"
"""A made token's file in the state folder of a coordinator, or in the run folder of a launch."""


def read_token_file(path: Path) -> tuple[str, ...]:
    """The accepted tokens of a run, from a file with one or two lines.

    Raises:
        ConfigError: There is no such file, or nothing in it.
        ValueError: A token is malformed.
    """
    if not path.is_file():
        raise ConfigError(f"{path} does not exist: write the run's secret into it, in one line")
    tokens = read_tokens(path.read_text(errors="replace"), str(path))
    if not tokens:
        raise ConfigError(f"{path} is empty: write the run's secret into it, in one line")
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        log.warning("%s has mode %o, so others can read the run's secret: chmod 600", path, mode)
    return tokens


def make_token_file(path: Path) -> tuple[str, ...]:
    """The tokens in a file; one is made if there is none.

    A coordinator that is started again goes on with the token that its groups have.

    Raises:
        ConfigError: The file is there and empty.
        OSError: It cannot be written.
    """
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_token_file(path, secrets.token_hex(16))
    return read_token_file(path)


def write_token_file(path: Path, token: str) -> None:
    """Write a token so that only this user can read it; the file is whole or not there at all.

    Raises:
        OSError: It cannot be written.
    """
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)  # it may be somebody else's, or a link
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(token + "\n")
    part.replace(path)
