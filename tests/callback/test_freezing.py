"""Freezing layers in a Composer job, by LayerFreezing or by hand.

``pytest tests/callback/test_freezing.py``
What Composer alone accepts, DiLoCoCallback accepts: and what is frozen does not move.
"""

import pytest
import torch
from composer.algorithms import LayerFreezing
from composer_jobs import Each, callback_of, trainer_of

from composer_replication.callback import DiLoCoCallback
from composer_replication.simulation.simulation import simulate

pytestmark = pytest.mark.slow

FIRST = "mlp.layers.0.weight"


class Track(Each):
    """Which parameters are frozen, and all values, at every end of a batch."""

    def __init__(self):
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


def two_groups(max_duration, **diloco):
    """Train with LayerFreezing; what was seen, the callback and the model of each group."""

    def replica(sim):
        track = Track()
        callback = callback_of(sim, **diloco)
        trainer = trainer_of(
            track,
            callback,
            replica_id=sim.replica_id,
            max_duration=max_duration,
            algorithms=LayerFreezing(0.1, 1.0),
        )
        trainer.fit()
        trainer.close()
        return track, callback.result["global_digest"], dict(trainer.state.model.named_parameters())

    return simulate(replica, num_replicas=2)


def test_layers_that_freeze_at_the_end_of_a_round_never_move_again():
    runs = two_groups("5ep", sync_every=4)
    assert runs[0][1] == runs[1][1]
    for track, _, model in runs:
        assert not model[FIRST].requires_grad
        assert track.moves_once_frozen(FIRST) == []


@pytest.mark.parametrize("diloco", [
    {"sync_every": 3},
    {"sync_every": 6, "num_fragments": 2},
    {"sync_every": 6, "fragment_sync_delay": 1, "fragment_update_alpha": 0.5},
], ids=["vanilla", "fragments", "streaming"])  # fmt: skip
def test_layers_that_freeze_in_mid_round_move_once_at_the_next_sync(diloco):
    runs = two_groups("6ep", **diloco)
    assert runs[0][1] == runs[1][1]
    for track, _, _ in runs:
        assert len(track.moves_once_frozen(FIRST)) <= 1
    one, other = (model for _, _, model in runs)
    assert all(torch.equal(one[name], other[name]) for name in one)


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
