"""Launched runs whose groups are killed, or whose disk is full for a while.

Run: pytest tests/integration/test_restart.py. Real: the command `launch`, its groups, lighthouse
and gloo, SIGKILL, Composer's autoresume. On a full disk no file of the launcher and the groups may
grow (``RLIMIT_FSIZE``).
"""

import itertools
import json
import os
import resource
import signal
import time

import psutil
import pytest
from harness.commands import Launch
from run_events import events_of, syncs_of
from text_config import TINY, text_job

pytestmark = pytest.mark.integration

LATEST = "latest-rank0.pt"
OWN = """
max_duration: 180ba
schedulers:
  _target_: composer.optim.CosineAnnealingWithWarmupScheduler
  t_warmup: 10ba
  alpha_f: 0.1
callbacks:
  diloco:
    _target_: composer_replication.DiLoCoCallback
    sync_every: 10
    num_fragments: 2
    fragment_sync_delay: 2
    fragment_update_alpha: 0.5
autoresume: true
save_folder: checkpoints
save_interval: 67ba  # two steps after a sync began, two before its outer step: in mid-round
"""
CONFIG = text_job(OWN, d_model=64, n_layers=2, length=64, batch=8)


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


# ---- before the first commit ------------------------------------------------------------------

ENDLESS = ["max_duration=1000000ba", "callbacks.diloco={sync_every: 30, schedule: []}"]


@pytest.mark.slow
def test_a_group_killed_before_the_first_commit_is_started_again_and_all_end_with_the_same(
    tmp_path,
):
    config = tmp_path / "tiny.yaml"
    config.write_text(TINY)
    with Launch(config, tmp_path / "run", "--replicas", "3", *ENDLESS, pace_s=0.05) as launch:

        def phase_of(replica_id):
            path = launch.folder(replica_id) / "status.json"
            return json.loads(path.read_text())["phase"] if path.exists() else ""

        # All have taken part in the cold start, and nobody has committed.
        launch.wait_until(lambda: all(phase_of(i) == "training" for i in range(3)))
        launch.leader_of(2).send_signal(signal.SIGKILL)
        assert not any(syncs_of(launch.folder(i)) for i in range(3))

        launch.wait_until(lambda: syncs_of(launch.folder(2)))  # it is back
        launch.stop()
        replicas = launch.summary()["replicas"]
    assert [replica["restarts"] for replica in replicas] == [0, 0, 1]
    assert len({replica["global_digest"] for replica in replicas}) == 1
    for replica_id in range(2):
        syncs = syncs_of(launch.folder(replica_id))
        assert sum(sync["diloco/steps_lost"] for sync in syncs) == 0


# ---- a full disk ------------------------------------------------------------------------------

ARGUMENTS = [
    "max_duration=1000000ba",
    "callbacks.diloco.sync_every=10",
    "log_to_console=true",  # Composer's own prints, into a file on that disk
    "eval_interval=100000ba",
    *("model.d_model=32", "model.n_heads=2", "model.n_layers=1", "model.max_seq_len=32"),
    *("train_dataloader.max_seq_len=32", "eval_dataloader.max_seq_len=32"),
]


def allow_files_of(launcher, num_bytes):
    """Files of the launcher, and of everything that it has started, may be of this size."""
    for process in (launcher, *launcher.children(recursive=True)):
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))


def test_a_disk_that_is_full_for_a_while_ends_no_group_and_loses_no_line(tmp_path):
    with Launch("configs/quickstart.yaml", tmp_path / "run", *ARGUMENTS, pace_s=0.03) as launch:

        def num_syncs():
            return min(len(syncs_of(launch.folder(i))) for i in range(2))

        launcher = psutil.Process(launch.process.pid)
        launch.wait_until(lambda: num_syncs() >= 5)
        groups = {child.pid for child in launcher.children()}
        allow_files_of(launcher, 0)
        before = num_syncs()
        time.sleep(4)
        assert num_syncs() - before <= 1, "the disk was not full"
        allow_files_of(launcher, resource.RLIM_INFINITY)
        launch.wait_until(lambda: num_syncs() >= before + 20)
        assert groups <= {child.pid for child in launcher.children()}
        launch.stop()
        launch.summary()
    made = set()
    for i in range(2):
        syncs = syncs_of(launch.folder(i))
        made |= {sync["diloco/outer_step"] for sync in syncs}
        for before, sync in itertools.pairwise(syncs):
            is_next = sync["diloco/outer_step"] == before["diloco/outer_step"] + 1
            # A group that a laden machine has kept from running takes over what the other made.
            assert is_next or sync["diloco/healed"]
    assert made == set(range(1, max(made) + 1))
    assert f"equal in 2 groups after {max(made)} outer steps" in launch.said()
    assert "started again" not in launch.said()
