"""Freezing layers in a Composer job, by LayerFreezing or by hand.

``pytest tests/callback/test_freezing.py``
What Composer alone accepts, DiLoCoCallback accepts: and what is frozen does not move.
"""

import pytest
import torch
from composer.algorithms import LayerFreezing
from harness.trainers import Each, fit_groups, trainer_of

from composer_replication.callback import DiLoCoCallback

pytestmark = pytest.mark.slow

FIRST = "mlp.layers.0.weight"


class Track(Each):
    """Which parameters are frozen, and all values, at every end of a batch."""

    def __init__(self, diloco):
        self.rows = []
        super().__init__(self._look)

    def _look(self, state):
        self.rows.append(
            {n: (p.requires_grad, p.detach().clone()) for n, p in state.model.named_parameters()}
        )

    def moves_once_frozen(self, name):
        """In which batches a parameter changed, counted from the one before which it froze."""
        frozen = next(i for i, row in enumerate(self.rows) if not row[name][0])
        values = [row[name][1] for row in self.rows[frozen - 1 :]]
        pairs = enumerate(zip(values, values[1:], strict=False), start=1)
        return [batch for batch, (before, after) in pairs if not torch.equal(before, after)]


def freezing(group):
    return {"algorithms": LayerFreezing(0.1, 1.0)}


@pytest.mark.parametrize(("diloco", "moves"), [
    ({"sync_every": 4}, 0),  # they freeze at the end of a round
    ({"sync_every": 3}, 1),
    ({"sync_every": 6, "num_fragments": 2}, 1),
    ({"sync_every": 6, "fragment_sync_delay": 1, "fragment_update_alpha": 0.5}, 1),
], ids=["at the end", "vanilla", "fragments", "streaming"])  # fmt: skip
def test_layers_that_freeze_in_mid_round_move_once_at_the_next_sync(diloco, moves):
    one, other = fit_groups(2, Track, own=freezing, max_duration="6ep", diloco=diloco)
    assert one.digest == other.digest
    for fit in (one, other):
        assert not fit.weights[FIRST].requires_grad
        [track] = fit.others
        assert len(track.moves_once_frozen(FIRST)) <= moves
        assert all(torch.equal(p, other.weights[name]) for name, p in fit.weights.items())


def test_a_fit_goes_on_after_layer_freezing():
    callback = DiLoCoCallback(sync_every=3, num_replicas=1)
    trainer = trainer_of(callback, max_duration="3ep", algorithms=LayerFreezing(0.1, 0.6))
    trainer.fit()
    frozen = {
        n: p.clone() for n, p in trainer.state.model.named_parameters() if not p.requires_grad
    }
    assert frozen
    trainer.fit(duration="1ep")
    after = dict(trainer.state.model.named_parameters())
    trainer.close()
    assert all(torch.equal(value, after[name]) for name, value in frozen.items())
    assert callback.result["inner_steps"] == 16
