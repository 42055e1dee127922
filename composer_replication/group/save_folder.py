"""Keeps two replica groups from saving in one folder: each would overwrite the other's state."""

from __future__ import annotations

from collections.abc import Iterable
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from composer_replication.options import DuplicateIdError
from composer_replication.util.json_files import open_lock

LOCK = "_replica_group.lock"
"""The lock's file. Hugging Face's Trainer uploads no file whose name begins with ``_``."""


class _Lock(NamedTuple):
    replica_id: str
    owner: object
    file: FileIO


_held: dict[Path, _Lock] = {}
"""The folders that this process has locked. In a notebook a group may be built anew while the
trainer that it had before is not closed: it then takes over the lock."""


def is_remote(folder: str) -> bool:
    """Whether a folder is in an object store, where nothing can be locked."""
    return "://" in folder


def hold(folders: Iterable[str], replica_id: str, owner: object, argument: str) -> None:
    """Lock the local ones of these folders until ``release``, or the end of this process.

    Args:
        folders: Where a group saves.
        replica_id: The group's id. If it has locked a folder already, ``owner`` takes that over.
        owner: What ``release`` will be called with.
        argument: What names the folder in a script, for the error.

    Raises:
        DuplicateIdError: Another process of this group saves there. It may be about to end.
        ValueError: Another group saves there.
    """
    who = f" (replica group {replica_id})"
    fix = (
        f"give each replica group {argument} of its own, such as one with its REPLICA_GROUP_ID in "
        "it: they would overwrite each other's checkpoints"
    )
    for each in folders:
        if is_remote(each):
            continue
        folder = Path(each)
        folder.mkdir(parents=True, exist_ok=True)
        folder = folder.resolve()
        held = _held.get(folder)
        if held is not None and held.replica_id == replica_id:
            _held[folder] = held._replace(owner=owner)
            continue
        try:
            _held[folder] = _Lock(replica_id, owner, open_lock(folder, LOCK, fix, who))
        except ValueError as error:
            if who in str(error):
                raise DuplicateIdError(str(error)) from error
            raise


def release(owner: object) -> None:
    """Unlock the folders that were locked by ``hold`` with this owner."""
    for folder, held in [*_held.items()]:
        if held.owner is owner:
            del _held[folder]
            held.file.close()
