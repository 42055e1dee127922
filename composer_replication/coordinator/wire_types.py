"""What a coordinator and its groups say about samples: a dataset, and the leases of its parts."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class DatasetSpec:
    """What samples there are, and how they are shared out. Equal in all replica groups.

    Attributes:
        dataset_id: Its name.
        length: Samples.
        seed: Of the order of the units, and of the samples in them.
        unit_size: Samples that are given out together; unit ``u`` begins at sample
            ``u * unit_size``.
        shuffle: Whether the samples of a unit are in another order than the dataset's.
    """

    dataset_id: str
    length: int
    seed: int
    unit_size: int
    shuffle: bool = True

    def samples(self, lease: Lease) -> list[int]:
        """The samples of a lease, in the order in which they are trained on."""
        first = lease.unit * self.unit_size
        size = min(self.unit_size, self.length - first)
        order = list(range(size))
        if self.shuffle:
            # Who goes on with a unit that another has begun needs the same order, whatever version
            # of whatever library each of them runs: Python promises this sequence for ever.
            draw = random.Random(f"{self.seed} {lease.epoch} {lease.unit}").random
            keys = [draw() for _ in order]
            order.sort(key=keys.__getitem__)
        return [first + place for place in order[lease.start : lease.stop]]


@dataclass(frozen=True)
class Lease:
    """The part ``[start, stop)`` of a unit, in the unit's own order.

    An empty one says that nothing of its epoch was to be had. ``stream_start`` samples of the
    stream come before it; ``is_open`` is false if its stream has been given to others since.
    """

    number: int
    epoch: int
    unit: int
    start: int
    stop: int
    stream_start: int
    is_open: bool = True

    @property
    def is_empty(self) -> bool:
        """Whether the stream pauses here."""
        return self.start == self.stop
