"""The modules of ``benchmarks`` are imported as their commands import them."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
