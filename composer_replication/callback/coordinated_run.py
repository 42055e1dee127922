"""A replica group's side of a coordinator, for all ranks of the group alike."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from composer.utils import dist
from torch import Tensor

from composer_replication.coordinator.membership import Membership, ask_for_run
from composer_replication.diloco.algorithm import DiLoCo
from composer_replication.diloco.settings import DiLoCoSettings
from composer_replication.replica.options import ReplicaOptions, replica_id_of
from composer_replication.replica.ranks import ask_on_rank_0

log = logging.getLogger(__name__)


class CoordinatedRun:
    """Takes the run's settings from its coordinator, and keeps the group known to it.

    Rank 0 asks; every rank hears the answer or the error, so that none waits for another.

    Args:
        options: Of this group, with ``coordinator_addr``.
        given: The callback's arguments as they were given: settings among them have to be the
            coordinator's.

    Attributes:
        settings: The run's.
        options: This group's, with what the coordinator knows filled in.

    Raises:
        CoordinatorAwayError: It does not answer.
        RefusedByCoordinatorError: It refuses the token.
        SettingsMismatch: A setting was given that is another there, or it lacks one.
    """

    def __init__(self, options: ReplicaOptions, given: Mapping[str, Any]) -> None:
        address = options.coordinator_addr
        assert address is not None, "made only where there is a coordinator"
        self._info = info = ask_on_rank_0(lambda: ask_for_run(options))
        info.check_given(given, address)
        self.settings = info.settings
        self.options = replace(
            options,
            lighthouse_addr=options.lighthouse_addr or info.lighthouse_addr,
            num_replicas=info.num_replicas,
            min_replica_size=info.min_replicas,
        )
        self._membership: Membership | None = None
        self._offered = 0
        log.info(
            "Settings from the coordinator at %s (%s): %s", address, info.source, info.settings
        )

    def register(self, synced: Sequence[Mapping[str, Tensor]]) -> None:
        """Take part, with the model that ``synced`` tells, by fragment.

        Raises:
            CoordinatorAwayError: It does not answer.
            RefusedByCoordinatorError: It refuses, and why.
        """
        model = {name: tensor for fragment in synced for name, tensor in fragment.items()}
        self._offered = 0

        def register() -> None:
            membership = Membership(self.options, self._info, replica_id_of(self.options))
            membership.join(model, dist.get_world_size())
            self._membership = membership

        ask_on_rank_0(register)

    @property
    def outer_step(self) -> int:
        """The last one that the coordinator had heard of when this group asked."""
        return self._info.outer_step

    @property
    def session(self) -> str | None:
        """Of the registration; None on other ranks than 0."""
        return None if self._membership is None else self._membership.session

    def offer_settings(self, diloco: DiLoCo) -> None:
        """Tell the other groups which versions of the settings this one knows.

        Right after a sync, so that all ranks come to know them at the same time, and an error, too:
        one that rank 0 raised alone would leave the others waiting for it in a collective.

        Raises:
            RefusedByCoordinatorError: Another group is in this one's place, or the coordinator
                does not know a version that it has announced.
        """
        found = ask_on_rank_0(self._new_settings)
        self._offered = max([self._offered, *found])
        diloco.offer_settings(found)

    def _new_settings(self) -> dict[int, DiLoCoSettings]:
        if self._membership is None:
            return {}
        if self._membership.refusal is not None:
            raise self._membership.refusal
        return self._membership.new_settings(self._offered)

    def report(self, progress: Mapping[str, Any]) -> None:
        """Where the group stands, for its next heartbeat."""
        if self._membership is not None:
            self._membership.report(progress)

    def leave(self) -> None:
        """End taking part."""
        if self._membership is not None:
            self._membership.leave()
            self._membership = None
