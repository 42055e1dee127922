"""The environment of processes whose training must not take a whole processor."""

import os
from pathlib import Path

FOLDER = Path(__file__).parent / "paced"


def paced(seconds: float) -> dict[str, str]:
    """This process's environment, in which an optimizer step takes so many seconds more."""
    others = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(FOLDER), *([others] if others else [])])
    return {**os.environ, "PYTHONPATH": path, "TEST_PACE_S": str(seconds)}
