"""What users combine with DiLoCo. Run: pytest tests/composer_parts/test_combinations.py

Real: Composer's Trainer, on the CPU. Replica groups are threads over the
simulation's shared buffer.
"""

import pytest
from composer_parts.combinations import COMBINATIONS
from composer_parts.fits import check_equal

from composer_replication.simulation.simulation import Fault

pytestmark = pytest.mark.slow

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
