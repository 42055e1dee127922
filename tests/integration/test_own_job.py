"""The page on own jobs, executed. Run: pytest tests/integration/test_own_job.py.

Real: everything. The commands are the page's, in a shell; the job is a plain Composer script that
configures no logging.
"""

import os
import sys
import time
from pathlib import Path

import pytest
from own_job import OwnJob, blocks
from run_events import result_of, syncs_of

pytestmark = [pytest.mark.integration, pytest.mark.together]

TRAIN = """
import torch
from composer import Trainer
from composer.models import ComposerClassifier
from torch.utils.data import DataLoader, TensorDataset

from composer_replication import DiLoCoCallback

module = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
points = torch.randn(512, 16)
data = TensorDataset(points, (points.sum(1) > 0).long())
trainer = Trainer(
    model=ComposerClassifier(module, num_classes=2),
    optimizers=torch.optim.AdamW(module.parameters(), lr=1e-3),
    train_dataloader=DataLoader(data, batch_size=8),
    max_duration="300ba",
    device="cpu",
    progress_bar=False,
    callbacks=[DiLoCoCallback(run_dir="runs/mine")],
)
trainer.fit()
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """The job of two groups, after its end."""
    folder = tmp_path_factory.mktemp("own_job")
    (folder / "train.py").write_text(TRAIN)
    (folder / "my.yaml").write_text(blocks("yaml")[0])
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with OwnJob(folder, {**os.environ, "PATH": programs}) as job:
        job.start_coordinator()
        groups = [job.start_group(group) for group in range(2)]
        deadline = time.monotonic() + 300
        for number, group in enumerate(groups):
            status = group.wait(timeout=max(1.0, deadline - time.monotonic()))
            assert status == 0, job.said(f"group_{number}")
        yield job


def test_both_groups_train_with_the_coordinators_settings_and_end_equal(job):
    folders = [job.folder / "runs" / "mine" / f"replica_{group}" for group in range(2)]
    results = [result_of(folder) for folder in folders]
    assert results[0]["global_digest"] == results[1]["global_digest"]
    # sync_every, num_fragments: the script has given none.
    assert {result["inner_steps"] for result in results} == {300}
    assert {sync["diloco/fragment"] for sync in syncs_of(folders[0])} == {0, 1}
    assert "settings: sync_every=100, num_fragments=2" in job.said("coordinator")


def test_nothing_is_written_where_there_is_nothing_to_warn_of(job):
    lines = job.said("group_0").splitlines()
    others = [line for line in lines if "Waiting for replica groups: " not in line]
    assert [line for line in others if "diloco" in line or "replica" in line] == []
