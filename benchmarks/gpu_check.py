"""What needs a GPU, most worth first, in six minutes; see ``make gpu-check``.

    python benchmarks/gpu_check.py [--seconds 360] [--out build/gpu] [--again] [PART ...]

Two replica groups share the GPU, over gloo and loopback, and over NCCL. Each part writes what it
measured, or what it said, into the folder, and one that has succeeded there is not run again: what
is cut off goes on at the next chance. Copy the JSON files to ``benchmarks/measured`` for the page.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent

SYNC = ("sync.py", "--device", "cuda", "--repetitions", "6")
PARTS: Mapping[str, tuple[float, Sequence[str]]] = {
    "tests": (90, ["-m", "pytest", "-q", "-x", "-rs", "tests/test_gpu.py"]),
    "sync-gpu-147": (60, SYNC),
    "sync-gpu-1000": (60, [*SYNC, "--tensors", "1000"]),
    "sync-gpu-at-rest": (60, [*SYNC, "--backup-device", "cpu"]),
    "sync-gpu-nccl": (60, [*SYNC, "--backend", "nccl"]),
    "overlap-gpu-1b": (
        110,
        ["overlap.py", "--device", "cuda", "--dtype", "bfloat16", "--params", "1e9"]
        + ["--batch", "4096", "--turns", "2", "--sync-every", "20"],
    ),
    "memory-gpu": (40, ["memory.py", "--device", "cuda"]),
    "memory-gpu-at-rest": (30, ["memory.py", "--device", "cuda", "--backup-device", "cpu"]),
    "sync-gpu-bfloat16": (45, [*SYNC, "--dtype", "bfloat16"]),
    "sync-gpu-int8": (45, [*SYNC, "--wire-format", "int8"]),
    "parts": (90, ["-m", "pytest", "-q", "-rs", "tests/composer_parts/test_on_gpu.py"]),
}
"""Each part's most seconds, and its command for Python: a script of this folder writes JSON."""


def main() -> int:
    """Run what is missing, as far as the time reaches; the worst exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], metavar="PART")
    parser.add_argument("--seconds", type=float, default=360.0)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu")
    parser.add_argument("--again", action="store_true", help="run what has succeeded too")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing is measured")
        return 0
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    ends, worst = time.monotonic() + arguments.seconds, 0
    for name in arguments.parts or PARTS:
        done = arguments.out / f"{name}.done"
        if done.exists() and not arguments.again:
            continue
        left = ends - time.monotonic()
        if left < 15:
            print(f"no time is left for {name}: run it again")
            continue
        status = run(name, min(left, PARTS[name][0]), arguments.out)
        worst = max(worst, status)
        if status == 0:
            done.touch()
    return worst


def run(name: str, seconds: float, out: Path) -> int:
    """Run a part, and keep what it says; its exit status, 124 if it took too long."""
    _, words = PARTS[name]
    is_benchmark = words[0].endswith(".py")
    command = [sys.executable, *words]
    if is_benchmark:
        command[1] = str(FOLDER / words[0])
        command += ["--json", str(out / f"{name}.json")]
    print(f"\n{name}: {' '.join(words)}", flush=True)
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    with (out / f"{name}.txt").open("w") as said:
        try:
            status = subprocess.run(
                command,
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": path},
                stdout=said,
                stderr=subprocess.STDOUT,
                timeout=seconds,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            status = 124
    lines = (out / f"{name}.txt").read_text(errors="replace").splitlines()
    print("\n".join(lines[-15:] if is_benchmark else lines[-6:]))
    print(f"{name}: status {status}", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
