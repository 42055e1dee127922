"""What the coordinator says of a group reaches each of its ranks. Run: pytest -m integration
tests/integration/test_coordinated_ranks.py. Real processes, gloo, a real coordinator."""

import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import httpx
import pytest
import torch
from harness.coordinators import coordinator_in
from harness.processes import Process, run_groups

from composer_replication.coordinator.client import RejectedByCoordinatorError
from composer_replication.coordinator.membership import Membership, ask_for_run
from composer_replication.coordinator.server import Coordinator
from composer_replication.options import ReplicaOptions

pytestmark = pytest.mark.integration

RANKS = 2


def register_a(address: str, ranks: int) -> Membership:
    options = ReplicaOptions(replica_id="a", coordinator_addr=address)
    return Membership(options, ask_for_run(options), [{"w": torch.zeros(1)}], ranks)


def be_a(process: Process, address: str, folder: str) -> str:
    """One of two ranks of group a; the error that ends it."""
    process.of_rank(folder, RANKS)
    membership = register_a(address, RANKS)
    with pytest.raises(RejectedByCoordinatorError) as caught:
        for step in range(2400):  # four minutes
            time.sleep(0.1)
            membership.check()
            membership.report_progress({"batch": step})
    membership.leave()
    return str(caught.value)


def be_another_a(coordinator: Coordinator, is_over: Event) -> None:
    """A process of the same name, which lives until the first one is sure of that."""
    while not httpx.get(f"{coordinator.address}/v1/status", verify=False).json()["replicas"]:
        assert not is_over.wait(0.1)
    coordinator.group_has_ended("a")
    another = register_a(coordinator.address, 1)
    is_over.wait()
    another.leave()


def test_every_rank_hears_that_another_group_has_its_name(tmp_path):
    is_over = Event()
    with (
        coordinator_in(tmp_path / "state", num_replicas=1) as coordinator,
        ThreadPoolExecutor(1) as pool,
    ):
        another = pool.submit(be_another_a, coordinator, is_over)
        try:
            said = run_groups(be_a, RANKS, address=coordinator.address, folder=str(tmp_path))
        finally:
            is_over.set()
        another.result()
    assert len(said) == RANKS and all("'a' is alive" in text for text in said)
