"""When the stream of a replica group ends. Run: pytest tests/coordinator/test_streams.py

Real: SQLite in ``tmp_path``, the registry and the work units; only the clock is ours.
"""

import shutil

import pytest

from composer_replication.coordinator.database import Database
from composer_replication.coordinator.events import Events
from composer_replication.coordinator.registry import Registry
from composer_replication.coordinator.streams import Streams
from composer_replication.coordinator.tables import UnknownStream
from coordinator.run_info import VERSIONS

TIMEOUT_S = 3.0
UNIT_SIZE = 8


class Service:
    """A coordinator without HTTP, on a clock that stands still."""

    def __init__(self, path):
        self.path = path
        self.now = 1000.0
        self.start()
        self.streams.units.create_dataset("c4", 80, 0, UNIT_SIZE)

    def start(self):
        self.database = Database(self.path)
        self.events = Events(self.database)
        self.registry = Registry(self.database, self.events, VERSIONS, TIMEOUT_S, lambda: self.now)
        self.streams = Streams(self.database, self.registry, self.events)

    def restart(self):
        self.database.close()
        self.start()

    def register(self, replica_id, session):
        self.registry.register(
            replica_id, session, model="a model", tensors={}, host="here", world_size=1, **VERSIONS
        )

    def begin(self, replica_id, session, leases=2):
        """A group registers, and leases some units of a stream of its own."""
        self.register(replica_id, session)
        units = self.streams.units
        stream = units.open_stream(f"{session}/0", "c4", replica_id, session)
        for number in range(leases):
            units.lease(stream, number, 0)
        return stream

    def lease_the_rest(self, stream):
        """Lease all that is left of the epoch to a stream of two leases."""
        for number in range(2, 8):
            self.streams.units.lease(stream, number, 0)

    def beat(self, replica_id, session):
        self.registry.heartbeat(replica_id, session, {})

    def report(self, present, age_s=0.0, ledger=None, outer_step=1):
        return self.streams.commit(outer_step, ledger or (), present, age_s)

    def open(self):
        return {stream.key for stream in self.streams.units.open_streams()}

    def done(self):
        return sum(epoch.done for epoch in self.streams.units.dataset("c4").epochs)

    def returned(self):
        return [
            event["text"] for event in self.events.newest() if "available again" in event["text"]
        ]


@pytest.fixture
def service(tmp_path):
    service = Service(tmp_path / "coordinator.db")
    yield service
    service.database.close()


@pytest.fixture
def a(service):
    return service.begin("0", "a")


@pytest.fixture
def b(service, a):
    return service.begin("1", "b")


def test_a_silent_group_keeps_its_samples_until_others_need_them(service, a, b):
    service.now += TIMEOUT_S + 0.5
    service.beat("0", "a")
    service.report([a])
    assert service.open() == {a, b}
    service.lease_the_rest(a)
    service.beat("1", "b")  # it was only stopped, and comes back in time
    service.report([a])
    assert service.open() == {a, b}
    service.now += TIMEOUT_S + 0.5
    service.report([a])
    assert service.open() == {a}
    assert service.returned() == ["16 uncommitted samples of replica group 1 are available again"]


def test_the_samples_of_a_dataset_are_needed_by_those_who_read_it(service, a, b):
    service.streams.units.create_dataset("wiki", UNIT_SIZE, 0, UNIT_SIZE)
    other = service.streams.units.open_stream("a/1", "wiki", "0", "a")
    service.streams.units.lease(other, 0, 0)
    service.now += TIMEOUT_S + 0.5
    service.beat("0", "a")
    service.report([a, other])
    assert b in service.open(), "there are more samples of c4"


def test_a_silent_group_ends_with_the_first_sync_without_it(service, a, b):
    service.lease_the_rest(a)
    service.now += TIMEOUT_S + 0.5
    service.beat("0", "a")
    assert service.open() == {a, b}, "silence alone ends nothing: a sync with it may be under way"
    service.report([a, b])
    assert service.open() == {a, b}, "it has taken part"
    service.report([a], ledger=[(a, 4, 4), (b, 3, 5)])
    assert service.open() == {a}
    assert service.returned() == [
        "13 uncommitted samples of replica group 1 are available again, "
        "2 of them in part of the model"
    ]
    service.report([a])
    assert len(service.returned()) == 1
    assert service.streams.units.lease(b, 2, 0).stop == 0, "if it was only stopped, it gets no more"


@pytest.mark.parametrize("age_s", [0.0, 5.0])
def test_an_absent_group_that_is_alive_goes_on(service, a, b, age_s):
    service.now += 60.0
    service.beat("1", "b")
    service.report([a], age_s=age_s)
    assert b in service.open()


def test_a_sync_that_ended_within_the_time_of_a_silent_group_ends_nothing(service, a, b):
    service.lease_the_rest(a)
    service.now += 10.0
    service.report([a], age_s=10.0 - TIMEOUT_S)
    assert service.open() == {a, b}
    service.report([a], age_s=10.0 - TIMEOUT_S - 0.1)
    assert service.open() == {a}


def test_a_report_from_before_a_group_registered_does_not_end_its_stream(service, a):
    service.now += 10.0
    b = service.begin("1", "b")
    service.report([a], age_s=1.0)
    service.now += 0.5
    service.report([a])
    assert b in service.open()


def test_a_group_that_registered_anew_ends_its_old_stream(service, a, b):
    service.now += 5.0
    later = service.begin("1", "another life")
    assert service.open() == {a, b, later}
    service.now += 1.0
    service.report([a, later], age_s=1.5)
    assert b in service.open(), "that sync was before: b may have been in a later one"
    service.report([a, later], age_s=0.5)
    assert service.open() == {a, later}
    assert service.returned() == ["16 uncommitted samples of replica group 1 are available again"]


def test_registering_again_with_the_same_session_ends_nothing(service, a, b):
    service.now += 1.0
    service.register("1", "b")
    service.report([a])
    assert b in service.open()
    service.now += 1.0
    assert service.registry.end_of("1", "an older life") == (service.now - 2.0, True)


def test_a_group_that_has_left_ends(service, a, b):
    service.now += 1.0
    service.registry.leave("1", "b")
    service.now += 1.0
    service.report([a], age_s=1.5)
    assert b in service.open(), "it may have been in a sync after that one"
    service.report([a])
    assert service.open() == {a}


def test_a_restarted_service_gives_silent_groups_their_time_again(service, a, b):
    service.lease_the_rest(a)
    service.now += 60.0
    service.restart()
    service.now += TIMEOUT_S - 0.1
    service.report([])
    assert service.open() == {a, b}
    service.beat("0", "a")
    service.now += 0.2
    service.report([])
    assert service.open() == {a}


def test_a_restarted_service_knows_who_was_replaced(service, a, b):
    service.now += 5.0
    service.register("1", "another life")
    service.restart()
    service.now += 1.0
    service.report([a], age_s=1.5)
    assert b in service.open(), "it does not know when that was, only that it was before it began"
    service.report([a], age_s=0.5)
    assert service.open() == {a}


def test_a_group_that_gives_up_its_stream_says_what_the_model_has(service, a, b):
    assert service.streams.release(b, [(b, 3, 3), (a, 1, 1), (2**40, 1, 1)]) == [2**40]
    (epoch,) = service.streams.units.dataset("c4").epochs
    assert (service.open(), epoch.done, epoch.leased) == ({a}, 4, 15)
    assert service.returned() == ["13 uncommitted samples of replica group 1 are available again"]
    assert service.streams.release(2**40, [(a, 5, 5)]) == [], "lost, so it is closed already"
    assert service.done() == 8


def test_a_stream_that_is_all_in_the_model_ends_silently(service, a):
    service.streams.release(a, [(a, 16, 16)])
    assert service.open() == set() and service.returned() == []


def test_an_older_copy_of_the_state_is_complete_up_to_its_own_outer_step(service, a, b):
    service.report([a, b], ledger=[(a, 8, 8)], outer_step=3)
    copy = service.path.with_name("copy")
    service.database.close()
    shutil.copy(service.path, copy)
    service.start()
    forgotten = service.begin("2", "c")
    service.report([a, b, forgotten], ledger=[(a, 9, 9), (forgotten, 5, 5)], outer_step=4)
    assert service.streams.units.gap is None
    service.database.close()
    service.path = copy
    service.start()
    service.streams.observe_outer_step(5)
    service.streams.store_outer_step()  # a heartbeat comes before the report
    for more in (0, 1):
        ledger = [(a, 17, 18), (forgotten, 6 + more, 6 + more)]
        lost = service.report([a], ledger=ledger, outer_step=5)
        assert lost == [a, forgotten]
        assert service.streams.units.gap == {"outer_step": 3, "samples": 8 + more}
    assert service.done() == 16
    assert service.begin("2", "d") != forgotten
    (event,) = [e["text"] for e in service.events.newest() if "record of samples" in e["text"]]
    assert event.startswith("the record of samples is complete up to outer step 3 only: ")


def test_the_largest_outer_step_is_remembered_until_a_rewind(service, a):
    assert service.streams.outer_step == 0
    for outer_step in (4, 9, 6):
        service.report([a], outer_step=outer_step, ledger=[(a, outer_step, outer_step)])
    assert service.streams.outer_step == 9
    service.restart()
    assert service.streams.outer_step == 9
    for _ in range(2):
        service.streams.rewind(5, [(a, 5, 5)])
    assert service.streams.outer_step == 5
    assert service.streams.units.dataset("c4").epochs[0].done == 5
    events = [event["text"] for event in service.events.newest()]
    assert events == ["the run continues from outer step 5, not 9"]
    with pytest.raises(UnknownStream):
        service.streams.rewind(3, [(2**40, 1, 1)])
    assert service.streams.outer_step == 5


def test_a_rewind_that_comes_late_changes_nothing(service, a, b):
    """Each group of a start says where it goes on; one is held up until others have synced.

    A group's heartbeat tells of an outer step before its report of the sync arrives.
    """
    service.streams.rewind(0, [])
    service.streams.observe_outer_step(1)
    service.report([a, b], ledger=[(a, 8, 8), (b, 8, 8)], outer_step=1)
    service.streams.rewind(0, [])
    assert service.done() == 16 and service.streams.outer_step == 1


def test_a_rewind_after_the_ended_at_all_is_one(service, a):
    service.report([a], ledger=[(a, 8, 8)], outer_step=1)
    service.now += TIMEOUT_S + 1
    service.begin("0", "another", leases=0)
    service.streams.rewind(0, [])
    assert service.done() == 0 and service.streams.outer_step == 0


def test_a_group_whose_processes_are_gone_gives_way_at_once(service, a, b):
    service.now += 1.0
    service.registry.end("1")
    service.registry.end("no such group")
    service.register("1", "started again")
    service.now += 0.5
    service.report([a])
    assert service.open() == {a}
