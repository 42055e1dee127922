"""Which checkpoints are whole: a group may have been killed while it wrote its newest one.

Imports neither torch nor a trainer, so that the launcher can ask too.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zipfile
from glob import glob
from pathlib import Path

STATE = "diloco.pt"
"""A group's part of a checkpoint of Hugging Face's Trainer, in its folder ``checkpoint-<step>``."""

TRAINER_STATE = "trainer_state.json"
"""What the Trainer itself writes last into that folder."""

_OF_TRAINER = re.compile(r"checkpoint-\d+")
_TORN = "torn-"
_METADATA = ".metadata"
"""What torch writes last into the folder of a sharded checkpoint."""


def newest_whole(pattern: str) -> Path | None:
    """Return the newest checkpoint from which a group can continue; None if there is none.

    Args:
        pattern: Of the checkpoints' paths, as for ``glob``.
    """
    return next((path for path in newest_first(pattern) if problem_of(path) is None), None)


def newest_first(pattern: str) -> list[Path]:
    """Return the checkpoints, whole or not, by the numbers in their names.

    Args:
        pattern: As for ``newest_whole``.
    """

    def numbers(path: Path) -> list[int]:
        return [int(each) for each in re.findall(r"\d+", path.name)]

    found = [Path(path) for path in glob(pattern)]
    own = [path for path in found if not path.name.startswith(_TORN) and not path.is_symlink()]
    return sorted(own, key=numbers, reverse=True)


def problem_of(checkpoint: Path) -> str | None:
    """Return why a group cannot continue from a checkpoint; None if it is whole.

    It reads the ends of the files, not all of them: a process that is killed leaves a file cut off,
    and a power cut leaves it cut off, empty or zeroed.

    Args:
        checkpoint: A file, or a folder with the files of one checkpoint.
    """
    if not checkpoint.is_dir():
        return _problem_of_file(checkpoint)
    needed = (STATE, TRAINER_STATE) if _OF_TRAINER.fullmatch(checkpoint.name) else ()
    for path in [*(checkpoint / name for name in needed), *sorted(checkpoint.rglob("*"))]:
        problem = None if path.is_dir() else _problem_of_file(path)
        if path.suffix == ".distcp" and not (path.parent / _METADATA).exists():
            path, problem = path.parent / _METADATA, "is missing"
        if problem is not None:
            return f"{path.relative_to(checkpoint)} {problem}"
    return None


def _problem_of_file(path: Path) -> str | None:
    try:
        if not path.exists():
            return "is missing"
        if path.suffix == ".json":
            return _problem_of_json(path)
        if path.suffix == ".safetensors":
            return _problem_of_safetensors(path)
        if path.suffix in (".pt", ".pth", ".bin"):
            return _problem_of_torch(path)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        return f"cannot be read ({error})"
    return None


def _problem_of_json(path: Path) -> str | None:
    content = json.loads(path.read_bytes())
    shards = content.get("weight_map", {}) if isinstance(content, dict) else {}
    lost = [name for name in {*shards.values()} if not (path.parent / name).exists()]
    return f"names {min(lost)}, which is missing" if lost else None


def _problem_of_safetensors(path: Path) -> str | None:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length)) if 0 < length < size else None
    if header is None:
        return "is cut off"
    ends = [each["data_offsets"][1] for key, each in header.items() if key != "__metadata__"]
    return "is cut off" if size < 8 + length + max(ends, default=0) else None


def _problem_of_torch(path: Path) -> str | None:
    with path.open("rb") as file:
        begin = file.read(4)
        if not begin.strip(b"\0"):
            return "is empty"
        if begin == b"PK\x03\x04":  # not a file of torch's old format, or a compressed one
            try:
                zipfile.ZipFile(file).close()
            except zipfile.BadZipFile:
                return "is cut off"
    return None


def set_aside(checkpoint: Path) -> Path:
    """Rename a checkpoint that is not whole, so that no trainer takes it for its newest one.

    Returns:
        Its new path. What had that path before is removed.
    """
    aside = checkpoint.with_name(f"{_TORN}{checkpoint.name}")
    if aside.is_dir():
        shutil.rmtree(aside)
    os.replace(checkpoint, aside)
    return aside
