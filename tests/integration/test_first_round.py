"""A group killed before the first commit. Run: pytest tests/integration/test_first_round.py

Real: the command `launch`, its groups, lighthouse and gloo, SIGKILL.
"""

import json
import signal
import subprocess
import sys
import time

import pytest
from forked_commands import ForkedCommand
from integration.groups import leader_of
from pace import paced
from run_events import syncs_of

pytestmark = [pytest.mark.integration, pytest.mark.slow]

CONFIG = """
max_duration: 1000000ba
global_train_batch_size: 8
model: {name: byte_gpt, d_model: 64, n_heads: 2, n_layers: 1, max_seq_len: 64}
train_loader: {name: text, path: null, max_seq_len: 64}
optimizer: {name: adamw, lr: 1.0e-3}
callbacks:
  diloco: {sync_every: 30, digest_every: 1}
"""


def phase_of(run_dir, replica_id):
    path = run_dir / f"replica_{replica_id}" / "status.json"
    return json.loads(path.read_text())["phase"] if path.exists() else ""


def wait_until(condition, launcher):
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline and launcher.poll() is None
        time.sleep(0.02)


@pytest.mark.parametrize("when", ["joining", "training"])
def test_it_is_started_again_and_all_end_with_the_same(tmp_path, when):
    config, run_dir = tmp_path / "tiny.yaml", tmp_path / "run"
    config.write_text(CONFIG)
    command = [sys.executable, "-m", "composer_replication", "launch", str(config)]
    launcher = ForkedCommand(
        [*command, "--replicas", "3", f"run_dir={run_dir}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=paced(0.05),
    )
    if when == "training":  # all have taken part in the cold start, and nobody has committed
        wait_until(lambda: all(phase_of(run_dir, i) == "training" for i in range(3)), launcher)
    else:
        wait_until(lambda: phase_of(run_dir, 2) == "joining", launcher)
    leader_of(launcher.pid, 2).send_signal(signal.SIGKILL)
    assert not any(syncs_of(run_dir / f"replica_{i}") for i in range(3))

    wait_until(lambda: syncs_of(run_dir / "replica_2"), launcher)  # it is back
    (run_dir / "STOP").touch()
    output, _ = launcher.communicate(timeout=240)
    assert launcher.returncode == 0, output
    replicas = json.loads((run_dir / "summary.json").read_text())["replicas"]
    assert [replica["restarts"] for replica in replicas] == [0, 0, 1]
    assert len({replica["global_digest"] for replica in replicas}) == 1
    for replica_id in range(2):
        syncs = syncs_of(run_dir / f"replica_{replica_id}")
        assert sum(sync["diloco/steps_lost"] for sync in syncs) == 0
