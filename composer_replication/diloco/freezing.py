"""Parameters that are frozen while a run goes on: what an outer step makes of them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepRules:
    """How one outer step treats the tensors of a fragment, by their places in it.

    Attributes:
        alpha: The part of the local value in what a group goes on from, as in ``write_back``.
        plain: These become the mean of the local values, whatever the outer optimizer is, and its
            state of them begins anew.
        held: These stay what they are, and the outer optimizer has no state of them.
        alphas: Of single tensors, where it is not ``alpha``.
    """

    alpha: float = 0.0
    plain: frozenset[int] = frozenset()
    held: frozenset[int] = frozenset()
    alphas: Mapping[int, float] = field(default_factory=dict)

    def alpha_of(self, place: int) -> float:
        """The alpha of one tensor."""
        return self.alphas.get(place, self.alpha)


class Freezing:
    """Which parameters of a fragment the groups have frozen (``requires_grad`` is False).

    Groups freeze a parameter in mid-round, where each holds another local value of it. At the next
    sync it becomes the plain mean of these; an outer step would move it on by its momentum, and
    nobody would train it back. From then on it does not change by a bit.

    A parameter counts as frozen if every group in training has frozen it. If only some have, it
    goes on moving with what the others train, and the log says which groups those are.

    Args:
        parameters: The fragment's, in the model, by name.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self.settled: frozenset[str] = frozenset()
        """Frozen by all groups, with one and the same value. Part of the global state."""
        self._disputed: frozenset[str] = frozenset()

    def own(self) -> list[bool]:
        """Of each parameter in its order, whether this group has frozen it."""
        return [not parameter.requires_grad for parameter in self._parameters.values()]

    def freeze_settled(self) -> None:
        """Freeze here what the groups have frozen whose global state was taken over."""
        news = [name for name in sorted(self.settled) if self._parameters[name].requires_grad]
        for name in news:
            self._parameters[name].requires_grad_(False)
        if news:
            log.info("Frozen, as in the global state that was taken over: %s", ", ".join(news))

    def rules(self, sent: list[bool], frozen: Mapping[int, Tensor], alpha: float) -> StepRules:
        """How the outer step of a sync treats this fragment.

        Args:
            sent: What ``own`` was when this group formed its pseudo-gradient.
            frozen: What it was in each group in training, by their places in the quorum: a 1 for
                each frozen parameter, 1-D.
            alpha: Of what is not frozen.
        """
        names = list(self._parameters)
        by_all, by_some = frozenset[int](), frozenset[int]()
        if frozen:
            by_all = frozenset.intersection(*map(_places, frozen.values()))
            by_some = frozenset.union(*map(_places, frozen.values())) - by_all
        self._tell_disputed({names[place] for place in by_some}, frozen)
        held = frozenset(place for place in by_all if names[place] in self.settled)
        # Frozen while the sync was in flight: this group's value is part of the next mean.
        since = (place for place, now in enumerate(self.own()) if now and not sent[place])
        alphas = dict.fromkeys(since, 1.0) | dict.fromkeys(by_all, 0.0)
        return StepRules(alpha, by_all - held, held, alphas)

    def settle(self, rules: StepRules) -> None:
        """The outer step of these rules has been taken."""
        names = list(self._parameters)
        frozen = (place for place, alpha in rules.alphas.items() if alpha == 0.0)
        self.settled = frozenset(names[place] for place in frozen)

    def _tell_disputed(self, names: set[str], frozen: Mapping[int, Tensor]) -> None:
        news = names - self._disputed
        self._disputed = frozenset(names)
        if news:
            name = min(news)
            place = list(self._parameters).index(name)
            groups = [str(rank) for rank, row in frozen.items() if not row[place]]
            log.warning(
                "Replica groups %s (by their place in the quorum) train %s%s, and others have "
                "frozen it: it goes on moving in all of them. Freeze the same layers in all groups",
                ", ".join(groups),
                name,
                f" and {len(news) - 1} more parameters" if len(news) > 1 else "",
            )


def _places(row: Tensor) -> frozenset[int]:
    return frozenset(row.nonzero().flatten().tolist())
