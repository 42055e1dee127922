"""Each benchmark runs at its smallest size and writes its numbers; what they are is no matter here.

Run: pytest tests/benchmarks/test_that_they_run.py. The parts of ``make gpu-check`` run on the CPU.
"""

import json
import math
import sys
from pathlib import Path

import pytest
from forked_commands import ForkedCommand, run
from gpu_check import PARTS
from text_config import DILOCO, text_job, write_config

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"
SMALL = {
    "checkpoint.py": "--d-model 16 --saves 1",
    "coordinator.py": "--seconds 0.2 --paced-s 0.5 --leases 200 --starts 1",
    "goodput.py": "--quick",
    "join.py": "--params 1e4 --turns 1 --round-s 0.1",
    "memory.py": "--params 1e5",
    "overlap.py": "--params 1e4 --batch 2 --turns 1 --sync-every 6",
    "ranks.py": "--params 1e4 --tensors 3 --ranks 2 --repetitions 1",
    "startup.py": "--params 1e4 --turns 1 --imports 0",
    "step.py": "--pairs 1 --batches 13",
    "sync.py": "--params 1e4 --tensors 3 --repetitions 1",
    "unequal.py": "--speeds 1 2 --step-s 0.002 --sync-every 10 --rounds 1",
    "wire.py": "--trainings float32 int8 --seeds 1 --config CONFIG",
}
"""The smallest size of each benchmark."""

CONFIG = f"""
max_duration: 30ba
eval_interval: 30ba
seed: 1
eval_dataloader:
  _target_: examples.quickstart.text.text_loader
  path: null
  max_seq_len: 32
  batch_size: 4
  split: eval
callbacks: {{diloco: {{{DILOCO}}}}}
"""


def options_of(words):
    return dict(zip(words[::2], words[1::2], strict=True))


def small_part(words):
    """A part of the check for GPUs with the options of ``SMALL``, on the CPU."""
    script, *words = words
    small = options_of(SMALL[script].split())
    options = small | options_of(words) | small
    del options["--device"]
    options.pop("--backend", None)
    return script, " ".join(f"{name} {value}" for name, value in options.items())


SMALL_PARTS = [small_part(words) for _, words in PARTS.values() if words[0].endswith(".py")]


def numbers(found):
    """All numbers in a file of results."""
    if isinstance(found, dict):
        found = [*found.values()]
    if isinstance(found, list):
        return [number for each in found for number in numbers(each)]
    return [found] if isinstance(found, (int, float)) else []


@pytest.mark.integration
@pytest.mark.parametrize(("script", "options"), dict.fromkeys([*SMALL.items(), *SMALL_PARTS]))
def test_a_benchmark_writes_its_numbers(script, options, tmp_path):
    config = write_config(tmp_path, text_job(CONFIG))
    words = [str(config) if word == "CONFIG" else word for word in options.split()]
    command = [sys.executable, str(FOLDER / script), *words, "--json", str(tmp_path / "found.json")]
    ended = run(ForkedCommand, command, cwd=ROOT, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found.pop("measured")["torch"] and found.pop("arguments")
    assert numbers(found) and all(map(math.isfinite, numbers(found)))


@pytest.mark.integration
def test_the_paced_job_trains(tmp_path):
    launch = [sys.executable, "-m", "composer_replication", "launch", "--replicas", "1"]
    launch += ["--run-dir", str(tmp_path), "--set", "sync_every=2"]
    command = [*launch, "--", sys.executable, str(FOLDER / "paced_job.py"), "4ba"]
    ended = run(ForkedCommand, command, cwd=ROOT, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert json.loads((tmp_path / "summary.json").read_text())["outer_steps"] == 2


def test_every_benchmark_is_run_here_and_the_check_of_a_gpu_runs_what_is_there():
    commands = [path.name for path in FOLDER.glob("*.py") if "__main__" in path.read_text()]
    assert sorted(commands) == sorted([*SMALL, "gpu_check.py"])
    files = [words[-1] for _, words in PARTS.values() if words[0] == "-m"]
    assert files and all((ROOT / file).exists() for file in files)
