"""A model that is not the one that a checkpoint, or the fit before, has left is refused by name.

Run: pytest tests/callback/test_checkpoint_layout.py

Real: Composer's Trainer and its checkpoints in ``tmp_path``. The network is the simulation's,
and two fits of one Trainer have none.
"""

import re

import pytest
import torch
from harness.trainers import Each, alone, fit_alone, train_and_save, trainer_of

from composer_replication.simulation.simulation import SimulationError

pytestmark = pytest.mark.slow

HEAD = ("mlp.layers.4.weight", "mlp.layers.4.bias")
NEW_HEAD = ["state/model/mlp.layers.4*"]


def replace_head(model):
    with torch.no_grad():
        model.get_parameter(HEAD[0]).fill_(0.25)
        model.get_parameter(HEAD[1]).zero_()


# ---- of a checkpoint ---------------------------------------------------------------------------


def resume(tmp_path, ignored=(), between=lambda model: None, **more):
    """Save a group, and resume it with something done to its model before the fit; how it ends."""
    train_and_save(tmp_path, num_replicas=1, diloco={"sync_every": 4})

    fit = fit_alone(
        diloco={"sync_every": 4},
        before=lambda trainer: between(trainer.state.model),
        replica_id=5,  # other initial weights than the run's
        load_path=tmp_path / "0/ba6.pt",
        load_ignore_keys=list(ignored),
        load_strict_model_weights=not ignored,
        max_duration="12ba",
        **more,
    )
    return fit.result


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"ignored": NEW_HEAD}, HEAD),
        ({"between": replace_head}, HEAD),
        ({"ignored": ["state/model/*"]}, ("mlp.layers.0.weight", "mlp.layers.0.bias")),
    ],
    ids=["ignored", "by_hand", "all_ignored"],
)
def test_a_part_that_is_not_the_checkpoints_is_refused_by_name(tmp_path, given, names):
    with pytest.raises(SimulationError, match=re.escape(", ".join(names))) as caught:
        resume(tmp_path, **given)
    assert "(load_ignore_keys), or replaced since" in str(caught.value)
    assert "load_weights_only: true" in str(caught.value)


@pytest.mark.parametrize(
    "given", [{}, {"ignored": NEW_HEAD, "load_weights_only": True}], ids=["whole", "weights alone"]
)
def test_what_was_loaded_whole_goes_on_and_so_do_the_weights_alone_in_part(tmp_path, given):
    result = resume(tmp_path, **given)
    assert (result["outer_steps"], result["inner_steps"]) == (3, 12)


# ---- of the fit before -------------------------------------------------------------------------


def freeze_head(model, is_frozen=True):
    for name in HEAD:
        model.get_parameter(name).requires_grad_(not is_frozen)


@pytest.mark.parametrize(
    ("before", "between", "problem"),
    [
        (lambda model: None, replace_head, "were replaced since the fit before"),
        (freeze_head, lambda model: freeze_head(model, False), "were not trained in the fit"),
    ],
    ids=["replaced", "unfrozen"],
)
def test_other_parameters_in_the_next_fit_are_refused_by_name(before, between, problem):
    trainer = trainer_of(alone())
    before(trainer.state.model)
    trainer.fit(duration="4ba")
    between(trainer.state.model)
    with pytest.raises(ValueError, match=problem) as caught:
        trainer.fit(duration="4ba")
    trainer.close()
    assert ", ".join(HEAD) in str(caught.value) and "a new Trainer" in str(caught.value)


def test_the_next_fit_goes_on_also_after_one_that_failed():
    fails_after = {7}

    def look(state):
        if state.timestamp.batch.value in fails_after:
            fails_after.clear()
            raise RuntimeError("the user's own error")

    trainer = trainer_of(callback := alone(), Each(look))
    trainer.fit(duration="4ba")
    with pytest.raises(RuntimeError, match="the user's own error"):
        trainer.fit(duration="4ba")
    freeze_head(trainer.state.model)  # which is still global then
    trainer.fit(duration="1ba")
    trainer.close()
    assert callback.result["inner_steps"] == 8
