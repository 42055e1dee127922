"""What this package relies on in torchft, private names included, at the pinned nightly.

When a test here fails after a bump of the pin, read what changed at the place it names before
anything else: the failure it prevents is a silent one.
"""

import ast
import functools
import importlib
import inspect
import re
import subprocess
import sys
import textwrap
import tomllib
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torchft.local_sgd
from common import plain_sgd
from harness.groups import Group
from torch import nn
from torchft.manager import Manager

from composer_replication import DiLoCo
from composer_replication.diloco.torchft_api import (
    DiLoCoManager,
    StockManager,
    as_diloco_manager,
)
from composer_replication.replica.lighthouse import start_lighthouse
from composer_replication.replica.manager import ReplicaManager
from composer_replication.replica.process_group import host_store, make_process_group
from composer_replication.replica.single_group import SingleGroupManager
from composer_replication.simulation.simulation import simulate

PACKAGE = Path(__file__).parents[2] / "composer_replication"

PRIVATE_NAMES = {
    "torchft.local_sgd.DiLoCo": "_manager _local_optimizer _step_pre_hook _step_post_hook",
    "torchft.process_group.ProcessGroupGloo": "_pg _rendezvous_store _create_pg _timeout",
    "torchft.manager.Manager": "_use_async_quorum _min_replica_size _pg _checkpoint_transport "
    "_client _commit_failures _connect_timeout _errored _executor _group_rank _group_world_size "
    "_init_sync "
    "_load_state_dict_fns _manager _quorum_future _quorum_id _reconfigure_pg _store "
    "_quorum_timeout _step "
    "_timeout _user_state_dicts",
    "torchft.manager.ManagerServer": "address shutdown",  # ours is put in its place
    "torchft.manager._ManagedWork": "_work wait",
    "torchft.work._DummyWork": "wait",
    "torchft.coordination.ManagerClient": "_checkpoint_metadata _quorum",
    "torchft._torchft.LighthouseServer": "address shutdown",
}
"""Every private torchft name that the package uses, by the class that has it: attributes that it
sets or reads, methods that it overrides."""


def load(path):
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


@functools.cache
def names_in(cls):
    """Methods of a class and the attributes that its code sets on self."""
    sources = "".join(
        inspect.getsource(c) for c in cls.__mro__ if c.__module__.startswith("torchft")
    )
    return set(dir(cls)) | set(re.findall(r"self\.(\w+)\b[^=\n]*=", sources))


def test_the_installed_nightly_is_the_pinned_one():
    pins = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]["dependencies"]
    assert f"torchft-nightly=={version('torchft-nightly')}" in pins


@pytest.mark.parametrize("path", PRIVATE_NAMES)
def test_every_private_name_we_use_is_still_there(path):
    missing = [name for name in PRIVATE_NAMES[path].split() if name not in names_in(load(path))]
    assert not missing, f"{path} of this torchft nightly has no {missing}: see who uses them"


def test_the_list_of_private_names_is_complete():
    # What our subclasses override or read with one underscore, and torchft has too, is on the list.
    for path, ours in {
        "torchft.local_sgd.DiLoCo": "diloco/algorithm.py group/plain_loop.py",
        "torchft.process_group.ProcessGroupGloo": "replica/process_group.py",
        "torchft.manager.Manager": "replica/manager.py replica/interruptible_manager.py",
    }.items():
        source = "".join((PACKAGE / name).read_text() for name in ours.split())
        used = set(re.findall(r"(?:self|super\(\)|def )\.?\s?(_[a-z]\w+)\b", source))
        shared = {name for name in used & names_in(load(path)) if not name.startswith("__")}
        assert shared <= set(PRIVATE_NAMES[path].split()), (
            f"{ours} uses {shared} of {path}: list them"
        )


def parameters_of(function):
    return list(inspect.signature(function).parameters)


def test_constructors_take_what_we_pass():
    tree = ast.parse(textwrap.dedent(inspect.getsource(ReplicaManager.__init__)))
    calls = [call for call in ast.walk(tree) if isinstance(call, ast.Call)]
    [manager] = [call for call in calls if ast.unparse(call.func) == "super().__init__"]
    passed = {keyword.arg for keyword in manager.keywords}
    assert passed <= set(parameters_of(Manager.__init__)) and len(passed) >= 15


TIMES = {"_quorum_timeout": timedelta(seconds=30), "_timeout": timedelta(seconds=5)}
MANAGERS = {
    StockManager: lambda: StockManager(SimpleNamespace(**TIMES)),
    SingleGroupManager: SingleGroupManager,
    ReplicaManager: lambda: ReplicaManager,  # it needs a lighthouse: its class has what we ask for
}


@pytest.mark.parametrize("kind", MANAGERS)
def test_every_manager_has_what_diloco_needs(kind):
    manager = MANAGERS[kind]()
    for name, needed in vars(DiLoCoManager).items():
        if isinstance(needed, property):
            assert hasattr(manager, name), f"{kind.__name__} lacks {name}"
        if name.startswith("_") or not inspect.isfunction(needed):
            continue
        if kind is StockManager and name == "all_to_all":
            continue  # wire formats that need it are refused
        expected = parameters_of(needed)
        is_torchfts = kind is StockManager and not hasattr(kind, name)  # it hands the call on
        has = getattr(Manager if is_torchfts else kind, name)
        assert parameters_of(has)[: len(expected)] == expected, (
            f"{kind.__name__}.{name} takes other arguments"
        )


def test_torchfts_own_manager_is_the_one_that_is_adapted():
    # Ours are in the way of torchft's, should they come.
    assert not any(hasattr(Manager, name) for name in vars(StockManager) if name[0] != "_")
    stock = object.__new__(Manager)
    assert isinstance(as_diloco_manager(stock), StockManager)
    single = SingleGroupManager()
    assert as_diloco_manager(single) is single


class OnlyTorchfts:
    """A simulated manager without what torchft's own lacks."""

    def __init__(self, simulated):
        self._simulated = simulated
        self._quorum_timeout = TIMES["_quorum_timeout"]
        self._timeout = TIMES["_timeout"]

    def __getattr__(self, name):
        if name not in names_in(Manager):
            raise AttributeError(name)
        return getattr(self._simulated, name)


@pytest.mark.slow
def test_groups_with_torchfts_own_manager_end_with_the_same_bits():
    def replica(sim, manager_of):
        model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(model.weight, 10.0)
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        with DiLoCo(manager_of(sim.manager), model, inner, sync_every=2) as diloco:
            for step in range(6):
                model.weight.grad = torch.full((1, 1), step + float(sim.replica_id))
                inner.step()
            diloco.final_sync()
        return diloco.global_digest(), diloco.outer_step

    names_in(Manager)  # once, before the threads: CPython 3.11 cannot parse in two of them
    stock, ours = (
        simulate(partial(replica, manager_of=kind), num_replicas=2)
        for kind in (OnlyTorchfts, lambda manager: manager)
    )
    assert stock == ours and len(set(stock)) == 1 and stock[0][1] == 3


@pytest.mark.integration
def test_groups_with_torchfts_own_manager_lose_no_step_after_their_start():
    lighthouse = start_lighthouse(bind="127.0.0.1:0", min_replicas=2)

    def train(group_id):
        store = host_store("127.0.0.1")
        manager = Manager(
            make_process_group("gloo", 10.0, "127.0.0.1"), None, None, 2, False,
            rank=0, world_size=1, store_addr="127.0.0.1", store_port=store.port,
            lighthouse_addr=lighthouse.address(), replica_id=f"own_{group_id}",
            hostname="127.0.0.1",
        )  # fmt: skip
        group = Group(SimpleNamespace(replica_id=group_id, num_replicas=2, manager=manager),
                      outer=plain_sgd(), sync_every=2, num_replicas=2)  # fmt: skip
        with group:
            group.step(-1.0, -1.0, -1.0, -1.0)
        manager.shutdown()
        manager._checkpoint_transport._server.server_close()  # torchft leaves its socket open
        return group.theta, group.of_reports("outer_step", "healed")

    with ThreadPoolExecutor() as threads:
        assert [*threads.map(train, range(2))] == [([6.0], [(1, False), (2, False)])] * 2
    lighthouse.shutdown()


def test_the_manager_still_does_what_ours_hangs_on():
    quorum = inspect.getsource(Manager._async_quorum)
    # We ask in the place of its client, with these two changed, and may have changed _quorum_id.
    asked = re.findall(r"^ +(\w+)=", quorum[: quorum.index("quorum_id = ")], re.MULTILINE)
    assert {"commit_failures", "reconfigure_handle"} < {*asked}
    assert "quorum = self._client._quorum(" in quorum
    assert "quorum_id != self._quorum_id" in quorum
    assert "self._reconfigure_pg(quorum_id, quorum.reconfigure_handles)" in quorum
    # We add to what it hands around; every member gets the handles of all.
    assert "reconfigure_handle=self._pg.get_reconfigure_handle()" in quorum
    # A donor's state is read in a quorum alone, so our inner steps do not lock it.
    read = "self._manager_state_dict()"
    assert read in quorum and inspect.getsource(Manager).count(read) == 1
    start = inspect.getsource(Manager.start_quorum)
    assert "self._executor.submit(" in start and "self.wait_quorum()" in start
    # We put a function in the place of ManagerServer that binds it to an address.
    assert re.search(
        r"= ManagerServer\((\n +\w+=.*,)+", init := inspect.getsource(Manager.__init__)
    )
    assert 'bind = f"[::]:{port}"' in init and "bind=bind," in init
    # And another uuid than torchft's.
    assert init.count("uuid.") == 1 and "new_uuid = str(uuid.uuid4())" in init
    assert 'replica_id = f"{replica_id}:{new_uuid}"' in init
    # The heal state has these two parts, and the transport is told when it may go.
    assert '"user": {' in inspect.getsource(Manager._manager_state_dict)
    assert "_checkpoint_transport.disallow_checkpoint()" in inspect.getsource(Manager.should_commit)


def test_a_quorum_has_what_we_read_and_copy_of_it():
    # The stub file names a field, commit_failures, that the compiled class does not have.
    fields = {"quorum_id", "replica_rank", "replica_ids", "reconfigure_handles"}
    assert fields | {"max_step", "heal"} <= set(dir(torchft._torchft.QuorumResult))


def test_stock_torchfts_pseudo_gradient_still_has_our_sign():
    # Stock torchft, one replica, outer SGD with lr 1: the global parameter lands where training
    # went. If this fails, torchft has turned the sign and everybody's checkpoints with it.
    def replica(sim):
        model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(model.weight, 10.0)
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        outer = torch.optim.SGD(model.parameters(), lr=1.0)
        with torchft.local_sgd.DiLoCo(sim.manager, [model], inner, outer, sync_every=2):
            for _ in range(2):
                model.weight.grad = torch.ones(1, 1)
                inner.step()
        return model.weight.item()

    assert simulate(replica, num_replicas=1) == [8.0]


@pytest.mark.integration
def test_the_compiled_half_is_loaded_without_the_package_and_is_the_same_one():
    program = (
        "import sys; from composer_replication.replica.lighthouse import start_lighthouse;"
        "server = start_lighthouse(bind='127.0.0.1:0'); assert 'torch' not in sys.modules;"
        "import torchft.coordination as c; assert type(server) is c.LighthouseServer;"
        "server.shutdown()"
    )
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert output.returncode == 0, output.stderr


def test_what_we_override_takes_torchfts_arguments():
    overridden = []
    for name, theirs in inspect.getmembers(Manager, inspect.isfunction):
        ours = getattr(ReplicaManager, name)
        if ours is not theirs and not name.startswith("_"):
            assert parameters_of(ours) == parameters_of(theirs), name
            overridden.append(name)
    assert {"start_quorum", "should_commit", "allreduce"} <= {*overridden}
