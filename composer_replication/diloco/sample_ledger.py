"""Which samples the global parameters have been trained on.

A *sample stream* is what one incarnation of a replica group reads, one sample after the other. A
*position* in it is a number of samples from its start. Each fragment is synchronised by itself, so
a sample can be in one fragment's global parameters and not yet in another's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from composer_replication.settings import DiLoCoSettings


class SyncedSamples(NamedTuple):
    """How much of one sample stream is in the global parameters after a sync.

    Attributes:
        stream: The stream's number; 0 for a group that reads none.
        position: All fragments have been trained on the samples up to here.
        in_part: At least one fragment has been trained on the samples up to here.
    """

    stream: int
    position: int
    in_part: int


def check_keeps_all_steps(settings: DiLoCoSettings) -> None:
    """Reject settings under which no record of trained samples could be right.

    Raises:
        ValueError: The settings throw inner steps away.
    """
    if settings.discards_overlapped_steps:
        raise ValueError(
            f"fragment_sync_delay={settings.fragment_sync_delay} with fragment_update_alpha=0 "
            "throws inner steps away, so their samples would count as trained and be lost: use "
            "fragment_update_alpha=0.5"
        )


class Ledger:
    """The part of the global state that records, for every sample stream, how much is in the model.

    A group's samples are in the model when the sync that packed them has committed, fragment by
    fragment. Every group sends its ``SyncedSamples`` with each sync in the peer table, so all
    groups that commit the sync write the same ledger. Every survivor therefore knows what a
    group that has died has contributed (docs/adrs/ADR-015).

    Args:
        num_fragments: Fragments of the model.

    Attributes:
        entries: The ``SyncedSamples`` of all streams that have been in a commit, by stream.
        stream: The stream that this group reads; 0 for none.
        position: This group's position, at the end of the batch that is being trained on.
    """

    def __init__(self, num_fragments: int) -> None:
        self.entries: dict[int, SyncedSamples] = {}
        self.stream = 0
        self.position = 0
        self._synced = [0] * num_fragments

    def read_from(self, stream: int) -> None:
        """Start a new stream, of which nothing has been trained on."""
        self.stream = stream
        self.position = 0
        self._synced = [0] * len(self._synced)

    def stop_reading(self) -> None:
        """End the stream: what was trained on and not synchronised stays unrecorded."""
        self.read_from(0)

    def send(self, fragment: int, packed_at: int, contributes: bool) -> SyncedSamples:
        """Return what holds of this group's stream once the sync of a fragment has committed.

        Args:
            fragment: The fragment that is synchronised.
            packed_at: The position when its pseudo-gradient was packed.
            contributes: Whether that pseudo-gradient is in the mean.
        """
        synced = list(self._synced)
        if contributes:
            synced[fragment] = packed_at
        return SyncedSamples(self.stream, min(synced), max(synced))

    def commit(self, synced_samples: Iterable[SyncedSamples]) -> None:
        """Record what the groups of a committed sync have sent."""
        for synced in synced_samples:
            known = self.entries.get(synced.stream, synced)
            if synced.stream:
                self.entries[synced.stream] = SyncedSamples(*map(max, known, synced))

    def has_synced(self, fragment: int, packed_at: int) -> None:
        """Remember that this group's samples up to ``packed_at`` are in a fragment."""
        self._synced[fragment] = packed_at

    def rows(self) -> list[list[int]]:
        """The entries as plain containers: stream, position, in_part."""
        return sorted(map(list, self.entries.values()))

    def load_rows(self, rows: Iterable[Iterable[int]]) -> None:
        """Replace the entries by those of ``rows()``, of another group or of a checkpoint."""
        entries = [SyncedSamples(*row) for row in rows]
        self.entries = {entry.stream: entry for entry in entries}

    def local_state(self) -> dict[str, Any]:
        """This group's own stream and position, for its checkpoint."""
        return {"stream": self.stream, "position": self.position, "synced": list(self._synced)}

    def load_local_state(self, state: Mapping[str, Any]) -> None:
        """Restore what ``local_state`` returned."""
        self.stream = state["stream"]
        self.position = state["position"]
        self._synced = list(state["synced"])
