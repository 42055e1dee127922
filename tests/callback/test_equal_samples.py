"""A Composer job warns if its groups train on the same samples.

Run: pytest tests/callback/test_equal_samples.py. Simulated network; real: Composer's Trainer. Which
groups are found is tested in tests/diloco/test_equal_samples.py.
"""

import logging

import pytest
import torch
from common import batch
from composer_jobs import TinyModel, callback_of, trainer_of
from run_events import events_of
from torch.utils.data import DataLoader

from composer_replication.launch.live_run import LiveRun
from composer_replication.simulation.simulation import simulate


class DictModel(TinyModel):
    """Batches are dicts of lists and tensors, as a tokenizer's are."""

    def forward(self, batch):
        return self.mlp(batch["x"])

    def loss(self, outputs, batch):
        return torch.nn.functional.mse_loss(outputs, batch["y"])


def tuples(data):
    return [pair for step in range(4) for pair in zip(*batch(data, step), strict=True)], None


def dicts(data):
    samples = [{"x": x, "y": y, "text": f"sample {x[0]}"} for x, y in tuples(data)[0]]
    return samples, DictModel


@pytest.fixture
def train(caplog, tmp_path):
    """Train two groups; the warnings of both, and what a launch says of the run."""

    def call(samples_of, data, **diloco):
        groups = LiveRun(tmp_path, range(2))
        said = []

        def replica(sim):
            samples, model = samples_of(data[sim.replica_id])
            callback = callback_of(sim, run_dir=str(tmp_path), **diloco)
            trainer = trainer_of(
                callback,
                model=model and model(),
                train_dataloader=DataLoader(samples, 8),
                max_duration="8ba",
            )
            trainer.fit()
            trainer.close()

        with caplog.at_level(logging.WARNING, "composer_replication"):
            simulate(replica, num_replicas=2)
        for _ in range(2):
            said += groups.update()
        return [r.getMessage() for r in caplog.records], said

    return call


SAID = (
    "groups 0 and 1 train on the same samples, their first batches are equal: give each its own "
    "part with ReplicaDataLoader(dataset, batch_size), or with a sampler that divides by "
    "REPLICA_GROUP_ID; if they are meant to be the same, set same_samples=True"
)


@pytest.mark.parametrize("samples_of", [tuples, dicts])
def test_groups_on_the_same_samples_say_so_once_and_the_launch_says_it_too(
    train, tmp_path, samples_of
):
    warnings, said = train(samples_of, (0, 0))
    assert warnings == [SAID] * 2
    assert said == [SAID]
    events = events_of(tmp_path / "replica_0", "start", "sync", "warning")
    assert [event["event"] for event in events][:3] == ["start", "warning", "sync"]
    assert LiveRun(tmp_path, range(2)).update() == [], "an earlier part of a run that is continued"


@pytest.mark.parametrize(("data", "diloco"), [
    ((0, 1), {}),
    ((0, 1), {"weight_by": "samples"}),
    ((0, 0), {"same_samples": True}),
])  # fmt: skip
@pytest.mark.parametrize("samples_of", [tuples, dicts])
def test_others_say_nothing(train, samples_of, data, diloco):
    assert train(samples_of, data, **diloco) == ([], [])
