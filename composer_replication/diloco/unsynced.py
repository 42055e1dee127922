"""Inner steps of one fragment that are not in the global parameters yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class Packed:
    """What a pseudo-gradient was computed from.

    Attributes:
        inner_steps: Inner steps since the fragment was last synchronised.
        samples: How many samples these steps have trained on; tokens with ``weight_by: tokens``.
        position: The position in the sample stream.
        is_replacing: Whether the local parameters are to become the global ones, see
            ``DiLoCo.make_local_global``.
        local: The local parameters and buffers, in the order of ``GlobalParameters.tensors``, kept
            while the sync is in flight; None without a delay.
        frozen: The tensors that were frozen then, by index. A tensor that is frozen later, while
            the sync is in flight, is sent again as it was sent first.
    """

    inner_steps: int = 0
    samples: int = 0
    position: int = 0
    is_replacing: bool = False
    local: list[Tensor] | None = None
    frozen: Sequence[int] = ()


@dataclass
class Unsynced:
    """Counts the inner steps for a fragment's next sync, and remembers what the last one sent.

    Args:
        weight_by: How a group's weight in the mean is counted, see ``DiLoCoSettings``.

    Attributes:
        inner_steps: Inner steps since the last sync.
        samples: The samples or tokens of these steps.
        replaces_global: Whether the next sync is to make the local parameters the global ones.
        packed: What the last pseudo-gradient was computed from.
        unsent: What was in flight in the checkpoint that this group resumes from, until it has been
            sent again; else None.
    """

    weight_by: str
    inner_steps: int = 0
    samples: int = 0
    replaces_global: bool = False
    packed: Packed = field(default_factory=Packed)
    unsent: Packed | None = None

    def count(self, samples: int) -> None:
        """Count a completed inner step and its samples or tokens."""
        self.inner_steps += 1
        self.samples += samples

    def pack(self, position: int, local: list[Tensor] | None, frozen: Sequence[int]) -> Packed:
        """Return what the next pseudo-gradient is computed from.

        Args:
            position: The position in the sample stream.
            local: Copies of the local parameters, if the sync has a delay.
            frozen: The tensors that are frozen, by index.
        """
        counted = self.inner_steps, self.samples, position
        return Packed(*counted, self.replaces_global, local=local, frozen=frozen)

    def contribution(self) -> float:
        """This group's weight in the mean, from what is packed.

        Raises:
            ValueError: The weight is a number of samples or tokens, and none were counted.
        """
        packed = self.packed
        if packed.is_replacing and not packed.inner_steps:
            return 1.0  # an average without inner steps after it
        if not packed.inner_steps:
            return 0.0
        if self.weight_by in ("samples", "tokens") and not packed.samples:
            raise ValueError(
                f"weight_by={self.weight_by!r} but no {self.weight_by} were counted: call "
                f"count_{self.weight_by}(n) before each optimizer step, or use weight_by='steps'"
            )
        by = {"uniform": 1, "steps": packed.inner_steps}
        return float(by.get(self.weight_by, packed.samples))

    def discard_synced(self, *, keeps_later: bool, is_joining: bool) -> None:
        """Forget what a committed sync has brought into the global parameters.

        Args:
            keeps_later: Whether the steps taken while the sync was in flight are sent with the next
                one. With alpha = 0 they are thrown away.
            is_joining: Whether this group joined in that sync.
        """
        if keeps_later:
            self.inner_steps -= self.packed.inner_steps
            self.samples -= self.packed.samples
        else:
            self.inner_steps = self.samples = 0
        if self.packed.is_replacing or is_joining:
            self.replaces_global = False
        self.unsent = None

    @property
    def has_more(self) -> bool:
        """Whether this group has something to send that is not in the global parameters yet."""
        return self.inner_steps > 0 or self.replaces_global
