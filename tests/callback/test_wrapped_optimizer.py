"""An inner optimizer around another one, as Composer's SAM makes it.

Run: pytest tests/callback/test_wrapped_optimizer.py. Real: Composer's Trainer and SAM on the CPU.
Replica groups are threads over the simulation's shared buffer.
"""

import pytest
import torch
from composer import Callback
from composer.algorithms import SAM
from composer_jobs import callback_of, trainer_of

from composer_replication.diloco.inner_optimizer import load_state, save_state, with_wrapped
from composer_replication.simulation.simulation import Fault, simulate

pytestmark = pytest.mark.filterwarnings("ignore:SAM has known issues:UserWarning")


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


class Poison(Callback):
    """One batch that is not a number."""

    def __init__(self, at):
        self._at = at

    def after_dataloader(self, state, logger):
        if state.timestamp.batch.value == self._at:
            x, y = state.batch
            state.batch = (x * float("nan"), y)


class Look(Callback):
    """The loss of every batch, and whether a batch begins on the global parameters."""

    def __init__(self, diloco):
        self._diloco = diloco
        self.losses = []
        self.begins_on_global = []
        self.inner_steps = []

    def batch_start(self, state, logger):
        theta = self._diloco.diloco.global_parameters()
        self.begins_on_global.append(
            all(torch.equal(p, theta[name]) for name, p in state.model.named_parameters())
        )
        of_first = next(iter(with_wrapped(state.optimizers[0])[-1].state.values()), {})
        self.inner_steps.append(int(of_first.get("step", 0)))

    def batch_end(self, state, logger):
        self.losses.append(float(state.loss.detach()))


def train(sim, algorithms, *others, max_duration="12ba", **diloco):
    callback = callback_of(sim, **diloco)
    look = Look(callback)
    trainer = trainer_of(
        callback,
        look,
        *others,
        replica_id=sim.replica_id,
        optimizer=adamw,
        algorithms=algorithms,
        max_duration=max_duration,
    )
    trainer.fit()
    final = [p.detach().clone() for p in trainer.state.model.parameters()]
    trainer.close()
    return callback, look, final


@pytest.mark.parametrize("interval", [None, 1, 2])
def test_a_batch_that_is_not_a_number_costs_one_round_with_sam_too(interval):
    def replica(sim):
        others = [Poison(at=4)] if sim.replica_id else []
        algorithms = [] if interval is None else [SAM(interval=interval)]
        return train(sim, algorithms, *others, sync_every=3, max_sync_retries=2)

    groups = simulate(replica, num_replicas=2)
    for replica_id, (callback, look, final) in enumerate(groups):
        sick = [i for i, loss in enumerate(look.losses) if loss != loss]
        assert sick == ([4, 5] if replica_id else [])
        assert look.begins_on_global[6]
        assert all(p.isfinite().all() for p in final)
        assert callback.result["outer_steps"] == 4
    assert groups[0][0].result["global_digest"] == groups[1][0].result["global_digest"]


@pytest.mark.parametrize(("how", "steps"), [("donor", [6, 7]), ("own", [0, 1])])
def test_a_joiner_takes_over_the_state_of_the_wrapped_optimizer_if_asked_to(how, steps):
    def replica(sim):
        more = {"num_replicas": 1, "heal_inner_state": how}
        return train(sim, [SAM()], max_duration="8ba", **more)[1].inner_steps

    late = [Fault("late", replica_id=1, step=3)]
    _, joiner = simulate(replica, num_replicas=2, faults=late)
    assert joiner == steps


class Wrapper(torch.optim.Optimizer):
    """As the SAM that most copy: its groups are those of what it wraps."""

    def __init__(self, base_optimizer):
        self.base_optimizer = base_optimizer
        super().__init__(base_optimizer.param_groups, {})


def wrapped():
    return Wrapper(adamw([torch.nn.Parameter(torch.ones(2))]))


def test_a_scheduler_still_reaches_the_wrapped_optimizer_after_a_load():
    optimizer = wrapped()
    load_state(optimizer, save_state(wrapped()))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.5)
    assert optimizer.base_optimizer.param_groups[0]["lr"] == scheduler.get_last_lr()[0] == 0.005


def test_the_state_of_another_kind_of_optimizer_is_refused_with_both():
    plain = adamw([torch.nn.Parameter(torch.ones(2))])
    with pytest.raises(ValueError, match=r"of 1 inner .* 2 \(Wrapper around AdamW\)"):
        load_state(wrapped(), save_state(plain))
