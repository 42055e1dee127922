"""Checks of folders: the run's, and that of the checkpoints, can be written by this user."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rich.filesize import decimal

from composer_replication.launch.doctor.results import Result, failure, ok, skipped, warning

LITTLE_SPACE = 2**30


def check_folder(
    name: str, folder: str | None, key: str, bytes_needed: int = 0
) -> Iterator[Result]:
    """A folder can be written, by a file in it or in its nearest parent that exists.

    Args:
        name: What the folder is.
        folder: Its path; None: there is none.
        key: What names it, for the fix.
        bytes_needed: How much is going to be written, at least.
    """
    if folder is None:
        yield skipped(name, f"no folder is named ({key})")
        return
    if "://" in folder:
        yield skipped(name, f"{folder} is not on this machine; try composer_validate_remote_path")
        return
    path = Path(folder.partition("{")[0]).absolute()
    existing = next(each for each in (path, *path.parents) if each.exists())
    fix = f"{key}: another folder, or give this user the right to write"
    try:
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".doctor-"):
            pass
    except OSError as error:
        yield failure(name, f"{folder} cannot be written ({error.strerror})", fix)
        return
    free = shutil.disk_usage(existing).free
    value = f"{folder} can be written, {decimal(free)} free"
    if free < max(LITTLE_SPACE, bytes_needed):
        needed = f", and one checkpoint has {decimal(bytes_needed)}" if bytes_needed else ""
        yield warning(name, f"{value}{needed}", f"free some space, or {key}: on another disk")
    else:
        yield ok(name, value)
