"""What a coordinator and its groups send each other about samples, and about a model's config."""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


def digests_of(section: Mapping[str, Any]) -> dict[str, str]:
    """Return a digest of each value in a section of a config, which may be a secret."""
    texts = {name: json.dumps(each, sort_keys=True, default=str) for name, each in section.items()}
    return {name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in texts.items()}


@dataclass(frozen=True)
class DatasetSpec:
    """Which samples there are, and how they are divided. Equal in all replica groups.

    Attributes:
        dataset_id: Its name.
        length: Number of samples.
        seed: Of the order of the units, and of the samples in them.
        unit_size: Number of samples that are leased together; unit ``u`` begins at sample
            ``u * unit_size``.
        shuffle: Whether the samples of a unit are shuffled.
    """

    dataset_id: str
    length: int
    seed: int
    unit_size: int
    shuffle: bool = True

    def size_of(self, unit: int) -> int:
        """Number of samples in a unit: the last one may be shorter."""
        return min(self.unit_size, self.length - unit * self.unit_size)

    def samples(self, lease: Lease) -> list[int]:
        """The samples of a lease, in the order in which they are trained on."""
        first = lease.unit * self.unit_size
        order = list(range(self.size_of(lease.unit)))
        if self.shuffle:
            # A group that continues a unit of another group needs the same order, whatever library
            # versions both run on: Python promises this sequence for all of its versions.
            draw = random.Random(f"{self.seed} {lease.epoch} {lease.unit}").random
            keys = [draw() for _ in order]
            order.sort(key=keys.__getitem__)
        return [first + index for index in order[lease.start : lease.stop]]


@dataclass(frozen=True)
class Lease:
    """The part ``[start, stop)`` of a unit, in the unit's own order.

    An empty lease means that nothing of its epoch was available. ``stream_start`` samples of the
    stream come before it. ``is_open`` is false if the coordinator has closed the stream, after
    which its remaining samples belong to other groups.
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


@dataclass(frozen=True)
class CommitReport:
    """Which samples are in the model after a sync. A newer report contains every older one.

    Attributes:
        outer_step: Of the model.
        ledger: Rows of stream, position, in_part; see ``diloco.sample_ledger``.
        present: The streams of the groups in that sync.
        ended_at: When that sync ended, by ``time.monotonic``.
    """

    outer_step: int
    ledger: Sequence[Sequence[int]]
    present: Sequence[int]
    ended_at: float = field(default_factory=time.monotonic)
