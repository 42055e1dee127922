"""An inner optimizer around another one, as Composer's SAM makes it.

Run: pytest tests/callback/test_wrapped_optimizer.py. Real: Composer's Trainer and SAM on the CPU.
Replica groups are threads over the simulation's shared buffer.
"""

import pytest
import torch
from composer import Callback
from composer.algorithms import SAM
from harness.groups import adamw
from harness.trainers import fit_groups

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:SAM has known issues:UserWarning"),
]


class Poison(Callback):
    """One batch that is not a number."""

    def __init__(self, at):
        self._at = at

    def after_dataloader(self, state, logger):
        if state.timestamp.batch.value == self._at:
            x, y = state.batch
            state.batch = (x * float("nan"), y)


class Look(Callback):
    """The loss of every batch, and whether a batch begins on the global parameters."""

    def __init__(self, diloco):
        self._diloco = diloco
        self.losses = []
        self.begins_on_global = []

    def batch_start(self, state, logger):
        theta = self._diloco.diloco.global_parameters()
        self.begins_on_global.append(
            all(torch.equal(p, theta[name]) for name, p in state.model.named_parameters())
        )

    def batch_end(self, state, logger):
        self.losses.append(float(state.loss.detach()))


@pytest.mark.parametrize("interval", [1, 2])
def test_a_batch_that_is_not_a_number_costs_one_round_with_sam(interval):
    def own(group):
        return {"algorithms": SAM(interval=interval), "others": [Poison(at=4)] if group else []}

    diloco = {"sync_every": 3, "max_sync_retries": 2}
    fits = fit_groups(2, Look, own=own, optimizer=adamw, max_duration="12ba", diloco=diloco)
    for group, fit in enumerate(fits):
        look = fit.others[0]
        sick = [i for i, loss in enumerate(look.losses) if loss != loss]
        assert sick == ([4, 5] if group else [])
        assert look.begins_on_global[6]
        assert all(p.isfinite().all() for p in fit.weights.values())
        assert fit.result["outer_steps"] == 4
    assert fits[0].digest == fits[1].digest
