"""The component of torchx. Run: pytest tests/deploy/test_torchx.py

Real: torchx, and the process that it starts here. Not run: its Slurm script, which is printed.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(find_spec("torchx") is None, reason="needs torchx: pip install '.[test]'"),
]

ROOT = Path(__file__).parents[2]
COMPONENT = ROOT / "deploy" / "torchx_component.py"
GROUP = [f"{COMPONENT}:group", *"--replica_id 1 --coordinator http://host:29512 --run_dir".split()]
TELL = """
import os
place = "REPLICA_GROUP_ID", "COMPOSER_REPLICATION_COORDINATOR", "COMPOSER_REPLICATION_TOKEN"
print("place", *map(os.environ.get, place), "{run_dir}")
"""


@pytest.fixture
def torchx(tmp_path):
    """Runs torchx in a folder of its own, as a scheduler's user does."""
    environ = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "COMPOSER_REPLICATION_TOKEN": "secret-of-the-run",
    }

    def run(*arguments):
        done = subprocess.run(
            [sys.executable, "-m", "torchx.cli.main", *map(str, arguments)],
            env=environ,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run


def test_a_group_runs_in_the_working_folder(torchx, tmp_path):
    command = [sys.executable, "-c", TELL]
    said = torchx("run", "-s", "local_cwd", *GROUP, tmp_path / "run", "--", *command)
    assert f"place 1 http://host:29512 secret-of-the-run {tmp_path}/run" in said
    assert "SUCCEEDED" in said


def test_on_slurm_a_group_is_one_job_of_its_own(torchx):
    command = ["python", "train.py", "--lr", "3"]
    said = torchx("run", "--dryrun", "-s", "slurm", *GROUP, "/runs/mine", "--", *command)
    script = said.partition("# SBATCH_SCRIPT")[2]
    assert script.count("--job-name=group-1-0") == 1
    assert "hetjob" not in script
    (step,) = [line for line in script.splitlines() if line.startswith("srun")]
    ours = "composer-replication run --restarts 100 -- python train.py --lr 3"
    assert step.endswith(ours) and step.count("composer-replication run") == 1
    assert "REPLICA_GROUP_ID=1," in step and "secret-of-the-run" not in said
