"""Each algorithm, callback and setting of Composer under DiLoCo, as docs/composer.md lists them.

Run: pytest tests/composer_parts/test_parts.py. Real: Composer's Trainer and its parts, on the CPU.
Replica groups are threads over the simulation's shared buffer. More about EMA is in
tests/callback/test_weight_averages.py.
"""

import dataclasses
import functools
import importlib.util

import pytest
from composer_parts.algorithms import ALGORITHMS
from composer_parts.callbacks import CALLBACKS, stopped_early
from composer_parts.combinations import COMBINATIONS
from composer_parts.fits import (
    NOT_TESTED,
    REJECTED,
    Part,
    check_equal,
    check_identity,
    difference,
    fit,
    fit_alone,
    fit_groups,
    names,
)
from composer_parts.models import text

from composer_replication.simulation.simulation import SimulationError

pytestmark = pytest.mark.slow

PARTS = ALGORITHMS | CALLBACKS | COMBINATIONS
NOT_RUN = [name for name, p in PARTS.items() if p.needs_gpu or p.status in (NOT_TESTED, REJECTED)]
TRIED = [name for name in PARTS if name not in {*NOT_RUN, "LoadCheckpoint"}]  # which has a file
# torch has one profiler for all threads, and its compiler fails when two threads compile at a time.
ONE_AT_A_TIME = ["`Profiler`", "torch.compile (`compile_config`)"]
# A manager that is given, as simulated groups have it, is good for one fit.
SEVERAL_FITS = [name for name, part in PARTS.items() if part.steps is not None]
SAVING = {"save_folder": ".", "save_filename": "ba{batch}.pt", "save_interval": "5ba"}


@functools.cache
def fit_without_it(model, data):
    return fit(Part(model=model, data=data))


def shapes(fit):
    return {name: p.shape for name, p in fit.parameters.items()}


@pytest.mark.parametrize("name", names(TRIED, PARTS))
def test_one_group_trains_as_under_composer_alone_and_the_part_does_its_work(name):
    part = PARTS[name]
    part.check_needs()
    ours, alone = check_identity(part, **SAVING if part.resumes else {})
    part.did(ours, alone)
    if part.changes:  # else the algorithm might have done nothing
        without = fit_without_it(part.model, part.data)
        assert shapes(alone) != shapes(without) or difference(alone, without) > 1e-3
    if part.resumes:
        resumed = fit_alone(part, load_path="ba5.pt")  # in mid-round
        assert resumed.diloco.result == ours.diloco.result  # has the digest of the weights
        assert resumed.losses == ours.losses[5:]


@pytest.mark.parametrize(
    "name", names([n for n in TRIED if n not in {*ONE_AT_A_TIME, *SEVERAL_FITS}], PARTS)
)
def test_two_groups_end_equal(name):
    PARTS[name].check_needs()
    one, other = check_equal(PARTS[name])
    assert len(one.losses) == len(other.losses)
    if PARTS[name].did is stopped_early:
        stopped_early(one, other)


@pytest.mark.parametrize("name", NOT_RUN)
def test_what_is_not_tried_is_refused_on_a_cpu(name):
    if name == "MLPerfCallback" and importlib.util.find_spec("mlperf_logging") is not None:
        pytest.skip("it is installed")
    if "CUDA" in PARTS[name].error:
        with pytest.warns(UserWarning, match=PARTS[name].error):
            check_identity(PARTS[name])
    else:
        with pytest.raises((ValueError, NotImplementedError, ImportError), match=PARTS[name].error):
            fit_alone(PARTS[name])


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
def test_composer_alone_does_not_resume_it_exactly(name):
    part = ALGORITHMS[name]
    part.check_needs()
    whole = fit(part, **SAVING)
    assert difference(fit(part, load_path="ba5.pt"), whole) > 1e-3


def test_composer_alone_saves_no_checkpoint_after_a_layer_has_frozen():
    with pytest.raises(KeyError):
        fit(ALGORITHMS["LayerFreezing"], **SAVING)
