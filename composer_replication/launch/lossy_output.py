"""Keeps training alive when standard output cannot be written."""

from __future__ import annotations

import contextlib
import io
import os
import stat
import sys


class _LossyFile(io.FileIO):
    """A file that drops what it cannot write."""

    def write(self, data: bytes) -> int:  # type: ignore[override]
        with contextlib.suppress(OSError):
            return super().write(data)
        return len(data)


def ignore_output_errors() -> None:
    """Drop output instead of raising, if stdout or stderr is a file on a full or broken disk.

    Composer's loggers print, and an error of a print in the training loop would end the group.
    Terminals and pipes are not changed.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        with contextlib.suppress(OSError, ValueError):  # a replaced stream has no file descriptor
            if stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                stream.flush()
                file = _LossyFile(stream.fileno(), "wb", closefd=False)
                encoding, errors = stream.encoding, stream.errors
                setattr(sys, name, io.TextIOWrapper(file, encoding, errors, write_through=True))
