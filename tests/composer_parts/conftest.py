"""For all tests of Composer's parts."""

import pytest

from composer_replication.replica.lighthouse import start_lighthouse


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def lighthouse_addr():
    lighthouse = start_lighthouse(heartbeat_timeout_ms=1_000)
    yield lighthouse.address()
    lighthouse.shutdown()
