"""Where a Composer job saves, and which of its checkpoints is whole."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from glob import escape
from pathlib import Path

from composer import Logger, State, Trainer
from composer.callbacks import CheckpointSaver
from composer.loggers import RemoteUploaderDownloader
from composer.utils import format_name_with_dist

from composer_replication.group.call_watch import caller
from composer_replication.group.checkpoint_files import (
    newest_first,
    problem_of,
    set_aside,
    whole_of,
)

log = logging.getLogger(__name__)


def savers_of(state: State) -> list[CheckpointSaver]:
    """Return the job's savers of checkpoints."""
    return [each for each in state.callbacks if isinstance(each, CheckpointSaver)]


def folders_of(state: State, logger: Logger) -> Iterator[str]:
    """Yield the folders in which a job saves, also those in object stores."""
    loggers = [each for each in logger.destinations if isinstance(each, RemoteUploaderDownloader)]
    for saver in savers_of(state):
        uploader = saver.remote_uploader
        stores = loggers if uploader is None else [uploader]
        if uploader is None:
            yield format_name_with_dist(saver.folder, state.run_name)
        if saver.remote_file_name is not None:
            name = format_name_with_dist(saver.remote_file_name.filename, state.run_name)
            for store in stores:
                place = f"{store.remote_backend_name}://{store.remote_bucket_name}"
                yield f"{place}/{os.path.dirname(name).lstrip('/')}"


def pattern_of(saver: CheckpointSaver, state: State) -> str:
    """Return a pattern, as for ``glob``, of the checkpoints that a saver writes."""
    path = Path(saver.folder, saver.filename.filename)
    if state.fsdp_sharded_state_dict_enabled:
        assert state.fsdp_config is not None, "shards are FSDP's"
        path = path.parent / str(state.fsdp_config.sharded_ckpt_prefix_dir)
    text = format_name_with_dist(os.path.abspath(path), state.run_name)
    between = re.split(r"\{[^{}]*\}", text)  # of placeholders such as {batch}
    return "*".join(map(escape, between))


def check_load_path() -> None:
    """Refuse a torn checkpoint that ``load_path`` names. Called while the Trainer is built.

    Raises:
        ValueError: It is not whole.
    """
    init = caller(Trainer.__init__)
    asked = {} if init is None else init.f_locals
    path = asked.get("load_path")
    if path and not asked["autoresume"] and os.path.exists(path):
        problem = problem_of(Path(path))
        if problem is not None:
            raise ValueError(
                f"load_path={str(path)!r} is not whole ({problem}): load the checkpoint before it, "
                "or none, to take over the state of other groups"
            )


def skip_torn(state: State, hold: Callable[[], None]) -> str:
    """Have each saver's ``latest``, from which Composer resumes, name a whole checkpoint.

    Composer writes a checkpoint, removes ``latest`` and makes it anew, and a group may be killed in
    any of these moments. Newer ones that are torn are set aside, since Composer refuses to train in
    a folder that has one, unless it may overwrite them.

    Args:
        state: Composer's.
        hold: Locks the folders, before anything is changed. It raises a ``ValueError`` if another
            process saves there: then they are left as they are, and the fit raises it too.

    Returns:
        Why there is no whole checkpoint; empty if there is one, or nothing at all.
    """
    problem = ""
    for saver in savers_of(state):
        if saver.latest_filename is None or saver.remote_uploader is not None:
            continue  # an upload is whole, or it is not there
        latest = Path(saver.latest_filename.format(state))
        found = [path.resolve() for path in newest_first(pattern_of(saver, state))]
        whole, torn = whole_of(found)
        linked = latest.resolve() if latest.exists() else None
        if linked is not None:
            why = problem_of(linked)
            if why is not None:
                torn[linked] = why
            elif saver.overwrite:
                whole = linked  # somebody may have gone back to it, and will overwrite newer ones
        if torn or whole != linked:
            with suppress(ValueError):
                hold()
                problem = _repair(latest, torn, whole) or problem
    return problem


def _repair(latest: Path, torn: Mapping[Path, str], whole: Path | None) -> str:
    """Set torn checkpoints aside, and have ``latest`` name the whole one, or nothing.

    Returns:
        Why nothing is whole; empty if something is.
    """
    said = set_aside(torn, whole) if torn else f"{latest} did not name the newest whole checkpoint"
    if whole is None:
        latest.unlink(missing_ok=True)
        return said
    link = latest.with_name(f".{latest.name}")
    link.unlink(missing_ok=True)
    link.symlink_to(os.path.relpath(whole, latest.parent.resolve()))
    link.replace(latest)
    log.warning("%s. %s names %s", said, latest, whole.name)
    return ""
