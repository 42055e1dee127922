"""The launcher with a script of the user's own. Run: pytest tests/integration/test_own_command.py

Real: everything; the script is one of ``examples``.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from forked_commands import ForkedCommand, run
from run_events import result_of

pytestmark = [pytest.mark.integration, pytest.mark.slow]

SCRIPT = Path(__file__).parents[2] / "examples" / "train.py"


def said_by(start, *command):
    done = run(start, [sys.executable, *map(str, command)], timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_a_launch_of_a_script_is_a_run_like_that_of_a_config(tmp_path):
    # Group 1 trains a batch more than group 0, if its id is where the braces were.
    script = [sys.executable, SCRIPT, "2{replica_id}ba"]
    ours = "-m composer_replication launch --replicas 2 --set sync_every=10".split()
    said = said_by(subprocess.Popen, *ours, "--run-dir", tmp_path / "run", "--", *script)
    assert "equal in 2 groups after 3 outer steps" in said
    assert "sent by each group" in said
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["outer_steps"] == 3
    assert [replica["inner_steps"] for replica in summary["replicas"]] == [20, 21]
    assert len({replica["global_digest"] for replica in summary["replicas"]}) == 1
    for name in ("config.yaml", "report.html", "replica_1/events.jsonl", "replica_0/log.txt"):
        assert (tmp_path / "run" / name).stat().st_size, name


BATCH_NORM = """
import os
import sys

import torch
from composer import Trainer
from composer.models import ComposerClassifier
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composer_replication import DiLoCoCallback

group = int(os.environ["REPLICA_GROUP_ID"])


def samples(seed):
    points = torch.randn(512, 8, generator=torch.Generator().manual_seed(seed)) + seed
    return DataLoader(TensorDataset(points, (points.sum(1) > 8 * seed).long()), batch_size=16)


torch.manual_seed(group)
module = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
trainer = Trainer(
    model=ComposerClassifier(module, num_classes=2),
    optimizers=torch.optim.SGD(module.parameters(), lr=0.1),
    train_dataloader=samples(group),
    eval_dataloader=samples(2),
    max_duration=f"2{group}ba",
    device="cpu",
    progress_bar=False,
    callbacks=[DiLoCoCallback()],
)
trainer.fit()
trainer.close()
torch.save(module.state_dict(), f"{sys.argv[1]}/model_{group}.pt")
"""


def test_batch_norm_ends_alike_in_both_groups_with_nothing_set_and_is_named_where_it_does_not(
    tmp_path,
):
    (tmp_path / "train.py").write_text(BATCH_NORM)

    def launch(*names):
        folder = tmp_path / f"run{len(names)}"
        ours = ["-m", "composer_replication", "launch", "--replicas", 2, "--run-dir", folder]
        ours += [word for name in ("sync_every=10", *names) for word in ("--set", name)]
        said = said_by(ForkedCommand, *ours, "--", sys.executable, tmp_path / "train.py", tmp_path)
        models = [torch.load(tmp_path / f"model_{group}.pt") for group in range(2)]
        ends = [result_of(folder / f"replica_{group}") for group in range(2)]
        summary = json.loads((folder / "summary.json").read_text())
        return said, models, ends, summary["differing_buffers"]

    said, (one, other), ends, differing = launch()
    assert one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)
    assert one["1.running_mean"].abs().sum() > 0.1 and one["1.num_batches_tracked"] == 20
    assert ends[0]["eval"] == ends[1]["eval"] != {}
    assert "equal in 2 groups after 3 outer steps" in said and "DIFFERENT" not in said
    assert differing == []

    said, (one, other), ends, differing = launch("sync_buffers=none", "outer_momentum=0.9")
    differ = [name for name in one if not torch.equal(one[name], other[name])]
    assert differing == [f"module.{name}" for name in differ]
    assert [name.partition(".")[2] for name in differ] == [
        "running_mean",
        "running_var",
        "num_batches_tracked",
    ]
    assert f"the models differ in {', '.join(differing)}" in said
    assert ends[0]["eval"] != ends[1]["eval"]
    # What the callback warns of in the groups' logs, launch says once.
    assert said.count("outer_momentum=0.9 overshoots in fewer than 200 rounds") == 1
