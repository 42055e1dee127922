"""Groups that train on equal samples are found at their first sync, and no others.

All groups take the same steps, so that their pseudo-gradients are parallel whatever they read.
"""

import collections
import itertools
from functools import partial

import numpy as np
import pytest
import torch
from common import Constant
from harness.groups import run
from torch.utils.data import DataLoader, TensorDataset

from composer_replication import ReplicaDataLoader
from composer_replication.coordinator.database import Database
from composer_replication.coordinator.wire_types import Lease
from composer_replication.coordinator.work_units import WorkUnits
from composer_replication.data.sample_stream import FixedShards, StreamPosition
from composer_replication.diloco.equal_samples import MAX_NUMBERS, NUM_BATCHES, digest_of_samples
from composer_replication.simulation.simulation import Fault

SAMPLES = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))


def found(k, batches_of, *faults, steps=12, **settings):
    """What each group's reports have as equal samples; empty ones are left out."""

    def replica(group):
        for batch in itertools.islice(batches_of(group.id, k), steps):
            group.diloco.note_batch(batch)
            group.diloco.count_samples(len(batch))
            group.step(-1.0)
        group.end()
        return [each for each in group.of_reports("outer_step", "equal_samples") if each[1]]

    model = partial(Constant, a=(1,), b=(1,))
    return run(k, replica, *faults, **{"model": model, "sync_every": 4} | settings)


def cycle(dataset, batch_size=4, seed=None):
    generator = torch.Generator().manual_seed(seed or 0)
    loader = DataLoader(dataset, batch_size, shuffle=seed is not None, generator=generator)
    return itertools.chain.from_iterable(loader for _ in itertools.count())


def same(group, k):
    return cycle(SAMPLES)


def own(group, k):
    """The part of the samples that one replica group trains on."""
    return cycle(SAMPLES[group::k], 2)


# ---- equal samples ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("settings", [
    {},
    {"sync_every": 1},
    {"fragment_patterns": ["a", "b"], "sync_every": 4},
    {"fragment_sync_delay": 2, "fragment_update_alpha": 0.5},
    {"weight_by": "samples"},
])  # fmt: skip
@pytest.mark.parametrize("groups", [2, 3, 8])
def test_groups_on_the_same_samples_are_named_at_the_first_sync_and_once(settings, groups):
    names = tuple(str(i) for i in range(groups))
    assert found(groups, same, **settings) == [[(1, names)]] * groups


def test_of_several_groups_those_are_named_that_are_equal():
    seen = found(4, lambda group, k: cycle(SAMPLES[(0, 16, 0, 32)[group] :]))
    assert seen == [[(1, ("0", "2"))], []] * 2


@pytest.mark.parametrize("kind", ["fail_allreduce", "fail_commit"])
def test_a_first_sync_that_is_tried_again_finds_them_too(kind):
    first, second = found(2, same, Fault(kind, replica_id=1, step=1))
    assert first == [(1, ("0", "1"))] and (second == first or kind == "fail_commit")


def test_a_run_that_is_meant_so_says_so():
    assert found(2, same, same_samples=True) == [[], []]


# ---- honest jobs -----------------------------------------------------------------------------


def loader_of():
    return ReplicaDataLoader(TensorDataset(SAMPLES), 4, dataset_id="samples", unit_size=4)


def read(loader, source):
    loader.read(source, StreamPosition(), lambda: False)
    for epoch in itertools.count():
        loader.begin(epoch, 0)
        yield from loader


def shards(group, k):
    loader = loader_of()
    return read(loader, FixedShards(loader.spec, group, k).lease)


HONEST = {
    "parts of a dataset": own,
    "fixed shards": shards,
    "a sampler of another seed": lambda group, k: cycle(SAMPLES, 1, seed=1 + group),
    "epochs of unequal length": lambda group, k: cycle(SAMPLES[14 * group :][: 14 + 6 * group]),
    "batches of unequal size": lambda group, k: cycle(SAMPLES[16 * group :][:16], 2 + group),
}


@pytest.mark.slow
@pytest.mark.parametrize("batches_of", [own, shards])
@pytest.mark.parametrize("groups", range(4, 9))
def test_many_groups_that_divide_a_dataset_are_not_equal(batches_of, groups):
    assert not any(found(groups, batches_of))


@pytest.mark.parametrize("batches_of", HONEST.values(), ids=HONEST)
@pytest.mark.parametrize("groups", [2, 3])
def test_no_honest_job_is_equal(batches_of, groups):
    weight_by = "samples" if batches_of is HONEST["batches of unequal size"] else "uniform"
    assert not any(found(groups, batches_of, steps=30, weight_by=weight_by))


@pytest.mark.parametrize("reads", [own, same])
def test_a_joiner_is_at_another_position_than_the_others(reads):
    late = Fault("late", replica_id=2, step=3)
    *_, joiner = found(3, lambda group, k: (own if group == 1 else reads)(group, k), late)
    assert joiner == []


@pytest.mark.parametrize("kind", ["left_behind", "restart", "fail_commit"])
@pytest.mark.parametrize("step", [1, 2])
def test_a_group_that_heals_is_not_equal(kind, step):
    assert not any(found(3, own, Fault(kind, replica_id=1, step=step), steps=20))


@pytest.mark.parametrize("faults", [(), (Fault("restart", replica_id=1, step=2),)])
def test_leases_are_not_equal(tmp_path, faults):
    units = WorkUnits(Database(tmp_path / "units.sqlite"))
    incarnations = itertools.count()

    def batches_of(group, k):
        loader = loader_of()
        spec = loader.spec
        units.create_dataset(spec.dataset_id, spec.length, spec.seed, spec.unit_size)
        name = f"{next(incarnations)}"
        stream = units.open_stream(name, spec.dataset_id, str(group), name)
        return read(loader, lambda *asked: Lease(**vars(units.lease(stream, *asked))))

    assert not any(found(3, batches_of, *faults))


# ---- a digest --------------------------------------------------------------------------------


def test_a_digest_is_that_of_the_content_alone():
    image = torch.arange(24.0).view(1, 2, 3, 4)
    words = ["some words", 3, None]
    batch = {"x": image, "words": words, "array": np.ones(2), "number": np.float32(1)}
    same = {
        "x": image.to(memory_format=torch.channels_last).requires_grad_(),
        "words": list(words),
        "array": np.ones(4)[::2],
        "number": np.float32(1),
    }
    assert digest_of_samples(batch) == digest_of_samples(same)
    # Known to the digit, since groups on different machines compare it.
    assert digest_of_samples(batch)[:16] == "31ee777ba0f1ccf3"
    others = [
        batch | {"x": image + 1},
        batch | {"x": image.view(2, 12)},
        batch | {"x": image.double()},
        batch | {"words": ["other words", 3, None]},
        batch | {"array": np.zeros(2)},
        collections.UserDict(batch),
        [*batch.values()],
    ]
    assert len({digest_of_samples(each) for each in [batch, *others]}) == 1 + len(others)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.int64, torch.complex64])
def test_every_type_of_number_has_a_digest(dtype):
    one, zero = (torch.tensor(value, dtype=dtype) for value in (1, 0))
    assert digest_of_samples(one) != digest_of_samples(zero) != ""
    assert digest_of_samples(torch.ones(0, dtype=dtype)) != digest_of_samples(one)


@pytest.mark.parametrize("kind", [set, frozenset])
def test_the_order_of_a_set_is_no_part_of_its_content(kind):
    one, same = kind([0, 8]), kind([8, 0])
    assert [*one] != [*same]
    assert digest_of_samples({"tags": one}) == digest_of_samples({"tags": same}) != ""
    others = [kind([0, 7]), [0, 8], kind([kind([0]), 8] if kind is frozenset else [(0,), 8])]
    assert len({digest_of_samples({"tags": each}) for each in [one, *others]}) == 4
    assert digest_of_samples(kind([0, lambda: 0])) == ""


def test_only_the_beginning_of_a_large_tensor_is_copied():
    large = torch.zeros(MAX_NUMBERS + 1)
    digest = digest_of_samples(large)
    large[-1] = 1
    assert digest_of_samples(large) == digest
    large[MAX_NUMBERS - 1] = 1
    assert digest_of_samples(large) != digest


def test_what_cannot_be_pickled_is_never_equal():
    assert digest_of_samples([lambda: 0]) == ""
    assert found(2, lambda *group: itertools.repeat([lambda: 0])) == [[], []]


def test_no_batch_is_looked_at_after_the_first_sync():
    class Batch(list):
        looked_at = 0

        def __reduce__(self):
            Batch.looked_at += 1
            return Batch, ()

    found(1, lambda *group: itertools.repeat(Batch()), steps=40, sync_every=10)
    assert Batch.looked_at == NUM_BATCHES
