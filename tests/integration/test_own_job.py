"""The page on own jobs, executed. Run: pytest tests/integration/test_own_job.py.

Real: everything. The commands are the page's, in a shell; the job is a plain Composer script that
configures no logging.
"""

import os
import re
import sys
import time
from pathlib import Path

import pytest
from own_job import OwnJob, blocks, page
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


@pytest.mark.parametrize("group", [0, 1])
def test_each_says_in_a_few_lines_how_the_run_went(job, group):
    lines = [line for line in job.said(f"group_{group}").splitlines() if "[diloco]" in line]
    # The group that is there first says so after 2 s without the other.
    said = [line for line in lines if "WARNING: Waiting for replica groups: " not in line]
    assert len(said) == 6
    texts = re.findall(r"^\[diloco\] .*$", page(), re.MULTILINE)

    def shape(line):
        """A line without numbers and what they count: the page's are those of another model."""
        line = re.sub(r"\bparameters \w{8}", "parameters DIGEST", line)
        line = re.sub(r"localhost|HOST", "HOST", line)
        return re.sub(r"\d[\d.:]*( [kMG]?B| h| min| s)*( \d+)*( min| s)*", "N", line)

    assert {shape(line) for line in said} <= {shape(text) for text in texts}
    assert said[0].endswith("The largest of 2 fragments has 89 % of the bytes")
    assert said[1].endswith(f"group {group} of 2 meets the others at http://localhost:{job.port}")
    assert f"here is group {group}, 1 rank" in said[2] and "blocked for" in said[-1]


def test_nothing_else_is_written_where_there_is_nothing_to_warn_of(job):
    lines = job.said("group_0").splitlines()
    others = [line for line in lines if not line.startswith("[diloco]") and "[c10d]" not in line]
    assert [line for line in others if "diloco" in line or "replica" in line] == []
