"""How an outer step treats parameters that are frozen during a run."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from composer_replication.diloco.fragments import listed

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepRules:
    """How one outer step treats the tensors of a fragment. Tensors are given by index.

    Attributes:
        alpha: The share of the local value in the value that training continues with, in [0, 1],
            as in ``write_back``.
        plain: Tensors that become the mean of the local values, whatever the outer optimizer is.
            Their outer optimizer state is reset.
        held: Tensors that do not change, and for which the outer optimizer has no state.
        alphas: The alpha of single tensors, where it is not ``alpha``.
    """

    alpha: float = 0.0
    plain: frozenset[int] = frozenset()
    held: frozenset[int] = frozenset()
    alphas: Mapping[int, float] = field(default_factory=dict)

    def alpha_of(self, index: int) -> float:
        """The alpha of one tensor."""
        return self.alphas.get(index, self.alpha)


class Freezing:
    """Tracks which parameters of a fragment the groups have frozen (``requires_grad`` is False).

    Groups freeze a parameter in mid-round, when each holds another local value of it. At the next
    sync the parameter becomes the plain mean of these values; an outer step would move it on by its
    momentum, and no group would train it back. From then on it stays bitwise the same.

    A parameter counts as frozen if every group in training has frozen it. If only some have, it
    keeps moving with the groups that still train it, and the log names those groups.

    Args:
        parameters: The fragment's parameters in the model, by name.

    Attributes:
        frozen_by_all: The names of the parameters that all groups have frozen, all with the same
            value. Part of the global state.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self.frozen_by_all: frozenset[str] = frozenset()
        self._disputed: frozenset[str] = frozenset()

    def own(self) -> list[bool]:
        """Whether this group has frozen each parameter, in the order of the parameters."""
        return [not parameter.requires_grad for parameter in self._parameters.values()]

    def freeze_like_global(self) -> None:
        """Freeze in this group's model what ``frozen_by_all`` names, after a heal or a resume."""
        news = [name for name in sorted(self.frozen_by_all) if self._parameters[name].requires_grad]
        for name in news:
            self._parameters[name].requires_grad_(False)
        if news:
            log.info("Frozen, as in the global state that was taken over: %s", listed(news))

    def rules(self, sent: list[bool], frozen: Mapping[int, Tensor], alpha: float) -> StepRules:
        """Return how the outer step of a sync treats this fragment.

        Args:
            sent: What ``own`` returned when this group computed its pseudo-gradient.
            frozen: The same of each group in training, by its rank in the quorum: 1-D, a 1 for each
                frozen parameter.
            alpha: The alpha of parameters that are not frozen.
        """
        names = list(self._parameters)
        by_all, by_some = frozenset[int](), frozenset[int]()
        if frozen:
            by_all = frozenset.intersection(*map(_indices, frozen.values()))
            by_some = frozenset.union(*map(_indices, frozen.values())) - by_all
        self._warn_of_disputed({names[index] for index in by_some}, frozen)
        held = frozenset(index for index in by_all if names[index] in self.frozen_by_all)
        # A parameter frozen while the sync was in flight keeps its local value, which is part of
        # the next mean.
        since = (index for index, now in enumerate(self.own()) if now and not sent[index])
        alphas = dict.fromkeys(since, 1.0) | dict.fromkeys(by_all, 0.0)
        return StepRules(alpha, by_all - held, held, alphas)

    def record_frozen(self, rules: StepRules) -> None:
        """Update ``frozen_by_all`` after an outer step with these rules."""
        names = list(self._parameters)
        frozen = (index for index, alpha in rules.alphas.items() if alpha == 0.0)
        self.frozen_by_all = frozenset(names[index] for index in frozen)

    def _warn_of_disputed(self, names: set[str], frozen: Mapping[int, Tensor]) -> None:
        news = names - self._disputed
        self._disputed = frozenset(names)
        if news:
            name = min(news)
            index = list(self._parameters).index(name)
            groups = [str(rank) for rank, row in frozen.items() if not row[index]]
            log.warning(
                "Replica groups %s (by their rank in the quorum) train %s%s, and others have "
                "frozen it: it keeps moving in all of them. Freeze the same layers in all groups",
                ", ".join(groups),
                name,
                f" and {len(news) - 1} more parameters" if len(news) > 1 else "",
            )


def _indices(row: Tensor) -> frozenset[int]:
    return frozenset(row.nonzero().flatten().tolist())
