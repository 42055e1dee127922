"""The files for SkyPilot, as far as they can be checked without a cloud.

Run: pytest tests/deploy/test_skypilot.py. Not run: SkyPilot.
"""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from composer_replication.cli import app
from composer_replication.options import ReplicaEnv

DEPLOY = Path(__file__).parents[2] / "deploy" / "skypilot"
FIELDS = {"name", "resources", "workdir", "envs", "secrets", "setup", "run", "num_nodes"}


@pytest.mark.parametrize("name", ["coordinator.yaml", "group.yaml"])
def test_a_file_is_a_task_whose_commands_exist(name):
    text = (DEPLOY / name).read_text()
    assert "Not run yet" in text
    task = yaml.safe_load(text)
    assert task.keys() <= FIELDS
    subprocess.run(["bash", "-n"], input=task["run"], text=True, check=True)
    command = task["run"].partition("\ncomposer-replication ")[2].replace("\\\n", " ")
    called, *arguments = shlex.split(command)
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    get_command(app).commands[called].make_context(called, own)  # an unknown option is an error
    named = set(re.findall(r"COMPOSER_REPLICATION_\w+", text))
    assert named <= set(re.findall(r"\| ``(\w+)`` \|", ReplicaEnv.__doc__))
