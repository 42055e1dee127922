"""A Composer job that reads a fixed shard of its samples: epochs, ranks, resumes.

Run: pytest tests/data/test_group_data.py. Simulated network; with a coordinator: test_leases.py.
"""

import time
from types import SimpleNamespace

import pytest
import torch
from harness.trainers import Each, TinyModel, callback_of, saving, train
from torch.utils.data import TensorDataset

from composer_replication import ReplicaDataLoader, simulate
from composer_replication.coordinator.wire_types import Lease
from composer_replication.data.group_data import LeasedData
from composer_replication.diloco.sample_ledger import Ledger
from composer_replication.group import reports, run_folder
from composer_replication.options import ReplicaOptions
from composer_replication.replica import ranks
from composer_replication.settings import DiLoCoSettings
from composer_replication.util.json_files import read_json

LENGTH = 44


def fit(sim, folder, *others, max_duration="2ep", stop=None, load=None, num_workers=0, **own):
    """Train; the ids of each batch with its epoch, and the digest."""
    seen = []

    def look(state):
        seen.append((state.timestamp.epoch.value, state.batch[2].tolist()))

    generator = torch.Generator().manual_seed(0)
    dataset = TensorDataset(
        torch.randn(LENGTH, 8, generator=generator),
        torch.randn(LENGTH, 4, generator=generator),
        torch.arange(LENGTH),
    )
    callback = callback_of(sim, **{"sync_every": 3} | own)
    loader = ReplicaDataLoader(dataset, 4, dataset_id="d", unit_size=5, num_workers=num_workers)
    trained = train(
        *(callback, Each(look), *others),
        model=TinyModel(seed=0),
        train_dataloader=loader,
        max_duration=stop or max_duration,
        save_overwrite=True,
        load_path=f"{folder}/{sim.replica_id}/ba{load}.pt" if load else None,
        device_train_microbatch_size=4,
        **saving(folder, sim.replica_id, "1ba"),
    )
    return seen, trained.digest


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_groups_read_every_sample_of_each_epoch_once_between_them(tmp_path, num_workers):
    results = simulate(lambda sim: fit(sim, tmp_path, num_workers=num_workers), num_replicas=2)
    for epoch in range(2):
        read = [x for seen, _ in results for e, ids in seen if e == epoch for x in ids]
        assert sorted(read) == list(range(LENGTH))
    assert results[0][1] == results[1][1]


@pytest.mark.slow
@pytest.mark.parametrize("stop", [2, 5, 7, 9])
def test_a_resume_reads_on_and_ends_on_the_same_bits(tmp_path, stop):
    """In mid-epoch, after the last batch of an epoch, and in the second epoch."""
    whole = simulate(lambda sim: fit(sim, tmp_path / "whole"), num_replicas=2)
    simulate(lambda sim: fit(sim, tmp_path, stop=f"{stop}ba"), num_replicas=2)
    rest = simulate(lambda sim: fit(sim, tmp_path, load=stop), num_replicas=2)
    for (seen, digest), (rest_seen, its) in zip(whole, rest, strict=True):
        assert rest_seen == seen[stop:]
        assert its == digest


@pytest.mark.slow
@pytest.mark.parametrize("groups", [1, 3])
def test_the_end_of_epochs_is_known_from_the_samples_that_are_done(tmp_path, monkeypatch, groups):
    monkeypatch.setattr(run_folder, "STATUS_EVERY_S", 0.0)
    monkeypatch.setattr(reports, "REPORT_EVERY_S", 0.0)
    seen = []

    def replica(sim):
        path = tmp_path / f"replica_{sim.replica_id}" / run_folder.STATUS
        watch = Each(lambda state: seen.append(read_json(path)) if not sim.replica_id else None)
        return len(fit(sim, tmp_path, watch, run_dir=str(tmp_path), max_duration="3ep")[0])

    trained = simulate(replica, num_replicas=groups)[0]
    ends = [status["max_batches"] for status in seen]
    # A shard is of about as many units as another, and the last batch of an epoch may be smaller.
    assert len(ends) == trained and all(abs(end - trained) <= 1 for end in ends)
    assert ends[-1] in range(trained, trained + 2)
    assert all(status["seconds_left"] >= 0 for status in seen)


class LateCoordinator:
    """Answers each request after a while; it has one lease, and all else is done."""

    ANSWERS = {
        "open_stream": 7,
        "progress": [{"epoch": 0, "done": 4, "length": 4, "available": 0}],
    }

    def __getattr__(self, name):
        def answer(*request):
            time.sleep(0.1)
            return self.ANSWERS.get(name)

        return answer

    def lease(self, stream, number, epoch):
        time.sleep(0.1)
        return Lease(number, epoch, 0, 0, 0 if number else 4, 4 * bool(number))

    def with_limits(self, **limits):
        return self


def test_a_wait_for_the_coordinator_is_no_hang(monkeypatch):
    monkeypatch.setattr(ranks, "POLL_S", 0.01)
    noted = []
    ledger = Ledger(num_fragments=1)
    diloco = SimpleNamespace(
        settings=DiLoCoSettings(),
        ledger=ledger,
        read_from=ledger.read_from,
        has_joined_others=True,
        inner_steps=0,
        hang_watch=SimpleNamespace(note_progress=lambda: noted.append(1)),
    )
    member = SimpleNamespace(
        client=LateCoordinator(), replica_id="0", session="s", send_report=lambda client: None
    )
    loader = ReplicaDataLoader(TensorDataset(torch.arange(4)), 4, dataset_id="d", unit_size=4)
    data = LeasedData(loader, diloco, ReplicaOptions(), member, sync_idle=lambda: None)

    def noted_in(wait):
        noted.clear()
        wait()
        return len(noted) > 3

    assert noted_in(data.start)  # opens a stream
    data.before_batch(0, 0, 1)
    batches = iter(loader)
    assert noted_in(lambda: next(batches))  # waits for a lease
    assert noted_in(lambda: list(batches))  # waits for the end
