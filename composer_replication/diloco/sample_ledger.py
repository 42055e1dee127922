"""Which samples the global parameters have been trained on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from composer_replication.diloco.settings import DiLoCoSettings


class Claim(NamedTuple):
    """How far a replica group's stream of samples is in the global parameters after a sync.

    Attributes:
        stream: Which stream; 0 for a group that reads none.
        position: Samples of it that every fragment has been trained on.
        in_part: Samples of it that at least one fragment has been trained on.
    """

    stream: int
    position: int
    in_part: int


def check_keeps_all_steps(settings: DiLoCoSettings) -> None:
    """Refuse settings under which no record of trained samples could be right.

    Raises:
        ValueError: Inner steps are thrown away.
    """
    if settings.discards_overlapped_steps:
        raise ValueError(
            f"fragment_sync_delay={settings.fragment_sync_delay} with fragment_update_alpha=0 "
            "throws inner steps away, so their samples would count as trained and be lost: use "
            "fragment_update_alpha=0.5"
        )


class Ledger:
    """A part of the global state: of every stream of samples, how much is in the model.

    A stream is what one life of a replica group reads, one sample after the other. Its samples are
    in the model when the sync that was formed after them has committed, fragment by fragment. Every
    group of a sync tells its claim in the roll call, so all that commit it write the same ledger:
    whoever survives knows what the dead have contributed (docs/adrs/ADR-015).

    Args:
        num_fragments: Fragments of the model.

    Attributes:
        entries: The claims of all streams that ever were in a commit, by stream.
        stream: What this group reads from; 0 for none.
        position: Samples of it up to the end of the batch that is being trained on.
    """

    def __init__(self, num_fragments: int) -> None:
        self.entries: dict[int, Claim] = {}
        self.stream = self.position = 0
        self._synced = [0] * num_fragments

    def read_from(self, stream: int) -> None:
        """Go on with a stream of which nothing has been trained on."""
        self.stream, self.position = stream, 0
        self._synced = [0] * len(self._synced)

    def stop_reading(self) -> None:
        """What was trained and not synchronised is lost, so that no later claim may cover it."""
        self.read_from(0)

    def claim(self, fragment: int, formed_at: int, contributes: bool) -> Claim:
        """What holds of this group's stream once a fragment's sync has committed.

        Args:
            fragment: Which one.
            formed_at: The position when its pseudo-gradient was formed.
            contributes: Whether that is in the mean.
        """
        synced = list(self._synced)
        if contributes:
            synced[fragment] = formed_at
        return Claim(self.stream, min(synced), max(synced))

    def commit(self, claims: Iterable[Claim]) -> None:
        """A sync has committed: note what its groups have claimed."""
        for claim in claims:
            known = self.entries.get(claim.stream, claim)
            if claim.stream:
                self.entries[claim.stream] = Claim(*map(max, known, claim))

    def has_synced(self, fragment: int, formed_at: int) -> None:
        """This group's own part of that, for its next claims."""
        self._synced[fragment] = formed_at

    def rows(self) -> list[list[int]]:
        """The entries as plain containers: stream, position, in_part."""
        return [list(claim) for _, claim in sorted(self.entries.items())]

    def load_rows(self, rows: Iterable[Iterable[int]]) -> None:
        """Take over another group's, or a checkpoint's."""
        self.entries = {claim.stream: claim for claim in (Claim(*row) for row in rows)}

    def local_state(self) -> dict[str, Any]:
        """Where this group itself stands."""
        return {"stream": self.stream, "position": self.position, "synced": list(self._synced)}

    def load_local_state(self, state: Mapping[str, Any]) -> None:
        """Stand there again."""
        self.stream, self.position = state["stream"], state["position"]
        self._synced = list(state["synced"])
