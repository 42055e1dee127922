"""The environment of processes whose training must not take a whole processor."""

import os
import time
from pathlib import Path

FOLDER = Path(__file__).parent / "paced"


def paced(seconds: float) -> dict[str, str]:
    """This process's environment, in which an optimizer step takes so many seconds more."""
    others = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(FOLDER), *([others] if others else [])])
    return {**os.environ, "PYTHONPATH": path, "TEST_PACE_S": str(seconds)}


def slow_down(seconds: float) -> None:
    """Make each optimizer step of this process take so many seconds more."""
    from torch.optim import optimizer

    optimizer.register_optimizer_step_post_hook(lambda *step: time.sleep(seconds))
