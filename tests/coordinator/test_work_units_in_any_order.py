"""Work units under random interleavings of all calls, against a model of the truth.

Run: pytest tests/coordinator/test_work_units_in_any_order.py. In one process, files of SQLite in
temporary folders. The truth knows nothing but the leases that were given, what the ledgers said and
which streams are open.
"""

import shutil
import tempfile
from collections import Counter
from itertools import groupby
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from composer_replication.coordinator.database import Database
from composer_replication.coordinator.tables import (
    StreamClosed,
    UnknownStream,
)
from composer_replication.coordinator.work_units import (
    EpochProgress,
    WorkUnits,
)
from coordinator.small_units import (
    LENGTH,
    SEED,
    UNIT_SIZE,
    UNKNOWN,
    open_ones,
    samples,
    size_of,
    unit_order,
)

EPOCHS = st.sampled_from([0, 0, 0, 1, 2])


class Stream:
    """What has been leased to it, how much of that is in the model, and whether it is open."""

    def __init__(self, owner):
        self.owner = owner
        self.samples, self.leases = [], []
        self.position = self.in_part = 0
        self.is_open = True

    @property
    def uncommitted(self):
        return self.samples[self.position :]


class Truth:
    """All streams, by key; the epochs that were asked for."""

    def __init__(self):
        self.streams = {}
        self.begun = set()

    def done(self):
        """By sample, how many streams have it in the model."""
        return Counter(x for s in self.streams.values() for x in s.samples[: s.position])

    def held(self):
        """By sample, how many open streams have yet to commit it."""
        return Counter(x for s in self.streams.values() if s.is_open for x in s.uncommitted)

    def available(self, epoch):
        """In the order of the epoch; those of a unit that was never leased are the last."""
        claimed = self.done() | self.held()
        return [
            (epoch, unit, at)
            for unit in unit_order(epoch)
            for at in range(size_of(unit))
            if (epoch, unit, at) not in claimed
        ]

    def next_lease(self, last_epoch):
        """The first unbroken run: units that were never leased are last, so one rule does."""
        epochs = sorted(e for e in self.begun if e <= last_epoch)
        rest = next(filter(None, map(self.available, epochs)), [])
        runs = groupby(enumerate(rest), lambda pair: (pair[1][1], pair[1][2] - pair[0]))
        return [x for _, x in next(runs, (None, []))[1]]

    def expected(self):
        """The lines of progress()."""
        done, held = self.done(), self.held()
        left = [s.samples[s.position : s.in_part] for s in self.streams.values() if not s.is_open]
        in_part = Counter(x[0] for part in left for x in part)
        twice = Counter()
        for x, count in (done + held).items():
            twice[x[0]] += count - 1
        return [
            EpochProgress(
                epoch,
                LENGTH,
                sum(x[0] == epoch for x in done.keys() - held.keys()),
                sum(x[0] == epoch for x in held),
                len(self.available(epoch)),
                in_part[epoch],
                twice[epoch],
            )
            for epoch in sorted(self.begun)
        ]


def rows(ledger):
    return [(key, *counts) for key, counts in ledger.items()]


class Coordinator(RuleBasedStateMachine):
    """Random calls of several groups, which die, come back, are late, and kill the coordinator."""

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.truth = Truth()
        self.ledgers = [{}]

    @initialize()
    def start(self):
        self.database = Database(self.folder / "coordinator.db")
        self.units = WorkUnits(self.database)
        self.units.create_dataset("c4", LENGTH, SEED, UNIT_SIZE)
        self.open()

    def keys(self, *, are_open):
        return [key for key, s in self.truth.streams.items() if s.is_open == are_open]

    def some_are_open(self):
        return bool(self.keys(are_open=True))

    def some_are_closed(self):
        return bool(self.keys(are_open=False))

    @rule()
    def open(self):
        name = f"stream {len(self.truth.streams)}"
        key = self.units.open_stream(name, "c4", "a replica", name)
        assert key not in self.truth.streams
        assert self.units.open_stream(name, "c4", "a replica", name) == key
        self.truth.streams[key] = Stream(name)

    @precondition(some_are_open)
    @rule(d=st.data(), epoch=EPOCHS, times=st.integers(1, 3))
    def lease(self, d, epoch, times):
        key = d.draw(st.sampled_from(self.keys(are_open=True)))
        for _ in range(times):
            self.lease_next(key, epoch)

    def lease_next(self, key, epoch):
        truth, stream = self.truth, self.truth.streams[key]
        truth.begun.add(epoch)
        expected = truth.next_lease(epoch)
        claimed = truth.done() | truth.held()
        lease = self.units.lease(key, len(stream.leases), epoch)
        assert samples(lease) == expected
        assert not claimed.keys() & set(expected), "nobody else has them"
        assert (lease.number, lease.stream_start) == (len(stream.leases), len(stream.samples))
        if not expected:
            assert (lease.epoch, lease.start, lease.stop) == (epoch, 0, 0)
        stream.leases.append(lease)
        stream.samples += expected
        return lease

    @precondition(some_are_closed)
    @rule(d=st.data(), epoch=EPOCHS, beyond=st.integers(0, 2))
    def lease_of_a_closed_stream(self, d, epoch, beyond):
        key = d.draw(st.sampled_from(self.keys(are_open=False)))
        stream = self.truth.streams[key]
        lease = self.units.lease(key, len(stream.leases) + beyond, epoch)
        assert (lease.epoch, lease.start, lease.stop) == (epoch, 0, 0)
        assert [self.units.lease(key, n, epoch) for n in range(len(stream.leases))] == stream.leases

    @rule(d=st.data())
    def commit(self, d):
        """Of open and closed streams alike: a ledger may be late."""
        sizes = {key: len(s.samples) for key, s in self.truth.streams.items()}
        names = d.draw(st.lists(st.sampled_from(list(sizes)), min_size=1, max_size=3))
        ledger = {}
        for key in names:
            # From the end: so a commit that is drawn to be simple is of nearly all the stream.
            in_part = sizes[key] - d.draw(st.integers(0, sizes[key]))
            ledger[key] = (in_part - d.draw(st.integers(0, in_part)), in_part)
        self.merge(ledger)
        self.ledgers.append(self.whole_ledger())

        size = sizes[names[0]]
        too_much = self.ledgers[-1] | {names[0]: (0, size + 3)}
        with pytest.raises(UnknownStream):
            self.units.rewind(rows(too_much))
        assert self.units.commit(rows(too_much)) == {names[0]: 3}
        self.truth.streams[names[0]].in_part = size

    @rule(d=st.data())
    def repeat(self, d):
        self.merge(d.draw(st.sampled_from(self.ledgers)))

    def merge(self, ledger):
        assert self.units.commit([*rows(ledger), (UNKNOWN, 5, 6)]) == {UNKNOWN: 6}
        for key, (position, in_part) in ledger.items():
            stream = self.truth.streams[key]
            stream.position = max(stream.position, position)
            stream.in_part = max(stream.in_part, in_part)

    def whole_ledger(self):
        return {key: (s.position, s.in_part) for key, s in self.truth.streams.items() if s.in_part}

    @precondition(some_are_open)
    @rule(d=st.data())
    def close(self, d):
        key = d.draw(st.sampled_from(self.keys(are_open=True)))
        stream = self.truth.streams[key]
        expected = (len(stream.uncommitted), stream.in_part - stream.position)
        closed = self.units.close(key)
        assert (closed.samples - closed.position, closed.in_part - closed.position) == expected
        assert self.units.close(key) is None
        stream.is_open = False

    @rule(d=st.data(), session=st.sampled_from(["one", "two"]))
    def reopen(self, d, session):
        truth = self.truth
        key = d.draw(st.sampled_from(list(truth.streams)))
        stream = truth.streams[key]
        position = d.draw(st.integers(stream.position, len(stream.samples)))
        claimed = truth.done() | truth.held()
        if not stream.is_open and any(x in claimed for x in stream.uncommitted):
            with pytest.raises(StreamClosed, match="leased to others or done"):
                self.units.reopen(key, position, session)
        else:
            for _ in range(2):
                self.units.reopen(key, position, session)
            stream.is_open, stream.owner = True, session

    @rule(d=st.data())
    def rewind(self, d):
        ledger = d.draw(st.sampled_from(self.ledgers))
        for _ in range(2):
            self.units.rewind(rows(ledger))
        for key, stream in self.truth.streams.items():
            stream.position, stream.in_part = ledger.get(key, (0, 0))

    @rule()
    def crash(self):
        """The files as they are now are opened anew: what the killed process had is lost."""
        folder = Path(tempfile.mkdtemp())
        shutil.copytree(self.folder, folder, dirs_exist_ok=True)
        self.discard()
        self.folder, self.database = folder, Database(folder / "coordinator.db")
        self.units = WorkUnits(self.database)
        for key in self.keys(are_open=True):
            known = self.truth.streams[key].leases
            for number, lease in enumerate(known):
                assert self.units.lease(key, number, 0) == lease
            assert not self.units.lease(key, len(known) + 1, 0).is_open, "lost with a state folder"

    def discard(self):
        self.database.close()
        shutil.rmtree(self.folder)

    @invariant()
    def progress_is_the_truth(self):
        lines = self.truth.expected()
        for line in lines:
            assert line.done + line.leased + line.available == LENGTH
        assert self.units.dataset("c4").epochs == lines

    @invariant()
    def the_open_streams_are_known(self):
        assert open_ones(self.units) == [
            (key, "a replica", s.owner)
            for key, s in sorted(self.truth.streams.items())
            if s.is_open
        ]

    def teardown(self):
        """What is available is handed out once, and then nothing more."""
        self.open()
        last = list(self.truth.streams)[-1]
        while self.lease_next(last, 2).stop:
            pass
        assert not any(map(self.truth.available, self.truth.begun))
        self.discard()


Coordinator.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
TestCoordinator = pytest.mark.slow(Coordinator.TestCase)
