"""A replica group's membership in a run that has a coordinator: rank 0 speaks for the group."""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import uuid
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from torch import Tensor

from composer_replication.coordinator.client import CoordinatorClient, RunInfo
from composer_replication.coordinator.client_http import (
    CoordinatorAwayError,
    RefusedByCoordinatorError,
)
from composer_replication.diloco.settings import DiLoCoSettings
from composer_replication.replica.options import ReplicaEnv, ReplicaOptions

log = logging.getLogger(__name__)


def ask_for_run(options: ReplicaOptions) -> RunInfo:
    """What the coordinator says of the run.

    Raises:
        CoordinatorAwayError: It does not answer.
        ValueError: It refuses, or this group would look dead to it between two heartbeats.
    """
    client = client_of(options)
    try:
        info = client.info()
    finally:
        client.close()
    if 2 * options.heartbeat_interval_s > info.heartbeat_timeout_s:
        raise ValueError(
            f"heartbeat_interval_s={options.heartbeat_interval_s:g} is above half of the "
            f"coordinator's heartbeat timeout of {info.heartbeat_timeout_s:g} s: this group would "
            f"look dead. Use at most {info.heartbeat_timeout_s / 2:g}"
        )
    return info


class Membership:
    """Registers the group, sends its heartbeats, and hears of new settings. On rank 0 only.

    Args:
        options: Of this group.
        info: What the coordinator has said.
        replica_id: The group's name.
    """

    def __init__(self, options: ReplicaOptions, info: RunInfo, replica_id: str) -> None:
        self._client = client_of(options)
        self._info = info
        self._replica_id = replica_id
        self._interval_s = options.heartbeat_interval_s
        self.session = uuid.uuid4().hex
        self._registration: dict[str, Any] = {}
        self._progress: dict[str, Any] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="membership", daemon=True)
        self._is_away = False
        self.newest_version = info.settings_version
        self.refusal: RefusedByCoordinatorError | None = None
        """Set when the coordinator has put another group in this one's place."""

    def join(self, synced: Mapping[str, Tensor], world_size: int) -> None:
        """Register, and send heartbeats from then on.

        A group that has just died and come back has to wait until it looks dead.

        Raises:
            CoordinatorAwayError: It does not answer.
            RefusedByCoordinatorError: It refuses.
        """
        from composer_replication import __version__

        self._registration = {
            "replica_id": self._replica_id,
            "session": self.session,
            "host": socket.gethostname(),
            "world_size": world_size,
            "composer_replication": __version__,
            "torchft": version("torchft-nightly"),
            "model": [
                {"name": name, "shape": list(t.shape), "dtype": str(t.dtype)}
                for name, t in sorted(synced.items())
            ],
        }
        tries = int((self._info.heartbeat_timeout_s + 1.0) / 0.5)
        for left in reversed(range(tries)):
            try:
                self.newest_version = self._client.register(self._registration)
                break
            except RefusedByCoordinatorError as error:
                if error.status != 409 or not left:
                    raise
            self._ended.wait(0.5)
        self._thread.start()

    def report(self, progress: Mapping[str, Any]) -> None:
        """Where the group stands, for the next heartbeat."""
        self._progress = {
            name: value
            for name, value in progress.items()
            if value is not None and not (isinstance(value, float) and not math.isfinite(value))
        }

    def new_settings(self, after: int) -> dict[int, DiLoCoSettings]:
        """The versions of the settings after one; what cannot be had now is had later."""
        found: dict[int, DiLoCoSettings] = {}
        try:
            for number in range(after + 1, self.newest_version + 1):
                found[number] = self._client.settings(number)
        except CoordinatorAwayError as error:
            log.warning("New settings will come later: %s", error)
        return found

    def leave(self) -> None:
        """End taking part."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(5.0)
            try:
                self._client.leave(self._replica_id, self.session)
            except (CoordinatorAwayError, RefusedByCoordinatorError) as error:
                log.info("Left without a word to the coordinator: %s", error)
        self._client.close()

    def _beat(self) -> None:
        while not self._ended.wait(self._interval_s):
            try:
                told = {"session": self.session, **self._progress}
                self.newest_version = self._client.heartbeat(self._replica_id, told)
                if self._is_away:
                    log.info("The coordinator is back")
                self._is_away = False
            except CoordinatorAwayError as error:
                if not self._is_away:
                    log.warning("Training goes on without the coordinator: %s", error)
                self._is_away = True
            except RefusedByCoordinatorError as error:
                self._register_again(error)

    def _register_again(self, error: RefusedByCoordinatorError) -> None:
        """The coordinator does not know this session: it has lost its state, or has another one."""
        try:
            self._client.register(self._registration)
            log.warning("Registered again: %s", error)
        except CoordinatorAwayError:
            self._is_away = True
        except RefusedByCoordinatorError as refusal:
            self.refusal = refusal
            self._ended.set()


def client_of(options: ReplicaOptions) -> CoordinatorClient:
    assert options.coordinator_addr is not None, "asked only where there is one"
    token = ReplicaEnv.from_env(os.environ).token
    return CoordinatorClient(options.coordinator_addr, token, tls_dir=options.tls_dir)
