"""The names of a run and of its replica groups.

Imports neither torch nor Composer.
"""

from __future__ import annotations

import re
from os import PathLike
from pathlib import Path

_REPLICA_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def check_replica_id(replica_id: str | int) -> None:
    """Check the name of a replica group.

    The name becomes part of URLs, of a folder's name, and of torchft's name for the group
    (``name:uuid``).

    Raises:
        ValueError: The name has a character that would be misread there, or is too long.
    """
    is_name = not isinstance(replica_id, bool) and _REPLICA_ID.fullmatch(str(replica_id))
    if not is_name:
        raise ValueError(
            f"replica_id={replica_id!r}: give each replica group a name of its own, of at most 64 "
            "letters, digits, '.', '_' and '-', with a letter or a digit in front"
        )


def check_run_id(run_id: str) -> None:
    """Check the id of a run, which becomes a folder's name in a TensorBoard log.

    Raises:
        ValueError: It has a character that a path or a shell would misread, or is too long.
    """
    if not isinstance(run_id, str) or not _RUN_ID.fullmatch(run_id):
        raise ValueError(
            f"run_id={run_id!r}: name the run with at most 128 letters, digits, '.', '_' and '-', "
            "with a letter or a digit in front"
        )


def run_id_of_folder(run_dir: str | PathLike[str]) -> str | None:
    """Make a run's id from the name of its folder; None if that has no letter and no digit."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(run_dir).absolute().name)
    return name.lstrip("._-")[:128] or None
