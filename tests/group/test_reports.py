"""A group's position: how often it is reported, and its end if nobody knows the last batch.

Run: pytest tests/group/test_reports.py. Faked: the clock, and the trainer.
With a Trainer: tests/data/test_group_data.py.
"""

from types import SimpleNamespace

import pytest

from composer_replication import DiLoCoSettings
from composer_replication.group.host import Host
from composer_replication.group.reports import Reporter
from composer_replication.group.run_folder import ReplicaFolder


class Folder(ReplicaFolder):
    """Keeps the status that it would write."""

    def write_status(self, phase, **status):
        self.status = status


class Trainer(Host):
    """Does not know its last step."""

    steps = 0


SECONDS = 2.0
"""Of a batch."""


@pytest.mark.parametrize(("began_at", "done_then", "share", "ends_at"), [
    (0, 0.0, 0.01, 100),
    (40, 0.25, 0.01, 40 + 75),  # a resume
    (40, 0.2, 0.02, 40 + 40),  # a joiner, whose batches count the others'
])  # fmt: skip
def test_it_is_estimated_at_each_sync_from_the_samples_that_are_in_the_model(
    clock, began_at, done_then, share, ends_at
):
    folder = Folder(None, 0)
    log = Reporter(folder, DiLoCoSettings(sync_every=5), trainer := Trainer())

    def report(phase, batch, done):
        trainer.steps = batch
        return log.position(phase, SimpleNamespace(inner_steps=batch, outer_step=0), done)

    assert report("joining", began_at, done_then)["max_batches"] is None
    for batch in range(20):
        synced = batch - batch % 5
        found = report("training", began_at + batch, done_then + share * synced)
        clock.now += SECONDS
        assert found["max_batches"] == (ends_at if synced else None)
        assert found["steps_per_second"] == (1 / SECONDS if synced else None)
    assert folder.status["seconds_left"] == SECONDS * (ends_at - began_at - 19)
    assert report("evaluating", began_at + 20, 1.0)["max_batches"] == ends_at


def test_between_syncs_it_is_reported_ten_times_a_second_and_to_a_progress_bar_at_each_step(
    clock,
):
    trainer = Trainer()
    log = Reporter(Folder(None, 0), DiLoCoSettings(sync_every=5), trainer)
    phases = ["joining", "training", "training", "evaluating", "training"]
    assert [log.is_due(phase) for phase in phases] == [True, True, False, True, True]
    clock.now += 0.11
    assert log.is_due("training") and not log.is_due("training")
    trainer.shows_position = True
    assert log.is_due("training") and log.is_due("training")
