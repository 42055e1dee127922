"""Runs a study, one training after the other, and continues where its results file ends.

    python spikes/009-learning/study.py run --workers 2 --hours 3
    python spikes/009-learning/study.py left --study warm

Each training adds one line to the results. A training that is there is not run again, so the
command can be stopped at any time and given again, on any machine with the same text. What was not
finished is thrown away. Several workers, also of several commands, take different trainings.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import defaults
import warm
from cells import Cell
from lines import DEFAULTS, HERE, PICTURES, RESULTS, WARM, Lines, append, read, read_all
from plan import cells

STUDIES = "learning", "defaults", "warm", "pictures"


class Work(NamedTuple):
    """What a worker does: trains what is wanted until it is stopped, at the latest ``until``.

    ``others`` are results in other files that those of this work are compared with.
    """

    results: Path
    wanted: Callable[[Lines], Iterable[Cell]]
    until: float
    stop: Path
    others: Lines = MappingProxyType({})


def work(task: Work) -> None:
    """Train what is not in the results, until there is nothing left or the time is over."""
    import torch
    from train import train

    torch.set_num_threads(1)  # several would wait for each other, and for the groups' threads
    where = ["git", "-C", str(HERE), "describe", "--always", "--dirty"]
    commit = subprocess.run(where, capture_output=True, text=True, check=False).stdout.strip()
    with _lock_file(task.results).open("w") as claims:
        while time.time() < task.until and not task.stop.exists():
            cell = _claim(task, claims.fileno())
            if cell is None:
                break
            result = {"commit": commit, "torch": torch.__version__, **train(cell)}
            append(task.results, {"cell": json.loads(cell.key), **result})
            _release(claims.fileno(), cell)
            print(f"{result['bits']:.4f} bits  {result['seconds']:.0f} s  {cell.key}", flush=True)


def _claim(task: Work, claims: int) -> Cell | None:
    """The next training that nobody has finished, or works on. A claim ends with its process."""
    for cell in task.wanted(read(task.results)):
        try:
            fcntl.lockf(claims, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _place(cell))
        except OSError:
            continue
        done = read(task.results)
        if cell.key not in done:
            _check_text(cell, {**task.others, **done})
            return cell
        _release(claims, cell)
    return None


def _release(claims: int, cell: Cell) -> None:
    fcntl.lockf(claims, fcntl.LOCK_UN, 1, _place(cell))


def _place(cell: Cell) -> int:
    return zlib.crc32(cell.key.encode())


def _lock_file(results: Path) -> Path:
    name = hashlib.sha256(str(results.resolve()).encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"study-{name}.lock"


def _check_text(cell: Cell, done: Lines) -> None:
    """Check that the results are for the data that are here.

    Raises:
        ValueError: They are not.
    """
    from jobs import data_of

    here = data_of(cell.data, "train").name
    texts = {line["text"] for line in done.values() if Cell(**line["cell"]).data == cell.data}
    if texts - {here}:
        raise ValueError(
            f"the results are for {', '.join(texts)}, and here is {here}: losses on different "
            "texts cannot be compared. Use the versions of Python and torch of the results, or "
            "begin another results file"
        )


def run(task: Work, workers: int) -> None:
    """Run workers, each in a fresh process with one thread for torch."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # which ends the workers too
    os.nice(5)
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=work, args=(task,), daemon=True) for _ in range(workers)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


def learning(done: Lines, others: Lines, stage: str | None = None) -> Iterable[Cell]:
    """The trainings that the study of learning still lacks, and that of the defaults too."""
    return (cell for cell in cells(stage) if cell.key not in done and cell.key not in others)


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs a study, and continues it.")
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="train what is missing")
    running.add_argument("--workers", type=int, default=os.cpu_count())
    running.add_argument("--hours", type=float, default=24.0)
    running.add_argument("--stop", type=Path, default=HERE / "stop", help="a file that ends it")
    left = commands.add_parser("left", help="say how much is missing")
    for each in (running, left):
        each.add_argument("--study", choices=STUDIES, default="learning")
        each.add_argument("--stage", help="of learning, only this one: see plan.py")
        each.add_argument("--results", type=Path, help="its file, if not the one that is here")
    given = parser.parse_args()
    results, wanted = RESULTS, partial(learning, others=read(DEFAULTS), stage=given.stage)
    if given.study == "defaults":
        results, wanted = DEFAULTS, partial(defaults.wanted, others=read(RESULTS))
    elif given.study == "warm":
        results, wanted = WARM, partial(warm.wanted, others=read_all())
    elif given.study == "pictures":
        results, wanted = PICTURES, partial(warm.wanted_pictures, others=read_all())
    results = given.results or results
    if given.command == "run":
        until = time.time() + given.hours * 3600
        run(Work(results, wanted, until, given.stop, read_all()), given.workers)
    else:
        print(f"{sum(1 for _ in wanted(read(results)))} trainings are left, that are known yet")


if __name__ == "__main__":
    main()
