"""Samples that replica groups share out. Run: pytest tests/data/test_loader.py

No network: the leases come from a list here, or from fixed shards.
"""

import itertools
import os

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset
from waiting import wait_until

from composer_replication import ReplicaDataLoader
from composer_replication.coordinator.wire_types import DatasetSpec, Lease
from composer_replication.data.loader import MapStyle
from composer_replication.data.sample_stream import (
    FixedShards,
    StreamPosition,
    StreamReader,
    shard_of,
)

START = StreamPosition()
WORKERS = [0, pytest.param(2, marks=pytest.mark.slow)]  # they are processes


class Numbers(Dataset):
    def __init__(self, length=100):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.tensor(index)


class Listed:
    """Leases as listed: (epoch, unit, start, stop), or None for a pause."""

    def __init__(self, *parts):
        self.leases, before = [], 0
        for number, part in enumerate(parts):
            epoch, unit, start, stop = part or (0, 0, 0, 0)
            self.leases.append(Lease(number, epoch, unit, start, stop, before))
            before += stop - start
        self.asked = []

    def __call__(self, number, epoch):
        self.asked.append((number, epoch))
        if number >= len(self.leases):
            return Lease(number, epoch, 0, 0, 0, 0, is_open=False)
        return self.leases[number]


def loader_of(source, position=START, length=100, has_more=lambda: False, epoch=0, done=0, **own):
    own = {"batch_size": 4, "unit_size": 10, "dataset_id": "numbers"} | own
    loader = ReplicaDataLoader(Numbers(length), **own)
    loader.read(source, position, has_more)
    loader.begin(epoch, done)
    return loader


def lists(loader):
    return [None if batch is None else batch.tolist() for batch in loader]


UNIT_0_AND_HALF_OF_3 = ((0, 0, 0, 10), (0, 3, 0, 5), None)


@pytest.mark.parametrize("num_workers", WORKERS)
def test_batches_cross_units_and_the_last_one_takes_what_is_left(num_workers):
    own = {"num_workers": num_workers, "shuffle": False}
    loader = loader_of(Listed(*UNIT_0_AND_HALF_OF_3), **own)
    positions = []
    found = []
    for batch in loader:
        found.append(batch.tolist())
        positions.append((loader.position.number, loader.position.samples))
    assert found == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 30, 31], [32, 33, 34]]
    assert positions == [(0, 4), (0, 8), (1, 12), (2, 15)]
    assert loader.position == StreamPosition(3, 15)


def test_a_unit_is_shuffled_by_seed_epoch_and_unit_alone():
    orders = {}
    for seed, epoch, unit in itertools.product((0, 1), (0, 1), (2, 5)):
        source = Listed((epoch, unit, 0, 10), None)
        batches = lists(loader_of(source, seed=seed, epoch=epoch))
        orders[seed, epoch, unit] = [x - 10 * unit for batch in batches for x in batch]
        assert sorted(orders[seed, epoch, unit]) == list(range(10))
    assert len({tuple(order) for order in orders.values()}) == len(orders)
    # Known to the digit, since groups of all versions have to agree on it.
    assert orders[0, 0, 2] == [8, 0, 5, 3, 6, 7, 9, 4, 1, 2]
    rest = lists(loader_of(Listed((0, 2, 7, 10), None)))
    assert rest == [[20 + x for x in orders[0, 0, 2][7:]]]


@pytest.mark.slow
@pytest.mark.parametrize("stop", range(1, 8))
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_resume_goes_on_after_the_last_batch_that_was_trained_on(stop, num_workers):
    parts = [(0, 0, 0, 10), (0, 3, 0, 5), (0, 4, 2, 10), None, (1, 1, 0, 10), None]
    whole, positions = [], []
    loader = loader_of(Listed(*parts), num_workers=num_workers)
    for epoch in range(2):
        loader.begin(epoch, 0)
        whole.append([])
        for batch in loader:
            whole[-1].append(batch.tolist())
            positions.append((epoch, len(whole[-1]), loader.position))
    epoch, done, position = positions[stop - 1]
    resumed = loader_of(Listed(*parts), position, epoch=epoch, done=done, num_workers=num_workers)
    found = [lists(resumed)]
    if epoch == 0:
        resumed.begin(1, 0)
        found.append(lists(resumed))
    assert found[0][:done] == [None] * done, "what Composer skips is not read"
    expected = [batches[:] for batches in whole[epoch:]]
    expected[0][:done] = [None] * done
    assert found == expected


def test_the_next_unit_is_asked_for_while_one_is_read():
    source = Listed((0, 0, 0, 10), (0, 1, 0, 10), None)
    batches = iter(loader_of(source))
    next(batches)
    wait_until(lambda: source.asked == [(0, 0), (1, 0)], 10)


def test_ranks_read_disjoint_parts_of_the_same_batches():
    found = []
    for rank in range(2):
        loader = loader_of(Listed(*UNIT_0_AND_HALF_OF_3), shuffle=False)
        loader.sampler.num_replicas, loader.sampler.rank = 2, rank
        found.append(lists(loader))
    assert found[0] == [[0, 2, 4, 6], [8, 30, 32, 34]]
    assert found[1] == [[1, 3, 5, 7], [9, 31, 33, 8]]  # 15 samples: one is twice in the last batch


def test_where_it_pauses_it_asks_whether_there_is_more():
    parts = ((0, 0, 0, 2), None, None, (0, 1, 0, 2), None)
    answers = iter([True, True, False])
    loader = loader_of(Listed(*parts), shuffle=False, has_more=lambda: next(answers))
    assert lists(loader) == [[0, 1], [10, 11]]
    assert next(answers, None) is None and loader.position == StreamPosition(5, 4)


@pytest.mark.parametrize("num_workers", WORKERS)
def test_another_stream_is_read_from_the_next_batch_on(num_workers):
    """What workers have read ahead of the one before is not given."""
    loader = loader_of(Listed((0, 0, 0, 10), None), shuffle=False, num_workers=num_workers)
    batches = iter(loader)
    assert next(batches).tolist() == [0, 1, 2, 3]
    loader.read(Listed((0, 7, 0, 6), None), StreamPosition(), lambda: False)
    assert [batch.tolist() for batch in batches] == [[70, 71, 72, 73], [74, 75]]


def test_another_stream_may_come_in_a_pause():
    def has_more():
        if loader.sampler.reader.is_closed:
            loader.read(Listed((0, 7, 0, 2), None), StreamPosition(), lambda: False)
            return True
        return False

    loader = loader_of(Listed((0, 0, 0, 2)), shuffle=False, has_more=has_more)
    assert lists(loader) == [[0, 1], [70, 71]]


def test_an_error_of_the_source_is_one_of_the_loader():
    def broken(number, epoch):
        raise ValueError("no such stream")

    with pytest.raises(ValueError, match="no such stream"):
        lists(loader_of(broken))


def test_it_gives_nothing_before_training_and_its_length_is_a_bound():
    loader = ReplicaDataLoader(Numbers(), 4, dataset_id="numbers")
    assert list(loader) == []
    loader.read(Listed((0, 0, 0, 2), None), StreamPosition(), lambda: False)
    assert list(loader) == [], "Composer looks at a batch of every past epoch"
    assert len(loader) == 25 + 1, "and one smaller batch for each unit"


@pytest.mark.parametrize(("wrong", "message"), [
    ({"batch_size": 0}, "batch_size=0: use an integer of at least 1"),
    ({"unit_size": 0}, "unit_size=0: use an integer of at least 1"),
    ({"dataset": Numbers(0)}, "Numbers has no samples"),
])  # fmt: skip
def test_bad_sizes_are_refused(wrong, message):
    arguments = {"dataset": Numbers(), "batch_size": 1, "dataset_id": "numbers"} | wrong
    with pytest.raises(ValueError, match=message):
        ReplicaDataLoader(**arguments)


class Drawn(Numbers):
    """Samples with an augmentation at random."""

    def __getitem__(self, index):
        return torch.rand(3)


class Opened(Numbers):
    """Samples of a file that each worker has to open for itself."""

    process = None

    def __getitem__(self, index):
        self.process = self.process or os.getpid()
        assert self.process == os.getpid()
        return torch.tensor(index)


class Halves(Numbers):
    def __getitem__(self, index):
        return torch.tensor(index / 2)


@pytest.mark.parametrize("num_workers", WORKERS)
def test_a_dataset_has_a_name_of_its_class_its_length_and_three_samples(num_workers):
    def name(dataset, **own):
        before = torch.get_rng_state()
        loader = ReplicaDataLoader(dataset, batch_size=16, num_workers=num_workers, **own)
        # A name takes no number of the generator, from which a run would go on otherwise.
        assert isinstance(dataset, Drawn) or torch.equal(torch.get_rng_state(), before)
        return loader.spec.dataset_id

    # Known to the digit, since groups on different machines have to agree on it.
    assert name(Numbers()) == "Numbers 100 d703cf56f8bdcfac"
    assert name(Numbers(101)) != name(Numbers())
    assert name(Halves()) != name(Numbers()).replace("Numbers", "Halves")
    assert name(Numbers(1)).startswith("Numbers 1 ")
    assert name(Drawn()) == "Drawn 100 unknown"
    assert name([lambda: 0]) == "list 1 unknown"
    assert name(Numbers(), dataset_id="mine") == "mine"


def test_a_dataset_that_opens_a_file_in_each_worker_may_do_so_after_it_was_named():
    dataset = Opened(10)
    named = ReplicaDataLoader(dataset, 4, num_workers=1).spec.dataset_id
    assert named.startswith("Opened 10 ") and dataset.process is None


def test_a_dataset_that_can_also_be_indexed_will_do():
    class Streaming(IterableDataset):
        num_samples = 3

        def __len__(self):
            return 1  # of this rank

        def __getitem__(self, index):
            return torch.tensor(index)

        def __iter__(self):
            return iter(())

    loader = ReplicaDataLoader(Streaming(), 1)
    assert len(loader.dataset) == 3 and loader.spec.dataset_id.startswith("Streaming 3 ")

    class Iterated(IterableDataset):
        def __iter__(self):
            return iter(())

    with pytest.raises(ValueError, match="Iterated can only be iterated"):
        MapStyle(Iterated())


# Fixed shards.


def parts(reader, count, epoch):
    while samples := reader.read(count, epoch):
        yield samples


@pytest.mark.parametrize(("length", "groups"), [(100, 3), (95, 2), (41, 4), (7, 1)])
def test_fixed_shards_are_all_of_an_epoch_once_and_another_order_every_epoch(length, groups):
    spec = DatasetSpec("numbers", length, seed=3, unit_size=10)
    orders = []
    readers = [
        StreamReader(spec, FixedShards(spec, g, groups).lease, StreamPosition())
        for g in range(groups)
    ]
    for epoch in range(3):
        everything = [x for reader in readers for part in parts(reader, 4, epoch) for x in part]
        assert sorted(everything) == list(range(length))
        orders.append(everything)
    assert orders[0] != orders[1] != orders[2]


def test_fewer_units_than_groups_are_refused():
    spec = DatasetSpec("numbers", 30, seed=3, unit_size=10)
    with pytest.raises(ValueError, match="3 units for num_replicas=4 .* unit_size of at most 7"):
        FixedShards(spec, 0, 4)


@pytest.mark.parametrize("replica_id", ["paris", "2"])
def test_a_name_that_says_no_shard_is_refused(replica_id):
    with pytest.raises(ValueError, match=f"replica_id='{replica_id}' does not say .* 0 to 1, or"):
        shard_of(replica_id, 2)
    assert shard_of("1", 2) == 1
