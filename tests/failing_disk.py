"""Python's operations on files, made to fail one at a time. For the tests."""

import builtins
import errno
import io
import os
import resource
from contextlib import contextmanager
from pathlib import Path

BY_PATH = ("mkdir", "open", "replace", "rmdir", "scandir", "stat", "unlink")


class Disk:
    """Operations on what is below a folder are counted, and one of them fails.

    Attributes:
        operations: What has been done: the operation, and the name of the file.
    """

    def __init__(self, folder, monkeypatch):
        self._folder = str(folder)
        self._fails_at = self._number = None
        self.operations = []
        for name in BY_PATH:
            monkeypatch.setattr(os, name, self._counting(name, getattr(os, name)))
        monkeypatch.setattr(os, "fsync", self._counting("fsync", os.fsync))
        self._real_open = builtins.open
        monkeypatch.setattr(builtins, "open", self._open)
        monkeypatch.setattr(io, "open", self._open)

    @contextmanager
    def failing(self, index, number):
        """Count from 0, and fail the operation of that index."""
        self.operations, self._fails_at, self._number = [], index, number
        try:
            yield
        finally:
            self._fails_at = None

    def operate(self, what, path):
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        if not isinstance(path, str | os.PathLike) or not str(path).startswith(self._folder):
            return
        self.operations.append(f"{what} {Path(path).name}")
        if len(self.operations) - 1 == self._fails_at:
            has_name = what in BY_PATH  # the others know a number only
            raise OSError(self._number, os.strerror(self._number), *[str(path)] * has_name)

    def _counting(self, name, real):
        def counting(path=".", *arguments, **keywords):
            self.operate(name, path)
            return real(path, *arguments, **keywords)

        return counting

    def _open(self, file, mode="r", buffering=-1, encoding=None, errors=None, newline=None, **more):
        watched = isinstance(file, str | os.PathLike) and str(file).startswith(self._folder)
        if not watched or more:
            return self._real_open(file, mode, buffering, encoding, errors, newline, **more)
        self.operate("open", file)
        raw = RawFile(self, file, mode.replace("b", "").replace("t", ""))
        if buffering == 0:
            return raw
        kind = io.BufferedReader if mode[0] == "r" else io.BufferedWriter
        buffered = (io.BufferedRandom if "+" in mode else kind)(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding, errors, newline)


class RawFile(io.FileIO):
    def __init__(self, disk, path, mode):
        super().__init__(path, mode)
        self._disk, self._path = disk, path

    def write(self, data):
        try:
            self._disk.operate("write", self._path)
        except OSError:
            super().write(bytes(data)[: len(data) // 2])  # a full disk takes a part
            raise
        return super().write(data)

    def readinto(self, buffer):
        self._disk.operate("read", self._path)
        return super().readinto(buffer)

    def readall(self):
        self._disk.operate("read", self._path)
        return super().readall()

    def truncate(self, size=None):
        self._disk.operate("truncate", self._path)
        return super().truncate(size)

    def close(self):
        was_open = not self.closed
        super().close()
        if was_open:
            self._disk.operate("close", self._path)


def each_failure(disk, prepare, program, judge):
    """Run a program again and again; each time the next of its operations on files fails.

    Args:
        disk: Whose operations.
        prepare: Makes what one run needs.
        program: Takes that.
        judge: Takes what the run needed, the operation that failed and the error, or None.

    Returns:
        The operations of a run in which none fails.
    """
    needed = prepare()
    with disk.failing(None, 0):
        program(needed)
    whole = list(disk.operations)
    for index, number in ((i, n) for i in range(len(whole)) for n in (errno.ENOSPC, errno.EIO)):
        needed, error = prepare(), None
        with disk.failing(index, number):
            try:
                program(needed)
            except Exception as caught:
                error = caught
            failed = disk.operations[index] if index < len(disk.operations) else None
        assert failed is not None, f"{whole[index]}: it ended before with {error!r}"
        try:
            judge(needed, failed, error)
        except Exception as wrong:
            problem = f"when {failed} failed ({os.strerror(number)}), it ended with {error!r}"
            raise AssertionError(problem) from wrong
    return whole


@contextmanager
def no_file_above(num_bytes):
    """A disk that is full: within it no file grows above so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
