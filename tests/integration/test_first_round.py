"""A group killed before the first commit. Run: pytest tests/integration/test_first_round.py

Real: the command `launch`, its groups, lighthouse and gloo, SIGKILL.
"""

import json
import signal

import pytest
from integration.groups import Launch
from run_events import syncs_of
from text_config import TINY

pytestmark = [pytest.mark.integration, pytest.mark.slow]

OVERRIDES = ["max_duration=1000000ba", "callbacks.diloco.sync_every=30"]


@pytest.mark.parametrize("when", ["joining", "training"])
def test_it_is_started_again_and_all_end_with_the_same(tmp_path, when):
    config = tmp_path / "tiny.yaml"
    config.write_text(TINY)
    with Launch(config, tmp_path / "run", "--replicas", "3", *OVERRIDES, pace_s=0.05) as launch:

        def phase_of(replica_id):
            path = launch.folder(replica_id) / "status.json"
            return json.loads(path.read_text())["phase"] if path.exists() else ""

        if when == "training":  # all have taken part in the cold start, and nobody has committed
            launch.wait_until(lambda: all(phase_of(i) == "training" for i in range(3)))
        else:
            launch.wait_until(lambda: phase_of(2) == "joining")
        launch.leader_of(2).send_signal(signal.SIGKILL)
        assert not any(syncs_of(launch.folder(i)) for i in range(3))

        launch.wait_until(lambda: syncs_of(launch.folder(2)))  # it is back
        launch.stop()
        replicas = launch.summary()["replicas"]
    assert [replica["restarts"] for replica in replicas] == [0, 0, 1]
    assert len({replica["global_digest"] for replica in replicas}) == 1
    for replica_id in range(2):
        syncs = syncs_of(launch.folder(replica_id))
        assert sum(sync["diloco/steps_lost"] for sync in syncs) == 0
