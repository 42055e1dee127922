"""All groups killed at once, and started again. Run: pytest tests/integration/test_restart.py

Real: the command `launch`, its groups, lighthouse and gloo, SIGKILL, Composer's autoresume.
"""

import os
import signal
import sys

import pytest
from forked_commands import ForkedCommand, run
from integration.groups import Launch
from run_events import events_of, syncs_of

from composer_replication.replica.lighthouse import read_status, start_lighthouse

pytestmark = pytest.mark.integration

LATEST = "latest-rank0.pt"
CONFIG = """
max_duration: 180ba
global_train_batch_size: 8
model: {name: byte_gpt, d_model: 64, n_heads: 2, n_layers: 2, max_seq_len: 64}
train_loader: {name: text, path: null, max_seq_len: 64}
optimizer: {name: adamw, lr: 1.0e-3}
scheduler: {name: cosine_with_warmup, t_warmup: 10ba, alpha_f: 0.1}
callbacks:
  diloco: {sync_every: 10, num_fragments: 2, fragment_sync_delay: 2, fragment_update_alpha: 0.5}
autoresume: true
save_folder: checkpoints
save_interval: 67ba  # two steps after a sync began, two before its outer step: in mid-round
"""


def wait_for_checkpoints(launch, name):
    """Until both groups' newest checkpoint is the one of this name."""
    links = [launch.folder(i) / "checkpoints" / LATEST for i in range(2)]
    launch.wait_until(
        lambda: all(link.is_symlink() and os.readlink(link) == name for link in links)
    )


@pytest.mark.slow
def test_killed_together_and_started_again_the_run_ends_as_if_never_killed(tmp_path):
    config, run_dir = tmp_path / "tiny.yaml", tmp_path / "killed"
    config.write_text(CONFIG)
    with Launch(config, tmp_path / "whole") as launch:
        whole = launch.summary()

    with Launch(config, run_dir) as launch:
        wait_for_checkpoints(launch, "ep0-ba67-rank0.pt")
        for i in range(2):
            launch.leader_of(i).send_signal(signal.SIGKILL)  # the launcher starts them again
        wait_for_checkpoints(launch, "ep0-ba134-rank0.pt")
        launch.kill_all()
    with Launch(config, run_dir) as launch:
        again = launch.summary()

    digests = {replica["global_digest"] for replica in again["replicas"]}
    assert digests == {replica["global_digest"] for replica in whole["replicas"]}
    assert again["outer_steps"] == whole["outer_steps"]
    for i in range(2):
        resumes = events_of(launch.folder(i), "resume")
        assert [line["batch"] for line in resumes] == [67, 134]
        # Since the checkpoint at most what the kill was late by.
        assert all(0 <= line["batches_again"] < 67 for line in resumes)
        last_made = {sync["diloco/outer_step"] for sync in syncs_of(launch.folder(i))}
        assert last_made == set(range(1, whole["outer_steps"] + 1))
    assert "resumed" in launch.said()  # it names what was made again


@pytest.mark.slow
def test_nobody_hears_of_a_group_whose_checkpoint_is_cut_off_and_an_earlier_one_is_loaded(tmp_path):
    config = tmp_path / "tiny.yaml"
    folder = tmp_path / "run" / "replica_0" / "checkpoints"
    config.write_text(CONFIG.replace("180ba", "4ba").replace("67ba", "2ba"))
    environ = os.environ | {"REPLICA_GROUP_ID": "0", "NUM_REPLICA_GROUPS": "1"}
    words = ["-m", "composer_replication", "train", str(config), f"run_dir={tmp_path / 'run'}"]
    lighthouse = start_lighthouse()
    try:
        environ["TORCHFT_LIGHTHOUSE"] = lighthouse.address()

        def train(status, *overrides):
            """What it says."""
            command = [sys.executable, *words, *overrides]
            ended = run(ForkedCommand, command, timeout=240, env=environ)
            assert ended.returncode == status, ended.stderr[-4000:]
            return ended.stdout + ended.stderr

        train(0)
        newest, earlier = folder / "ep0-ba4-rank0.pt", folder / "ep0-ba2-rank0.pt"
        newest.write_bytes(newest.read_bytes()[:-1000])
        heard_of = read_status(lighthouse.address()).heard_of
        assert "failed finding central directory" in train(1)
        assert read_status(lighthouse.address()).heard_of == heard_of
        # In a run that has begun a group without a checkpoint does not begin anew either.
        output = train(2, "autoresume=false", "save_overwrite=true")
        assert "outer steps, and this group starts without a checkpoint" in output
        assert f"continue from this group's last checkpoint (load_path={folder / LATEST})" in output
        train(0, f"load_path={earlier}", "autoresume=false", "save_overwrite=true")
    finally:
        lighthouse.shutdown()
