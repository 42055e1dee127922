"""A coordinator that can be killed and started again.

Run: pytest tests/chaos/test_services.py.

Real: all of it.
"""

import signal
import time

import httpx
import psutil
import pytest
from chaos.services import KillableCoordinator
from waiting import wait_until

from composer_replication.replica.lighthouse import read_status
from composer_replication.settings import DiLoCoSettings

pytestmark = pytest.mark.integration


@pytest.fixture
def coordinator(tmp_path):
    coordinator = KillableCoordinator(
        DiLoCoSettings(sync_every=8),
        "tiny.yaml",
        num_replicas=2,
        state_dir=tmp_path,
        bind="127.0.0.1:0",
        straggler_timeout_s=5.0,
        lighthouse_heartbeat_ms=2000,
    )
    yield coordinator
    coordinator.shutdown()


def answers(address, within_s=90.0):
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            found = httpx.get(f"{address}/v1/info", timeout=2.0, verify=False)  # it is no HTTPS
            return found.json()["settings"]["sync_every"]
        except (httpx.HTTPError, OSError):
            time.sleep(0.1)
    return None


def test_each_comes_back_at_the_same_address_with_its_state(coordinator):
    assert answers(coordinator.address) == 8
    coordinator.services["coordinator"].kill()
    assert answers(coordinator.address, within_s=1.0) is None
    assert "away" not in read_status(coordinator.lighthouse_addr).situation
    coordinator.services["coordinator"].start()
    assert answers(coordinator.address) == 8

    coordinator.services["lighthouse"].kill()
    assert "away" in read_status(coordinator.lighthouse_addr).situation
    coordinator.services["lighthouse"].start()
    wait_until(lambda: "away" not in read_status(coordinator.lighthouse_addr).situation, 90)
    assert answers(coordinator.address) == 8


def test_it_stands_still_and_goes_on(coordinator):
    coordinator.services["coordinator"].signal(signal.SIGSTOP)
    assert answers(coordinator.address, within_s=1.0) is None
    coordinator.services["coordinator"].signal(signal.SIGCONT)
    assert answers(coordinator.address) == 8


def test_both_end_with_the_process_that_started_them(coordinator):
    processes = [service._process for service in coordinator.services.values()]
    for process in processes:
        assert "token" not in " ".join(psutil.Process(process.pid).cmdline())
        process.stdin.close()  # as if that process had been killed
    for process in processes:
        assert process.wait(timeout=90) == 0
