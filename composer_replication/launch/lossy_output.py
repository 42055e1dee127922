"""Standard output that a full disk does not turn into an error."""

from __future__ import annotations

import contextlib
import io
import os
import stat
import sys


class _LossyFile(io.FileIO):
    """Drops what it cannot write."""

    def write(self, data: bytes) -> int:  # type: ignore[override]
        with contextlib.suppress(OSError):
            return super().write(data)
        return len(data)


def lose_what_cannot_be_printed() -> None:
    """Let training go on when stdout or stderr is a file and its disk is full or broken.

    Loggers of Composer's print, and an error of a print in the training loop would end the group.
    Terminals and pipes stay as they are.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        with contextlib.suppress(OSError, ValueError):  # it is none of the system's
            if stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                stream.flush()
                file = _LossyFile(stream.fileno(), "wb", closefd=False)
                encoding, errors = stream.encoding, stream.errors
                setattr(sys, name, io.TextIOWrapper(file, encoding, errors, write_through=True))
