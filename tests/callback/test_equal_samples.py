"""A Composer job warns if its groups train on the same samples.

Run: pytest tests/callback/test_equal_samples.py. Simulated network; real: Composer's Trainer. Which
groups are found is tested in tests/diloco/test_equal_samples.py.
"""

import logging

import torch
from common import batch
from harness.trainers import TinyModel, fit_groups
from run_events import events_of, write_events
from torch.utils.data import DataLoader

from composer_replication.launch.display import LiveRun


class DictModel(TinyModel):
    """Batches are dicts of lists and tensors, as a tokenizer's are."""

    def forward(self, batch):
        return self.mlp(batch["x"])

    def loss(self, outputs, batch):
        return torch.nn.functional.mse_loss(outputs, batch["y"])


def samples():
    pairs = [pair for step in range(4) for pair in zip(*batch(0, step), strict=True)]
    return [{"x": x, "y": y, "text": f"sample {x[0]}"} for x, y in pairs]


SAID = (
    "groups 0 and 1 train on the same samples, their first batches are equal: give each its own "
    "part with ReplicaDataLoader(dataset, batch_size), or with a sampler that divides by "
    "REPLICA_GROUP_ID; if they are meant to be the same, set same_samples=True"
)


def test_groups_on_the_same_samples_say_so_once_and_the_launch_says_it_too(caplog, tmp_path):
    job = {"model": DictModel, "train_dataloader": DataLoader(samples(), 8)}
    groups = LiveRun(tmp_path, range(2))
    with caplog.at_level(logging.WARNING, "composer_replication"):
        fit_groups(2, max_duration="8ba", diloco={"run_dir": str(tmp_path)}, **job)
    assert caplog.messages == [SAID] * 2
    assert [*groups.update(), *groups.update()] == [SAID]
    events = events_of(tmp_path / "replica_0", "start", "sync", "warning")
    assert [event["event"] for event in events][:3] == ["start", "warning", "sync"]
    for group in range(2):
        write_events(tmp_path / f"replica_{group}", "continued", {})
    assert LiveRun(tmp_path, range(2)).update() == [], "that was an earlier part of the run"
