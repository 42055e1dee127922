"""Checkpoints of a Composer job under DiLoCo. Run: pytest tests/callback/test_resume.py

Real: Composer's Trainer, savers and checkpoints in ``tmp_path``. The network is the simulation's;
in tests/integration/test_resume.py it is real, and so is FSDP.
"""

import itertools
import json
import operator
import re
import threading
import time

import pytest
import torch
from common import TinyMLP
from composer import Callback, Evaluator, Trainer
from composer.callbacks import CheckpointSaver, LoadCheckpoint
from composer.loggers import InMemoryLogger
from composer_jobs import (
    STREAMING,
    BufferedModel,
    Evaluated,
    TinyModel,
    callback_of,
    data,
    final_theta,
    fit,
    fit_alone,
    read_checkpoint,
    saving,
    train_and_save,
    trainer_of,
)
from run_events import events_of, result_of
from torch.utils._pytree import keystr, tree_flatten_with_path

from composer_replication.callback import DiLoCoCallback
from composer_replication.coordinator.server import Coordinator
from composer_replication.diloco import block_cuts
from composer_replication.settings import DiLoCoSettings
from composer_replication.simulation import SimulationError, simulate

pytestmark = pytest.mark.slow


class Thetas(Callback):
    """Remembers the global and local parameters after every batch."""

    def __init__(self, diloco):
        self._diloco = diloco
        self.seen = {}

    def batch_end(self, state, logger):
        copies = {n: t.clone() for n, t in self._diloco.diloco.global_parameters().items()}
        local = {n: p.detach().clone() for n, p in state.model.named_parameters()}
        self.seen[state.timestamp.batch.value] = copies, local


class Losses(Callback):
    """The loss and the local weights after every batch."""

    def __init__(self):
        self.seen = []

    def batch_end(self, state, logger):
        weights = [p.detach().clone() for p in state.model.parameters()]
        self.seen.append((float(state.loss.detach()), weights))


# ---- the saved model -------------------------------------------------------------------------


@pytest.mark.parametrize("saver_first", [False, True])
def test_the_saved_model_is_the_global_one_wherever_the_saver_stands(tmp_path, saver_first):
    def replica(sim):
        saver = CheckpointSaver(f"{tmp_path}/{sim.replica_id}", "ba{batch}.pt", save_interval="3ba")
        callback = callback_of(sim, **STREAMING)
        thetas = Thetas(callback)
        callbacks = [saver, callback, thetas] if saver_first else [callback, thetas, saver]
        trainer = trainer_of(*callbacks, replica_id=sim.replica_id, max_duration="6ba")
        trainer.fit()
        trainer.close()
        return thetas.seen

    for replica_id, seen in enumerate(simulate(replica, num_replicas=2)):
        for batch, (theta, local) in seen.items():
            if batch % 3:
                continue
            saved = read_checkpoint(tmp_path / f"{replica_id}" / f"ba{batch}.pt")["state"]
            own = saved["callbacks"]["DiLoCoCallback"]["local"]
            assert saved["model"].keys() == theta.keys() == own.keys()
            assert all(torch.equal(saved["model"][name], value) for name, value in theta.items())
            assert all(torch.equal(own[name], value) for name, value in local.items())
            assert not all(torch.equal(theta[name], value) for name, value in local.items())


def test_composer_without_our_callback_and_torch_alone_load_the_global_weights(tmp_path):
    [(callback, _)] = train_and_save(tmp_path, num_replicas=1, max_duration="8ba", interval="8ba")
    path = tmp_path / "0" / "ba8.pt"
    model = TinyModel(seed=9)
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        device="cpu",
        load_path=str(path),
        progress_bar=False,
        auto_log_hparams=False,
    )
    trainer.close()
    theta = final_theta(callback)
    assert all(torch.equal(p, theta[name]) for name, p in model.named_parameters())
    weights = torch.load(path, weights_only=False)["state"]["model"]
    TinyModel().load_state_dict(weights)  # strict
    assert all(torch.equal(weights[name], value) for name, value in theta.items())


def test_what_is_ours_in_it_needs_no_leave_to_be_unpickled(tmp_path):
    # Composer 0.32 itself puts timedeltas, a torch version and numpy arrays beside the tensors, for
    # which plain weights_only refuses its every file; 0.33 allows these.
    train_and_save(tmp_path, num_replicas=1, diloco=STREAMING, max_duration="6ba", interval="6ba")
    path = tmp_path / "0" / "ba6.pt"
    whole = torch.load(path, weights_only=False)["state"]
    ours = {"model": whole["model"], "diloco": whole["callbacks"]["DiLoCoCallback"]}
    assert ours["diloco"]["in_flight"]
    torch.save(ours, tmp_path / "ours.pt")
    torch.load(tmp_path / "ours.pt", weights_only=True)

    alone = trainer_of(max_duration="1ba", save_folder=str(tmp_path), save_filename="alone.pt")
    alone.fit()
    alone.close()
    unsafe = torch.serialization.get_unsafe_globals_in_checkpoint
    assert set(unsafe(path)) == set(unsafe(tmp_path / "alone.pt"))


def test_fp32_weights_are_in_the_file_once(tmp_path):
    train_and_save(tmp_path, num_replicas=1, max_duration="4ba", interval="4ba")
    saved = read_checkpoint(tmp_path / "0/ba4.pt")["state"]
    ours = saved["callbacks"]["DiLoCoCallback"]
    # The global parameters are the model; the inner optimizer's state is Composer's.
    assert ours.keys() == {"progress", "in_flight", "local", "momentum"}
    stored = [
        t for part in (saved["model"], ours["local"], ours["momentum"]) for t in part.values()
    ]
    num_bytes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in stored}
    assert sum(num_bytes.values()) == 3 * 4 * sum(p.numel() for p in TinyMLP().parameters())


# ---- evaluation --------------------------------------------------------------------------------


def evaluating(sim, interval, *callbacks, diloco=None, model=Evaluated, **arguments):
    callback = callback_of(sim, **STREAMING | (diloco or {}))
    trainer = trainer_of(
        callback,
        *callbacks,
        model=model,
        replica_id=sim.replica_id,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        eval_dataloader=Evaluator(label="eval", dataloader=data(7), metric_names=["Mean*"]),
        eval_interval=interval,
        max_duration="14ba",
        **arguments,
    )
    trainer.fit()
    return callback, trainer


def loss_of(weights):
    model = TinyModel()
    model.load_state_dict(weights)
    parts = [(model(batch), batch[1]) for batch in data(7)]
    return torch.nn.functional.mse_loss(*(torch.cat(part) for part in zip(*parts, strict=True)))


@pytest.mark.parametrize("interval", ["7ba", "5ba"])  # the last one in the fit, or after fit_end
def test_the_result_of_any_job_has_its_last_evaluation(tmp_path, interval):
    def replica(sim):
        callback, trainer = evaluating(sim, interval, diloco={"run_dir": str(tmp_path)})
        seen = float(trainer.state.eval_metrics["eval"]["MeanSquaredError"].compute())
        trainer.close()
        return callback.result["eval"], seen

    ((reported, seen),) = simulate(replica, num_replicas=1)
    written = result_of(tmp_path / "replica_0")["eval"]
    assert reported == written == {"MeanSquaredError": seen}


def test_training_is_bitwise_the_same_with_and_without_evaluations():
    class Dropping(Evaluated):
        def forward(self, batch):
            return torch.nn.functional.dropout(super().forward(batch), 0.5, self.training)

    def replica(sim, interval):
        losses = Losses()
        callback, trainer = evaluating(sim, interval, losses, model=Dropping)
        trainer.close()
        return callback.result["global_digest"], losses.seen

    # One replica: the simulation's are threads, and torch has one generator for all of them.
    without, *others = (
        simulate(lambda sim, at=interval: replica(sim, at), num_replicas=1)[0]
        for interval in ("100ba", "1ba", "4ba")
    )
    for digest, seen in others:
        assert digest == without[0]
        assert [loss for loss, _ in seen] == [loss for loss, _ in without[1]]
        for (_, weights), (_, its) in zip(without[1], seen, strict=True):
            assert all(map(torch.equal, weights, its))


@pytest.mark.parametrize("eval_weights", ["global", "local"])
def test_the_evaluated_loss_is_that_of_the_saved_weights(tmp_path, eval_weights):
    def replica(sim):
        logged = InMemoryLogger()
        folder = saving(tmp_path, sim, "1ba")
        diloco = {"eval_weights": eval_weights}
        _, trainer = evaluating(sim, "1ba", diloco=diloco, loggers=[logged], **folder)
        trainer.close()
        return [float(v) for _, v in logged.data["metrics/eval/MeanSquaredError"]]

    for replica_id, evaluated in enumerate(simulate(replica, num_replicas=2)):
        losses = []
        for batch in range(1, 15):
            saved = read_checkpoint(tmp_path / f"{replica_id}" / f"ba{batch}.pt")["state"]["model"]
            losses.append(loss_of(saved).item())
        same = [a == pytest.approx(b, rel=1e-6) for a, b in zip(evaluated, losses, strict=False)]
        assert all(same[:14]) if eval_weights == "global" else sum(same) < 4


@pytest.mark.parametrize("final_sync", [True, False])
def test_after_the_fit_evaluators_and_savers_see_the_global_weights(tmp_path, final_sync):
    def replica(sim):
        callback, trainer = evaluating(sim, "100ba", diloco={"final_sync": final_sync})
        theta = final_theta(callback)
        before = {n: p.detach().clone() for n, p in trainer.state.model.named_parameters()}
        trainer.eval()
        seen = float(trainer.state.eval_metrics["eval"]["MeanSquaredError"].compute())
        trainer.save_checkpoint(str(tmp_path / "after.pt"))
        after = dict(trainer.state.model.named_parameters())
        assert all(torch.equal(after[name], value) for name, value in before.items())
        assert final_sync == all(torch.equal(after[name], value) for name, value in theta.items())
        trainer.close()
        return theta, seen

    [(theta, seen)] = simulate(replica, num_replicas=1)
    assert seen == pytest.approx(loss_of({n: t for n, t in theta.items()}).item(), rel=1e-6)
    saved = read_checkpoint(tmp_path / "after.pt")["state"]["model"]
    assert all(torch.equal(saved[name], value) for name, value in theta.items())


# ---- going on ----------------------------------------------------------------------------------


def test_a_run_whose_end_is_put_off_goes_on_as_if_it_had_never_ended(tmp_path):
    # Saved before the final sync, which the longer run does not have there.
    diloco = STREAMING
    whole = train_and_save(tmp_path / "whole", diloco=diloco, max_duration="13ba")
    train_and_save(tmp_path, diloco=diloco, max_duration="6ba")

    def replica(sim):
        path = str(tmp_path / f"{sim.replica_id}" / "ba6.pt")
        return fit(sim, diloco=diloco, load_path=path, max_duration="13ba")

    for (one, its), (other, theirs) in zip(whole, simulate(replica, num_replicas=2), strict=True):
        assert one.result["global_digest"] == other.result["global_digest"]
        assert its.state.timestamp.batch == theirs.state.timestamp.batch == 13


def ours_in(path):
    """DiLoCo's part of a checkpoint, as one flat mapping of plain values and tensors."""
    ours = dict(read_checkpoint(path)["state"]["callbacks"]["DiLoCoCallback"])
    ours["progress"] = json.loads(ours["progress"])
    leaves, _ = tree_flatten_with_path(ours)
    return {keystr(path): leaf for path, leaf in leaves}


# Where a run is stopped its momentum is 0 or has just come back.
SCHEDULED = STREAMING | {
    "schedule": [
        {"outer_step": 1, "outer_lr": 0.5, "outer_momentum": 0.0},
        {"outer_step": 3, "outer_lr": 0.7, "outer_momentum": 0.9},
    ]
}


@pytest.mark.parametrize(
    ("diloco", "model"),
    [
        (STREAMING | {"wire_format": "int8"}, BufferedModel),
        (SCHEDULED, TinyModel),
    ],
    ids=["buffers", "scheduled"],
)
def test_what_a_resumed_run_saves_is_what_the_uninterrupted_one_saves(tmp_path, diloco, model):
    job = {"diloco": diloco, "model": model, "max_duration": "15ba"}
    train_and_save(tmp_path, **job)

    def replica(sim, start):
        path = str(tmp_path / f"{sim.replica_id}" / f"ba{start}.pt")
        folder = saving(tmp_path / "resumed", sim) | {"save_overwrite": True}
        return fit(sim, load_path=path, **job, **folder)

    for start in (3, 6):  # 6 is in mid-round, and has a sync in flight where there is a delay
        simulate(lambda sim, start=start: replica(sim, start), num_replicas=2)
        for replica_id in range(2):
            for batch in range(start + 3, 16, 3):
                whole = ours_in(tmp_path / f"{replica_id}/ba{batch}.pt")
                resumed = ours_in(tmp_path / f"resumed/{replica_id}/ba{batch}.pt")
                assert whole.keys() == resumed.keys()
                for key, value in whole.items():
                    is_tensor = isinstance(value, torch.Tensor)
                    same = torch.equal if is_tensor else operator.eq
                    assert same(value, resumed[key]), (start, batch, key)


def test_groups_that_have_waited_long_for_others_take_over_from_a_newer_checkpoint(tmp_path):
    train_and_save(tmp_path, num_replicas=3, max_duration="12ba")
    have_waited = threading.Event()
    attempts = itertools.count()

    def replica(sim):
        start = 12 if sim.replica_id == 2 else 3
        path = str(tmp_path / f"{sim.replica_id}" / f"ba{start}.pt")
        callback = callback_of(sim, sync_every=4)
        arguments = {"load_path": path, "max_duration": "20ba"}
        trainer = trainer_of(callback, replica_id=sim.replica_id, **arguments)
        if sim.replica_id == 2:
            sim.manager.shutdown()
            assert have_waited.wait(100)
            sim.manager._network.rejoin(2)
        else:
            asked = sim.manager.start_quorum

            def start_quorum():
                if next(attempts) > 12:
                    have_waited.set()
                asked()

            sim.manager.start_quorum = start_quorum
        trainer.fit()
        trainer.close()
        return callback.result["outer_steps"], callback.result["inner_steps"]

    waited, also, newest = simulate(replica, num_replicas=3)
    assert newest == (5, 20)  # three before, and two of its own
    assert waited[0] == also[0] == 5


@pytest.mark.parametrize("batches", [(9, 3), (9, 6), (6, 9)])
def test_groups_whose_newest_checkpoints_differ_end_together(tmp_path, batches):
    train_and_save(tmp_path, diloco=STREAMING, max_duration="9ba")

    def replica(sim):
        path = str(tmp_path / f"{sim.replica_id}" / f"ba{batches[sim.replica_id]}.pt")
        callback, trainer = fit(sim, diloco=STREAMING, load_path=path, max_duration="16ba")
        return callback.result, int(trainer.state.timestamp.batch)

    (one, one_batch), (other, other_batch) = simulate(replica, num_replicas=2)
    assert one_batch == other_batch == 16
    for key in ("global_digest", "outer_steps"):
        assert one[key] == other[key]


def test_a_start_and_a_resume_say_how_far_the_process_before_had_come(tmp_path):
    diloco = {"run_dir": str(tmp_path / "run")}
    began = time.time()
    train_and_save(tmp_path, num_replicas=1, max_duration="9ba", diloco=diloco)
    ended = time.time()

    def replica(sim):
        return fit(sim, diloco=diloco, load_path=str(tmp_path / "0/ba3.pt"), max_duration="9ba")

    simulate(replica, num_replicas=1)
    first, second = events_of(tmp_path / "run/replica_0", "start")
    assert first["started"] <= began <= first["joined"] <= ended <= second["joined"]
    assert (first["inner_steps"], first["trained_at"], first["steps_before"]) == (0, None, 0)
    assert first["joined"] <= second["trained_at"] <= ended
    assert (second["inner_steps"], second["steps_before"]) == (3, 9)
    (resume,) = events_of(tmp_path / "run/replica_0", "resume")
    again = {"batches_again": 6, "outer_steps_again": 3}
    assert {"batch": 3, "outer_step": 0} | again == {
        name: value for name, value in resume.items() if name not in ("time", "event")
    }


# ---- never from nothing by accident -----------------------------------------------------------


def test_a_run_that_has_begun_is_not_begun_anew_without_a_word(tmp_path):
    run_dir = str(tmp_path / "run")
    saved = saving(tmp_path, type("Sim", (), {"replica_id": 0}))
    simulate(
        lambda sim: fit(sim, diloco={"run_dir": run_dir}, max_duration="9ba", **saved),
        num_replicas=1,
    )

    def replica(sim):
        arguments = saved | {"save_overwrite": True}
        return fit(sim, diloco={"run_dir": run_dir}, max_duration="9ba", **arguments)

    with pytest.raises(
        SimulationError, match="NothingToContinueFromError: 1 of 1 replica"
    ) as caught:
        simulate(replica, num_replicas=1)
    told = str(caught.value)
    assert f"{run_dir} says that this run has made 3 outer steps" in told
    assert f"load_path={tmp_path}/0/latest-rank0.pt" in told
    # With that, it goes on.
    arguments = {"load_path": str(tmp_path / "0/latest-rank0.pt"), "max_duration": "12ba"}
    [(callback, _)] = simulate(
        lambda sim: fit(sim, diloco={"run_dir": run_dir}, **arguments), num_replicas=1
    )
    assert callback.result["inner_steps"] == 12


# ---- bad state -------------------------------------------------------------------------------


def without_ours(path):
    saved = torch.load(path, weights_only=False)
    del saved["state"]["callbacks"]["DiLoCoCallback"]
    torch.save(saved, path)


def of_another_format(path):
    saved = torch.load(path, weights_only=False)
    ours = saved["state"]["callbacks"]["DiLoCoCallback"]
    ours["progress"] = ours["progress"].replace('"format": 3', '"format": 99')
    torch.save(saved, path)


def without_a_parameter(path):
    saved = torch.load(path, weights_only=False)
    del saved["state"]["callbacks"]["DiLoCoCallback"]["local"]["mlp.layers.0.bias"]
    torch.save(saved, path)


def with_a_scrambled_sync_in_flight(path):
    saved = torch.load(path, weights_only=False)
    saved["state"]["callbacks"]["DiLoCoCallback"]["in_flight"] = "scrambled"
    torch.save(saved, path)


BAD = [
    (without_ours, "it is of batch 3 and has no DiLoCo state"),
    (of_another_format, "its format is 99 and this version reads 3"),
    (
        without_a_parameter,
        "mlp.layers.0.bias is only in the model: the checkpoint is",
    ),
    (with_a_scrambled_sync_in_flight, "its sync in flight cannot be read"),
]


@pytest.mark.parametrize(("damage", "message"), BAD)
def test_bad_state_is_an_error_before_any_peer_hears_of_it(tmp_path, monkeypatch, damage, message):
    train_and_save(tmp_path, num_replicas=1)
    path = tmp_path / "0" / "ba3.pt"
    damage(path)
    connect = "composer_replication.group.replica_group.make_manager"
    monkeypatch.setattr(connect, lambda **_: pytest.fail("a manager was built"))
    callback = DiLoCoCallback(sync_every=4, replica_id=0, lighthouse_addr="http://nowhere:1")
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        trainer_of(callback, load_path=str(path), max_duration="6ba").fit()
    assert "load_weights_only: true" in str(caught.value) and str(path) in str(caught.value)


def test_other_fragments_than_the_checkpoint_s_are_refused_with_both(tmp_path):
    train_and_save(tmp_path, num_replicas=1)
    callback = DiLoCoCallback(sync_every=4, num_fragments=2, replica_id=0)
    with pytest.raises(ValueError, match="num_fragments: 2 here, 1 there"):
        trainer_of(callback, load_path=str(tmp_path / "0/ba3.pt"), max_duration="6ba").fit()


def test_buffers_that_were_each_group_s_own_stay_so_and_without_any_nothing_changes(
    tmp_path,
):
    own = {"sync_buffers": "none"}
    for model in (BufferedModel, TinyModel):
        train_and_save(tmp_path / model.__name__, num_replicas=1, diloco=own, model=model)
    refused, adopted = (f"{tmp_path}/{name}/0/ba3.pt" for name in ("BufferedModel", "TinyModel"))
    callback = DiLoCoCallback(sync_every=4, replica_id=0)
    with pytest.raises(ValueError, match="sync_buffers: 'mean' here, 'none' there") as caught:
        trainer_of(callback, load_path=refused, model=BufferedModel, max_duration="6ba").fit()
    assert "Use the settings that it was saved with" in str(caught.value)
    callback, _ = fit_alone("6ba", load_path=adopted)
    assert callback.result["inner_steps"] == 6


def test_a_model_that_is_cut_at_other_blocks_than_the_checkpoint_s_is_refused(
    tmp_path, monkeypatch
):
    diloco = {"sync_every": 4, "num_fragments": 2}
    train_and_save(tmp_path, num_replicas=1, diloco=diloco)
    callback = DiLoCoCallback(**diloco, replica_id=0)
    path = str(tmp_path / "0/ba3.pt")
    trainer = trainer_of(callback, load_path=path, max_duration="6ba")
    monkeypatch.setattr(block_cuts, "balanced_cuts", lambda sizes, parts: [2])
    message = "fragment 1 begins with mlp.layers.2.weight, and with mlp.layers.4.weight here"
    with pytest.raises(ValueError, match=message):
        trainer.fit()


@pytest.mark.integration
def test_under_a_coordinator_a_checkpoint_may_be_loaded_at_init(tmp_path):
    """Its settings are known only later, at BEFORE_LOAD."""
    train_and_save(tmp_path, num_replicas=1)
    settings = DiLoCoSettings(sync_every=4)
    coordinator = Coordinator(
        settings, "x.yaml", num_replicas=1, state_dir=tmp_path / "state", bind="127.0.0.1:0"
    )
    try:
        callback = DiLoCoCallback(
            coordinator_addr=coordinator.address, replica_id=0, hostname="127.0.0.1"
        )
        loads = LoadCheckpoint(str(tmp_path / "0" / "ba3.pt"), event="INIT")
        trainer = trainer_of(loads, callback, max_duration="8ba")
        trainer.fit()
        trainer.close()
    finally:
        coordinator.shutdown()
    assert callback.result["inner_steps"] == 8 and callback.result["outer_steps"] == 2
