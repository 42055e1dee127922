"""Runs a script whose process is killed in a moment of a save: python dying.py SCRIPT ARGUMENTS

The environment's DIES says in which: as JSON, a list of moments for each replica group. The first
process of a group dies in the first of them, its next process in the second, and so on. A moment
is an operation on a file that the process is about to make: the name of Python's audit event, or
``written`` when a file is complete. What a kill in the middle of a write leaves is made then: a
part of that file is kept.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import runpy
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.symlink", "shutil.rmtree")


@dataclass(frozen=True)
class Moment:
    """When a group dies.

    Args:
        operation: The operation.
        path: Of the path that is written, made, renamed or removed, a pattern.
        left: Which part of the file of this pattern is left; None: all of it.
        skip: How often the process lives through it before.
    """

    operation: str
    path: str
    left: float | None = None
    skip: int = 0


class Watch:
    """Watches the operations of this process, and calls a function in a moment.

    Args:
        moment: The moment.
        act: The function, which gets the path.
    """

    def __init__(self, moment: Moment, act: Callable[[str], None]) -> None:
        self._moment, self._act, self._left = moment, act, moment.skip

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in EVENTS:
            return
        if event == "open" and not (arguments[2] or 0) & os.O_CREAT:
            return
        at = -1 if event == "os.symlink" else 0
        named = [each for each in arguments[:2] if isinstance(each, (str, os.PathLike))]
        if named:
            self.happens(event, os.fspath(named[at]))

    def happens(self, operation: str, path: str) -> None:
        moment = self._moment
        if operation != moment.operation or not fnmatch.fnmatch(os.path.abspath(path), moment.path):
            return
        self._left -= 1
        if self._left == -1:
            self._act(path)

    def sees_writes(self, function: Callable[..., Any], at: int) -> Callable[..., Any]:
        """Wrap a function, so that each file that it has written is seen here.

        Args:
            function: Writes a file.
            at: Which of its arguments is that file.
        """

        def writes(*arguments: Any, **named: Any) -> Any:
            result = function(*arguments, **named)
            target = [*arguments, *named.values()][at]
            if hasattr(target, "flush"):
                target.flush()
            path = getattr(target, "name", target)
            if isinstance(path, (str, os.PathLike)):
                self.happens("written", os.fspath(path))
            return result

        return writes


def prepare() -> None:
    """Die in the moment of this process, if there is one."""
    group, deaths = os.environ["REPLICA_GROUP_ID"], json.loads(os.environ.get("DIES", "{}"))
    if group not in deaths and "WAITS" in os.environ:
        waits = Watch(
            Moment(**json.loads(os.environ["WAITS"])), lambda _: wait_for_requests(deaths)
        )
        sys.addaudithook(waits.audit)
    moments = [Moment(**each) for each in deaths.get(group, ())]
    if (num_died := num_died_of(_mark_of(group))) >= len(moments):
        return
    moment = moments[num_died]

    def die(path: str) -> None:
        if moment.left is not None:
            size = os.path.getsize(path)
            os.truncate(path, min(size - 1, round(size * moment.left)))
        with _mark_of(group).open("a") as mark:
            mark.write(f"{moment}\n")
        os.kill(os.getpid(), signal.SIGKILL)

    death = Watch(moment, die)
    import torch

    torch.save = death.sees_writes(torch.save, 1)
    if find_spec("transformers") is not None:
        import safetensors.torch

        safetensors.torch.save_file = death.sees_writes(safetensors.torch.save_file, 1)
        from transformers import TrainerState

        TrainerState.save_to_json = death.sees_writes(TrainerState.save_to_json, 1)
    sys.addaudithook(death.audit)


def wait_for_the_dead(run_dir: str, limit_s: float = 200.0) -> None:
    """In a group that does not die: wait until the one that does is back, and about to join."""
    deaths, until = json.loads(os.environ.get("DIES", "{}")), time.monotonic() + limit_s
    for group in deaths if os.environ["REPLICA_GROUP_ID"] not in deaths else ():
        mark, status = _mark_of(group), Path(run_dir, f"replica_{group}", "status.json")
        while time.monotonic() < until:
            is_over = num_died_of(mark) == len(deaths[group])
            if is_over and status.stat().st_mtime > mark.stat().st_mtime:
                if json.loads(status.read_text())["phase"] in ("joining", "training"):
                    break
            time.sleep(0.05)


def wait_for_requests(deaths: Mapping[str, Any], limit_s: float = 200.0) -> None:
    """The same without a run's folder: wait until the lighthouse has a request for a quorum."""
    from composer_replication.replica.lighthouse import read_status

    until = time.monotonic() + limit_s
    for group in deaths:
        while time.monotonic() < until:
            situation = read_status(os.environ["TORCHFT_LIGHTHOUSE"]).situation
            asks = re.search(r"\b[1-9]\d* participants,", situation)  # and this group does not
            if num_died_of(_mark_of(group)) == len(deaths[group]) and asks:
                break
            time.sleep(0.02)


def num_died_of(mark: Path) -> int:
    """How many processes of the group of this mark have died in their moments."""
    return len(mark.read_text().splitlines()) if mark.exists() else 0


def _mark_of(group: str) -> Path:
    return Path(os.environ["DIES_MARKS"]) / f"died_{group}"


if __name__ == "__main__":
    prepare()
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
