"""What a process keeps of the managers that have left it, as at every further ``fit`` in it."""

import os
import time

import psutil
import pytest

from composer_replication.replica.factory import make_manager
from composer_replication.replica.lighthouse import start_lighthouse

pytestmark = pytest.mark.integration


@pytest.mark.alone
def test_a_process_with_one_manager_after_the_other_keeps_what_one_needs():
    lighthouse = start_lighthouse(bind="127.0.0.1:0", join_timeout_ms=500, heartbeat_timeout_ms=500)
    address = "http://127.0.0.1:" + lighthouse.address().rpartition(":")[2]

    def num_ports(expected):
        """After at most 5 s: threads of torchft's close the last ports."""
        deadline = time.monotonic() + 5.0
        while True:
            connections = psutil.Process().net_connections()
            count = sum(connection.status == "LISTEN" for connection in connections)
            if count <= expected or time.monotonic() > deadline:
                return count
            time.sleep(0.05)

    def one_life(expected_ports=0):
        manager = make_manager(
            replica_id="x", lighthouse_addr=address, hostname="127.0.0.1", timeout=5, token="secret"
        )
        manager.start_quorum()
        assert manager.errored() is None and manager.should_commit()
        manager.shutdown()
        return (
            len(os.listdir("/proc/self/fd")),
            psutil.Process().num_threads(),
            num_ports(expected_ports),
        )

    try:
        one_life()  # what is loaded at the first use stays
        first = one_life()
        lives = [one_life(first[2]) for _ in range(6)]
    finally:
        lighthouse.shutdown()
    for fds, threads, ports in lives:
        # A life that is kept takes 26 descriptors, 4 threads and 2 ports.
        assert fds < first[0] + 26 and threads < first[1] + 4 and ports <= first[2]
