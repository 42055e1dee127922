"""Which checkpoints are whole: a group may have been killed while it wrote its newest one.

Imports neither torch nor a trainer, so that the launcher can ask too.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zipfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from glob import glob
from pathlib import Path

STATE = "diloco.pt"
"""A group's part of a checkpoint of Hugging Face's Trainer, in its folder ``checkpoint-<step>``."""

TRAINER_STATE = "trainer_state.json"
"""What the Trainer itself writes last into that folder."""

NO_STATE = f"{STATE} is missing"
"""The problem of a folder in which all else is whole: of a training without DiLoCo, perhaps."""

_READ = re.compile(
    r"((trainer_state|config|adapter_config|.*\.index)\.json"
    r"|(diloco|optimizer|scheduler|scaler|rng_state.*|training_args)\.(pt|pth|bin)"
    r"|(pytorch_model.*|adapter_model)\.bin"
    r"|.*\.(safetensors|distcp))"
)
"""What a trainer reads from a folder to continue; others may keep files of any content there."""

_OF_TRAINER = re.compile(r"checkpoint-\d+")
_TORN = "torn-"
"""How the name of a checkpoint begins that has been set aside."""

_METADATA = ".metadata"
"""What torch writes last into the folder of a sharded checkpoint."""


def newest_whole(pattern: str) -> Path | None:
    """Return the newest checkpoint from which a group can continue; None if there is none.

    Args:
        pattern: Of the checkpoints' paths, as for ``glob``.
    """
    return whole_of(newest_first(pattern))[0]


def newest_first(pattern: str) -> list[Path]:
    """Return the checkpoints, whole or not, by the numbers in their names.

    Args:
        pattern: As for ``newest_whole``.
    """
    found = []
    for path in map(Path, glob(pattern)):
        is_latest = path.is_symlink() and not path.is_dir()  # Composer's link to a file
        if not is_latest and not path.name.startswith(_TORN):
            found.append(path)
    found.sort(key=lambda path: [*map(int, re.findall(r"\d+", path.name))], reverse=True)
    return found


def problem_of(checkpoint: Path) -> str | None:
    """Return why a group cannot continue from a checkpoint; None if it is whole.

    It reads the ends of the files, not all of them: a process that is killed leaves a file cut off,
    and a power cut leaves it cut off, empty or zeroed.

    Args:
        checkpoint: A file, or a folder with the files of one checkpoint.
    """
    if not checkpoint.is_dir():
        return _problem_of_file(checkpoint)
    named = (path for path in checkpoint.rglob("*") if _READ.fullmatch(path.name))
    files = sorted(path for path in named if not path.is_dir())
    files += [path.parent / _METADATA for path in files if path.suffix == ".distcp"]
    if _OF_TRAINER.fullmatch(checkpoint.name):
        files += [checkpoint / TRAINER_STATE, checkpoint / STATE]
    for path in files:
        problem = _problem_of_file(path)
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
    except zipfile.BadZipFile:
        return "is cut off"
    except (OSError, ValueError) as error:
        return f"cannot be read ({error})"
    return None


def _problem_of_json(path: Path) -> str | None:
    content = json.loads(path.read_bytes())
    shards = content.get("weight_map", {}) if isinstance(content, dict) else {}
    for name in sorted(set(shards.values())):
        if not (path.parent / name).exists():
            return f"names {name}, which is missing"
    return None


def _problem_of_safetensors(path: Path) -> str | None:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length < size:
            return "is cut off"
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    ends = [each["data_offsets"][1] for each in header.values()]
    whole = 8 + length + max(ends, default=0)
    return "is cut off" if size < whole else None


def _problem_of_torch(path: Path) -> str | None:
    with path.open("rb") as file:
        begin = file.read(4)
        if not begin.strip(b"\0"):
            return "is empty"
        if begin == b"PK\x03\x04":  # not a file of torch's old format, or a compressed one
            zipfile.ZipFile(file).close()
    return None


def whole_of(
    found: Iterable[Path],
    look: Callable[[Path], str | None] = problem_of,
) -> tuple[Path | None, dict[Path, str]]:
    """Find the first of several checkpoints that is whole.

    Args:
        found: The checkpoints, newest first.
        look: Returns why one is not whole.

    Returns:
        That checkpoint, None if none is whole; and of those before it why they are not.
    """
    torn: dict[Path, str] = {}
    for path in found:
        problem = look(path)
        if problem is None:
            return path, torn
        torn[path] = problem
    return None, torn


def set_aside(torn: Mapping[Path, str], whole: Path | None, *, renames: bool = True) -> str:
    """Rename checkpoints that are not whole: no trainer is to take one for its newest.

    Args:
        torn: Why each is not whole.
        whole: The one from which the group continues, if there is one.
        renames: False: leave them as they are, since they are another group's.

    Returns:
        What has been done, for a warning.
    """
    renamed = ""
    if renames:
        renamed = f"It begins with {_TORN} now. "
        for path in torn:
            aside = path.with_name(f"{_TORN}{path.name}")
            if aside.is_dir() and not aside.is_symlink():
                shutil.rmtree(aside)
            with suppress(FileNotFoundError):
                os.replace(path, aside)
    problems = ", ".join(f"{path} ({problem})" for path, problem in torn.items())
    instead = "There is no other" if whole is None else f"This group continues from {whole.name}"
    return f"Not whole, since the group died while it saved: {problems}. {renamed}{instead}"
