"""Checks of the run's coordinator: it answers, agrees, and reaches this machine; and the link."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from composer_replication import MissingExtraError, named_extra
from composer_replication.diloco.fingerprints import SettingsMismatch
from composer_replication.launch.doctor.link import SIZES, Link, check_link, measure_link
from composer_replication.launch.doctor.network import (
    check_clock,
    check_lighthouse_port,
    check_peers,
    check_way_back,
)
from composer_replication.launch.doctor.results import (
    Result,
    failure,
    from_error,
    ok,
    skipped,
    warning,
)
from composer_replication.replica.lighthouse import read_status
from composer_replication.replica.options import TOKEN, ReplicaOptions

if TYPE_CHECKING:
    from composer_replication.coordinator.client import CoordinatorClient, RunInfo


@dataclass
class Found:
    """What the checks of a coordinator have found out for later ones."""

    info: RunInfo | None = None
    link: Link | None = None


@dataclass(frozen=True, kw_only=True)
class Member:
    """What a group would come to the coordinator with.

    Args:
        options: The group's, with ``coordinator_addr``.
        token: The run's secret, if it is set.
        named: The settings and options that the config names.
        model: The config's ``model``, if it is one of ours.
        hostname: The name that this machine advertises.
        name_is_given: Whether it was set, and is not just the host name.
    """

    options: ReplicaOptions
    token: str | None
    named: Mapping[str, Any]
    model: Mapping[str, Any]
    hostname: str
    name_is_given: bool


def check_coordinator(member: Member, found: Found) -> Iterator[Result]:
    """Everything that needs the coordinator, as long as it answers."""
    address = str(member.options.coordinator_addr)
    try:
        from composer_replication.coordinator.client import CoordinatorClient

        client = CoordinatorClient(address, member.token)
    except ModuleNotFoundError as error:
        named = named_extra("the check of the coordinator", error)
        if not isinstance(named, MissingExtraError):
            raise
        value, _, fix = str(named).partition(": ")
        yield warning("coordinator", value, fix)
        return
    with closing(client):
        client = client.with_limits(retry_s=0.0, timeout_s=15.0)
        try:
            found.info = info = client.info()
        except (ConnectionError, ValueError) as error:
            yield from_error("coordinator", error)
            return
        source = f"settings from {info.settings_source}"
        yield ok("coordinator", f"{address}, version {info.version}, {source}")
        yield from _compare(info, member)
        yield from _check_name(client, info, member.options.replica_id)
        lighthouse = member.options.lighthouse_addr or info.lighthouse_addr
        yield from check_lighthouse_port(lighthouse)
        yield from check_peers(read_status(lighthouse))
        yield from _measure(client, member, found)


def _compare(info: RunInfo, member: Member) -> Iterator[Result]:
    """What a registration would be rejected for."""
    address = str(member.options.coordinator_addr)
    checks: dict[str, Callable[[], None]] = {
        "run's versions": info.check_versions,
        "run's settings": lambda: info.check_settings(member.named, address),
        "run's model": lambda: info.check_model(member.model),
        "heartbeats": lambda: info.check_heartbeats(member.options.heartbeat_interval_s),
    }
    for name, check in checks.items():
        try:
            check()
        except SettingsMismatch as error:
            differing = str(error).partition(":\n")[2].replace("\n", ";")
            yield failure(
                name,
                f"this config differs from the coordinator's: {differing}",
                "leave them out, or make them equal",
            )
        except ValueError as error:
            if name == "run's model":
                yield failure(name, str(error), "make the model sections equal")
            else:
                yield from_error(name, error)


def _check_name(client: CoordinatorClient, info: RunInfo, replica_id: object) -> Iterator[Result]:
    if replica_id is None:
        yield skipped("replica id", "set REPLICA_GROUP_ID to this group's own")
        return
    try:
        client.check_name_is_free(str(replica_id), info.heartbeat_timeout_s)
    except ValueError as error:
        yield from_error("replica id", error)
    else:
        yield ok("replica id", f"{replica_id} is free")


def _measure(client: CoordinatorClient, member: Member, found: Found) -> Iterator[Result]:
    """Clock, way back and link; each alone may fail, at a coordinator of another version."""
    try:
        yield from check_clock(client.clock)
    except (ValueError, ConnectionError) as error:
        yield warning(
            "clock, way back, link",
            f"not checked: {error}",
            "install the same version of composer-replication there and here",
        )
        return
    if member.token is None:
        yield skipped("way back", f"set {TOKEN}: without a token a coordinator connects to nobody")
    else:
        try:
            yield from check_way_back(member.hostname, member.name_is_given, client.why_unreached)
        except (ValueError, OSError) as error:
            yield warning("way back", f"not checked: {error}", "try again")
    try:
        found.link = measure_link(client, str(member.options.coordinator_addr))
    except (ValueError, OSError) as error:
        yield failure(
            "link",
            f"a transfer of up to {SIZES[-1] >> 20} MiB broke off: {error}",
            "look for a proxy or a limit between this machine and the coordinator",
        )
    else:
        yield from check_link(found.link)
