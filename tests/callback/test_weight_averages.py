"""Composer's EMA beside DiLoCo. Run: pytest tests/callback/test_weight_averages.py

Real: Composer's Trainer, algorithms, savers and checkpoints in ``tmp_path``. The network is the
simulation's.
"""

import logging

import pytest
from common import are_equal
from composer import Callback, Trainer
from composer.algorithms import EMA
from harness import trainers
from harness.trainers import Evaluated, data, part_of, saving, trainer_of
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)

from composer_replication.callback.weight_averages import WeightAverages
from composer_replication.diloco.fragments import plain_name
from composer_replication.group import replica_group
from composer_replication.replica.heal import state_bytes as heal_format
from composer_replication.simulation.simulation import Fault

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

PLAIN = {"outer_lr": 1.0, "outer_momentum": 0.0}
STREAMING = trainers.STREAMING | {"sync_every": 4, "fragment_sync_delay": 1}


def copies(named):
    return {plain_name(name): tensor.detach().clone() for name, tensor in named}


class Checkpointed(Evaluated):
    """The same with activation checkpointing, whose wrappers are in the names of parameters."""

    groups = (0, 1)

    def __init__(self, seed):
        super().__init__(seed)
        if seed in self.groups:
            apply_activation_checkpointing(self, check_fn=lambda each: isinstance(each, nn.Linear))


class CheckpointedInOne(Checkpointed):
    groups = (1,)


class Record(Callback):
    """The weights that were trained, evaluated, global and averaged, by batch."""

    def __init__(self, diloco=None):
        self._diloco = diloco
        self.trained, self.evaluated, self.theta, self.ema = {}, {}, {}, {}

    def before_train_batch(self, state, logger):
        self.trained[state.timestamp.batch.value] = copies(state.model.named_parameters())

    def eval_batch_start(self, state, logger):
        self.evaluated[state.timestamp.batch.value] = copies(state.model.named_parameters())

    def batch_end(self, state, logger):
        now = state.timestamp.batch.value
        if self._diloco is not None:
            self.theta[now] = copies(self._diloco.diloco.global_parameters().items())
        for algorithm in state.algorithms:
            self.ema[now] = copies(algorithm.ema_model.named_parameters())


def fit_groups(num_replicas, algorithm, *others, batches=4, folder=None, interval="1ba", **more):
    """Groups with an algorithm each, and checkpoints if there is a folder.

    Args:
        num_replicas: How many groups.
        algorithm: Returns the algorithms of a group by its number.
        *others: Callbacks of each, after its record.
        batches: In an epoch.
        folder: For the checkpoints.
        interval: Between two of them.
        **more: As of ``trainers.fit_groups``.
    """

    def own(group):
        job = {"algorithms": algorithm(group), "train_dataloader": data(group, batches)}
        return job | (saving(folder, group, interval) if folder else {})

    job = {"model": Evaluated, "max_duration": "12ba"} | more
    job["diloco"] = {"sync_every": 3} | more.get("diloco", {})
    return trainers.fit_groups(num_replicas, Record, *others, own=own, **job)


def record_of(fit):
    return fit.others[0]


def evaluating(interval):
    return {"eval_dataloader": data(7, 1), "eval_interval": f"{interval}ba"}


def ema(group=0):
    return EMA(half_life="2ba")


def weights_without_diloco(batches):
    """The parameters after each batch of a training without DiLoCo, by the number of the batch."""
    record = Record()
    trainer = trainer_of(
        record, model=Evaluated, max_duration="12ba", train_dataloader=data(0, batches)
    )
    trainer.fit()
    trainer.close()
    return record.trained


def ema_by_hand(theta, smoothing):
    """Composer's formula, from the global weights after each batch."""
    average, averages = theta[1], {}
    for at, weights in sorted(theta.items()):
        average = {n: average[n] * smoothing + w * (1.0 - smoothing) for n, w in weights.items()}
        averages[at] = average
    return averages


def difference(one, other):
    return max((one[name] - tensor).abs().max().item() for name, tensor in other.items())


# ---- EMA -------------------------------------------------------------------------------------


@pytest.mark.parametrize("save", [1, 3, 4])
@pytest.mark.parametrize("batches", [4, 5])
def test_ema_is_of_global_weights_and_leaves_training_alone_at_all_intervals(
    tmp_path, batches, save
):
    alone = weights_without_diloco(batches)
    for evaluate in (1, 3, 4):
        folder = tmp_path / str(evaluate)
        algorithm = ema()
        [fit] = fit_groups(
            1, lambda _, own=algorithm: own, folder=folder, interval=f"{save}ba",
            batches=batches, diloco=PLAIN, **evaluating(evaluate),
        )  # fmt: skip
        record = record_of(fit)
        by_hand = ema_by_hand(record.theta, algorithm.smoothing)
        for at, weights in alone.items():
            assert difference(record.trained[at], weights) < 1e-6
        assert set(range(evaluate, 13, evaluate)) <= record.evaluated.keys()
        for at, weights in record.evaluated.items():
            assert are_equal(weights, by_hand[at]), at
        for at in range(save, 13, save):
            model, ours = part_of(folder / f"0/ba{at}.pt")
            assert are_equal(model, by_hand[at]), at
            assert are_equal(ours["theta"], record.theta[at]), at
            if at < 12:
                assert are_equal(ours["local"], record.trained[at]), at
        left = copies(fit.weights.items())
        if algorithm.ema_weights_active:  # a checkpoint came last
            assert are_equal(left, by_hand[12])
            left = dict(algorithm.ema_model.named_parameters())
        assert difference(left, record.theta[12]) < 1e-6  # batch 12 ends a round


@pytest.mark.parametrize("batches", [4, 5])
def test_ema_that_is_updated_at_the_end_of_an_epoch_is_so_too(tmp_path, batches):
    # The checkpoint of the epoch's last batch has left EMA's weights in the model by then.
    algorithm = EMA(half_life="1ep", update_interval="1ep")
    evaluation = {"eval_dataloader": data(7, 1), "eval_interval": "1ep"}
    [fit] = fit_groups(
        1, lambda _: algorithm, folder=tmp_path, batches=batches, diloco=PLAIN, **evaluation
    )
    record = record_of(fit)
    for at, weights in weights_without_diloco(batches).items():
        assert difference(record.trained[at], weights) < 1e-6
    ends = {1 + n: record.theta[at] for n, at in enumerate(range(batches, 13, batches))}
    by_hand = ema_by_hand(ends, algorithm.smoothing)
    for n, at in enumerate(range(batches, 13, batches)):
        assert are_equal(record.evaluated[at], by_hand[1 + n])


def test_before_ema_has_started_the_global_weights_are_evaluated_and_saved(tmp_path):
    [fit] = fit_groups(1, lambda _: EMA(ema_start="7ba"), folder=tmp_path, **evaluating(1))
    record = record_of(fit)
    for at in range(1, 7):
        assert are_equal(record.evaluated[at], record.theta[at])
        assert are_equal(part_of(tmp_path / f"0/ba{at}.pt")[0], record.theta[at])
    assert are_equal(record.evaluated[7], record.ema[7])
    assert difference(record.ema[7], record.theta[7]) < 1e-6
    assert not are_equal(record.evaluated[12], record.theta[12])


@pytest.mark.parametrize("diloco", [{"sync_every": 3}, STREAMING], ids=["vanilla", "streaming"])
def test_groups_resumed_from_any_checkpoint_are_bitwise_uninterrupted(tmp_path, diloco):
    uninterrupted = fit_groups(2, ema, folder=tmp_path, diloco=diloco)
    for stop in (1, 2, 3, 6, 7, 8):
        job = {"diloco": diloco, "load_path": tmp_path / "{group}" / f"ba{stop}.pt"}
        if stop % 2 == 0:
            job["before"] = Trainer.eval
        resumed = fit_groups(2, ema, folder=tmp_path / f"from {stop}", **job, **evaluating(2))
        for one, other in zip(uninterrupted, resumed, strict=True):
            check_seen(other, one)
            assert are_equal(one.weights, other.weights)


def test_a_resume_may_switch_activation_checkpointing_on_and_groups_may_differ_in_it(tmp_path):
    whole = fit_groups(2, ema, folder=tmp_path)
    for stop in (2, 3):
        job = {"load_path": tmp_path / "{group}" / f"ba{stop}.pt", **evaluating(2)}
        for model in (Checkpointed, CheckpointedInOne):
            resumed = fit_groups(2, ema, model=model, **job)
            for one, other in zip(whole, resumed, strict=True):
                check_seen(other, one)


def check_seen(rest, whole):
    """What a resumed group has seen is what the whole run has."""
    assert rest.digest == whole.digest
    for name in ("trained", "theta", "ema"):
        before, after = (getattr(record_of(fit), name) for fit in (whole, rest))
        assert max(after) == max(before)
        for at, weights in after.items():
            assert are_equal(before[at], weights), (name, at)


def test_a_checkpoint_with_ema_in_the_model_gives_weights_alone_as_composer_does(tmp_path):
    fit_groups(1, ema, folder=tmp_path)
    path = str(tmp_path / "0/ba12.pt")
    trainer = trainer_of(model=Evaluated, load_path=path, load_weights_only=True)
    trainer.close()
    loaded = dict(trainer.state.model.named_parameters())
    model, ours = part_of(path)
    assert are_equal(loaded, model)
    assert not are_equal(loaded, ours["theta"])


def test_a_joiner_takes_over_the_average_of_its_donor(monkeypatch):
    arrived = []
    state_dict = WeightAverages.state_dict

    def travel(own):
        sent = bytearray().join(heal_format.dump(state_dict(own)))
        arrived.append(heal_format.load(memoryview(sent)))
        return arrived[-1]

    monkeypatch.setattr(WeightAverages, "state_dict", travel)
    fits = fit_groups(2, ema, faults=JOINS_LATE, diloco={"num_replicas": 1})
    one, other = map(record_of, fits)
    assert min(other.ema) > 4 and max(other.ema) == 12
    assert all(are_equal(one.ema[at], average) for at, average in other.ema.items())
    assert are_equal(fits[0].weights, fits[1].weights)
    at = min(other.ema) - 2  # the donor has yet to make the update of the batch in which it is
    assert are_equal(arrived[0]["ema_model"]["named_parameters_dict"], one.ema[at])


JOINS_LATE = [Fault("late", replica_id=1, step=3)]


def test_a_group_that_heals_in_training_takes_them_over_too():
    faults = [Fault("fail_commit", replica_id=1, step=2)]
    one, other = map(record_of, fit_groups(2, ema, faults=faults))
    # In its sixth batch it was behind; it heals there, in its donor's ninth.
    assert list(other.ema) == [1, 2, 3, 4, 5, 9, 10, 11, 12]
    assert all(are_equal(one.ema[at], weights) for at, weights in other.ema.items())


def test_a_joiner_without_the_donor_s_algorithm_gets_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        fit_groups(
            2, lambda group: None if group == 0 else ema(), faults=JOINS_LATE,
            diloco={"num_replicas": 1},
        )  # fmt: skip
    warning = "This joiner keeps its own EMA: the donor has none"
    assert any(warning in message for message in caplog.messages)


def test_a_group_that_stands_by_sends_the_local_weights_and_not_ema_s(tmp_path, monkeypatch):
    asked = []

    def keep(loader, options, diloco, membership, sync_idle, epochs):
        asked.append(sync_idle)

    class StandingBy(Callback):
        def before_dataloader(self, state, logger):
            if state.timestamp.batch.value == 4:  # after a checkpoint, in mid-round
                asked[-1]()

    monkeypatch.setattr(replica_group, "group_data_of", keep)
    without, with_ema = (
        record_of(fit_groups(1, algorithm, StandingBy(), folder=folder)[0])
        for algorithm, folder in ((lambda _: None, None), (ema, tmp_path))
    )
    for at, weights in without.theta.items():
        assert are_equal(with_ema.theta[at], weights), at
    assert difference(without.theta[4], without.theta[5]) > 1e-4  # it did sync there
    assert are_equal(with_ema.ema[5], ema_by_hand(with_ema.theta, 0.5**0.5)[5])


# ---- what is left behind ---------------------------------------------------------------------


def test_the_algorithms_are_left_as_they_were():
    algorithm = ema()
    fit_groups(1, lambda _: algorithm)
    assert not {"match", "apply", "state_dict"} & vars(algorithm).keys()
