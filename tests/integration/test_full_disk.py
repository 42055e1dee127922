"""A launch on a disk that is full for a while.

Run: pytest tests/integration/test_full_disk.py

Real: everything. For a while no file of the launcher and the groups may grow (``RLIMIT_FSIZE``).
"""

import resource
import time

import psutil
import pytest
from integration.groups import Launch
from run_events import syncs_of

ARGUMENTS = [
    "max_duration=1000000ba",
    "callbacks.diloco.sync_every=10",
    "log_to_console=true",  # Composer's own prints, into a file on that disk
    "eval_interval=100000ba",
    *("model.d_model=32", "model.n_heads=2", "model.n_layers=1", "model.max_seq_len=32"),
    *("train_loader.max_seq_len=32", "eval_loader.max_seq_len=32"),
]


def allow_files_of(launcher, num_bytes):
    """Files of the launcher, and of everything that it has started, may be of this size."""
    for process in (launcher, *launcher.children(recursive=True)):
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))


@pytest.mark.integration
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
    for i in range(2):
        steps = [sync["diloco/outer_step"] for sync in syncs_of(launch.folder(i))]
        assert steps == list(range(1, len(steps) + 1))
    assert f"equal in 2 groups after {len(steps)} outer steps" in launch.said()
    assert "started again" not in launch.said()
