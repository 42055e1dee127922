"""Which errors say all there is to say, and what a command ends with."""

from __future__ import annotations

import traceback

from rich.console import Console

from composer_replication import MissingExtraError
from composer_replication.diloco.settings import SettingsMismatch
from composer_replication.training.config import ConfigError

FAILED = 1
BAD_INPUT = 2
"""Something was started wrongly: it would fail the same way again."""
INTERRUPTED = 130


def report_error(error: Exception) -> int:
    """Print an error on stderr, and return the exit status: 2 for bad input, 1 for a failed run."""
    if not is_known(error):
        traceback.print_exception(error)
        return FAILED
    Console(stderr=True).print(
        f"Error: {error}", style="red", markup=False, highlight=False, soft_wrap=True
    )
    is_bad_input = isinstance(error, ValueError | FileNotFoundError | MissingExtraError)
    return BAD_INPUT if is_bad_input else FAILED


def is_known(error: BaseException | None) -> bool:
    """Whether an error's message says all there is to say."""
    if error is None or not str(error):
        return False
    if isinstance(error, ConfigError | SettingsMismatch | FileNotFoundError | MissingExtraError):
        return True
    if isinstance(error, ConnectionError | TimeoutError):
        return True
    if isinstance(error, ValueError | OSError):
        # A library's, from deep inside a training step, says little without its traceback.
        return raised_by_us(error)
    name = type(error).__name__  # by name: importing these would import torch
    return name in ("SyncError", "DivergenceError") or (
        name == "SimulationError" and is_known(error.__cause__)
    )


def raised_by_us(error: BaseException) -> bool:
    """Whether the ``raise`` stands in this package."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_globals["__name__"].partition(".")[0] == "composer_replication"
