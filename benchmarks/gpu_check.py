"""The benchmarks on a machine with one GPU, one after the other; see ``make gpu-check``.

    python benchmarks/gpu_check.py

Two replica groups share the GPU and average over gloo, through host memory; where there are two,
each has one, over NCCL too.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

RUNS = (
    ("sync.py", "--device", "cuda"),
    ("sync.py", "--device", "cuda", "--tensors", "1000"),
    ("sync.py", "--device", "cuda", "--dtype", "bfloat16"),
    ("sync.py", "--device", "cuda", "--wire-format", "int8"),
    ("overlap.py", "--device", "cuda", "--dtype", "bfloat16"),
    ("step.py", "--device", "gpu"),
    ("memory.py", "--device", "cuda"),
)
ON_TWO = (
    ("sync.py", "--backend", "nccl"),
    ("sync.py", "--backend", "nccl", "--wire-format", "int8"),
)


def main() -> int:
    """Run them all; the worst exit status."""
    if not torch.cuda.is_available():
        print("no CUDA device: nothing is measured")
        return 0
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    folder = Path(__file__).parent
    statuses = []
    for script, *arguments in (*RUNS, *(ON_TWO if torch.cuda.device_count() > 1 else ())):
        print(f"\n{script} {' '.join(arguments)}", flush=True)
        command = [sys.executable, str(folder / script), *arguments]
        statuses.append(subprocess.run(command, check=False).returncode)
    return max(statuses)


if __name__ == "__main__":
    sys.exit(main())
