"""Transports on loopback, and the quorums in which joiners find their donors."""

from typing import NamedTuple

import pytest

from composer_replication.replica import addresses
from composer_replication.replica.heal import transport
from composer_replication.replica.heal.transport import HealTransport
from composer_replication.replica.lighthouse import LighthouseStatus, Member


@pytest.fixture
def transports(start_server):
    def make(*tokens, timeout=10.0, name=""):
        return HealTransport(start_server(*tokens), timeout, "http://localhost:1", 0, name)

    return make


class FakeManager(NamedTuple):
    """A torchft manager's server, which tells where its rank's state is."""

    address: str

    def _checkpoint_metadata(self, rank, timeout):
        return self.address


@pytest.fixture
def has_quorum(monkeypatch):
    """Have a last quorum of these members, each with its step and what its manager says."""

    def form(*members):
        named = {f"http://localhost:{number}": member for number, member in enumerate(members, 1)}
        found = tuple(Member(f"{a}:1", step, a) for a, (step, _) in named.items())
        status = LighthouseStatus(found, alive=frozenset(each.replica_id for each in found))
        monkeypatch.setattr(transport, "read_status", lambda *_: status)
        monkeypatch.setattr(transport, "ManagerClient", lambda a, **_: FakeManager(named[a][1]))
        connects, managers = addresses.can_connect, range(1, len(named) + 1)
        monkeypatch.setattr(addresses, "can_connect", lambda *a: a[1] in managers or connects(*a))

    return form
