"""A replica group's connection to the others. Run: pytest tests/replica/test_factory.py

Real: logging, process group objects, a store; in the last test the lighthouse and the Manager.
"""

import gc
import logging
import re
import threading
import time
import weakref
from unittest.mock import Mock

import pytest
import torch
from replica.listening import listening_addresses
from torchft.manager import Manager

from composer_replication import DiLoCo
from composer_replication.diloco.retry import SyncError
from composer_replication.replica import factory as replica
from composer_replication.replica.addresses import bracketed, does_answer
from composer_replication.replica.factory import backend_for, make_manager, tame_torchft_logs
from composer_replication.replica.quorum_member import QuorumDeclined

NOBODY = "http://no-such-host.invalid:29510"


# ---- arguments of make_manager, before any network ------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"replica_id": ""}, "replica_id='': give each replica group a name of its own"),
        ({"replica_id": "  "}, "replica_id='  ': give each replica group a name"),
        ({"replica_id": True}, "replica_id=True: give each replica group a name"),
        ({"store_addr": "here"}, "store_addr='here' and store_port=None: give both"),
        ({"store_port": 1234}, "store_addr=None and store_port=1234: give both"),
        ({"world_size": 2}, "rank=None and world_size=2: give both"),
        (
            {"rank": 0, "world_size": 2},
            "world_size=2 without store_addr and store_port: call torch.distributed.init_process_",
        ),
        ({"lighthouse_addr": "head:29510"}, "lighthouse_addr='head:29510': use http://host:port"),
    ],
)
def test_wrong_arguments_are_refused_before_the_network(arguments, message):
    # Nobody is at this address, and nobody has to be: that error would be a ConnectionError.
    with pytest.raises(ValueError, match=re.escape(message)):
        make_manager(**{"replica_id": 0, "lighthouse_addr": NOBODY} | arguments)


@pytest.fixture
def no_token(monkeypatch):
    for name in ("COMPOSER_REPLICATION_TOKEN", "COMPOSER_REPLICATION_NO_TOKEN"):
        monkeypatch.delenv(name, raising=False)


def test_without_a_token_a_group_does_not_leave_its_machine(no_token, monkeypatch):
    monkeypatch.setattr(replica, "check_lighthouse", lambda *_: None)
    address = "http://192.0.2.1:29510"
    with pytest.raises(ValueError, match="COMPOSER_REPLICATION_TOKEN is not set") as error:
        make_manager(replica_id=0, lighthouse_addr=address)
    assert address in str(error.value) and "export COMPOSER_REPLICATION_TOKEN=" in str(error.value)
    assert "COMPOSER_REPLICATION_NO_TOKEN=1" in str(error.value)


class Opened(Exception):
    """The server of a group would be opened with these tokens."""


@pytest.mark.parametrize(
    ("address", "environ", "argument", "tokens"),
    [
        # On one machine, or if told so, it needs none.
        ("http://127.0.0.1:1", {}, None, ()),
        ("http://[::1]:1", {}, None, ()),
        (NOBODY, {"COMPOSER_REPLICATION_NO_TOKEN": "1"}, None, ()),
        (NOBODY, {"COMPOSER_REPLICATION_TOKEN": "new,old\n"}, None, ("new", "old")),
        (NOBODY, {"COMPOSER_REPLICATION_TOKEN": "new,old\n"}, "another", ("another",)),
    ],
)
def test_the_token_is_the_argument_or_the_variable(
    no_token, monkeypatch, address, environ, argument, tokens
):
    def open_server(hostname, tokens):
        raise Opened(tokens)

    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(replica, "check_lighthouse", lambda *_: None)
    monkeypatch.setattr(replica, "PeerServer", open_server)
    with pytest.raises(Opened) as opened:
        make_manager(replica_id=0, lighthouse_addr=address, token=argument)
    assert opened.value.args == (tokens,)


def test_a_variable_with_which_torchft_overrides_an_argument_is_warned_of(monkeypatch, caplog):
    monkeypatch.setenv("TORCHFT_QUORUM_TIMEOUT_SEC", "7")
    with pytest.raises(ValueError, match="lighthouse_addr='head'"):
        make_manager(replica_id=0, lighthouse_addr="head")
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == [
        "TORCHFT_QUORUM_TIMEOUT_SEC=7 overrides the argument (torchft's rule)"
    ]


# ---- process groups and the store -----------------------------------------------------------


def test_the_backend_is_gloo_unless_asked_for_nccl():
    assert backend_for(torch.device("cpu")) == backend_for(torch.device("cuda", 1)) == "gloo"
    assert backend_for(torch.device("cuda", 1), "nccl") == "nccl"


# ---- logs -----------------------------------------------------------------------------------


@pytest.fixture
def torchft_loggers():
    """torchft's loggers, as they were before the test again after it."""
    names = ("torchft", "torchft.manager", "torchft_quorums", "torchft_commits", "torchft_errors")
    loggers = {name: logging.getLogger(name) for name in names}
    before = {name: (log.level, list(log.filters)) for name, log in loggers.items()}
    for logger in loggers.values():
        logger.setLevel(logging.NOTSET)
        logger.filters = []
    yield loggers
    for name, (level, filters) in before.items():
        loggers[name].setLevel(level)
        loggers[name].filters = filters


def test_torchft_s_errors_are_one_line_and_its_steps_none(torchft_loggers, caplog):
    caplog.set_level(logging.DEBUG)
    for _ in range(2):
        tame_torchft_logs()
    assert len(torchft_loggers["torchft.manager"].filters) == 1
    manager_log = torchft_loggers["torchft.manager"]
    manager_log.info("should_commit=True")
    torchft_loggers["torchft_quorums"].info("{}")
    try:
        raise RuntimeError("a peer is gone")
    except RuntimeError:
        manager_log.exception("got exception in all reduce")
    assert [record.getMessage() for record in caplog.records] == ["got exception in all reduce"]
    assert "Traceback" not in caplog.text


# ---- the manager ----------------------------------------------------------------------------


@pytest.mark.integration
def test_a_manager_is_ready_for_diloco_owns_its_store_and_shuts_down_twice(start_lighthouse):
    manager = make_manager(replica_id=0, lighthouse_addr=start_lighthouse())
    assert isinstance(manager, Manager)
    assert manager._use_async_quorum is False
    assert manager.store is not None
    manager.start_quorum()
    assert manager.num_participants() == 1
    manager.shutdown()
    manager.shutdown()
    assert manager.store is None


@pytest.mark.integration
def test_a_manager_that_has_left_does_not_hold_what_was_trained(start_lighthouse):
    model = torch.nn.Linear(2, 2)
    manager = make_manager(replica_id=0, lighthouse_addr=start_lighthouse())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    diloco = DiLoCo(manager, model, optimizer, sync_every=2, num_replicas=1)
    with diloco:
        for _ in range(4):
            optimizer.step()
    kept = weakref.ref(model), weakref.ref(diloco._state)
    manager.shutdown()
    del manager, model, diloco, optimizer
    gc.collect()
    assert [each() for each in kept] == [None, None]


@pytest.mark.integration
def test_quorums_that_are_declined_again_and_again_are_given_up_too(start_lighthouse):
    # A group that is left out gets one at once, as often as its peers sync.
    address = start_lighthouse()
    manager = make_manager(replica_id=0, lighthouse_addr=address, give_up_after_s=0.5)
    manager.member.use = Mock(side_effect=[QuorumDeclined] * 50)
    with pytest.raises(SyncError, match="waited for a quorum for .*, above give_up_after_s=0.5"):
        manager.start_quorum()
    manager.shutdown()


@pytest.mark.integration
def test_a_quorum_that_comes_after_its_group_has_given_up_is_not_connected(start_lighthouse):
    manager = make_manager(replica_id=0, lighthouse_addr=start_lighthouse(), give_up_after_s=0.5)
    given_up, connected, use = threading.Event(), [], manager.member.use
    manager.member.use = lambda *given: given_up.wait(30) and use(*given)
    manager._reconfigure_pg = lambda *given: connected.append(given)
    with pytest.raises(SyncError, match="waited for a quorum for"):
        manager.start_quorum()
    asking = [thread for thread in threading.enumerate() if thread.name == "daemon_executor"]
    given_up.set()
    for thread in asking:
        thread.join(30)
    assert asking and not connected
    manager.shutdown()


@pytest.mark.integration
def test_a_manager_that_cannot_be_made_leaves_no_server(start_lighthouse, monkeypatch):
    failing = Mock(side_effect=RuntimeError("no port"))
    monkeypatch.setattr(replica, "ReplicaManager", failing)
    with pytest.raises(RuntimeError, match="no port"):
        make_manager(replica_id=0, lighthouse_addr=start_lighthouse())
    *_, transport, _ = failing.call_args.args
    assert not does_answer(transport.server.address)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("own", "expected"), [({}, (3, 600.0)), ({"give_up_after_s": 5.0}, (3, 5.0))]
)
def test_a_loop_waits_as_its_manager_was_told_unless_it_is_told_otherwise(
    own, expected, start_lighthouse
):
    waits = {"num_replicas": 3, "give_up_after_s": 600.0}
    manager = make_manager(replica_id=0, lighthouse_addr=start_lighthouse(), **waits)
    model = torch.nn.Linear(2, 2)
    diloco = DiLoCo(manager, model, torch.optim.SGD(model.parameters()), sync_every=2, **own)
    assert (diloco.options.num_replicas, diloco.options.give_up_after_s) == expected
    manager.shutdown()


@pytest.mark.integration
def test_who_waits_does_not_hang_and_gives_up_with_what_was_missing(start_lighthouse, monkeypatch):
    monkeypatch.setattr("composer_replication.replica.manager.QUORUM_TIMEOUT_S", 0.2)
    address = start_lighthouse(min_replicas=2)
    manager = make_manager(replica_id=0, lighthouse_addr=address, give_up_after_s=4.0)
    noted = []
    manager.watch_waits(lambda: noted.append(time.monotonic()))
    with pytest.raises(SyncError, match="waited for a quorum for .* only have 1 .*Start the miss"):
        manager.start_quorum()
    manager.shutdown()
    assert len(noted) > 2


@pytest.mark.integration
@pytest.mark.parametrize(
    ("hostname", "argument"), [("127.0.0.1", None), ("127.0.0.1", "127.0.0.1"), ("::1", "::1")]
)
def test_a_group_listens_on_the_address_it_is_told_and_on_no_other_interface(
    hostname, argument, monkeypatch, start_lighthouse
):
    monkeypatch.setenv("COMPOSER_REPLICATION_HOSTNAME", "127.0.0.1")
    host = bracketed(hostname)
    address = f"http://{host}:{start_lighthouse(bind=f'{host}:0').rpartition(':')[2]}"
    before = listening_addresses()
    manager = make_manager(replica_id=0, lighthouse_addr=address, hostname=argument, token="secret")
    manager.start_quorum()
    assert manager.num_participants() == 1 and manager.errored() is None
    opened = listening_addresses() - before
    manager.shutdown()
    assert len(opened) >= 4  # the peer server, torchft's manager server, two stores, gloo
    assert {each[0] for each in opened} == {hostname}
