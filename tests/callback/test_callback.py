"""The Composer callback. Run: pytest tests/callback/test_callback.py

Real: Composer's Trainer on the CPU, checkpoints and the run folder in ``tmp_path``. Replica groups
are threads over the simulation's shared buffer.
"""

import dataclasses
import json
import os
import re
import threading
import time
from contextlib import closing

import pytest
import torch
from composer import Callback, Event
from composer.core import DataSpec
from composer.loggers import InMemoryLogger
from harness.trainers import (
    Each,
    alone,
    callback_of,
    data,
    fit_alone,
    fit_groups,
    saving,
    train,
    trainer_of,
)
from run_events import result_of, syncs_of

from composer_replication.callback import DiLoCoCallback
from composer_replication.diloco.sync_report import SyncReport
from composer_replication.group import replica_group
from composer_replication.simulation.simulation import SimulationError, simulate

NUM_ELEMENTS = 8 * 16 + 16 + 16 * 16 + 16 + 16 * 4 + 4


# ---- arguments ------------------------------------------------------------------------------


def test_each_argument_reaches_the_settings_or_the_options():
    given = {"sync_every": 12, "outer_lr": 0.5, "timeout": 8.0, "backend": "gloo"}
    given |= {"replica_id": "berlin", "final_sync": False, "same_samples": True}
    callback = DiLoCoCallback(**given, schedule=[{"outer_step": 9, "outer_lr": 0.25}])
    seen = dataclasses.asdict(callback.settings) | dataclasses.asdict(callback.options)
    assert given.items() <= seen.items()
    assert seen["schedule"] == ({"outer_step": 9, "outer_lr": 0.25},)


def test_construction_touches_no_network_and_starts_nothing(monkeypatch):
    monkeypatch.setattr("socket.create_connection", lambda *_, **__: pytest.fail("network"))
    threads = threading.active_count()
    callback = DiLoCoCallback(replica_id=0, lighthouse_addr="http://no-such-host.invalid:1")
    assert threading.active_count() == threads
    assert callback.diloco is None and callback.state_dict() == {}


def test_a_handler_of_a_subclass_is_called_too():
    called = []

    class Mine(DiLoCoCallback):
        def after_forward(self, state, logger):
            called.append("after_forward")

        def batch_end(self, state, logger):
            called.append("batch_end")

    for event in ("after_forward", "after_backward", "batch_end"):
        Mine().run_event(Event(event), None, None)
    assert called == ["after_forward", "batch_end"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"replica_id": None}, "replica_id=None: this replica group has no name. Start"),
        ({"replica_id": 0}, "lighthouse_addr=None: no lighthouse is named. Start"),
    ],
)
def test_what_the_environment_lacks_is_named_when_training_starts(no_network, arguments, message):
    trainer = trainer_of(DiLoCoCallback(**arguments), max_duration="1ba")
    with closing(trainer), pytest.raises(ValueError, match=re.escape(message)):
        trainer.fit()


def test_an_optimizer_that_moves_weights_between_steps_is_refused():
    class ScheduleFree(torch.optim.SGD):
        def eval(self):
            """As in the package schedulefree: changes the weights that are evaluated."""

    def built(parameters):
        return ScheduleFree(parameters, lr=0.1)

    callback = alone()
    with pytest.raises(ValueError, match="^DiLoCo cannot train with ScheduleFree, whose eval"):
        train(callback, optimizer=built)
    assert callback.diloco is None


def test_a_second_callback_in_a_trainer_is_refused_at_once():
    class Mine(DiLoCoCallback):
        """Of a user."""

    with pytest.raises(ValueError, match="^2 callbacks DiLoCoCallback in one Trainer: leave all"):
        trainer_of(*(kind(replica_id=0, num_replicas=1) for kind in (DiLoCoCallback, Mine)))


def test_a_trainer_that_nobody_closes_is_closed_at_once_by_the_thread_that_drops_it():
    closed = []

    class Tells(Callback):
        def post_close(self):
            closed.append(threading.current_thread())

    trainer_of(alone(), Tells(), max_duration="4ba").fit()
    assert closed == [threading.current_thread()]


# ---- what counts as an inner step -----------------------------------------------------------


class CountedSGD(torch.optim.SGD):
    """SGD without state, of which torch's checkpoint functions make hidden steps."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.05)
        self.calls = 0
        self.register_step_post_hook(lambda *_: setattr(self, "calls", self.calls + 1))


class WithoutGradients(Callback):
    """Clears the gradients after a batch, as torchft's own DiLoCo does after a sync."""

    def batch_end(self, state, logger):
        state.optimizers[0].zero_grad()


def test_the_hidden_steps_of_a_save_and_a_load_do_not_count(tmp_path):
    arguments = {"optimizer": CountedSGD, **saving(tmp_path, 0, "1ba")}
    first = fit_alone(WithoutGradients(), max_duration="3ba", **arguments)
    assert first.trainer.state.optimizers[0].calls > 3  # else there was nothing to overlook
    assert first.result["inner_steps"] == 3

    path = tmp_path / "0/ba3.pt"
    resumed = fit_alone(WithoutGradients(), max_duration="6ba", load_path=path, **arguments)
    assert resumed.trainer.state.optimizers[0].calls > 3
    assert resumed.result["inner_steps"] == 6


class OneInfinity(Callback):
    """Makes the loss of one batch infinite, after its forward pass."""

    def __init__(self, batch):
        self._batch = batch

    def after_loss(self, state, logger):
        if state.timestamp.batch == self._batch:
            state.loss = state.loss * float("inf")


@pytest.mark.parametrize("is_fused", [False, True])
def test_a_step_that_the_grad_scaler_skips_does_not_count(is_fused):
    # Composer scales gradients under amp_fp16 only, and that needs a GPU. What it then does is
    # done here: a real scaler decides, after the backward pass, whether the optimizer steps.
    def adam(parameters):
        return torch.optim.Adam(parameters, fused=is_fused)

    def scale(trainer):
        trainer._use_closures = lambda: False
        trainer._use_grad_scaling = lambda precision, scaler: True
        trainer.state.scaler = torch.amp.GradScaler("cpu", init_scale=2.0)

    logged = InMemoryLogger()
    job = {"before": scale, "optimizer": adam, "loggers": [logged]}
    fit = fit_alone(OneInfinity(batch=1), diloco={"weight_by": "samples"}, **job)
    assert fit.trainer.state.timestamp.batch == 4
    assert fit.trainer.state.scaler.get_scale() == 1.0  # halved once
    assert fit.result["inner_steps"] == 3
    assert fit.result["outer_steps"] == 2  # after steps 2 and 3, the last at the end
    assert logged.data["diloco/contribution"][0][1] == 16, "without the skipped batch's samples"


def test_tokens_are_counted_by_the_loaders_own_function():
    def own(group):
        def count(batch):
            return {"total": 100 * (1 + group) + len(batch[0]), "loss_generating": 1}

        spec = DataSpec(data(group), get_num_tokens_in_batch=count)
        return {"train_dataloader": spec, "loggers": logged[group]}

    logged = [InMemoryLogger(), InMemoryLogger()]
    fit_groups(2, own=own, diloco={"weight_by": "tokens"})
    contributions = [[value for _, value in each.data["diloco/contribution"]] for each in logged]
    assert contributions == [[216, 216], [416, 416]]


def test_a_batch_of_no_tokens_is_refused_with_the_fix():
    # Composer's own count knows nothing of these batches.
    with pytest.raises(SimulationError, match=r"1 ranks have a batch of 0 tokens: give the loader"):
        fit_alone(diloco={"weight_by": "tokens"})


# ---- what it tells --------------------------------------------------------------------------


def documented_keys():
    """Those of the table in ``SyncReport``; tests/diloco/test_sync_report.py checks it."""
    names = {field.name for field in dataclasses.fields(SyncReport)}
    names -= {"inner_steps"}  # it is the batch, nearly always
    names -= {"equal_samples"}  # names
    return {f"diloco/{name}" for name in names | {"round"}}


def test_the_documented_metrics_are_logged_at_every_sync_and_no_others():
    logged = [InMemoryLogger(), InMemoryLogger()]
    diloco = {"digest_every": 1, "schedule": []}
    fit_groups(2, own=lambda group: {"loggers": logged[group]}, diloco=diloco)
    for metrics in (each.data for each in logged):
        keys = {key for key in metrics if key.startswith("diloco/")}
        assert keys == documented_keys() - {"diloco/global_digest"}  # numbers only
        steps = [(int(at.batch), value) for at, value in metrics["diloco/outer_step"]]
        assert steps == [(2, 1), (4, 2)]
        assert [value for _, value in metrics["diloco/round"]] == [1, 2]
        for key in keys:
            assert all(isinstance(value, int | float) for _, value in metrics[key])
            assert len(metrics[key]) == 2
        assert metrics["diloco/bytes_sent"][0][1] == 4 * (NUM_ELEMENTS + 1)


def test_the_run_folder_has_a_line_for_every_sync_and_the_result(tmp_path):
    began = time.time()
    diloco = {"run_dir": str(tmp_path), "digest_every": 2, "schedule": []}
    fit = fit_alone(max_duration="5ba", diloco=diloco)
    folder = tmp_path / "replica_0"
    lines = syncs_of(folder)
    assert [line["batch"] for line in lines] == [2, 4, 5]  # the last one is the final sync
    assert [line["inner_steps"] for line in lines] == [2, 4, 5]
    assert [line["diloco/outer_step"] for line in lines] == [1, 2, 3]
    for line in lines:
        has_digest = line["diloco/outer_step"] % 2 == 0
        # A group alone has no other to compare with.
        expected = documented_keys() - {"diloco/group_cosine"}
        expected |= {"batch", "inner_steps", "loss", "ranks", "time", "event"}
        assert line.keys() == expected - (set() if has_digest else {"diloco/global_digest"})
        assert line["loss"] > 0
        assert began <= line["time"] <= time.time()
    result = result_of(folder)
    assert result == fit.result
    assert result["final_loss"] == lines[-1]["loss"]
    status = json.loads((folder / "status.json").read_text())
    assert (status["phase"], status["batch"], status["max_batches"]) == ("evaluating", 5, 5)
    assert (status["inner_steps"], status["outer_step"]) == (5, 3)


def test_a_manager_that_was_given_is_good_for_one_fit():
    def replica(sim):
        trainer = trainer_of(callback_of(sim, sync_every=2), max_duration="2ba")
        trainer.fit()
        with pytest.raises(ValueError, match="manager= can be used for one fit only"):
            trainer.fit(duration="2ba")
        trainer.close()

    simulate(replica, num_replicas=1)


# ---- its life -------------------------------------------------------------------------------


def test_who_is_slow_at_the_end_of_the_fit_holds_nobody_up():
    is_done = threading.Event()

    class Slow(Callback):
        def fit_end(self, state, logger):
            assert is_done.wait(5)

    def replica(sim):
        callback = callback_of(sim)
        first = [Slow()] if sim.replica_id else []
        duration = "4ba" if sim.replica_id else "8ba"
        trainer = trainer_of(*first, callback, replica_id=sim.replica_id, max_duration=duration)
        trainer.fit()
        is_done.set()
        trainer.close()
        return callback.result["outer_steps"]

    assert simulate(replica, num_replicas=2, timeout_s=10.0) == [4, 4]


def test_closing_again_and_again_is_harmless():
    def replica(sim):
        callback = callback_of(sim)
        trainer = trainer_of(callback, max_duration="2ba")
        callback.close(trainer.state, trainer.logger)  # before anything has begun
        trainer.fit()
        kept = callback.state_dict()["progress"]
        for _ in range(2):
            callback.close(trainer.state, trainer.logger)
            trainer.close()
        assert callback.state_dict()["progress"] == kept
        return callback

    [callback] = simulate(replica, num_replicas=1)
    assert callback.diloco is None


def test_evaluation_alone_needs_no_peers():
    trainer = trainer_of(DiLoCoCallback(replica_id=0, num_replicas=2))
    trainer.eval(eval_dataloader=data())
    trainer.close()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rank_ends_when_its_launcher_has_died_and_a_lone_process_has_none(ranks, monkeypatch):
    def lose_parent(state):
        monkeypatch.setattr(os, "getppid", lambda: 1)
        monkeypatch.setattr(replica_group, "world_size", lambda: ranks)

    if ranks == 1:  # it may lose its parent: a shell that was left
        assert fit_alone(Each(lose_parent)).result["inner_steps"] == 4
    else:
        with pytest.raises(SimulationError, match="the launcher of this group's ranks has died"):
            fit_alone(Each(lose_parent))


def test_who_raises_at_the_start_of_the_fit_holds_nobody_up():
    class RaisesAtStart(Callback):
        def fit_start(self, state, logger):
            raise ZeroDivisionError

    def replica(sim):
        callback = callback_of(sim)
        others = [RaisesAtStart()] if sim.replica_id else []
        trainer = trainer_of(*others, callback, replica_id=sim.replica_id, max_duration="4ba")
        if sim.replica_id:
            with pytest.raises(ZeroDivisionError):
                trainer.fit()
            trainer.close()
            assert callback.diloco is None
        else:
            trainer.fit()
            trainer.close()
        return callback.result.get("outer_steps")

    assert simulate(replica, num_replicas=2, timeout_s=10.0) == [2, None]


def test_a_group_that_cannot_join_leaves_no_one_waiting_and_says_that_it_never_can(tmp_path):
    # What the optimizer trains is found out after the manager is up, in mid-join as it were.
    def replica(sim):
        callback = callback_of(sim, run_dir=str(tmp_path), num_replicas=1)
        trainer = trainer_of(callback, max_duration="2ba")
        if sim.replica_id:
            trainer.state.optimizers = [torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1)]
            with pytest.raises(ValueError, match="in a fragment but not in the inner optimizer"):
                trainer.fit()
        else:
            trainer.fit()
        trainer.close()
        return callback.result.get("outer_steps")

    assert simulate(replica, num_replicas=2, timeout_s=10.0) == [1, None]
    status = json.loads((tmp_path / "replica_1" / "status.json").read_text())
    assert status == {"phase": "rejected"}


def test_only_a_close_after_an_error_watches_for_ranks_that_never_come(monkeypatch):
    watched = []
    monkeypatch.setattr(
        "composer_replication.callback.callback.end_if_stuck_in_close", watched.append
    )
    fit_alone()
    assert watched == []

    def fail(state):
        raise RuntimeError("in training")

    with pytest.raises(SimulationError):
        fit_alone(Each(fail))
    assert [str(error) for error in watched] == ["in training"]
