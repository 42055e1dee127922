"""Fits that follow each other in a process that lives on, and fits that fail in one.

Real: lighthouse, managers, gloo and Composer, the groups as threads; processes where their end is
what matters. Run: pytest tests/integration/test_failed_fit.py
"""

import itertools
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import psutil
import pytest
import torch
from composer import Callback
from harness.coordinators import coordinator_in
from harness.trainers import STREAMING, Each, train, trainer_of
from torch.utils.data import TensorDataset

from composer_replication import ReplicaDataLoader
from composer_replication.callback import DiLoCoCallback
from composer_replication.coordinator.client import CoordinatorClient
from composer_replication.diloco.averaging.weighted_mean import WeightedMean
from composer_replication.replica.interruptible_manager import InterruptibleWork
from composer_replication.replica.lighthouse import start_lighthouse

pytestmark = pytest.mark.integration

HEARTBEAT_TIMEOUT_S = 5.0
TIMEOUT_S = 20.0


class Broken(Exception):
    pass


class Starts(Callback):
    """How long each fit takes from its start to its first batch."""

    def __init__(self):
        self.seconds = []
        self._since = None

    def run_event(self, event, state, logger):
        if event.name == "FIT_START":
            self._since = time.monotonic()
        elif event.name == "BATCH_START" and self._since is not None:
            self.seconds.append(time.monotonic() - self._since)
            self._since = None


@pytest.fixture
def lighthouse_addr():
    lighthouse = start_lighthouse(
        bind="127.0.0.1:0", heartbeat_timeout_ms=round(1000 * HEARTBEAT_TIMEOUT_S)
    )
    yield "http://127.0.0.1:" + lighthouse.address().rpartition(":")[2]
    lighthouse.shutdown()


def diloco(lighthouse_addr, **arguments):
    defaults = {"replica_id": 0, "sync_every": 2, "hostname": "127.0.0.1", "timeout": TIMEOUT_S}
    return DiLoCoCallback(lighthouse_addr=lighthouse_addr, **defaults | arguments)


class RaisesIn(Callback):
    """Raises in this event of the batches after so many, once each."""

    def __init__(self, event, *batches):
        self._event, self._left = event, [*batches]

    def run_event(self, event, state, logger):
        if event.name == self._event and self._left[:1] == [state.timestamp.batch.value]:
            raise Broken(self._left.pop(0))


def side_by_side(*groups):
    """What each returns; all run at the same time."""
    with ThreadPoolExecutor(len(groups)) as pool:
        return [future.result(400) for future in [pool.submit(group) for group in groups]]


# ---- a fit that fails -----------------------------------------------------------------------


@pytest.mark.alone
def test_the_others_go_on_when_a_fit_fails_in_a_sync_and_its_process_lives_on(
    lighthouse_addr, caplog, monkeypatch
):
    is_over, failed_at, steps, sick = threading.Event(), [], [], set()
    pack = WeightedMean.pack

    def broken(*arguments, **named):
        if threading.get_ident() in sick:
            raise Broken("in a sync")
        pack(*arguments, **named)

    monkeypatch.setattr(WeightedMean, "pack", broken)

    def fails():
        def look(state):
            if state.timestamp.batch == 3:  # the first sync was at 2
                sick.add(threading.get_ident())

        callback = diloco(lighthouse_addr, num_replicas=2)
        trainer = trainer_of(callback, Each(look), max_duration="90ba")
        with pytest.raises(Broken):
            trainer.fit()
        failed_at.append(time.monotonic())
        is_over.wait(200)  # as a notebook does
        trainer.close()

    def goes_on():
        callback = diloco(lighthouse_addr, replica_id=1, num_replicas=2)
        note = Each(lambda _: steps.append((time.monotonic(), callback.diloco.outer_step)))
        result = train(callback, note, replica_id=1, max_duration="8ba").result
        is_over.set()
        return result

    _, result = side_by_side(fails, goes_on)
    assert result["outer_steps"] == 4
    next_commit = next(at for at, outer_step in steps if outer_step == 2)
    assert next_commit - failed_at[0] < HEARTBEAT_TIMEOUT_S + 2
    assert "This replica group has left: its fit ended with an error" in caplog.text


@pytest.mark.parametrize("pause_s", [0.0, 1.0], ids=["before it has left", "after it has left"])
def test_the_next_fit_of_the_same_trainer_goes_on_where_the_failed_one_stopped(
    lighthouse_addr, pause_s
):
    def train_through(*failures):
        callback = diloco(lighthouse_addr, **STREAMING | {"sync_every": 6})
        trainer = trainer_of(callback, RaisesIn("BATCH_END", *failures), max_duration="13ba")
        for _ in failures:
            with pytest.raises(Broken):
                trainer.fit()
            time.sleep(pause_s)
        trainer.fit()
        trainer.close()
        return callback.result

    # Of the two failures one comes with a sync in flight.
    whole, in_parts = train_through(), train_through(5, 8)
    assert in_parts["global_digest"] == whole["global_digest"]
    assert in_parts["inner_steps"] == whole["inner_steps"] == 13


@pytest.mark.parametrize("where", ["AFTER_DATALOADER", "AFTER_LOSS", "BATCH_END"])
def test_a_fit_that_fails_inside_a_batch_skips_no_sample_of_it(where, tmp_path):
    length, trained = 44, []
    numbers = torch.arange(length)
    dataset = TensorDataset(torch.randn(length, 8), torch.randn(length, 4), numbers)
    loader = ReplicaDataLoader(dataset, 4, dataset_id="d", unit_size=5)
    # Of a batch whose end raises the inner step is done: it stands before the look.
    look = Each(lambda state: trained.append(state.batch[2].tolist()))
    with coordinator_in(tmp_path, sync_every=2, num_replicas=1) as coordinator:
        callback = diloco(None, coordinator_addr=coordinator.address)
        trainer = trainer_of(callback, look, RaisesIn(where, 7), max_duration="2ep")
        with pytest.raises(Broken):
            trainer.fit(train_dataloader=loader)
        trainer.fit()
        trainer.close()
        with closing(CoordinatorClient(coordinator.address, None)) as client:
            [_, epoch] = client.progress("d")
        assert epoch["done"] == length
    assert sorted(sum(trained, [])) == sorted([*range(length)] * 2)
    assert callback.result["inner_steps"] == len(trained)


def test_ctrl_c_in_a_sync_costs_nothing_but_the_attempt(lighthouse_addr, monkeypatch):
    waits = []
    wait = InterruptibleWork.wait

    def interrupted(work, *limits):
        waits.append(work)
        if len(waits) == 8:
            raise KeyboardInterrupt
        return wait(work, *limits)

    monkeypatch.setattr(InterruptibleWork, "wait", interrupted)
    callback = diloco(lighthouse_addr)
    trainer = trainer_of(callback, max_duration="12ba")
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    assert 0 < trainer.state.timestamp.batch.value < 10
    trainer.fit()
    trainer.close()
    assert callback.result["inner_steps"] == 13  # the batch of the sync is trained on again
    assert callback.result["outer_steps"] in (6, 7)


# ---- fits that follow each other ------------------------------------------------------------


@pytest.mark.alone
@pytest.mark.parametrize("same_trainer", [True, False], ids=["one Trainer", "a Trainer each"])
def test_fits_that_follow_each_other_start_at_once_and_leave_nothing(lighthouse_addr, same_trainer):
    starts, kept = Starts(), []
    process = psutil.Process()
    once = [starts] if same_trainer else []  # Composer allows a callback one open Trainer
    trainer = trainer_of(diloco(lighthouse_addr), *once, max_duration="0ba")
    for _ in range(25):
        if same_trainer:
            trainer.fit(duration="2ba")
        else:
            train(diloco(lighthouse_addr), starts, max_duration="2ba")
        kept.append((process.num_fds(), process.num_threads()))
    trainer.close()
    assert len(starts.seconds) == 25 and max(starts.seconds[1:]) < 1.0, starts.seconds
    for before, after in zip(kept[9], kept[-1], strict=True):
        assert abs(after - before) <= 10, kept


@pytest.mark.alone
@pytest.mark.parametrize("pause_s", [0.0, HEARTBEAT_TIMEOUT_S + 1])
def test_a_group_that_leaves_and_comes_back_hurts_nobody(lighthouse_addr, pause_s, caplog):
    def comes_back():
        callback = diloco(lighthouse_addr, num_replicas=2)
        trainer = trainer_of(callback, RaisesIn("BATCH_END", 5), max_duration="40ba")
        with pytest.raises(Broken):
            trainer.fit()
        time.sleep(pause_s)
        trainer.fit()
        trainer.close()
        return callback.result

    def goes_on():
        callback = diloco(lighthouse_addr, replica_id=1, num_replicas=2)
        ends = []
        note = Each(lambda _: (time.sleep(0.1), ends.append(time.monotonic())))
        result = train(callback, note, replica_id=1, max_duration="40ba").result
        return result, max(after - before for before, after in itertools.pairwise(ends))

    one, (other, longest_wait) = side_by_side(comes_back, goes_on)
    assert one["global_digest"] == other["global_digest"]
    # A joiner's rounds may end elsewhere, which leaves steps for one more sync at the end.
    assert one["outer_steps"] == other["outer_steps"] in (20, 21)
    assert other["inner_steps"] == 40
    assert longest_wait < HEARTBEAT_TIMEOUT_S + 2
    assert "did not commit" not in caplog.text and "Going on without" not in caplog.text


# ---- the end of the process -----------------------------------------------------------------

FAILED = """
import sys
from harness.trainers import Each, trainer_of
from composer_replication.callback import DiLoCoCallback
from composer_replication.settings import DiLoCoSettings
from composer_replication.replica.lighthouse import start_lighthouse

lighthouse = start_lighthouse(bind="127.0.0.1:0")
address = "http://127.0.0.1:" + lighthouse.address().rpartition(":")[2]

def fail(state):
    raise ValueError("of the job")

def job():
    callback = DiLoCoCallback(replica_id=0, lighthouse_addr=address, hostname="127.0.0.1")
    trainer = trainer_of(callback, Each(fail), max_duration="2ba")
    try:
        trainer.fit()
    except ValueError:
        return trainer

kept = job()
other = trainer_of(max_duration="1ba")
other.fit()
other = None  # its end takes all closes off atexit
print("end of the script", flush=True)
"""


@pytest.mark.alone
@pytest.mark.parametrize("last, status", [("", 0), ("sys.exit(3)", 3), ("1 / 0", 1)])
def test_a_process_whose_fit_has_failed_ends_by_itself(last, status):
    tests = Path(__file__).parent.parent
    path = os.pathsep.join([str(tests), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-c", FAILED + last], env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "end of the script\n"
        assert process.wait(5.0) == status
    finally:
        process.kill()
        process.communicate()  # closes its output too
