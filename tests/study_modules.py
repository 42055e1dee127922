"""Imports the learning study, which is a folder of scripts."""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "spikes" / "009-learning"


@contextmanager
def study_modules() -> Iterator[Callable[[str], Any]]:
    """Gives a function that imports a script, and forgets them all at the end."""
    before = set(sys.modules)
    sys.path.insert(0, str(FOLDER))
    try:
        yield importlib.import_module
    finally:
        sys.path.remove(str(FOLDER))
        for name in {path.stem for path in FOLDER.glob("*.py")} - before:
            sys.modules.pop(name, None)
