"""What a join costs a donor: copies, hashes, memory, and waits. Run: pytest tests/replica/heal

Real: the servers on loopback. The donor's global state is a script.
"""

import threading
import time
import weakref
from datetime import timedelta

import pytest
import torch
from scripted_state import ScriptedState

from composer_replication.replica import peer_server
from composer_replication.replica.heal import donor as donors
from composer_replication.replica.heal import state_bytes
from composer_replication.replica.heal.donor import KEPT_S
from composer_replication.replica.heal.prefetch import Prefetch
from composer_replication.replica.heal.transport import HealTransport
from composer_replication.replica.peer_client import PeerError

LIMIT = timedelta(seconds=10)
WAIT_S = 20.0


class Group:
    """A donor or a joiner. As a donor it has a state with a tensor that a test can change."""

    def __init__(self, server, timeout=10.0):
        self.transport = HealTransport(server, timeout)
        self.theta = torch.arange(1000.0)
        self.state = ScriptedState(lambda: {"outer_step": self.step, "theta": self.theta})
        self.step = 4
        self.transport.serve(lambda: self.step, self.state)

    def commit(self):
        """An outer step."""
        self.theta += 1
        self.step += 1
        self.state.version += 1

    def step_on_another_thread(self):
        def step():
            with self.state.held():
                self.commit()

        thread = threading.Thread(target=step)
        thread.start()
        return thread

    def enter_quorum(self):
        state = {"outer_step": self.step, "theta": self.theta}
        sent = {"user": {"diloco": state}, "torchft": {"step": self.step}}
        self.transport.send_checkpoint([1], self.step, sent, LIMIT)

    def ask(self, donor, *request):
        return self.transport.ask(donor.transport.metadata(), *request, limit_s=WAIT_S)

    def fetch(self, donor, offer):
        address, deadline = donor.transport.metadata(), time.monotonic() + WAIT_S
        self.transport.download(address, offer.state, deadline)
        return self.transport.downloads[offer.state.name]

    def fetch_ahead(self, donor):
        self.fetch(donor, self.ask(donor, "copy"))

    def heal(self, donor, limit=LIMIT):
        address = donor.transport.metadata()
        return self.transport.recv_checkpoint(0, address, donor.step, limit)["user"]["diloco"]

    @property
    def kept(self):
        return self.transport._donor._copy()


@pytest.fixture
def group(start_server):
    return lambda *arguments: Group(start_server(), *arguments)


@pytest.fixture
def before_hash(monkeypatch):
    """Has a function called before the donor or a joiner hashes the large state."""
    digest = state_bytes.digest

    def call_before(act):
        def first_act(parts):
            if sum(map(len, parts)) > 4000:
                act()
            return digest(parts)

        monkeypatch.setattr(state_bytes, "digest", first_act)

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


def test_what_is_fetched_after_the_vote_is_never_a_mixture(group, monkeypatch):
    donor, late = group(), group()
    donor.enter_quorum()
    offer = late.ask(donor, "offer", str(donor.step))
    send = peer_server._send_body

    def after_the_vote(connection, body):
        donor.transport.disallow_checkpoint()
        donor.commit()
        send(connection, body)

    monkeypatch.setattr(peer_server, "_send_body", after_the_vote)
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


def test_a_copy_is_released_as_soon_as_all_who_asked_have_it(group):
    donor, one, other = group(), group(), group()
    offers = [each.ask(donor, "copy") for each in (one, other)]
    assert offers[0] == offers[1]
    copy = weakref.ref(donor.kept)
    one.fetch(donor, offers[0])
    assert donor.kept is copy()
    other.fetch(donor, offers[1])
    until = time.monotonic() + WAIT_S  # the server's thread ends after the last byte
    while copy() is not None and time.monotonic() < until:
        time.sleep(0.01)
    assert donor.kept is None and copy() is None


def test_a_newer_copy_is_made_when_the_older_one_is_gone(group):
    donor, joiner = group(), group()
    joiner.ask(donor, "copy")  # and it never fetches it
    older = weakref.ref(donor.kept)
    donor.commit()
    alive = []
    donor.state._state = lambda: alive.append(older()) or {"theta": donor.theta}
    assert joiner.ask(donor, "copy").step == 5
    assert alive == [None]


def test_while_a_copy_is_being_sent_there_is_no_other(group, monkeypatch):
    donor, slow, other = group(), group(), group()
    send, is_sending, may_end = peer_server._send_body, threading.Event(), threading.Event()

    def wait(connection, body):
        is_sending.set()
        assert may_end.wait(WAIT_S)
        send(connection, body)

    offer = slow.ask(donor, "copy")
    monkeypatch.setattr(peer_server, "_send_body", wait)
    fetching = threading.Thread(target=slow.fetch, args=(donor, offer))
    fetching.start()
    assert is_sending.wait(WAIT_S)
    monkeypatch.setattr(peer_server, "_send_body", send)
    donor.commit()
    assert other.ask(donor, "copy") == offer  # older, and its step says so
    donor.enter_quorum()  # and in a quorum there is no copy at all
    assert torch.equal(other.heal(donor)["theta"], donor.theta)
    assert donor.state.num_taken == 1
    may_end.set()
    fetching.join()


def test_a_copy_that_nobody_fetches_is_dropped_at_a_vote(group, monkeypatch):
    donor, joiner = group(), group()
    joiner.ask(donor, "copy")
    donor.transport.disallow_checkpoint()
    assert donor.kept is not None  # its joiner may be about to fetch it
    donor.kept.made_at -= KEPT_S
    donor.transport.disallow_checkpoint()
    assert donor.kept is None


def test_a_donor_that_has_left_keeps_nothing(group):
    donor, joiner = group(), group()
    joiner.ask(donor, "copy")
    donor.enter_quorum()
    donor.transport.shutdown()
    assert donor.kept is None and donor.transport._donor._quorum is None


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

    donor.state._state = overtaken
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

    donor.state._state = overtaken
    offer = joiner.ask(donor, "copy")
    assert len(steps) == 3 and offer.step == 6
    steps[-1].join()
    assert donor.step == 7


# ---- waits -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("bytes_per_s", [100.0, 1e9])
def test_the_waits_for_offer_and_name_scale_with_the_bytes(
    group, monkeypatch, before_hash, bytes_per_s
):
    # The state is said to have 1000 bytes: 10 s at 100 bytes a second, else nothing to speak of.
    monkeypatch.setattr(donors, "SLOWEST_COPY_BYTES_PER_S", bytes_per_s)
    donor, joiner = group(0.5), group(0.5)
    limit = timedelta(seconds=0.5)

    def ask_ahead():
        ahead = Prefetch(joiner.transport, lighthouse_addr="", rank=0, timeout=0.5)
        ahead._fetch_from(donor.transport.metadata())

    def heal():
        donor.commit()
        joiner.transport.downloads.clear()
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
def test_the_wait_for_the_rest_scales_with_its_bytes(group, monkeypatch):
    monkeypatch.setattr(donors, "SLOWEST_BYTES_PER_S", 400.0)  # 4000 bytes: 10 s
    donor, joiner = group(0.5), group(5.0)
    send = peer_server._send_body

    def slowly(connection, body):
        if sum(map(len, body)) > 800:  # no offer
            time.sleep(0.7)
        send(connection, body)

    monkeypatch.setattr(peer_server, "_send_body", slowly)
    donor.enter_quorum()
    assert joiner.heal(donor, timedelta(seconds=0.5))["outer_step"] == 4
