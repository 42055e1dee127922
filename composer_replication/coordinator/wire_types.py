"""What a coordinator and its groups send each other about the run and its samples."""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from composer_replication.arguments import among
from composer_replication.options import ReplicaOptions
from composer_replication.settings import (
    DiLoCoSettings,
    SettingKeywords,
    SettingsMismatch,
    describe_difference,
    differing,
)

SIGN = "X-Composer-Replication"
"""The header that every answer of the coordinator has, and no proxy's or other service's."""


def digests_of(section: Mapping[str, Any]) -> dict[str, str]:
    """Return a digest of each value in a section of a config, which may be a secret.

    Equal values have equal digests: 0 and 0.0, keys in another order, and 1 and "1" as keys.
    """
    texts = {}
    for name, each in section.items():
        plain = json.loads(json.dumps(each, default=str), parse_int=float)
        texts[name] = json.dumps(plain, sort_keys=True)
    return {name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in texts.items()}


@dataclass(frozen=True)
class RunInfo:
    """What a group has to know about the run before it starts."""

    settings: DiLoCoSettings
    settings_source: str
    num_replicas: int
    min_replicas: int
    lighthouse_addr: str
    heartbeat_timeout_s: float
    version: str
    torchft: str
    digest_every: int
    model_section: Mapping[str, str] = field(default_factory=dict)
    """Digests of the values of its config's ``model``."""
    outer_step: int = 0
    """The largest outer step that the coordinator knows."""

    def adopt(self, options: ReplicaOptions, named: Mapping[str, Any]) -> ReplicaOptions:
        """A group's options with the run's numbers of groups, and its lighthouse if none is set.

        Args:
            options: Of the group.
            named: The settings and options that its config names.

        Raises:
            SettingsMismatch: One differs from the run's.
        """
        self.check_settings(named, str(options.coordinator_addr))
        return replace(
            options,
            lighthouse_addr=options.lighthouse_addr or self.lighthouse_addr,
            num_replicas=self.num_replicas,
            min_replica_size=self.min_replicas,
            digest_every=named.get("digest_every", self.digest_every),
        )

    def check_settings(self, named: Mapping[str, Any], address: str) -> None:
        """Compare the settings that a config names with the coordinator's.

        A value of None is no difference: the settings choose a value for it.

        Raises:
            SettingsMismatch: One differs; the message lists both values of each.
        """
        options = {"num_replicas": self.num_replicas, "min_replica_size": self.min_replicas}
        run = asdict(self.settings) | options
        mine = asdict(DiLoCoSettings(**among(named, SettingKeywords)))
        mine |= {name: named.get(name) for name in options}
        if names := [name for name in differing(mine, run) if named.get(name) is not None]:
            raise SettingsMismatch(
                f"the settings of this run are the coordinator's ({address}, from "
                f"{self.settings_source}), and this group's config has others; leave them out, or "
                "make them equal: "
                + "; ".join(describe_difference(name, mine[name], run[name]) for name in names)
            )

    def check_model(self, section: Mapping[str, Any]) -> None:
        """Compare a config's ``model`` with that of the coordinator's config.

        Keys that only one of them names are compared later, by the shapes of the built model. Keys
        that do not change a shape, such as a number of heads, are compared here only.

        Raises:
            SettingsMismatch: A key has another value.
        """
        run = self.model_section
        others = [
            f"model.{name}"
            for name, digest in digests_of(section).items()
            if run.get(name, digest) != digest
        ]
        if others:
            raise SettingsMismatch(
                f"another model: {', '.join(others)} of this config differ from the config of "
                "the run's coordinator: make them equal"
            )


def shuffled(count: int, seed: str) -> list[int]:
    """The numbers below ``count`` in an order of a seed.

    A group that continues the samples of another group needs the same order, whatever library
    versions both run on: Python promises this sequence for all of its versions.
    """
    draw = random.Random(seed).random
    keys = [draw() for _ in range(count)]
    return sorted(range(count), key=keys.__getitem__)


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

    @property
    def num_units(self) -> int:
        """Into how many units the samples are divided; the last one may be smaller."""
        return -(-self.length // self.unit_size)

    def size_of(self, unit: int) -> int:
        """Number of samples in a unit: the last one may be shorter."""
        return min(self.unit_size, self.length - unit * self.unit_size)

    def samples(self, lease: Lease) -> list[int]:
        """The samples of a lease, in the order in which they are trained on."""
        first, size = lease.unit * self.unit_size, self.size_of(lease.unit)
        seed = f"{self.seed} {lease.epoch} {lease.unit}"
        order = shuffled(size, seed) if self.shuffle else range(size)
        return [first + index for index in order[lease.start : lease.stop]]


@dataclass(frozen=True)
class Lease:
    """The part ``[start, stop)`` of a unit, in the unit's own order.

    An empty lease, at which the stream pauses, means that nothing of its epoch was available.
    ``stream_start`` samples of the stream come before it. ``is_open`` is false if the coordinator
    has closed the stream, after which its remaining samples belong to other groups.
    """

    number: int
    epoch: int
    unit: int
    start: int
    stop: int
    stream_start: int
    is_open: bool = True


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
