"""A command of a user's own, in two groups under ``launch``: real processes, to their end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def launch(
    folder: Path, *words: object, run_dir: str = "run", **environ: str
) -> tuple[dict[str, Any], str]:
    """Train in a folder with what ``words`` say, to groups that end equal.

    Returns:
        The summary of the run, and what was said.
    """
    ours = ["-m", "composer_replication", "launch", "--replicas", "2", "--run-dir", run_dir]
    done = subprocess.run(
        [sys.executable, *ours, *map(str, words)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
        capture_output=True,
        text=True,
        timeout=450,  # less than pytest's, after which nobody would stop it
    )
    logs = [log.read_text()[-2000:] for log in sorted(folder.glob(f"{run_dir}/*/log.txt"))]
    assert done.returncode == 0, "\n".join([done.stdout, done.stderr, *logs])
    summary = json.loads((folder / run_dir / "summary.json").read_text())
    assert len(summary["replicas"]) == 2
    assert len({replica["global_digest"] for replica in summary["replicas"]}) == 1
    return summary, done.stdout
