"""Exit statuses of the command, and which errors are printed without a traceback."""

from __future__ import annotations

import os
import signal
import time
import traceback

from rich.console import Console

from composer_replication import MissingExtraError
from composer_replication.diloco.fingerprints import SettingsMismatch
from composer_replication.training.config import ConfigError

FAILED = 1
BAD_INPUT = 2
"""The command was started wrongly: it would fail in the same way again."""
INTERRUPTED = 130

RANK_0_WAIT_S = 10.0
"""How long a rank with bad input waits until rank 0 has found it too, in seconds."""


def report_error(error: Exception) -> int:
    """Print an error on stderr.

    Returns:
        The exit status: ``BAD_INPUT`` for bad input, ``FAILED`` for a run that failed.
    """
    if not is_known(error):
        traceback.print_exception(error)
        return FAILED
    Console(stderr=True).print(
        f"Error: {error}", style="red", markup=False, highlight=False, soft_wrap=True
    )
    is_bad_input = isinstance(error, ValueError | FileNotFoundError | MissingExtraError)
    return BAD_INPUT if is_bad_input else FAILED


def is_known(error: BaseException | None) -> bool:
    """Whether an error's message says everything, so that no traceback is needed."""
    if error is None or not str(error):
        return False
    if isinstance(error, ConfigError | SettingsMismatch | FileNotFoundError | MissingExtraError):
        return True
    if isinstance(error, ConnectionError | TimeoutError):
        return True
    if isinstance(error, ValueError | OSError):
        # One that a library raised deep inside a training step says little without a traceback.
        return raised_by_us(error)
    name = type(error).__name__  # by name: importing these classes would import torch
    return name in ("SyncError", "DivergenceError") or (
        name == "SimulationError" and is_known(error.__cause__)
    )


def raised_by_us(error: BaseException) -> bool:
    """Whether this package raised the error."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_globals["__name__"].partition(".")[0] == "composer_replication"


def let_rank_0_end_first(wait_s: float = RANK_0_WAIT_S) -> None:
    """Wait after bad input, on every rank but the first of its node, to be ended by the launcher.

    Composer's launcher ends all ranks as soon as one has failed, and returns the status of the
    lowest rank. All ranks find the same bad input. If another rank than 0 ends first, rank 0 is
    ended by a signal, which looks like a crash: the group would be started again.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Composer's handler would only raise here
        time.sleep(wait_s)
