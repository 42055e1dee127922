"""Finds the checkpoint that a config names, and checks that it is complete before it is loaded."""

from __future__ import annotations

import logging
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

LATEST = "latest-rank0.pt"
"""Composer's link to the newest checkpoint of a folder."""


def usable_checkpoint(
    config: Mapping[str, Any], save_folder: str | None, on_bad_state: str
) -> dict[str, Any]:
    """Check the checkpoint that a group is to continue from, if it is a local one.

    Args:
        config: From ``load_config``.
        save_folder: This group's ``save_folder``.
        on_bad_state: What to do if the checkpoint is damaged: ``error``, or ``fresh``: start
            without it.

    Returns:
        The config, without that checkpoint if it is damaged and ``on_bad_state`` is ``fresh``.

    Raises:
        ValueError: The checkpoint is missing or damaged. No other group waits for this one yet.
    """
    path = asked_for(config, save_folder)
    if path is None:
        return dict(config)
    problem = what_is_wrong(path)
    if problem is None:
        return dict(config)
    if on_bad_state == "fresh":
        log.warning("Starting without %s, as asked (on_bad_state): %s", path, problem)
        return dict(config) | {"load_path": None, "autoresume": False, "save_overwrite": True}
    earlier = newest_whole(path.parent)
    fix = "another one" if earlier is None else f"an earlier one (load_path={earlier})"
    raise ValueError(
        f"cannot continue from {path}: {problem}. Choose: load {fix} with autoresume=false, or let "
        "this group start without it (callbacks.diloco.on_bad_state=fresh): it then takes over "
        "the other groups' state"
    )


def asked_for(config: Mapping[str, Any], save_folder: str | None) -> Path | None:
    """Return the local checkpoint that Composer will load: with autoresume, the newest one."""
    if config.get("autoresume") and save_folder is not None and "://" not in save_folder:
        latest = Path(save_folder) / LATEST
        if latest.is_symlink() or latest.exists():
            return latest.resolve()
    load_path = config.get("load_path")
    if load_path is None or "://" in load_path:
        return None
    return Path(load_path.replace("{rank}", "0"))


def newest_whole(folder: Path) -> Path | None:
    """Return the newest checkpoint in a folder that looks complete. No code in it is run."""
    files = [p for p in folder.glob("*") if not p.is_symlink()]
    files = [p for p in files if p.suffix == ".pt" or (p / ".metadata").exists()]
    newest_first = sorted(files, key=lambda path: -path.stat().st_mtime)
    return next((path for path in newest_first if what_is_wrong(path) is None), None)


def what_is_wrong(path: Path) -> str | None:
    """Return why a checkpoint cannot be read; None if it looks complete. Reads no tensor."""
    if not path.exists():
        return "there is no such file"
    if path.is_dir():
        return _wrong_with_folder(path)
    if path.stat().st_size == 0:
        return "it is empty"
    if path.suffix != ".pt" and path.suffixes[-2:-1] == [".pt"]:
        return None  # it is compressed, and Composer checks it
    if not zipfile.is_zipfile(path):
        size = path.stat().st_size
        return f"its end is missing (the file has {size:,} bytes), or it is not a torch file"
    return None


def _wrong_with_folder(path: Path) -> str | None:
    from composer_replication.callback.sharded_folder import read_metadata  # imports torch

    try:
        metadata = read_metadata(path)
    except Exception as error:  # unpickling half a file raises many kinds
        return f"its .metadata cannot be read ({type(error).__name__}: {error})"
    needed: dict[str, int] = {}
    for entry in (metadata.storage_data or {}).values():
        end = entry.offset + entry.length
        needed[entry.relative_path] = max(end, needed.get(entry.relative_path, 0))
    for name, size in needed.items():
        actual = (path / name).stat().st_size if (path / name).exists() else 0
        if actual < size:
            return f"{name} has {actual:,} of {size:,} bytes"
    return None
