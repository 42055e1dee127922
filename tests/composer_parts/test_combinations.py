"""What users combine with DiLoCo. Run: pytest tests/composer_parts/test_combinations.py

Real: Composer's Trainer, schedulers, profiler and checkpoints, on the CPU; where there is more
than one fit a torchft lighthouse, Manager and gloo too. Elsewhere replica groups are threads over
the simulation's shared buffer.
"""

from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import pytest
import torch
from composer_parts.combinations import COMBINATIONS
from composer_parts.fits import (
    IDENTITY,
    NOT_TESTED,
    REJECTED,
    Part,
    check_equal,
    check_identity,
    difference,
    fit,
    fit_groups,
    fit_over_torchft,
)
from forked import context

from composer_replication.replica.lighthouse import start_lighthouse
from composer_replication.simulation.simulation import Fault

pytestmark = pytest.mark.slow

NOT_RUN = [name for name, part in COMBINATIONS.items() if part.status in (NOT_TESTED, REJECTED)]
SEVERAL_FITS = [name for name, part in COMBINATIONS.items() if part.steps is not None]
ONE_FIT = [name for name in COMBINATIONS if name not in {*NOT_RUN, *SEVERAL_FITS}]
# torch has one profiler for all threads, and its compiler fails when two threads compile at a time.
ALONE_IN_A_PROCESS = ["`Profiler`", "torch.compile (`compile_config`)"]


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", ONE_FIT)
def test_one_group_trains_as_under_composer_alone(name):
    part = COMBINATIONS[name]
    part.did(*check_identity(part))


@pytest.mark.parametrize("name", [name for name in ONE_FIT if name not in ALONE_IN_A_PROCESS])
def test_two_groups_end_equal(name):
    check_equal(COMBINATIONS[name])


def train_in_a_process(name, lighthouse_addr, group):
    done = fit_over_torchft(COMBINATIONS[name], lighthouse_addr, group, num_replicas=2)
    return done.diloco.result["global_digest"], done.diloco.result["outer_steps"]


@pytest.mark.integration
@pytest.mark.parametrize("name", ALONE_IN_A_PROCESS)
def test_two_groups_end_equal_each_in_its_process(name, lighthouse_addr):
    with ProcessPoolExecutor(2, mp_context=context) as processes:
        groups = [processes.submit(train_in_a_process, name, lighthouse_addr, k) for k in range(2)]
        [one, other] = [group.result(timeout=240) for group in groups]
    assert one == other
    assert one[1] == 4


@pytest.mark.parametrize("name", NOT_RUN)
def test_what_is_refused_says_so(name):
    with pytest.raises((ValueError, NotImplementedError), match=COMBINATIONS[name].error):
        fit(COMBINATIONS[name])


# ---- several fits ----------------------------------------------------------------------------


@pytest.fixture
def lighthouse_addr():
    lighthouse = start_lighthouse(heartbeat_timeout_ms=1_000)
    yield lighthouse.address()
    lighthouse.shutdown()


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


def test_weights_alone_start_a_run():
    part = COMBINATIONS["`load_weights_only`"]
    fit_groups(part, num_replicas=2, **SAVING)
    loading = {"load_path": "group0/ba5.pt", "load_weights_only": True}
    part = Part(build=lambda: loading)
    ours, _ = check_identity(part)
    assert len(ours.losses) == 12
    check_equal(part)


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


@pytest.mark.parametrize(
    ("name", "every_batch", "agree"),
    [
        ("Composer's schedulers", None, True),
        ("torch's schedulers", True, True),
        ("torch's schedulers", False, False),  # it is in the middle of its own epoch
    ],
)
def test_a_group_that_joins_late_has_the_others_learning_rate(name, every_batch, agree):
    groups = check_equal(
        COMBINATIONS[name],
        faults=JOINS_LATE,
        max_duration="12ba",
        step_schedulers_every_batch=every_batch,
    )
    one, other = (fit.trainer.state.schedulers[0].get_last_lr() for fit in groups)
    assert (one == other) is agree
