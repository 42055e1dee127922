"""What a command writes: its log lines and its errors, and the exit status that goes with them."""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import os
import signal
import sys
import time
import traceback
import warnings
from typing import Any

from rich.console import Console

from composer_replication.config_file import ConfigError
from composer_replication.options import DuplicateIdError
from composer_replication.settings import SettingsMismatch
from composer_replication.util.fence import fence
from composer_replication.util.lazy import MissingExtraError

FAILED = 1

BAD_INPUT = 2
"""The command was started wrongly: it would fail in the same way again."""

INTERRUPTED = 130

PACKAGE = "composer_replication"


def quiet_others() -> None:
    """Log from INFO on in this package and from WARNING on elsewhere; show only our warnings."""
    is_first = os.environ.get("RANK", "0") == "0"
    # It writes to what sys.stderr is now: a live display replaces that for its duration, and a line
    # that bypassed the display would appear in the middle of its table.
    handler = logging.lastResort
    assert handler is not None, "only a program that wants no log lines at all removes it"
    handler.setLevel(logging.NOTSET)
    logging.basicConfig(
        level=logging.WARNING,
        handlers=[handler],
        format="%(asctime)s %(levelname).1s %(name)s: %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
    )
    ours = logging.getLogger(PACKAGE)
    ours.setLevel(logging.INFO if is_first else logging.WARNING)
    warnings.filterwarnings("ignore")
    warnings.filterwarnings("default", module=rf"{PACKAGE}(\.|$)")


def report_error(error: Exception) -> int:
    """Print an error on stderr.

    Returns:
        The exit status: ``BAD_INPUT`` for bad input, ``FAILED`` for a run that failed.
    """
    if hasattr(error, "format_message"):  # typer's own, whose class is private
        print_error(f"Error: {_usage(error)}")
        return BAD_INPUT
    if not is_known(error):
        traceback.print_exception(error)
        return FAILED
    print_error(f"Error: {error}")
    if isinstance(error, DuplicateIdError):
        return FAILED  # the name may be free the next time
    is_bad_input = isinstance(error, ValueError | FileNotFoundError | MissingExtraError)
    return BAD_INPUT if is_bad_input else FAILED


@fence("what has failed")
def print_error(text: str) -> None:
    """Print an error in red on stderr, with its own line breaks only."""
    Console(stderr=True).print(text, style="red", markup=False, highlight=False, soft_wrap=True)


def _usage(error: Any) -> str:
    """What is wrong with a command line, with the value that was given, which typer leaves out."""
    context, text = error.ctx, error.format_message()
    options = getattr(getattr(error, "param", None), "opts", ())
    words = [part for word in sys.argv[1:] for part in word.split("=", 1)]
    known = {option for each in context.command.params for option in each.opts}
    for word in words:
        # Click takes the letters behind a single hyphen for options of their own.
        if type(error).__name__ == "NoSuchOption" and f"-{word}" in known:
            text = f"No such option: {word}. Did you mean -{word}?"
    for option, value in itertools.pairwise(words):
        if option in options:
            text = f"{option} {value}: {text.partition(': ')[2] or text}"
    return f"{text.rstrip('.')} (`{context.command_path} -h` lists what it takes)"


def is_known(error: BaseException | None) -> bool:
    """Whether an error's message says everything, so that no traceback is needed."""
    if error is None or not str(error):
        return False
    of_the_input = ConfigError | SettingsMismatch | FileNotFoundError | MissingExtraError
    if isinstance(error, of_the_input | ConnectionError | TimeoutError):
        return True
    if isinstance(error, ValueError | OSError):
        # An error that a library raised deep inside a training step says little without a
        # traceback.
        return raised_by_us(error)
    name = type(error).__name__  # by name: importing most of these would import torch
    return name in ("SyncError", "DivergenceError", "StorageError") or (
        name == "SimulationError" and is_known(error.__cause__)
    )


def raised_by_us(error: BaseException) -> bool:
    """Whether this package raised the error, or an ``OSError`` in its own call of pathlib."""
    packages = [
        frame.f_globals["__name__"].partition(".")[0]
        for frame, _ in traceback.walk_tb(error.__traceback__)
    ]
    while isinstance(error, OSError) and packages[-1] == "pathlib":
        packages.pop()  # it only opens the file, which the message names
    return packages[-1] == PACKAGE


def let_rank_0_end_first() -> None:
    """Wait after bad input, on every rank but the first of its node, to be ended by the launcher.

    Composer's launcher ends all ranks as soon as one has failed, and returns the status of the
    lowest rank. All ranks find the same bad input. If another rank than 0 ends first, rank 0 is
    ended by a signal, which looks like a crash: the group would be started again.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Composer's handler would only raise here
        time.sleep(10.0)  # by then rank 0 has found it too


class _LossyFile(io.FileIO):
    """A file that drops what it cannot write."""

    def write(self, data: bytes) -> int:  # type: ignore[override]
        with contextlib.suppress(OSError):
            return super().write(data)
        return len(data)


def ignore_output_errors() -> None:
    """Drop output instead of raising, if stdout or stderr is closed, or on a full or broken disk.

    Composer's loggers print, and an error of a print in the training loop would end the group.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # it was closed when this process started
            setattr(sys, name, open(os.devnull, "w"))
            continue
        with contextlib.suppress(OSError, ValueError):  # a replaced stream has no file descriptor
            file = _LossyFile(stream.fileno(), "wb", closefd=False)
            stream.flush()
            encoding, errors = stream.encoding, stream.errors
            setattr(sys, name, io.TextIOWrapper(file, encoding, errors, write_through=True))
