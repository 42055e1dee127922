"""What users combine with DiLoCo. Run: pytest tests/composer_parts/test_combinations.py

Real: Composer's Trainer, schedulers, profiler and checkpoints, on the CPU; where there is more
than one fit a torchft lighthouse, Manager and gloo too. Elsewhere replica groups are threads over
the simulation's shared buffer.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from composer_parts.combinations import COMBINATIONS
from composer_parts.fits import (
    IDENTITY,
    check_equal,
    difference,
    fit,
    fit_groups,
    fit_over_torchft,
)

from composer_replication.simulation.simulation import Fault

pytestmark = pytest.mark.slow

SEVERAL_FITS = [name for name, part in COMBINATIONS.items() if part.steps is not None]
# ---- several fits ----------------------------------------------------------------------------


@pytest.mark.integration
@pytest.mark.parametrize("name", SEVERAL_FITS)
def test_one_group_goes_on_in_the_next_fit_as_under_composer_alone(name, lighthouse_addr):
    part = COMBINATIONS[name]
    alone = fit(part)
    ours = fit_over_torchft(part, lighthouse_addr, **IDENTITY)
    torch.testing.assert_close(ours.losses, alone.losses, rtol=0, atol=1e-5)
    assert difference(ours, alone) < 1e-5
    assert ours.diloco.result["inner_steps"] == len(ours.losses)


@pytest.mark.integration
def test_two_groups_end_equal_after_several_fits(lighthouse_addr):
    def train(group):
        part = COMBINATIONS["fits in a row"]
        return fit_over_torchft(part, lighthouse_addr, group, num_replicas=2)

    with ThreadPoolExecutor(2) as threads:
        one, other = threads.map(train, range(2))
    assert one.diloco.result["outer_steps"] == 5  # after batches 3, 4, 7, 9 and 12
    assert one.diloco.result["global_digest"] == other.diloco.result["global_digest"]
    assert difference(one, other) == 0


# ---- checkpoints -----------------------------------------------------------------------------

SAVING = {"save_folder": "{run_name}", "save_filename": "ba{batch}.pt", "save_interval": "5ba"}


def test_groups_that_resume_by_themselves_end_as_if_nobody_had_stopped():
    part = COMBINATIONS["`autoresume`"]
    whole = fit_groups(part, num_replicas=2)
    fit_groups(part, num_replicas=2, max_duration="5ba", **SAVING)  # in mid-round
    again = check_equal(part, autoresume=True, **SAVING)
    for one, other in zip(again, whole, strict=True):
        assert len(one.losses) == 7
        assert one.diloco.result == other.diloco.result


# ---- the notes on the page -------------------------------------------------------------------


JOINS_LATE = [Fault("restart", replica_id=1, step=2)]


@pytest.mark.parametrize("duration", ["3ep", "12ba", "96sp"])
def test_a_group_that_joins_late_ends_with_the_others(duration):
    part = COMBINATIONS["`max_duration` in epochs"]
    one, late = check_equal(part, faults=JOINS_LATE, max_duration=duration)
    assert (len(one.losses), len(late.losses)) == (12, 6)
    now = late.trainer.state.timestamp
    assert (now.batch, now.epoch, now.batch_in_epoch) == (12, 2, 2)  # from the start of epoch 1


def test_a_group_that_heals_in_mid_epoch_trains_its_epochs_and_the_others_stay():
    part = COMBINATIONS["`max_duration` in epochs"]
    fails = [Fault("fail_commit", replica_id=1, step=2)]
    one, other = check_equal(part, faults=fails, max_duration="3ep")
    assert len(one.losses) == len(other.losses) == 12
    assert other.trainer.state.timestamp.batch == 15
