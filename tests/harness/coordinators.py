"""Coordinators that end with their test."""

from contextlib import contextmanager

from composer_replication.coordinator.server import Coordinator
from composer_replication.settings import DiLoCoSettings


@contextmanager
def coordinator_in(state_dir, sync_every=100, **options):
    """Serve on loopback, for two groups unless ``options`` say otherwise."""
    options = {"num_replicas": 2, "bind": "127.0.0.1:0"} | options
    settings = DiLoCoSettings(sync_every=sync_every)
    coordinator = Coordinator(settings, "x.yaml", state_dir=state_dir, **options)
    try:
        yield coordinator
    finally:
        coordinator.shutdown()
