"""Groups that sync over TLS, and who cannot take part. Run: pytest tests/integration/test_tls.py

Real: processes, the torchft lighthouse and Manager, certificates, gloo through its relays.
"""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from common import Constant, plain_sgd, take_step
from integration.replicas import Group, run_groups
from torch.distributed import TCPStore
from torchft._torchft import ManagerClient, ManagerServer

from composer_replication.diloco.algorithm import DiLoCo
from composer_replication.replica.certificates import make_certificates
from composer_replication.replica.heal.client import HealError
from composer_replication.replica.lighthouse import read_status
from composer_replication.replica.quorum_watch import AtFaultError
from composer_replication.replica.sync_faults import SyncFaults

pytestmark = pytest.mark.integration

SYNCS = 25
MESSAGE = 12_000_000  # 48 MB, above any buffer of the kernel


def certificates(folder: Path, name: str, run: str = "run") -> str:
    make_certificates(folder / name, [], folder / f"{run}-authority", 30)
    return str(folder / name)


def train(group: Group, tls_dir: str, size: int = 1, syncs: int = SYNCS, **options) -> dict:
    """Every sync moves the parameter by 1: any other number comes from somebody else."""
    model = Constant(weight=(size,))
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    retries = lost = 0
    participants = set()
    with (
        group.manager(hostname="127.0.0.1", tls_dir=tls_dir, token="secret", **options) as manager,
        DiLoCo(manager, model, inner, plain_sgd(), 1, num_replicas=2) as diloco,
    ):
        for _ in range(syncs):
            time.sleep(0.2)
            take_step(inner, 1.0)
            for done in diloco.pop_finished_syncs():
                retries += done.retries
                lost += done.steps_lost
                participants.add(done.num_participants)
        theta = diloco.global_parameters()["weight"]
        values = float(theta.min()), float(theta.max())
    return {"values": values, "retries": retries, "lost": lost, "participants": participants}


def train_over_tls(group: Group, folders: list[str]) -> dict:
    return train(group, folders[group.replica_id], MESSAGE, 3)


def test_two_groups_sync_a_large_model_over_tls(tmp_path):
    folders = [certificates(tmp_path, name) for name in "ab"]
    for found in run_groups(train_over_tls, 2, folders=folders):
        assert found == {"values": (13.0, 13.0), "retries": 0, "lost": 0, "participants": {2}}


def train_beside_a_stranger(group: Group, folders: list[str]) -> dict:
    if group.replica_id < 2:
        found = train(group, folders[group.replica_id])
        assert group.signal.is_set(), "the stranger never took part"
        return found
    while not any(member.step > 2 for member in read_status(group.lighthouse_addr).members):
        time.sleep(0.05)
    limit = timedelta(seconds=10)
    with ExitStack() as leaves:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        server = ManagerServer(
            replica_id="stranger:uuid",
            lighthouse_addr=group.lighthouse_addr,
            hostname="127.0.0.1",
            bind="127.0.0.1:0",
            store_addr=f"127.0.0.1:{store.port}",
            world_size=1,
            heartbeat_interval=timedelta(milliseconds=100),
            connect_timeout=limit,
            quorum_retries=0,
        )
        leaves.callback(server.shutdown)
        client = ManagerClient(server.address(), connect_timeout=limit)
        address = f"127.0.0.1:{store.port}"
        for _ in range(8):
            quorum = client._quorum(
                group_rank=0,
                step=10**6,  # so that the others are told to take over its state
                checkpoint_metadata="https://127.0.0.1:1",
                shrink_only=False,
                timeout=limit,
                init_sync=False,
                commit_failures=0,
                reconfigure_handle=json.dumps(
                    {"id": "0", "store": address, "global_rank": None, "tls": address}
                ),
            )
            if quorum.replica_world_size == 3:
                group.signal.set()
    return {}


def test_a_stranger_in_the_quorum_changes_nothing_and_costs_nothing(tmp_path):
    folders = [certificates(tmp_path, name) for name in "ab"]
    for found in run_groups(train_beside_a_stranger, 3, folders=folders)[:2]:
        assert found["values"] == (10.0 + SYNCS,) * 2
        assert (found["retries"], found["lost"], found["participants"]) == (0, 0, {2})


def train_beside_another_authority(group: Group, folders: list[str]) -> dict:
    if group.replica_id < 2:
        return train(group, folders[group.replica_id])
    while not any(member.step > 2 for member in read_status(group.lighthouse_addr).members):
        time.sleep(0.05)
    SyncFaults.LEAVES_AFTER_S = 3.0  # in this process
    try:
        return train(group, folders[2])
    except (HealError, TimeoutError, AtFaultError) as error:
        return {"error": f"{error}"}


def test_a_member_with_the_token_and_a_certificate_of_another_run_leaves_alone(tmp_path):
    folders = [certificates(tmp_path, name) for name in "ab"]
    folders.append(certificates(tmp_path, "c", run="another-run"))
    *own, other = run_groups(train_beside_another_authority, 3, folders=folders)
    for found in own:
        assert (found["values"], found["lost"]) == ((10.0 + SYNCS,) * 2, 0)
        assert found["participants"] == {2}
    assert "leaves" in other["error"]
