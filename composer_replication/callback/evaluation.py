"""Evaluation on the global weights, without any effect on training."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from composer import State

from composer_replication.callback.global_weights import GlobalWeights


class Evaluation:
    """Swaps in the global weights while evaluators run, and keeps random generators unchanged.

    Iterating over a loader draws from torch's generator. Without saving and restoring the
    generators, an evaluation would change the dropout of the training steps after it.

    Both methods may be called several times in a row.

    Args:
        eval_weights: ``global`` or ``local``, see ``ReplicaOptions``.
    """

    def __init__(self, eval_weights: str) -> None:
        self._shows_global = eval_weights == "global"
        self._generators: tuple[Any, ...] | None = None

    def open(self, weights: GlobalWeights, is_left_alone: bool) -> None:
        """Save the random generators and swap in the global weights, before evaluators run.

        Args:
            weights: Swaps the global weights into the model and back.
            is_left_alone: Whether evaluators see the weights that the model holds, for example
                because Composer's EMA swaps in its own.
        """
        if self._generators is None:
            cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
            own = random.getstate(), np.random.get_state()
            self._generators = torch.get_rng_state(), cuda, *own
        if self._shows_global and not is_left_alone:
            weights.show()

    def close(self, weights: GlobalWeights) -> None:
        """Restore the local weights and the random generators, after evaluators have run."""
        weights.hide()
        if self._generators is not None:
            torch_state, cuda, python, numpy = self._generators
            torch.set_rng_state(torch_state)
            if cuda is not None:
                torch.cuda.set_rng_state(cuda)
            random.setstate(python)
            np.random.set_state(numpy)
            self._generators = None


def metrics_of(state: State) -> dict[str, float]:
    """Return the metrics of the last evaluation, those that are one number.

    Args:
        state: Composer's state, right after an evaluation. The metrics then keep what they have
            computed, so that nothing is communicated between ranks.
    """
    values = {}
    for label, metrics in state.eval_metrics.items():
        for name, metric in metrics.items():
            value = metric.compute() if metric.update_called else None
            if isinstance(value, torch.Tensor) and value.numel() == 1:
                values[name if label == "eval" else f"{label}/{name}"] = float(value)
    return values
