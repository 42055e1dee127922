"""Each algorithm of Composer under DiLoCo. Run: pytest tests/composer_parts/test_algorithms.py

Real: Composer's Trainer and algorithms, on the CPU. Replica groups are threads over the
simulation's shared buffer. More about EMA and SWA is in tests/callback/test_weight_averages.py,
about LayerFreezing in tests/callback/test_freezing.py.
"""

import dataclasses
import functools

import pytest
from composer_parts.algorithms import ALGORITHMS
from composer_parts.fits import (
    IDENTITY,
    NOT_TESTED,
    Part,
    check_equal,
    check_identity,
    difference,
    fit,
    fit_groups,
    names,
)
from composer_parts.models import text

from composer_replication.simulation.simulation import SimulationError

pytestmark = pytest.mark.slow

TRIED = {name: part for name, part in ALGORITHMS.items() if part.status != NOT_TESTED}


@functools.cache
def fit_without_it(model, data):
    return fit(Part(model=model, data=data))


def shapes(fit):
    return {name: p.shape for name, p in fit.parameters.items()}


@pytest.mark.parametrize("name", names(TRIED, ALGORITHMS))
def test_one_group_trains_as_under_composer_alone_and_goes_on_in_mid_round(name, tmp_path):
    part = TRIED[name]
    part.check_needs()
    saving = {"save_folder": str(tmp_path), "save_filename": "ba{batch}.pt", "save_interval": "5ba"}
    ours, alone = check_identity(part, **saving if part.resumes else {})
    if part.changes:  # else the algorithm might have done nothing
        without = fit_without_it(part.model, part.data)
        assert shapes(alone) != shapes(without) or difference(alone, without) > 1e-3
    if part.resumes:
        [resumed] = fit_groups(part, settings=IDENTITY, load_path=f"{tmp_path}/ba5.pt")
        assert resumed.diloco.result == ours.diloco.result  # has the digest of the weights
        assert resumed.losses == ours.losses[5:]


@pytest.mark.parametrize("name", names(TRIED, ALGORITHMS))
def test_two_groups_end_equal(name):
    TRIED[name].check_needs()
    check_equal(TRIED[name])


@pytest.mark.parametrize("name", sorted(ALGORITHMS.keys() - TRIED.keys()))
def test_what_is_not_tried_is_refused_by_composer_on_a_cpu(name):
    with pytest.raises(ValueError, match=ALGORITHMS[name].error):
        fit(ALGORITHMS[name])


# ---- the notes on the page --------------------------------------------------------------------


@pytest.mark.llmfoundry
def test_alibi_with_tied_embeddings_is_refused():
    # Composer's surgery takes the tied matrix out of the optimizer, and would not train it.
    part = dataclasses.replace(ALGORITHMS["Alibi"], model=text)
    part.check_needs()
    with pytest.raises(
        SimulationError, match="in a fragment but not in the inner optimizer: .*decoder"
    ):
        fit_groups(part)


@pytest.mark.parametrize("name", names(["GyroDropout", "SAM", "SeqLengthWarmup"], ALGORITHMS))
def test_composer_alone_does_not_resume_it_exactly(name, tmp_path):
    part = ALGORITHMS[name]
    part.check_needs()
    saving = {"save_folder": str(tmp_path), "save_filename": "ba{batch}.pt", "save_interval": "5ba"}
    whole = fit(part, **saving)
    assert difference(fit(part, load_path=f"{tmp_path}/ba5.pt"), whole) > 1e-3


def test_composer_alone_saves_no_checkpoint_after_a_layer_has_frozen(tmp_path):
    with pytest.raises(KeyError):
        fit(ALGORITHMS["LayerFreezing"], save_folder=str(tmp_path), save_interval="5ba")
