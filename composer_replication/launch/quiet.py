"""What a command logs: this package's lines, and warnings of all others."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from typing import TextIO

PACKAGE = "composer_replication"


class ShortNames(logging.Formatter):
    """Formats a record with its time, level and logger, without the package in the logger's name.

    Every line of a group's log begins with it, so it is short.
    """

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname).1s %(module_name)s: %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        record.module_name = record.name.removeprefix(f"{PACKAGE}.")
        return super().format(record)


class CurrentStderr(logging.StreamHandler):
    """Writes to what ``sys.stderr`` is now, since a live display replaces it for its duration.

    A line that bypassed the display would stand in the middle of its table.
    """

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # pyright: ignore[reportIncompatibleVariableOverride]
        return sys.stderr


def quiet_others() -> None:
    """Log from INFO on in this package and from WARNING on elsewhere; show only our warnings."""
    is_first = os.environ.get("RANK", "0") == "0"
    handler = CurrentStderr()
    handler.setFormatter(ShortNames())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    ours = logging.getLogger(PACKAGE)
    ours.setLevel(logging.INFO if is_first else logging.WARNING)
    warnings.filterwarnings("ignore")
    warnings.filterwarnings("default", module=rf"{PACKAGE}(\.|$)")
