"""Each callback of Composer under DiLoCo. Run: pytest tests/composer_parts/test_callbacks.py

Real: Composer's Trainer, callbacks and files, on the CPU. Replica groups are threads over the
simulation's shared buffer.
"""

import dataclasses

import pytest
import torch
from common import are_equal, parameters_of
from composer.callbacks import LoadCheckpoint, ThresholdStopper
from composer_parts.callbacks import CALLBACKS
from composer_parts.fits import (
    IDENTITY,
    Part,
    check_equal,
    check_identity,
    difference,
    fit,
    fit_alone,
    fit_groups,
)
from composer_parts.models import steady
from composer_parts.test_parts import SAVING

from composer_replication.callback import DiLoCoCallback
from composer_replication.simulation.simulation import SimulationError

pytestmark = pytest.mark.slow

STREAMING = {"sync_every": 4, "num_fragments": 2, "fragment_sync_delay": 1}
# ---- the notes on the page --------------------------------------------------------------------


def test_an_export_is_the_model_after_the_final_sync():
    part = CALLBACKS["ExportForInferenceCallback"]
    for each in check_equal(part):
        part.did(each, None)


@pytest.mark.parametrize("settings", [{}, STREAMING], ids=["vanilla", "streaming"])
def test_a_group_that_stops_by_itself_follows_the_others_to_their_end(settings):
    def stopper(group):
        threshold = -1.0 if group else 2  # group 1 never stops by itself
        stops = {"comp": torch.less, "stop_on_batch": True}
        return {"callbacks": [ThresholdStopper("MulticlassAccuracy", "train", threshold, **stops)]}

    stopped, other = check_equal(Part(), own=stopper, settings=settings)
    assert (len(stopped.losses), len(other.losses)) == (1, 12)
    assert other.diloco.result["outer_steps"] == (8 if settings else 4)
    assert difference(stopped, other) == 0


@pytest.mark.llmfoundry
def test_prompts_are_answered_by_the_local_weights():
    CALLBACKS["Generate"].check_needs()
    from composer.callbacks import Generate

    answering = {}

    class Looking(Generate):
        def generate(self, state, logger):
            super().generate(state, logger)
            weights = parameters_of(state.model)
            answering.setdefault(state.timestamp.batch.value, []).append(weights)

    build = lambda: {"callbacks": [Looking(["w1"], "5ba", max_new_tokens=1)]}  # noqa: E731
    check_equal(dataclasses.replace(CALLBACKS["Generate"], build=build))
    one, other = answering[5]  # in mid-round
    assert not are_equal(one, other)


# ---- LoadCheckpoint ---------------------------------------------------------------------------


@pytest.fixture
def whole():
    """A run that was not stopped, and has left a checkpoint in mid-round."""
    return fit_alone(Part(model=steady), **SAVING)


@pytest.mark.parametrize("event", ["INIT", "BEFORE_LOAD"])
@pytest.mark.parametrize("comes_first", [False, True])
def test_a_checkpoint_that_a_callback_loads_is_gone_on_from(whole, event, comes_first):
    diloco = DiLoCoCallback(num_replicas=1, sync_every=3, **IDENTITY)
    load = LoadCheckpoint("ba5.pt", event=event)
    both = [load, diloco] if comes_first else [diloco, load]
    assert len(fit(Part(model=steady), callbacks=both).losses) == 7
    assert diloco.result["global_digest"] == whole.diloco.result["global_digest"]


@pytest.mark.parametrize(
    ("event", "weights_only"), [("AFTER_LOAD", False), ("FIT_START", True), ("EPOCH_START", False)]
)
def test_a_checkpoint_that_comes_after_the_global_weights_were_taken_is_refused(
    whole, event, weights_only
):
    load = LoadCheckpoint("ba5.pt", event=event, load_weights_only=weights_only)
    with pytest.raises(SimulationError, match=f"LoadCheckpoint.*event={event}.*BEFORE_LOAD"):
        fit_groups(Part(build=lambda: {"callbacks": [load]}, model=steady))


@pytest.mark.parametrize("event", ["BEFORE_LOAD", "AFTER_LOAD"])
def test_weights_alone_that_a_callback_loads_start_a_run(whole, event):
    load = LoadCheckpoint("ba5.pt", event=event, load_weights_only=True)
    part = Part(build=lambda: {"callbacks": [load]}, model=steady)
    ours, _ = check_identity(part)
    assert len(ours.losses) == 12
