"""Runs the study, one training after the other, and continues where the results file ends.

    python spikes/009-learning/study.py run --workers 2 --hours 3
    python spikes/009-learning/study.py left

Each training adds one line to ``results.jsonl``. A training that is there is not run again, so the
command can be interrupted at any time and given again, on any machine with the same text.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Iterable
from pathlib import Path

from cells import Cell
from plan import cells

RESULTS = Path(__file__).with_name("results.jsonl")


def read(path: Path = RESULTS) -> dict[str, dict]:
    """The results by the cell's key."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {Cell(**result["cell"]).key: result for result in map(json.loads, lines)}


def run(wanted: Iterable[Cell], workers: int, hours: float) -> None:
    """Train what is not in the results file, until there is nothing left or the time is over.

    Raises:
        ValueError: The results are for another text than this machine's.
    """
    until = time.monotonic() + hours * 3600
    done = read()
    texts = {result["text"] for result in done.values()}
    left = [cell for cell in wanted if cell.key not in done]
    # Fresh processes with one thread each: torch's own threads would wait for each other.
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers, maxtasksperchild=1) as pool:
        for key, result in pool.imap_unordered(_train, [(cell, until, texts) for cell in left]):
            if result is None:
                continue
            line = json.dumps({"cell": json.loads(key), **result})
            with RESULTS.open("a") as file:
                file.write(line + "\n")
            print(f"{result['bits']:.4f} bits  {result['seconds']:.0f} s  {key}", flush=True)


def _train(task: tuple[Cell, float, set[str]]) -> tuple[str, dict | None]:
    cell, until, texts = task
    if time.monotonic() > until:
        return cell.key, None
    os.nice(5)
    from train import text, train  # imports torch, in the worker only

    if texts - {text("train").name}:
        raise ValueError(
            f"the results are for {', '.join(texts)}, and here is {text('train').name}: losses on "
            "different texts cannot be compared. Use the Python version of the results, or begin "
            "another results file"
        )
    return cell.key, train(cell)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="train what is missing")
    running.add_argument("--workers", type=int, default=os.cpu_count())
    running.add_argument("--hours", type=float, default=24.0)
    running.add_argument("--stage", help="only this one: see plan.py")
    left = commands.add_parser("left", help="say how much is missing")
    left.add_argument("--stage")
    arguments = parser.parse_args()
    wanted = list(cells(arguments.stage))
    if arguments.command == "run":
        run(wanted, arguments.workers, arguments.hours)
    else:
        done = read()
        print(f"{sum(cell.key not in done for cell in wanted)} of {len(wanted)} trainings are left")


if __name__ == "__main__":
    main()
