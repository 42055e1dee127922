"""The requests that a replica group makes to the coordinator."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_type_hints
from urllib.parse import quote

from composer_replication.coordinator.client_http import (
    CoordinatorHttp,
    NameTakenError,
    RejectedByCoordinatorError,
)
from composer_replication.coordinator.wire_types import CommitReport, DatasetSpec, Lease, digests_of
from composer_replication.diloco.fingerprints import SettingsMismatch
from composer_replication.diloco.schedule import check_rows
from composer_replication.diloco.settings import DiLoCoSettings
from composer_replication.replica.options import ReplicaOptions

_MEMBER: dict[str, type] = {"replica_id": str}
_LEASE: dict[str, type] = dict.fromkeys((field.name for field in dataclasses.fields(Lease)), int)


@dataclass(frozen=True)
class RunInfo:
    """What a group has to know about the run before it starts."""

    settings: DiLoCoSettings
    settings_source: str
    num_replicas: int
    min_replicas: int
    lighthouse_addr: str
    heartbeat_timeout_s: float
    version: str
    torchft: str
    digest_every: int
    outer_step: int
    """The largest one that the coordinator knows of."""
    model_section: Mapping[str, str]
    """Digests of the values of its config's ``model``."""

    def adopt(self, options: ReplicaOptions, named: Mapping[str, Any]) -> ReplicaOptions:
        """A group's options with the run's numbers of groups, and its lighthouse if none is set.

        Args:
            options: Of the group.
            named: The settings and options that its config names.

        Raises:
            SettingsMismatch: One differs from the run's.
        """
        self.check_settings(named, str(options.coordinator_addr))
        return replace(
            options,
            lighthouse_addr=options.lighthouse_addr or self.lighthouse_addr,
            num_replicas=self.num_replicas,
            min_replica_size=self.min_replicas,
            digest_every=named.get("digest_every", self.digest_every),
        )

    def check_settings(self, named: Mapping[str, Any], address: str) -> None:
        """Compare the settings that a config names with the coordinator's.

        What it leaves open is no difference: None where a value is chosen for it.

        Raises:
            SettingsMismatch: One differs; the message lists both values of each.
        """
        if "schedule" in named:  # as the settings hold it: rows of a YAML file are a list
            named = {**named, "schedule": check_rows(named["schedule"])}
        options = {"num_replicas": self.num_replicas, "min_replica_size": self.min_replicas}
        run = dataclasses.asdict(self.settings) | options
        chosen = (*options, "fragment_update_alpha")
        differing = [
            f"{name}: {value!r} here, {run[name]!r} there"
            for name, value in named.items()
            if name in run and value != run[name]
            if not (name in chosen and value is None)
        ]
        if differing:
            raise SettingsMismatch(
                f"the settings of this run are the coordinator's ({address}, from "
                f"{self.settings_source}), and this group's config has others; leave them out, or "
                "make them equal: " + "; ".join(differing)
            )

    def check_model(self, section: Mapping[str, Any]) -> None:
        """Compare a config's ``model`` with that of the coordinator's config.

        Keys that only one of them names are compared later, by the shapes of the built model. Keys
        that do not change a shape, such as a number of heads, are compared here only.

        Raises:
            RejectedByCoordinatorError: A key has another value.
        """
        run = self.model_section
        differing = [
            f"model.{name}"
            for name, digest in digests_of(section).items()
            if run.get(name, digest) != digest
        ]
        if differing:
            raise RejectedByCoordinatorError(
                f"another model: {', '.join(differing)} of this config differ from the config of "
                "the run's coordinator: make them equal"
            )


_INFO: dict[str, type] = {
    name: kind for name, kind in get_type_hints(RunInfo).items() if kind in (int, float, str)
} | {"settings": dict}


class CoordinatorClient(CoordinatorHttp):
    """The coordinator's requests as methods. Arguments: see ``CoordinatorHttp``.

    Every method raises ``CoordinatorAwayError`` if nobody has answered for ``retry_s``, and
    ``RejectedByCoordinatorError`` with the reason if the coordinator rejects.
    """

    def info(self) -> RunInfo:
        """What a group has to know before it starts.

        Raises:
            SettingsMismatch: The coordinator lacks a setting that this version has, or the other
                way round.
        """
        answer = self.ask("GET", "/v1/info", fields=_INFO)
        known = {name: answer[name] for name in _INFO} | {
            "settings": self._settings_of(answer["settings"]),
            "model_section": answer.get("model_section") or {},
        }
        return RunInfo(**known)

    def check_name_is_free(self, replica_id: str, heartbeat_timeout_s: float) -> None:
        """Check that no living group has a name. Takes up to half the heartbeat timeout.

        A group that died a moment ago still looks alive, but sends no more heartbeats.

        Raises:
            NameTakenError: A group of this name sends heartbeats.
        """
        began = time.monotonic()
        # Half the timeout is the longest heartbeat interval, see ``ask_for_run``.
        while (elapsed := time.monotonic() - began) < heartbeat_timeout_s / 2 + 0.2:
            replicas = self.ask("GET", "/v1/status", fields={"replicas": list})["replicas"]
            same = next((r for r in replicas if r["replica_id"] == replica_id), None)
            if same is None or not same["is_alive"]:
                return
            if same["last_seen_s"] is not None and same["last_seen_s"] < elapsed - 0.1:
                raise NameTakenError(
                    f"a replica group {replica_id!r} is alive: give each group a REPLICA_GROUP_ID "
                    "of its own, or end that one"
                )
            time.sleep(0.1)

    def register(self, registration: Mapping[str, Any]) -> None:
        """Register a group."""
        self.ask("POST", "/v1/replicas", registration, _MEMBER)

    def heartbeat(self, replica_id: str, progress: Mapping[str, Any]) -> None:
        """Report a group's progress."""
        path = f"/v1/replicas/{quote(replica_id, safe='')}/heartbeat"
        self.ask("POST", path, progress, _MEMBER)

    def leave(self, replica_id: str, session: str) -> None:
        """End a group's registration."""
        self.ask("DELETE", f"/v1/replicas/{quote(replica_id, safe='')}?session={session}")

    # ---- work units ---------------------------------------------------------------------------

    def create_dataset(self, dataset: DatasetSpec) -> None:
        """Create a dataset; the same one may be created again.

        Raises:
            NameTakenError: Its name belongs to another dataset.
        """
        names = ("dataset_id", "length", "seed", "unit_size")
        self.ask("POST", "/v1/datasets", {name: getattr(dataset, name) for name in names})

    def progress(self, dataset_id: str) -> list[dict[str, Any]]:
        """The epochs that have begun: length, done, leased, available."""
        path = f"/v1/datasets/{quote(dataset_id)}"
        return self.ask("GET", path, fields={"epochs": list})["epochs"]

    def open_stream(self, name: str, dataset_id: str, replica_id: str, session: str) -> int:
        """Open a stream for a group to read; the same name is always the same stream."""
        body = {"name": name, "dataset_id": dataset_id, "replica_id": replica_id}
        body["session"] = session
        return self.ask("POST", "/v1/streams", body, {"stream": int})["stream"]

    def lease(self, stream: int, number: int, epoch: int) -> Lease:
        """The lease of a number in a stream, from ``epoch`` or an earlier one."""
        body = {"number": number, "epoch": epoch}
        answer = self.ask("POST", f"/v1/streams/{stream}/leases", body, _LEASE)
        return Lease(**{name: answer[name] for name in _LEASE})

    def reopen_stream(self, stream: int, position: int, session: str) -> None:
        """Continue a stream from a checkpoint. Refused if its samples belong to others by now."""
        body = {"position": position, "session": session}
        self.ask("POST", f"/v1/streams/{stream}/reopen", body)

    def release_stream(self, stream: int, ledger: Sequence[Sequence[int]]) -> None:
        """End a stream: samples of it that are not in the ledger become available to others."""
        self.ask("POST", f"/v1/streams/{stream}/release", {"ledger": ledger})

    def commit(self, report: CommitReport) -> list[int]:
        """Report which samples are in the model. May be repeated, and may arrive late.

        Returns:
            Streams in the ledger of which the coordinator has lost leases.
        """

        def send() -> list[int]:
            # Every attempt states the age anew: a sync that looks younger than it is could look
            # later than the death of a group that took part in it.
            body = dataclasses.asdict(report)
            body["age_s"] = time.monotonic() - body.pop("ended_at")
            return self.once("POST", "/v1/commits", body, {"unknown": list})["unknown"]

        return self.retry(send)

    def rewind(self, outer_step: int, ledger: Sequence[Sequence[int]]) -> None:
        """Say that the run continues from a checkpoint's model."""
        self.ask("POST", "/v1/rewind", {"outer_step": outer_step, "ledger": ledger})

    def _settings_of(self, values: Mapping[str, Any]) -> DiLoCoSettings:
        known = {field.name for field in dataclasses.fields(DiLoCoSettings)}
        odd = sorted(known ^ values.keys())
        if odd:
            lacks = [name for name in odd if name in known]
            what = f"lacks {', '.join(lacks)}" if lacks else f"has {', '.join(odd)}, unknown here"
            raise SettingsMismatch(
                f"the coordinator at {self.address} {what}: run the same version of "
                "composer-replication there and here"
            )
        return DiLoCoSettings(**values)
