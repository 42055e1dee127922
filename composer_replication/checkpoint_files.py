"""Which checkpoint a config asks for, and whether it is whole: before anything is built of it."""

from __future__ import annotations

import logging
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from composer_replication.config import ConfigError

log = logging.getLogger(__name__)

LATEST = "latest-rank0.pt"
"""Composer's link to the newest checkpoint of a folder."""


def usable_checkpoint(
    config: Mapping[str, Any], save_folder: str | None, on_bad_state: str
) -> dict[str, Any]:
    """Check the checkpoint that a group is to continue from, if it is a local one.

    Args:
        config: From ``load_config``.
        save_folder: Of this group.
        on_bad_state: What to do with a damaged one: ``error``, or start ``fresh``, without it.

    Returns:
        The config, without that checkpoint if it is damaged and may be left out.

    Raises:
        ConfigError: It is missing or damaged; nobody has heard of this group yet.
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
    others = [p for p in newest_first(path.parent) if p != path.resolve() and not what_is_wrong(p)]
    fix = f"load an earlier one (load_path={others[0]} autoresume=false), " if others else ""
    raise ConfigError(
        f"cannot continue from {path}: {problem}. Choose: {fix or 'load another one, '}or let this "
        "group start without it (callbacks.diloco.on_bad_state=fresh), which takes over what the "
        "others hold"
    )


def asked_for(config: Mapping[str, Any], save_folder: str | None) -> Path | None:
    """The local checkpoint that Composer will load, by its rule: the newest of ours first."""
    if config.get("autoresume") and save_folder is not None and "://" not in save_folder:
        latest = Path(save_folder) / LATEST
        if latest.is_symlink() or latest.exists():
            return latest.resolve()
    load_path = config.get("load_path")
    if load_path is None or "://" in load_path:
        return None
    return Path(load_path.replace("{rank}", "0"))


def newest_first(folder: Path) -> list[Path]:
    """The checkpoints in a folder."""
    files = [p for p in folder.glob("*") if not p.is_symlink()]
    files = [p for p in files if p.suffix == ".pt" or (p / ".metadata").exists()]
    return sorted(files, key=lambda path: -path.stat().st_mtime)


def what_is_wrong(path: Path) -> str | None:
    """Why a checkpoint cannot be read; None if it looks whole. Reads no tensor."""
    if not path.exists():
        return "there is no such file"
    if path.is_dir():
        return _wrong_with_folder(path)
    if path.stat().st_size == 0:
        return "it is empty"
    if path.suffix != ".pt" and path.suffixes[-2:-1] == [".pt"]:
        return None  # compressed: Composer looks into it
    if not zipfile.is_zipfile(path):
        size = path.stat().st_size
        return f"its end is missing ({size:,} bytes are there), or it is no torch file"
    return None


def _wrong_with_folder(path: Path) -> str | None:
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    try:
        metadata = FileSystemReader(path).read_metadata()
    except Exception as error:  # of many kinds: whatever unpickling half a file may give
        return f"its .metadata cannot be read ({type(error).__name__}: {error})"
    needed: dict[str, int] = {}
    for entry in (metadata.storage_data or {}).values():
        end = entry.offset + entry.length
        needed[entry.relative_path] = max(end, needed.get(entry.relative_path, 0))
    for name, size in needed.items():
        found = (path / name).stat().st_size if (path / name).exists() else 0
        if found < size:
            return f"{name} has {found:,} of {size:,} bytes"
    return None
