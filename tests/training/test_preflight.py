"""What is found before Composer is imported. Run: pytest tests/training/test_preflight.py."""

import pytest

from composer_replication.training.config import ConfigError
from composer_replication.training.preflight import check_group


def test_the_lighthouse_is_the_configs_before_the_environments():
    section = {"lighthouse_addr": "http://config"}
    environ = {"TORCHFT_LIGHTHOUSE": "http://environment"}
    with pytest.raises(ValueError, match="lighthouse_addr='http://config'"):
        check_group({"callbacks": {"diloco": section}}, environ)
    with pytest.raises(ValueError, match="lighthouse_addr='http://environment'"):
        check_group({"callbacks": {"diloco": None}}, environ)
    with pytest.raises(ConfigError, match="lighthouse_addr=None: set COMPOSER_REPLICATION_COORD"):
        check_group({}, {})


@pytest.mark.parametrize(
    ("section", "environ"), [({"num_replicas": 1}, {}), ({}, {"NUM_REPLICA_GROUPS": "1"})]
)
def test_a_group_that_trains_alone_needs_none(section, environ):
    config = {"callbacks": {"diloco": section}}
    check_group(config, environ)
    with pytest.raises(ValueError, match="lighthouse_addr='http://environment'"):
        check_group(config, environ | {"TORCHFT_LIGHTHOUSE": "http://environment"})
    with pytest.raises(ConfigError, match="train alone with callbacks.diloco.num_replicas=1"):
        check_group({"callbacks": {"diloco": {"num_replicas": 2}}}, {})
