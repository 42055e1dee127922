"""What only Lightning has, beside the questions of test_hosts.py. Run: pytest tests/hosts

Real: ``lightning`` and ``pytorch_lightning`` on the CPU, and two groups in a simulation.
"""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from common import TinyMLP, are_equal
from harness.failed_start import failed_start, of_each_place
from torch import Tensor, nn

lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")

from lightning.pytorch.callbacks import (  # noqa: E402
    EarlyStopping,
    EMAWeightAveraging,
    ModelCheckpoint,
    RichProgressBar,
    StochasticWeightAveraging,
    TQDMProgressBar,
)
from lightning.pytorch.plugins import MixedPrecision  # noqa: E402

from composer_replication import simulate  # noqa: E402
from composer_replication.lightning import DiLoCoLightningCallback  # noqa: E402
from hosts.host import ALONE, FarFromZero, held_out, own_batches  # noqa: E402
from hosts.lightning_host import Batches, Module, trainer_of  # noqa: E402


def alone(**settings: Any) -> DiLoCoLightningCallback:
    """A callback in a run of one group that trains alone."""
    return DiLoCoLightningCallback(**ALONE | settings)


def in_group(sim, **settings: Any) -> DiLoCoLightningCallback:
    own = {"replica_id": str(sim.replica_id), "num_replicas": sim.num_replicas, "sync_every": 4}
    return DiLoCoLightningCallback(manager=sim.manager, **own | settings)


def adamw(net: nn.Module, lr: float = 0.01) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=lr)


def cosine(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)


def module_of(group: int = 0, schedule: Any = None) -> Module:
    return Module(net := TinyMLP(group), adamw(net), schedule)


def loader_of(group: int, count: int) -> Batches:
    return Batches(own_batches(group, count))


# ---- equal to Lightning alone ----------------------------------------------------------------


def test_40_steps_are_those_of_lightning_alone_bit_for_bit():
    def train(*callbacks):
        module = Module(net := FarFromZero(), adamw(net, lr=1e-3), cosine)
        more = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "max_steps": 40}
        trainer_of(*callbacks, **more).fit(module, loader_of(0, 80))
        return module.net.state_dict()

    settings = {"outer_lr": 1.0, "outer_momentum": 0.0, "schedule": []}
    own, expected = train(diloco := alone(**settings)), train()
    assert diloco.result["outer_steps"] == 10
    assert are_equal(own, expected)


def test_the_callback_serves_the_trainer_of_pytorch_lightning_too():
    pytorch_lightning = pytest.importorskip("pytorch_lightning")

    class Other(pytorch_lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = TinyMLP()

        def configure_optimizers(self):
            return adamw(self)

        def training_step(self, batch, index):
            return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    silent = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pytorch_lightning.Trainer(
        max_steps=8,
        accelerator="cpu",
        callbacks=[diloco := alone()],
        enable_checkpointing=False,
        **silent,
    )
    trainer.fit(Other(), loader_of(0, 8))
    assert (diloco.result["inner_steps"], diloco.result["outer_steps"]) == (8, 2)


# Lightning sets torch's default dtype for bf16-true, and two groups are threads of one process.
@pytest.mark.parametrize(("precision", "groups"), [("bf16-true", 1), ("bf16-mixed", 2)])
def test_precisions_of_16_bits_train_and_groups_end_equal(precision, groups):
    def replica(sim):
        module = module_of(sim.replica_id)
        trainer = trainer_of(diloco := in_group(sim), max_steps=8, precision=precision)
        trainer.fit(module, loader_of(sim.replica_id, 8))
        return diloco.result["global_digest"], diloco.result["outer_steps"]

    results = simulate(replica, num_replicas=groups)
    assert len({*results}) == 1 and results[0][1] == 2


class Overflows(Module):
    """Has an infinite gradient in step 3."""

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = super().training_step(batch, index)
        return loss * float("inf") if index == 2 else loss


def test_a_step_that_the_gradient_scaler_skips_is_no_inner_step():
    scaler = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    module = Overflows(net := TinyMLP(), adamw(net))
    trainer = trainer_of(diloco := alone(), max_steps=9, plugins=[scaler])
    trainer.fit(module, loader_of(0, 9))
    assert (diloco.result["inner_steps"], diloco.result["outer_steps"]) == (8, 2)


# ---- several optimizers ----------------------------------------------------------------------


class ActorAndCritic(lightning.LightningModule):
    """Steps a critic in each batch, and an actor in every second one."""

    def __init__(self, group: int) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(group)
        self.actor, self.critic = nn.Linear(8, 4), nn.Linear(8, 4)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(net.parameters(), lr=0.1) for net in (self.actor, self.critic)]

    def training_step(self, batch: Any, index: int) -> None:
        actor, critic = self.optimizers()
        turns = [(self.critic, critic)] + [(self.actor, actor)] * (index % 2)
        for net, optimizer in turns:
            optimizer.zero_grad()
            self.manual_backward(nn.functional.mse_loss(net(batch[0]), batch[1]))
            optimizer.step()


@pytest.mark.parametrize(("counted", "inner_steps"), [(0, 8), (1, 16)])
def test_the_steps_of_the_optimizer_that_is_named_are_counted(counted, inner_steps):
    def replica(sim):
        diloco = in_group(sim, counted_optimizer=counted)
        module = ActorAndCritic(sim.replica_id)
        trainer_of(diloco, max_epochs=1).fit(module, loader_of(sim.replica_id, 16))
        weights = [each.tolist() for each in module.parameters()]
        return diloco.result["inner_steps"], diloco.result["global_digest"], weights

    first, second = simulate(replica, num_replicas=2)
    assert first == second and first[0] == inner_steps


def test_an_optimizer_that_is_not_there_is_named():
    for index in (2, -1):
        told = f"counted_optimizer={index}, and configure_optimizers returns 2: give the index"
        with pytest.raises(ValueError, match=told):
            trainer = trainer_of(alone(counted_optimizer=index), max_steps=8)
            trainer.fit(ActorAndCritic(0), loader_of(0, 8))


@pytest.mark.parametrize("bar", [RichProgressBar, TQDMProgressBar])
def test_the_bar_shows_the_outer_step(bar, capfd):
    trainer = trainer_of(alone(), bar(), max_steps=9, enable_progress_bar=True)
    trainer.fit(module_of(), loader_of(0, 9))
    assert re.search(r"outer_step[:=] ?[12]\.0", "".join(capfd.readouterr()))


# ---- what is saved and shown -----------------------------------------------------------------


def saver_in(folder, every=4):
    return ModelCheckpoint(folder, every_n_train_steps=every, save_last=True)


def test_the_last_checkpoint_and_validation_are_of_the_result(tmp_path):
    saver = ModelCheckpoint(tmp_path, save_last=True, monitor="eval", save_top_k=2)
    module = module_of()
    trainer = trainer_of(diloco := alone(), saver, max_epochs=2, limit_val_batches=1)
    trainer.fit(module, loader_of(0, 3), Batches([held_out()]))  # 6 steps, syncs every 4
    state = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
    assert diloco.result["outer_steps"] == 2
    with torch.no_grad():
        x, y = held_out()
        loss = float(nn.functional.mse_loss(module.net(x), y))
    assert diloco.result["eval"]["eval"] == pytest.approx(loss)
    assert are_equal(state, module.state_dict())
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, loader_of(0, 3), Batches([held_out()]), ckpt_path="last")
    assert diloco.result["inner_steps"] == 9


def test_a_validation_of_other_weights_after_the_fit_is_of_those(tmp_path):
    trainer = trainer_of(diloco := alone(), max_steps=4, limit_val_batches=1)
    trainer.fit(module_of(), loader_of(0, 4))
    other = module_of(5)
    before = copy.deepcopy(other.state_dict())
    result = copy.deepcopy(diloco.result)
    trainer.validate(other, Batches([held_out()]), verbose=False)
    assert diloco.result == result
    assert are_equal(before, other.state_dict())


def test_early_stopping_ends_all_groups_equal():
    def replica(sim):
        stops = EarlyStopping("eval", patience=1, min_delta=1e9)  # no loss is good enough
        module = module_of(sim.replica_id)
        trainer = trainer_of(stops, diloco := in_group(sim), max_steps=40, val_check_interval=3)
        trainer.fit(module, loader_of(sim.replica_id, 40), Batches([held_out()]))
        return diloco.result["inner_steps"], diloco.result["global_digest"]

    first, second = simulate(replica, num_replicas=2)
    assert first == second and first[0] < 12


def test_a_checkpoint_of_a_training_without_diloco_is_refused_in_one_line(tmp_path):
    trainer_of(saver_in(tmp_path), max_steps=4).fit(module_of(), loader_of(0, 4))
    with pytest.raises(ValueError, match="it is of batch 4 and has no DiLoCo state"):
        trainer = trainer_of(alone(), saver_in(tmp_path), max_steps=8)
        trainer.fit(module_of(), loader_of(0, 8), ckpt_path=str(tmp_path / "last.ckpt"))


def test_a_run_continued_from_its_last_step_ends_with_what_it_had(tmp_path):
    def train():
        trainer = trainer_of(diloco := alone(), saver_in(tmp_path), max_steps=8)
        trainer.fit(module_of(), loader_of(0, 8), ckpt_path="last")
        return diloco.result["global_digest"], diloco.result["inner_steps"]

    first = train()
    assert train() == first and first[1] == 8
    # It is no end of a run if there was nothing to train on.
    trainer = trainer_of(diloco := alone(), max_steps=16, limit_train_batches=0)
    trainer.fit(module_of(), loader_of(0, 8), ckpt_path=str(tmp_path / "last.ckpt"))
    assert diloco.diloco is None and not trainer.fit_loop.done


@pytest.fixture
def checkpoint(tmp_path):
    """The path of a checkpoint of step 8."""
    trainer_of(alone(), saver_in(tmp_path), max_steps=8).fit(module_of(), loader_of(0, 8))
    return str(tmp_path / "last.ckpt")


@of_each_place
def test_a_fit_after_a_start_that_failed_continues_from_the_checkpoint_of_its_model(
    where, checkpoint
):
    def train(module, fails=False):
        trainer = trainer_of(diloco := alone(), max_steps=16)
        if fails:
            with failed_start(where):
                trainer.fit(module, loader_of(0, 8), ckpt_path=checkpoint)
        trainer.fit(module, loader_of(0, 8), ckpt_path=None if fails else checkpoint)
        return diloco.result

    expected = train(module_of())
    assert expected["inner_steps"] == 16
    assert train(module_of(), fails=True) == expected


def test_a_fit_of_another_model_forgets_what_one_that_did_not_start_has_loaded(checkpoint):
    trainer = trainer_of(diloco := alone(), max_steps=16)
    with failed_start():
        trainer.fit(module_of(), loader_of(0, 8), ckpt_path=checkpoint)
    trainer_of(diloco, max_steps=8).fit(module_of(1), loader_of(0, 8))
    assert diloco.result["inner_steps"] == 8


# ---- other groups ----------------------------------------------------------------------------


@pytest.mark.parametrize("end", [{"max_steps": 16}, {"max_epochs": 4}])
def test_a_joiner_continues_at_the_others_step_and_learning_rate(end):
    from composer_replication.simulation.simulation import Fault

    def replica(sim):
        module = module_of(sim.replica_id, schedule=cosine)
        trainer = trainer_of(diloco := in_group(sim, num_replicas=1), **end)
        trainer.fit(module, loader_of(sim.replica_id, 4 if "max_epochs" in end else 16))
        rate = module.made.param_groups[0]["lr"]
        return trainer.global_step, rate, diloco.result["global_digest"]

    late = Fault("late", replica_id=1, step=2)
    first, joiner = simulate(replica, num_replicas=2, faults=[late])
    assert first == joiner and first[0] == 16
    assert joiner[1] == pytest.approx(0.005 * (1 + torch.cos(torch.tensor(torch.pi * 16 / 40))))


# ---- what cannot be a replica group ----------------------------------------------------------


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (StochasticWeightAveraging(swa_lrs=0.1), "cannot train with StochasticWeightAveraging"),
        (EMAWeightAveraging(), "cannot train with EMAWeightAveraging, which puts an average"),
    ],
)
def test_callbacks_that_replace_weights_are_refused_by_name(callback, message):
    with pytest.raises(ValueError, match=message):
        trainer_of(alone(), callback, max_steps=8).fit(module_of(), loader_of(0, 8))


def test_strategies_that_cannot_be_a_group_are_refused_before_any_peer_waits():
    from lightning.pytorch.strategies import ModelParallelStrategy

    trainer = trainer_of(diloco := alone(), max_steps=8)
    trainer._accelerator_connector.strategy = ModelParallelStrategy()
    with pytest.raises(ValueError, match="with ModelParallelStrategy: use strategy='ddp'"):
        diloco.setup(trainer, module_of(), "fit")


def test_an_argument_that_is_none_of_ours_is_named_with_the_closest():
    with pytest.raises(TypeError, match="sync_evry is no argument .* did you mean sync_every"):
        DiLoCoLightningCallback(sync_evry=4)


def test_a_failed_fit_can_be_continued_from_what_it_has_saved(tmp_path):
    class Fails(Module):
        def training_step(self, batch, index):
            if index == 6 and not self.has_failed:
                self.has_failed = True
                raise RuntimeError("once")
            return super().training_step(batch, index)

    def train(fails):
        module = Fails(net := TinyMLP(), adamw(net))
        module.has_failed = not fails
        saver = saver_in(tmp_path / str(fails), every=2)
        trainer = trainer_of(diloco := alone(), saver, max_steps=12)
        if fails:
            with pytest.raises(RuntimeError, match="once"):
                trainer.fit(module, loader_of(0, 12))
        trainer.fit(module, loader_of(0, 12), ckpt_path="last" if fails else None)
        return diloco.result["inner_steps"], diloco.result["global_digest"]

    assert train(True) == train(False)
