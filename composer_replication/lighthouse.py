"""The old name of ``composer_replication.replica.lighthouse``. To be removed in version 0.2."""

from composer_replication.replica.lighthouse import read_status, start_lighthouse

__all__ = ["read_status", "start_lighthouse"]
