"""A small dataset, and what its units have to be; for the tests of the work units."""

import numpy as np

LENGTH, SEED, UNIT_SIZE = 23, 7, 5
NUM_UNITS = 5
UNKNOWN = 2**40
"""The key of no stream."""


def unit_order(epoch):
    """What every coordinator makes of them: it depends on the seed and the epoch alone."""
    return np.random.default_rng([SEED, epoch]).permutation(NUM_UNITS).tolist()


def size_of(unit):
    return 3 if unit == 4 else 5


def open_ones(units):
    return [(stream.key, stream.replica_id, stream.session) for stream in units.open_streams()]


def samples(lease):
    return [(lease.epoch, lease.unit, at) for at in range(lease.start, lease.stop)]


def open_stream(units, name):
    return units.open_stream(name, "c4", f"replica of {name}", f"session of {name}")


def lease_all(units, stream, epoch=0):
    return [units.lease(stream, number, epoch) for number in range(NUM_UNITS)]


def counts(units, epoch=0):
    progress = units.dataset("c4").epochs[epoch]
    assert progress.done + progress.leased + progress.available == progress.length == LENGTH
    return progress.done, progress.leased, progress.available
