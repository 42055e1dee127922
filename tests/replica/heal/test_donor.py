"""What a join costs a donor: copies, hashes, memory, and waits. Run: pytest tests/replica/heal

Real: the servers on loopback. The donor's global state is a script.
"""

import socket
import threading
import time
import weakref
from datetime import timedelta

import pytest
import torch
from replica.heal.groups import WAIT_S, Group
from waiting import wait_until

from composer_replication.replica.heal import donor as donors
from composer_replication.replica.heal import state_bytes
from composer_replication.replica.peer_client import PeerClient, PeerError


@pytest.fixture
def group(transports):
    return lambda timeout=10.0: Group(transports(timeout=timeout))


@pytest.fixture
def before_body(monkeypatch):
    """Has a function called with the sizes before a server sends parts of a body."""
    send = socket.socket.sendmsg

    def call_before(act):
        def first_act(connection, parts):
            parts = list(parts)
            act(sum(map(len, parts)))
            return send(connection, parts)

        monkeypatch.setattr(socket.socket, "sendmsg", first_act)

    return call_before


@pytest.fixture
def before_hash(monkeypatch):
    """Has a function called before the donor or a joiner hashes the large state."""
    digest = state_bytes.digest_of_bytes

    def call_before(act):
        def first_act(parts):
            if sum(map(len, parts)) > 4000:
                act()
            return digest(parts)

        monkeypatch.setattr(state_bytes, "digest_of_bytes", first_act)

    return call_before


@pytest.fixture
def work(monkeypatch, before_hash):
    """What was copied and hashed: the large state alone."""
    done, dump = [], state_bytes.dump

    def noting_dump(content, *, copies=False):
        done.extend(["copy"] * copies)
        return dump(content, copies=copies)

    before_hash(lambda: done.append("hash"))
    monkeypatch.setattr(state_bytes, "dump", noting_dump)
    return done


@pytest.fixture
def num_kept(monkeypatch):
    """Tells how many copies of the state are in memory."""
    made, dump = [], state_bytes.dump

    def noting_dump(content, *, copies=False):
        body = dump(content, copies=copies)
        made.extend(map(weakref.ref, body) if copies else ())
        return body

    monkeypatch.setattr(state_bytes, "dump", noting_dump)
    return lambda: sum(copy() is not None for copy in made)


# ---- in the quorum -----------------------------------------------------------------------------


def test_a_state_that_was_fetched_ahead_is_neither_copied_nor_hashed_again(group, work):
    donor, joiner = group(), group()
    joiner.fetch_ahead(donor)
    assert work == ["copy", "hash", "hash"]  # the donor's, and the joiner's own check
    work.clear()
    for _ in range(2):  # the second time it is a retry
        donor.enter_quorum()
        joiner.ask(donor, "offer", str(donor.step))
        donor.transport.disallow_checkpoint()
    donor.enter_quorum()
    assert torch.equal(joiner.heal(donor)["theta"], donor.theta)
    assert work == []


def test_one_that_was_not_is_hashed_once_for_all_joiners_and_not_copied(group, work):
    donor, joiners = group(), [group(), group()]
    joiners[0].fetch_ahead(donor)
    donor.commit()
    work.clear()
    donor.enter_quorum()
    for joiner in joiners:
        assert torch.equal(joiner.heal(donor)["theta"], donor.theta)
    assert work == ["hash"] * 3  # one is the donor's


def test_the_donor_itself_goes_on_while_the_name_is_computed(group, before_hash):
    donor, joiner, goes_on = group(), group(), threading.Event()
    before_hash(lambda: goes_on.wait(WAIT_S))
    asking = threading.Thread(target=joiner.ask, args=(donor, "offer", str(donor.step)))
    asking.start()
    donor.enter_quorum()  # on the thread of the quorum: it waits for no hash
    goes_on.set()
    asking.join()
    assert joiner.heal(donor)["outer_step"] == 4


def test_what_is_fetched_after_the_vote_is_never_a_mixture(group, before_body):
    donor, late = group(), group()
    donor.enter_quorum()
    offer = late.ask(donor, "offer", str(donor.step))
    before_body(lambda _: donor.transport.disallow_checkpoint() or donor.commit())
    with pytest.raises(PeerError, match="damaged"):
        late.fetch(donor, offer)


def test_a_name_that_was_overtaken_by_the_vote_is_not_given(group, before_hash):
    donor, late = group(), group()
    donor.enter_quorum()
    before_hash(lambda: donor.transport.disallow_checkpoint() or donor.commit())
    with pytest.raises(PeerError, match="has no 'offer 4'"):
        late.ask(donor, "offer", "4")
    before_hash(lambda: None)
    donor.enter_quorum()
    assert torch.equal(late.heal(donor)["theta"], donor.theta)


# ---- memory ------------------------------------------------------------------------------------


def test_a_copy_is_released_as_soon_as_all_who_asked_have_it(group, num_kept):
    donor, one, other = group(), group(), group()
    offers = [each.ask(donor, "copy") for each in (one, other)]
    assert offers[0] == offers[1]
    one.fetch(donor, offers[0])
    assert num_kept() == 1
    other.fetch(donor, offers[1])
    wait_until(lambda: num_kept() == 0, WAIT_S)  # the server's thread ends after the last byte


def test_a_newer_copy_is_made_when_the_older_one_is_gone(group, num_kept):
    donor, joiner = group(), group()
    joiner.ask(donor, "copy")  # and it never fetches it
    donor.commit()
    kept = []
    donor.state.state = lambda: kept.append(num_kept()) or {"theta": donor.theta}
    assert joiner.ask(donor, "copy").step == 5
    assert kept == [0]


def test_while_a_copy_is_being_sent_there_is_no_other(group, before_body):
    donor, slow, other = group(), group(), group()
    is_sending, may_end = threading.Event(), threading.Event()

    def wait(_):
        is_sending.set()
        assert may_end.wait(WAIT_S)

    offer = slow.ask(donor, "copy")
    before_body(wait)
    fetching = threading.Thread(target=slow.fetch, args=(donor, offer))
    fetching.start()
    assert is_sending.wait(WAIT_S)
    before_body(lambda _: None)
    donor.commit()
    assert other.ask(donor, "copy") == offer  # older, and its step says so
    donor.enter_quorum()  # and in a quorum there is no copy at all
    assert torch.equal(other.heal(donor)["theta"], donor.theta)
    assert donor.state.num_taken == 1
    may_end.set()
    fetching.join()


def test_a_copy_that_nobody_fetches_is_dropped_at_a_vote(group, num_kept, monkeypatch):
    donor, joiner = group(), group()
    joiner.ask(donor, "copy")
    donor.transport.disallow_checkpoint()
    assert num_kept() == 1  # its joiner may be about to fetch it
    monkeypatch.setattr(donors, "KEPT_S", 0.0)
    donor.transport.disallow_checkpoint()
    assert num_kept() == 0


def test_a_joiner_holds_one_state_at_a_time(group, monkeypatch):
    donor, joiner = group(), group()
    joiner.fetch_ahead(donor)
    before = weakref.ref(joiner.transport.downloaded.body.obj)
    fetch, is_alone = PeerClient.fetch, []

    def fetched(*arguments, **named):
        is_alone.append(before() is None)
        return fetch(*arguments, **named)

    monkeypatch.setattr(PeerClient, "fetch", fetched)
    donor.theta = torch.zeros(600)  # of another size; memory of the same one is written into
    donor.commit()
    joiner.fetch_ahead(donor)
    assert is_alone == [True]
    assert joiner.transport.downloaded.state["theta"].sum() == 600


def test_a_peer_that_sends_something_else_than_a_state_is_named(group):
    donor, joiner = group(), group()
    donor.state.state = [1, 2]
    with pytest.raises(PeerError, match="sent no state, but a list"):
        joiner.fetch_ahead(donor)
    assert joiner.transport.downloaded is None


def test_a_donor_that_has_left_keeps_nothing(group, num_kept):
    donor, joiner = group(), group()
    joiner.ask(donor, "copy")
    donor.enter_quorum()
    donor.transport.shutdown()
    theta = weakref.ref(donor.theta)
    del donor.theta
    assert num_kept() == 0 and theta() is None


# ---- beside training ---------------------------------------------------------------------------


def test_an_outer_step_waits_for_no_copy_and_the_copy_is_made_again(group):
    donor, joiner = group(), group()
    taken = []

    def overtaken():
        state = {"outer_step": donor.step, "theta": donor.theta}
        if not taken:  # an outer step, on another thread, while this one copies
            stepping = donor.step_on_another_thread()
            stepping.join(WAIT_S)
            taken.append(stepping.is_alive())
        return state

    donor.state.state = overtaken
    offer = joiner.ask(donor, "copy")
    assert taken == [False] and offer.step == 5
    assert torch.equal(state_bytes.load(joiner.fetch(donor, offer))["theta"], donor.theta)


def test_where_rounds_are_shorter_than_a_copy_an_outer_step_waits_in_the_end(group):
    donor, joiner = group(), group()
    steps = []

    def overtaken():
        steps.append(donor.step_on_another_thread())
        steps[-1].join(0.2)
        return {"outer_step": donor.step, "theta": donor.theta}

    donor.state.state = overtaken
    offer = joiner.ask(donor, "copy")
    assert len(steps) == 3 and offer.step == 6
    steps[-1].join()
    assert donor.step == 7


# ---- waits -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("bytes_per_s", [100.0, 1e9])
def test_the_waits_for_offer_and_name_scale_with_the_bytes(
    group, monkeypatch, before_hash, has_quorum, bytes_per_s
):
    # The state is said to have 1000 bytes: 10 s at 100 bytes a second, else nothing to speak of.
    monkeypatch.setattr(donors, "SLOWEST_COPY_BYTES_PER_S", bytes_per_s)
    donor, joiner = group(0.5), group(0.5)
    limit = timedelta(seconds=0.5)

    def ask_ahead():
        has_quorum((donor.step, donor.transport.metadata()))
        joiner.transport.fetch()

    def heal():
        donor.commit()
        joiner.transport.downloaded = None
        donor.enter_quorum()
        return joiner.heal(donor, limit)

    def heal_from_a_late_donor():
        donor.transport.disallow_checkpoint()
        threading.Timer(1.0, donor.enter_quorum).start()
        return joiner.heal(donor, limit)

    before_hash(lambda: time.sleep(1.0))
    for attempt in (ask_ahead, heal, heal_from_a_late_donor):
        if bytes_per_s == 100.0:
            attempt()
        else:
            with pytest.raises(PeerError, match="did not arrive in time|has no"):
                attempt()


@pytest.mark.slow
def test_the_wait_for_the_rest_scales_with_its_bytes(group, before_body, monkeypatch):
    monkeypatch.setattr(donors, "SLOWEST_BYTES_PER_S", 400.0)  # 4000 bytes: 10 s
    donor, joiner = group(0.5), group(5.0)
    before_body(lambda size: time.sleep(0.7 * (size > 800)))  # of the state
    donor.enter_quorum()
    assert joiner.heal(donor, timedelta(seconds=0.5))["outer_step"] == 4
