"""What a coordinator tells about its run."""

from composer_replication.coordinator.wire_types import RunInfo, digests_of
from composer_replication.settings import DiLoCoSettings

VERSIONS = {"composer_replication": "0.1.0", "torchft": "2026.10.26"}
INFO = RunInfo(
    settings=DiLoCoSettings(),
    settings_source="tiny.yaml",
    num_replicas=2,
    min_replicas=1,
    lighthouse_addr="http://head:1",
    heartbeat_timeout_s=3.0,
    version="0.1.0",
    torchft="2026.10.26",
    digest_every=10,
    model_section=digests_of({"d_model": 8, "hub": {"token": "a-secret"}}),
)
