"""Composer's EMA and SWA beside DiLoCo. Run: pytest tests/callback/test_weight_averages.py

Real: Composer's Trainer, algorithms, savers and checkpoints in ``tmp_path``. The network is the
simulation's.
"""

import functools
import logging
import warnings

import composer_jobs
import pytest
import torch
from composer import Callback
from composer.algorithms import EMA, SWA
from composer_jobs import Evaluated, callback_of, data, read_checkpoint
from torch.optim.swa_utils import SWALR

from composer_replication.callback.weight_averages import WeightAverages
from composer_replication.replica.heal import state_bytes as heal_format
from composer_replication.simulation.simulation import Fault, simulate

pytestmark = pytest.mark.slow

PLAIN = {"outer_lr": 1.0, "outer_momentum": 0.0}
STREAMING = composer_jobs.STREAMING | {"sync_every": 4, "fragment_sync_delay": 1}


class Tied(Evaluated):
    """With a buffer that training changes, and two names for one weight."""

    def __init__(self, seed=0):
        super().__init__(seed)
        self.head = torch.nn.Linear(4, 4, bias=False)
        self.tied = torch.nn.Linear(4, 4, bias=False)
        self.tied.weight = self.head.weight
        self.frozen = torch.nn.Parameter(torch.ones(4), requires_grad=False)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, batch):
        if self.training:
            self.seen += 1
        return self.tied(self.head(super().forward(batch))) * self.frozen


def copies(named):
    return {name: tensor.detach().clone() for name, tensor in named}


class Record(Callback):
    """The weights that were trained, evaluated and global, by batch."""

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
            if isinstance(algorithm, EMA):
                self.ema[now] = copies(algorithm.ema_model.named_parameters())


def trainer_of(*callbacks, replica_id=0, batches=4, **arguments):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return composer_jobs.trainer_of(
            *callbacks,
            replica_id=replica_id,
            train_dataloader=data(replica_id, batches),
            **{"model": Evaluated, "max_duration": "12ba"} | arguments,
        )


saving = functools.partial(composer_jobs.saving, interval="1ba")


def fit(sim, algorithm, *, diloco=None, evaluates_first=False, **arguments):
    """Train one group; its record, callback and trainer, closed."""
    callback = callback_of(sim, **{"sync_every": 3} | (diloco or {}))
    record = Record(callback)
    trainer = trainer_of(
        record, callback, replica_id=sim.replica_id, algorithms=algorithm, **arguments
    )
    if evaluates_first:
        trainer.eval()
    trainer.fit()
    trainer.close()
    return record, callback, trainer


def fit_alone(algorithm, **arguments):
    return simulate(lambda sim: fit(sim, algorithm, **arguments), num_replicas=1)[0]


def fit_without_diloco(algorithm=None, **arguments):
    record = Record()
    trainer = trainer_of(record, algorithms=algorithm, **arguments)
    trainer.fit()
    trainer.close()
    return record, trainer


def ema_by_hand(theta, smoothing):
    """Composer's formula, from the global weights after each batch."""
    average, averages = theta[1], {}
    for at, weights in sorted(theta.items()):
        average = {n: average[n] * smoothing + w * (1.0 - smoothing) for n, w in weights.items()}
        averages[at] = average
    return averages


def are_equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[n], t) for n, t in other.items())


def difference(one, other):
    return max((one[name] - tensor).abs().max().item() for name, tensor in other.items())


def part_of(path):
    state = read_checkpoint(path)["state"]
    return state["model"], state["callbacks"]["DiLoCoCallback"], dict(state["algorithms"])


# ---- EMA -------------------------------------------------------------------------------------


@pytest.mark.parametrize("save", [1, 3, 4])
@pytest.mark.parametrize("batches", [4, 5])
def test_ema_is_of_global_weights_and_leaves_training_alone_at_all_intervals(
    tmp_path, batches, save
):
    alone, _ = fit_without_diloco(batches=batches)
    for evaluate in (1, 3, 4):
        ema = EMA(half_life="2ba")

        def replica(sim, ema=ema, evaluate=evaluate):
            folder = saving(tmp_path / str(evaluate), sim, interval=f"{save}ba")
            evaluation = {"eval_dataloader": data(7, 1), "eval_interval": f"{evaluate}ba"}
            return fit(sim, ema, diloco=PLAIN, batches=batches, **folder, **evaluation)

        [(record, _, trainer)] = simulate(replica, num_replicas=1)
        by_hand = ema_by_hand(record.theta, ema.smoothing)
        for at, weights in alone.trained.items():
            assert difference(record.trained[at], weights) < 1e-6
        assert set(range(evaluate, 13, evaluate)) <= record.evaluated.keys()
        for at, weights in record.evaluated.items():
            assert are_equal(weights, by_hand[at]), at
        for at in range(save, 13, save):
            model, ours, _ = part_of(tmp_path / str(evaluate) / "0" / f"ba{at}.pt")
            assert are_equal(model, by_hand[at]), at
            assert are_equal(ours["theta"], record.theta[at]), at
            if at < 12:
                assert are_equal(ours["local"], record.trained[at]), at
        left = copies(trainer.state.model.named_parameters())
        if ema.ema_weights_active:  # a checkpoint came last
            assert are_equal(left, by_hand[12])
            left = dict(ema.ema_model.named_parameters())
        assert difference(left, record.theta[12]) < 1e-6  # batch 12 ends a round


@pytest.mark.parametrize("batches", [4, 5])
def test_ema_that_is_updated_at_the_end_of_an_epoch_is_so_too(tmp_path, batches):
    # The checkpoint of the epoch's last batch has left EMA's weights in the model by then.
    ema = EMA(half_life="1ep", update_interval="1ep")

    def replica(sim):
        folder = saving(tmp_path, sim)
        evaluation = {"eval_dataloader": data(7, 1), "eval_interval": "1ep"}
        return fit(sim, ema, diloco=PLAIN, batches=batches, **folder, **evaluation)

    [(record, _, _)] = simulate(replica, num_replicas=1)
    alone, _ = fit_without_diloco(batches=batches)
    for at, weights in alone.trained.items():
        assert difference(record.trained[at], weights) < 1e-6
    ends = {1 + n: record.theta[at] for n, at in enumerate(range(batches, 13, batches))}
    by_hand = ema_by_hand(ends, ema.smoothing)
    for n, at in enumerate(range(batches, 13, batches)):
        assert are_equal(record.evaluated[at], by_hand[1 + n])


def test_before_ema_has_started_the_global_weights_are_evaluated_and_saved(tmp_path):
    def replica(sim):
        evaluation = {"eval_dataloader": data(7, 1), "eval_interval": "1ba"}
        return fit(sim, EMA(ema_start="7ba"), **saving(tmp_path, sim), **evaluation)

    [(record, _, _)] = simulate(replica, num_replicas=1)
    for at in range(1, 7):
        assert are_equal(record.evaluated[at], record.theta[at])
        assert are_equal(part_of(tmp_path / "0" / f"ba{at}.pt")[0], record.theta[at])
    assert are_equal(record.evaluated[7], record.ema[7])
    assert difference(record.ema[7], record.theta[7]) < 1e-6
    assert not are_equal(record.evaluated[12], record.theta[12])


@pytest.mark.parametrize("diloco", [{"sync_every": 3}, STREAMING], ids=["vanilla", "streaming"])
def test_groups_resumed_from_any_checkpoint_are_bitwise_uninterrupted(tmp_path, diloco):
    def whole(sim):
        return fit(sim, EMA(half_life="2ba"), diloco=diloco, **saving(tmp_path, sim))

    uninterrupted = simulate(whole, num_replicas=2)
    for stop in (1, 2, 3, 6, 7, 8):

        def resumed(sim, stop=stop):
            path = str(tmp_path / f"{sim.replica_id}" / f"ba{stop}.pt")
            more = saving(tmp_path / f"from {stop}", sim)
            # Evaluations make no difference.
            more |= {"eval_dataloader": data(7, 1), "eval_interval": "2ba"}
            more |= {"evaluates_first": stop % 2 == 0}
            return fit(sim, EMA(half_life="2ba"), diloco=diloco, load_path=path, **more)

        for one, other in zip(uninterrupted, simulate(resumed, num_replicas=2), strict=True):
            for seen in ("trained", "theta", "ema"):
                before, after = getattr(one[0], seen), getattr(other[0], seen)
                assert max(after) == max(before)
                for at, weights in after.items():
                    assert are_equal(before[at], weights), (stop, seen, at)
            left = [each[2].state.model for each in (one, other)]
            assert are_equal(*(dict(model.named_parameters()) for model in left))
            assert one[1].result["global_digest"] == other[1].result["global_digest"]


def test_a_checkpoint_with_ema_in_the_model_gives_weights_alone_as_composer_does(tmp_path):
    fit_alone(EMA(half_life="2ba"), **saving(tmp_path, type("Sim", (), {"replica_id": 0})))
    path = str(tmp_path / "0/ba12.pt")
    trainer = trainer_of(load_path=path, load_weights_only=True)
    loaded = copies(trainer.state.model.named_parameters())
    trainer.close()
    model, ours, _ = part_of(path)
    assert are_equal(loaded, model)
    assert not are_equal(loaded, ours["theta"])


@pytest.mark.parametrize("algorithm", ["EMA", "SWA"])
def test_a_joiner_takes_over_the_averages_of_its_donor(algorithm):
    def build():
        if algorithm == "EMA":
            return EMA(half_life="2ba")
        return SWA(swa_start="0.1dur", swa_end="0.9dur", update_interval="1ba")

    class Averages(Callback):
        def __init__(self, own):
            self._own, self.seen = own, {}

        def batch_end(self, state, logger):
            model = self._own.ema_model if algorithm == "EMA" else self._own.swa_model.module
            self.seen[state.timestamp.batch.value] = copies(model.named_parameters())

    def replica(sim):
        own = build()
        averages = Averages(own)
        callback = callback_of(sim, sync_every=2, num_replicas=1)
        trainer = trainer_of(averages, callback, replica_id=sim.replica_id, algorithms=own)
        trainer.fit()
        trainer.close()
        return averages.seen, copies(trainer.state.model.named_parameters())

    late = [Fault("late", replica_id=1, step=3)]
    (one, its), (other, theirs) = simulate(replica, num_replicas=2, faults=late)
    assert min(other) > 4 and max(other) == 12
    assert all(are_equal(one[at], average) for at, average in other.items())
    assert are_equal(its, theirs)


def test_a_group_that_heals_in_training_takes_them_over_too():
    faults = [Fault("fail_commit", replica_id=1, step=2)]

    def replica(sim):
        return fit(sim, EMA(half_life="2ba"))

    (one, _, _), (other, _, _) = simulate(replica, num_replicas=2, faults=faults)
    # In its sixth batch it was behind; it heals there, in its donor's ninth.
    assert list(other.ema) == [1, 2, 3, 4, 5, 9, 10, 11, 12]
    assert all(are_equal(one.ema[at], weights) for at, weights in other.ema.items())


def test_a_group_that_stands_by_sends_the_local_weights_and_not_ema_s(tmp_path):
    class StandingBy(Callback):
        def __init__(self, diloco):
            self._diloco = diloco

        def before_dataloader(self, state, logger):
            if state.timestamp.batch.value == 4:  # after a checkpoint, in mid-round
                self._diloco._group.sync_idle()

    def replica(sim, algorithm, **more):
        callback = callback_of(sim, sync_every=3)
        record = Record(callback)
        trainer = trainer_of(record, callback, StandingBy(callback), algorithms=algorithm, **more)
        trainer.fit()
        trainer.close()
        return record

    [without] = simulate(lambda sim: replica(sim, None), num_replicas=1)
    [with_ema] = simulate(
        lambda sim: replica(sim, EMA(half_life="2ba"), **saving(tmp_path, sim)), num_replicas=1
    )
    for at, weights in without.theta.items():
        assert are_equal(with_ema.theta[at], weights), at
    assert difference(without.theta[4], without.theta[5]) > 1e-4  # it did sync there
    assert are_equal(with_ema.ema[5], ema_by_hand(with_ema.theta, 0.5**0.5)[5])


COMPOSER_CANNOT_SAVE_SWALR = pytest.mark.skipif(
    hasattr(SWALR, "_set_anneal_func"),
    reason="Composer's SWA(schedule_swa_lr=True) cannot save this torch's SWALR",
)


@pytest.mark.parametrize(
    "schedule_swa_lr", [False, pytest.param(True, marks=COMPOSER_CANNOT_SAVE_SWALR)]
)
def test_what_a_joiner_gets_of_them_travels(monkeypatch, schedule_swa_lr):
    arrived = []
    state_dict = WeightAverages.state_dict

    def travel(own):
        sent = bytearray().join(heal_format.dump(state_dict(own)))
        arrived.append(heal_format.load(memoryview(sent)))
        return arrived[-1]

    monkeypatch.setattr(WeightAverages, "state_dict", travel)
    swa = {"swa_start": "0.1dur", "swa_end": "0.9dur", "update_interval": "1ba"}

    def replica(sim):
        averages = [EMA(half_life="2ba"), SWA(**swa, schedule_swa_lr=schedule_swa_lr)]
        return fit(sim, averages, diloco={"num_replicas": 1})

    late = [Fault("late", replica_id=1, step=3)]
    (one, _, _), (other, _, _) = simulate(replica, num_replicas=2, faults=late)
    assert are_equal(one.ema[12], other.ema[12])
    [(name, ema), (its_name, swa)] = arrived[0]
    assert (name, its_name) == ("EMA", "SWA")
    at = min(other.ema) - 2  # the donor has yet to make the update of the batch in which it is
    assert are_equal(ema["ema_model"]["named_parameters_dict"], one.ema[at])
    assert swa["swa_started"] and swa["step_counter"] == at - 1  # of 12 batches it leaves out one


# ---- SWA -------------------------------------------------------------------------------------


class Swap(Callback):
    """The model as SWA has left it, right after the average has been put into it."""

    def __init__(self, swa):
        self._swa = swa
        self.average = self.at = None

    def batch_end(self, state, logger):
        if self._swa.swa_completed and self.at is None:
            self.at = state.timestamp.batch.value
            self.average = copies(state.model.named_parameters())


@pytest.mark.parametrize("outer", [{}, PLAIN], ids=["default", "plain"])
@pytest.mark.parametrize("sync_every", [3, 5])
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_swa_to_the_end_leaves_the_average_of_global_weights(num_replicas, sync_every, outer):
    def replica(sim):
        swa = SWA(swa_start="0.3dur", swa_end="1dur", update_interval="1ba")
        callback = callback_of(sim, sync_every=sync_every, **outer)
        record, swap = Record(callback), Swap(swa)
        trainer = trainer_of(record, swap, callback, replica_id=sim.replica_id, algorithms=swa)
        trainer.fit()
        trainer.close()
        return record, swap, callback, copies(trainer.state.model.named_parameters())

    groups = simulate(replica, num_replicas=num_replicas)
    for record, swap, callback, left in groups:
        assert swap.at == 12
        theta = [record.theta[at] for at in range(4, 13)]  # 0.3 of 12 batches is 3.6
        mean = {name: torch.stack([each[name] for each in theta]).mean(0) for name in left}
        assert difference(left, mean) < 1e-6
        assert difference(left, swap.average) < 1e-6
        assert are_equal(left, groups[0][3])
        assert are_equal(swap.average, groups[0][1].average)
        assert callback.result["global_digest"] == groups[0][2].result["global_digest"]


@pytest.mark.parametrize("diloco", [{"sync_every": 5}, STREAMING], ids=["vanilla", "streaming"])
def test_training_goes_on_from_swa_s_average_also_after_a_resume(tmp_path, diloco):
    def job(sim, **more):
        swa = SWA(swa_start="0.25dur", swa_end="0.5dur", update_interval="1ba")
        callback = callback_of(sim, **diloco)
        record, swap = Record(callback), Swap(swa)
        evaluation = {"eval_dataloader": data(7, 1), "eval_interval": "1ba"}
        trainer = trainer_of(
            record, swap, callback, replica_id=sim.replica_id, algorithms=swa, **evaluation, **more
        )
        trainer.fit()
        trainer.close()
        return record, swap, callback

    groups = simulate(lambda sim: job(sim, **saving(tmp_path, sim)), num_replicas=2)
    for replica_id, (record, swap, callback) in enumerate(groups):
        assert swap.at == 6
        assert are_equal(swap.average, groups[0][1].average)
        assert are_equal(record.trained[6], swap.average)
        # Until all of it is global, what is saved and evaluated is the model as it is.
        assert are_equal(record.evaluated[6], swap.average)
        model, ours, _ = part_of(tmp_path / f"{replica_id}" / "ba6.pt")
        assert are_equal(model, swap.average)
        assert are_equal(ours["theta"], record.theta[6])
        # From the average on to the next sync is not far; the global weights were elsewhere.
        assert are_equal(part_of(tmp_path / f"{replica_id}" / "ba12.pt")[0], record.theta[12])
        assert callback.result["global_digest"] == groups[0][2].result["global_digest"]

    def resumed(sim, stop):
        return job(sim, load_path=str(tmp_path / f"{sim.replica_id}" / f"ba{stop}.pt"))

    for stop in (4, 6, 7):
        again = simulate(lambda sim, at=stop: resumed(sim, at), num_replicas=2)
        for (one, _, whole), (other, _, rest) in zip(groups, again, strict=True):
            for seen in ("trained", "theta", "evaluated"):
                before, after = getattr(one, seen), getattr(other, seen)
                assert all(are_equal(before[at], weights) for at, weights in after.items()), stop
            assert whole.result["global_digest"] == rest.result["global_digest"]


# ---- what is left behind ---------------------------------------------------------------------


def test_the_algorithms_are_left_as_they_were():
    ema = EMA(half_life="2ba")
    fit_alone(ema)
    assert not {"match", "apply", "state_dict"} & vars(ema).keys()


def test_a_joiner_without_the_donor_s_algorithm_is_told(caplog):
    def replica(sim):
        own = EMA(half_life="2ba") if sim.replica_id else None
        return fit(sim, own, diloco={"num_replicas": 1})

    with caplog.at_level(logging.WARNING):
        simulate(replica, num_replicas=2, faults=[Fault("late", replica_id=1, step=3)])
    told = "This joiner keeps its own averages, ['EMA']: the donor has none"
    assert any(told in message for message in caplog.messages)
