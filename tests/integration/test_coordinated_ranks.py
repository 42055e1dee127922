"""What the coordinator says of a group reaches each of its ranks. Run: pytest -m integration
tests/integration/test_coordinated_ranks.py. Real processes, gloo, a real coordinator."""

import os
import subprocess
import sys
import time

import pytest
import torch
from forked_commands import ForkedCommand
from integration.groups import free_port

from composer_replication.coordinator.client import CoordinatorClient
from composer_replication.coordinator.server import Coordinator
from composer_replication.diloco.fragments import model_fingerprint
from composer_replication.settings import DiLoCoSettings

pytestmark = pytest.mark.integration

RANK = """
import sys, time
import torch, torch.distributed as dist
from composer_replication.coordinator.client import RejectedByCoordinatorError
from composer_replication.coordinator.membership import Membership, ask_for_run
from composer_replication.options import ReplicaOptions

dist.init_process_group("gloo")
options = ReplicaOptions(replica_id="a", coordinator_addr=sys.argv[1])
membership = Membership(options, ask_for_run(options), [{"w": torch.zeros(1)}], world_size=2)
print("registered", flush=True)
for step in range(2400):  # four minutes
    time.sleep(0.1)
    try:
        membership.check()
    except RejectedByCoordinatorError as error:
        print("refused:", error)
        break
    membership.report_progress({"batch": step})
membership.leave()
"""


def test_every_rank_hears_that_another_group_has_its_name(tmp_path):
    coordinator = Coordinator(
        DiLoCoSettings(),
        "x.yaml",
        num_replicas=1,
        state_dir=tmp_path,
        bind="127.0.0.1:0",
        tokens=["secret"],
    )
    port = str(free_port())
    ranks = [
        ForkedCommand(
            [sys.executable, "-c", RANK, coordinator.address],
            env=os.environ
            | {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
            | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
            | {"COMPOSER_REPLICATION_TOKEN": "secret", "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "0"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        client = CoordinatorClient(coordinator.address, "secret")
        info = client.info()
        deadline = time.monotonic() + 240
        while not coordinator._registry.replicas():
            assert time.monotonic() < deadline and ranks[0].poll() is None
            time.sleep(0.1)
        coordinator.group_has_ended("a")
        client.register(
            {
                "replica_id": "a",
                "session": "another",
                "host": "here",
                "world_size": 1,
                "composer_replication": info.version,
                "torchft": info.torchft,
                "model": model_fingerprint([{"w": torch.zeros(1)}]),
            }
        )
        while ranks[0].poll() is None:  # it asks again until it is sure that the other one lives
            assert time.monotonic() < deadline
            client.heartbeat("a", {"session": "another"})
            time.sleep(0.2)
        client.close()
        said = [rank.communicate(timeout=240)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
        coordinator.shutdown()
    for rank, text in zip(ranks, said, strict=True):
        assert rank.returncode == 0 and "refused: " in text and "'a' is alive" in text, text
