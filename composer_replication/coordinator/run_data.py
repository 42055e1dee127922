"""What the coordinator says about a run: to groups that start, and to the status page."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from composer_replication.coordinator.api_types import Info
from composer_replication.coordinator.journal import Journal
from composer_replication.coordinator.registry import Registry
from composer_replication.coordinator.run_settings import RunSettings
from composer_replication.coordinator.streams import Streams

Record = Callable[[], Mapping[str, Any]]
"""Returns what a run's folder adds to the page's data, or has more of; see ``RunData.page``."""


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Facts about a run that groups receive beside its settings.

    Args:
        num_replicas: Number of groups that a cold start waits for.
        min_replicas: Fewest groups in a quorum that may commit.
        model_section: The config's ``model``, if it has one. Groups compare it with their own
            before they build the model.
    """

    num_replicas: int
    min_replicas: int = 1
    model_section: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class RunData:
    """Collects what there is to say about a run.

    Args:
        settings: Settings of the run.
        registry: Replica groups of the run.
        streams: Their sample streams.
        journal: Newest events.
        lighthouse_addr: ``http://host:port`` of the lighthouse, as groups reach it.
        facts: What groups receive beside the settings.
        record: What the run's folder adds. None: the service knows no such folder.
    """

    settings: RunSettings
    registry: Registry
    streams: Streams
    journal: Journal
    lighthouse_addr: str
    facts: RunFacts
    record: Record | None = None

    def info(self) -> Info:
        """The settings that all replica groups adopt, and what else they need to start."""
        section = self.facts.model_section
        return Info(
            version=self.registry.versions.composer_replication,
            torchft=self.registry.versions.torchft,
            settings=asdict(self.settings.settings),
            settings_source=self.settings.source,
            num_replicas=self.facts.num_replicas,
            min_replicas=self.facts.min_replicas,
            lighthouse_addr=self.lighthouse_addr,
            heartbeat_timeout_s=self.registry.heartbeat_timeout_s,
            outer_step=self.streams.outer_step,
            model_section=None if section is None else dict(section),
        )

    def status(self) -> dict[str, Any]:
        """What this service knows about the run. Groups ask for it too."""
        replicas = self.registry.replicas()
        run = self.info().model_dump()
        return run | {
            "time": time.time(),
            "outer_step": max(run["outer_step"], *(r.get("outer_step") or 0 for r in replicas), 0),
            "replicas": replicas,
            "losses": self.registry.history.losses(),
            "syncs": self.registry.history.syncs(),
            "lives": self.registry.lives(),
            "datasets": [asdict(dataset) for dataset in self.streams.units.datasets()],
            "events": self.journal.events(),
        }

    def page(self) -> dict[str, Any]:
        """Everything that the status page shows; ``docs/watching.md`` describes the views.

        What the run's folder has replaces what heartbeats have reported: it has every sync, and
        its losses are means over a round.
        """
        return {**self.status(), **(self.record() if self.record is not None else {})}
