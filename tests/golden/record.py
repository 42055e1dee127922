"""Record the digests that test_golden.py compares.

Command: ``PYTHONPATH=tests python tests/golden/record.py``.

Record again only for a change that is meant to alter bits, and name the changed runs in the commit.
"""

import json
from pathlib import Path

from golden.real_runs import REAL_RUNS
from golden.runs import RUNS

DIGESTS = Path(__file__).with_name("digests.json")

if __name__ == "__main__":
    recorded = {name: run() for name, run in {**RUNS, **REAL_RUNS}.items()}
    lines = [f"  {json.dumps(name)}: {json.dumps(end)}" for name, end in recorded.items()]
    DIGESTS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{len(recorded)} runs are in {DIGESTS.name}")
