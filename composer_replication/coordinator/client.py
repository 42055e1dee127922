"""What a replica group asks the coordinator."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any
from urllib.parse import quote

from composer_replication import __version__
from composer_replication.coordinator.client_http import CoordinatorHttp, RefusedByCoordinatorError
from composer_replication.coordinator.wire_types import DatasetSpec, Lease
from composer_replication.diloco.settings import DiLoCoSettings, SettingsMismatch

_INFO: dict[str, type] = {
    "settings": dict,
    "settings_version": int,
    "settings_source": str,
    "num_replicas": int,
    "min_replicas": int,
    "lighthouse_addr": str,
    "heartbeat_timeout_s": float,
    "version": str,
    "torchft": str,
    "outer_step": int,
}
_VERSION: dict[str, type] = {"settings_version": int}
_LEASE: dict[str, type] = dict.fromkeys((field.name for field in dataclasses.fields(Lease)), int)


@dataclass(frozen=True)
class RunInfo:
    """What a group has to know before it starts."""

    settings: DiLoCoSettings
    settings_version: int
    source: str
    num_replicas: int
    min_replicas: int
    lighthouse_addr: str
    heartbeat_timeout_s: float
    version: str
    torchft: str
    model_section: Mapping[str, Any] | None
    outer_step: int
    """The last one that it has heard of."""

    def check_given(self, given: Mapping[str, Any], address: str) -> None:
        """Compare the settings that a config names with the coordinator's.

        Raises:
            SettingsMismatch: One is another; the message lists both of each.
        """
        options = {"num_replicas": self.num_replicas, "min_replica_size": self.min_replicas}
        run = dataclasses.asdict(self.settings) | options
        differing = [
            f"  {name}: {value!r} here, {run[name]!r} there"
            for name, value in given.items()
            if name in run and value != run[name] and not (name in options and value is None)
        ]
        if differing:
            raise SettingsMismatch(
                f"the settings of this run are the coordinator's ({address}, from {self.source}), "
                "and this group's config has others; leave them out, or make them equal:\n"
                + "\n".join(differing)
            )

    def check_model(self, section: Mapping[str, Any]) -> None:
        """Compare a config's ``model`` with that of the coordinator's config.

        What only one of them names is compared when the model has been built, by its shapes. What
        shapes do not tell, such as a number of heads, is found out here alone.

        Raises:
            RefusedByCoordinatorError: A key has another value.
        """
        run = self.model_section or {}
        differing = [
            f"model.{name} is {value!r} here, and {run[name]!r} in this run"
            for name, value in section.items()
            if name in run and value != run[name]
        ]
        if differing:
            raise RefusedByCoordinatorError(f"another model: {'; '.join(differing)}", 422)

    def check_versions(self) -> None:
        """Compare what is installed here with what the run's coordinator has.

        Raises:
            RefusedByCoordinatorError: It would refuse this group.
        """
        for name, own, run in (
            ("composer_replication", __version__, self.version),
            ("torchft", version("torchft-nightly"), self.torchft),
        ):
            if own != run:
                raise RefusedByCoordinatorError(
                    f"{name} {own} here, and {run} in this run: install the same version"
                )


class CoordinatorClient:
    """Asks the coordinator over HTTP.

    Args:
        address: ``http://host:port``.
        token: The run's secret, if it has one.
        patience_s: How long a request is tried again while nobody answers, in seconds.
        tls_dir: The folder of certificates, see ``CoordinatorHttp``.
    """

    def __init__(
        self,
        address: str,
        token: str | None,
        patience_s: float = 5.0,
        tls_dir: str | None = None,
    ) -> None:
        self.address = address
        self._http = CoordinatorHttp(address, token, patience_s, tls_dir)

    def info(self) -> RunInfo:
        """What a group has to know before it starts.

        Raises:
            CoordinatorAwayError: Nobody answers.
            RefusedByCoordinatorError: The token is wrong.
            SettingsMismatch: It lacks a setting that this version has, or has others.
        """
        told = self._http.ask("GET", "/v1/info", fields=_INFO)
        taken = {name: told[name] for name in _INFO}
        source, settings = taken.pop("settings_source"), taken.pop("settings")
        return RunInfo(
            settings=_settings_of(settings, self.address),
            source=source,
            model_section=told.get("model_section"),
            **taken,
        )

    def check_name_is_free(self, replica_id: str, heartbeat_timeout_s: float) -> None:
        """Find out within half the heartbeat timeout whether a living group has a name.

        One that has died a moment ago looks alive, but sends no more heartbeats.

        Raises:
            CoordinatorAwayError: Nobody answers.
            RefusedByCoordinatorError: It sends heartbeats.
        """
        began = time.monotonic()
        # No group's heartbeats are further apart, see ``ask_for_run``.
        while (elapsed := time.monotonic() - began) < heartbeat_timeout_s / 2 + 0.2:
            replicas = self._http.ask("GET", "/v1/status", fields={"replicas": list})["replicas"]
            found = next((r for r in replicas if r["replica_id"] == replica_id), None)
            if found is None or not found["is_alive"]:
                return
            if found["last_seen_s"] is not None and found["last_seen_s"] < elapsed - 0.1:
                raise RefusedByCoordinatorError(
                    f"a replica group {replica_id!r} is alive: give each group a REPLICA_GROUP_ID "
                    "of its own, or end that one",
                    409,
                )
            time.sleep(0.1)

    def settings(self, number: int) -> DiLoCoSettings:
        """One version of the settings. Raises what ``info`` does."""
        path = f"/v1/settings/{number}"
        return _settings_of(self._http.ask("GET", path, fields={"sync_every": int}), self.address)

    def register(self, registration: Mapping[str, Any]) -> int:
        """Take part; the newest version of the settings.

        Raises:
            CoordinatorAwayError: Nobody answers.
            RefusedByCoordinatorError: With the reason.
        """
        return self._http.ask("POST", "/v1/replicas", registration, _VERSION)["settings_version"]

    def heartbeat(self, replica_id: str, progress: Mapping[str, Any]) -> int:
        """Say where the group stands; the newest version of the settings. Raises as ``register``.

        Asked once: the next heartbeat is the next try.
        """
        path = f"/v1/replicas/{quote(replica_id, safe='')}/heartbeat"
        return self._http.once("POST", path, progress, _VERSION)["settings_version"]

    def leave(self, replica_id: str, session: str) -> None:
        """End taking part. Raises as ``register``."""
        self._http.once("DELETE", f"/v1/replicas/{quote(replica_id, safe='')}?session={session}")

    # ---- work units ---------------------------------------------------------------------------

    def create_dataset(self, dataset: DatasetSpec) -> None:
        """Make a dataset known. Raises as ``register``; 409 if it is known as another."""
        told = {name: getattr(dataset, name) for name in ("dataset_id", "length", "seed")}
        self._http.ask("POST", "/v1/datasets", told | {"unit_size": dataset.unit_size})

    def progress(self, dataset_id: str) -> list[dict[str, Any]]:
        """The epochs that have been begun: length, done, leased, available. Asked once."""
        path = f"/v1/datasets/{quote(dataset_id)}"
        return self._http.once("GET", path, fields={"epochs": list})["epochs"]

    def open_stream(self, name: str, dataset_id: str, replica_id: str, session: str) -> int:
        """A stream for a group to read; the same one for the same name. Raises as ``register``."""
        told = {"name": name, "dataset_id": dataset_id, "replica_id": replica_id}
        told["session"] = session
        return self._http.ask("POST", "/v1/streams", told, {"stream": int})["stream"]

    def lease(self, stream: int, number: int, epoch: int) -> Lease:
        """The lease of a number in a stream. Raises as ``register``. Asked once."""
        told = {"number": number, "epoch": epoch}
        found = self._http.once("POST", f"/v1/streams/{stream}/leases", told, _LEASE)
        return Lease(**{name: found[name] for name in _LEASE})

    def reopen_stream(self, stream: int, position: int, session: str) -> None:
        """Go on with a stream from a checkpoint. Raises as ``register``; 410 if others have it."""
        told = {"position": position, "session": session}
        self._http.ask("POST", f"/v1/streams/{stream}/reopen", told)

    def release_stream(self, stream: int, ledger: Sequence[Sequence[int]]) -> None:
        """Give back what a stream has and the model has not. Raises as ``register``."""
        self._http.ask("POST", f"/v1/streams/{stream}/release", {"ledger": ledger})

    def commit(
        self, outer_step: int, ledger: Sequence[Sequence[int]], present: Sequence[int], age_s: float
    ) -> list[int]:
        """Say which samples are in the model. Raises as ``register``. Asked once.

        Args:
            outer_step: Of the model.
            ledger: Rows of stream, position, in_part.
            present: The streams of the groups in the last sync.
            age_s: How long ago that was.

        Returns:
            Streams in the ledger that the coordinator does not know.
        """
        told = {"outer_step": outer_step, "ledger": ledger, "present": present, "age_s": age_s}
        return self._http.once("POST", "/v1/commits", told, {"unknown": list})["unknown"]

    def rewind(self, outer_step: int, ledger: Sequence[Sequence[int]]) -> None:
        """Say that the run goes on from this model. Raises as ``register``."""
        self._http.ask("POST", "/v1/rewind", {"outer_step": outer_step, "ledger": ledger})

    def close(self) -> None:
        """Close the connections."""
        self._http.close()


def _settings_of(told: Mapping[str, Any], address: str) -> DiLoCoSettings:
    known = {field.name for field in dataclasses.fields(DiLoCoSettings)}
    odd = sorted(known ^ told.keys())
    if odd:
        lacks = [name for name in odd if name in known]
        what = f"lacks {', '.join(lacks)}" if lacks else f"has {', '.join(odd)}, unknown here"
        raise SettingsMismatch(
            f"the coordinator at {address} {what}: run the same version of composer-replication "
            "there and here"
        )
    return DiLoCoSettings(**told)
