"""An evaluation in the middle of training: it sees the global weights and leaves no trace."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from composer_replication.callback.global_weights import GlobalWeights


class Evaluation:
    """Opened before evaluators run and closed after them, each as often as events come.

    A loader draws from torch's generator whenever it is iterated over, so that without a copy of
    the generators dropout would go another way for every evaluation.

    Args:
        eval_weights: ``global`` or ``local``, see ``ReplicaOptions``.
    """

    def __init__(self, eval_weights: str) -> None:
        self._shows_global = eval_weights == "global"
        self._generators: tuple[Any, ...] | None = None

    def open(self, weights: GlobalWeights, is_left_alone: bool) -> None:
        """Evaluators come next.

        Args:
            weights: Puts the global weights into the model.
            is_left_alone: Whether they see what Composer has put there, or puts there by itself.
        """
        if self._generators is None:
            cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
            own = random.getstate(), np.random.get_state()
            self._generators = torch.get_rng_state(), cuda, *own
        if self._shows_global and not is_left_alone:
            weights.show()

    def close(self, weights: GlobalWeights) -> None:
        """They are through."""
        weights.hide()
        if self._generators is not None:
            torch_state, cuda, python, numpy = self._generators
            torch.set_rng_state(torch_state)
            if cuda is not None:
                torch.cuda.set_rng_state(cuda)
            random.setstate(python)
            np.random.set_state(numpy)
            self._generators = None
