"""Checkpoints of a Composer job under DiLoCo. Run: pytest tests/callback/test_resume.py

Real: Composer's Trainer, savers and checkpoints in ``tmp_path``. The network is the simulation's;
in tests/integration/test_resume.py it is real, and so is FSDP.
"""

import re
import time

import pytest
import torch
from common import TinyMLP, are_equal, parameters_of
from composer import Callback, Evaluator
from composer.algorithms import EMA
from composer.callbacks import CheckpointSaver, LoadCheckpoint
from composer.loggers import InMemoryLogger
from harness.failed_start import failed_start, of_each_place
from harness.groups import adamw
from harness.trainers import (
    STREAMING,
    BufferedModel,
    Evaluated,
    TinyModel,
    callback_of,
    data,
    fit_alone,
    fit_groups,
    part_of,
    saving,
    train,
    train_and_save,
    trainer_of,
)
from run_events import events_of, result_of

from composer_replication import ReplicaDataLoader
from composer_replication.callback import DiLoCoCallback
from composer_replication.coordinator.server import Coordinator
from composer_replication.diloco import fragments
from composer_replication.group.save_folder import hold, release
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
        self.seen[state.timestamp.batch.value] = copies, parameters_of(state.model)


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
        for batch in (3, 6):
            theta, local = seen[batch]
            model, ours = part_of(tmp_path / f"{replica_id}/ba{batch}.pt")
            assert are_equal(model, theta) and are_equal(ours["local"], local)
            assert not are_equal(theta, local)


def test_composer_without_our_callback_loads_the_global_weights(tmp_path):
    [fit] = train_and_save(tmp_path, Thetas, num_replicas=1, interval="6ba")
    theta, _ = fit.others[0].seen[6]
    trainer = trainer_of(replica_id=9, load_path=str(tmp_path / "0/ba6.pt"))
    trainer.close()
    assert are_equal(theta, parameters_of(trainer.state.model))


def test_what_is_ours_in_it_needs_no_leave_to_be_unpickled(tmp_path):
    # Composer 0.32 itself puts timedeltas, a torch version and numpy arrays beside the tensors, for
    # which plain weights_only refuses its every file; 0.33 allows these.
    train_and_save(tmp_path, num_replicas=1, diloco=STREAMING, max_duration="6ba", interval="6ba")
    path = tmp_path / "0" / "ba6.pt"
    model, ours = part_of(path)
    assert ours["in_flight"]
    torch.save([model, ours], tmp_path / "ours.pt")
    torch.load(tmp_path / "ours.pt", weights_only=True)

    alone = trainer_of(max_duration="1ba", save_folder=str(tmp_path), save_filename="alone.pt")
    alone.fit()
    alone.close()
    unsafe = torch.serialization.get_unsafe_globals_in_checkpoint
    assert set(unsafe(path)) == set(unsafe(tmp_path / "alone.pt"))


def test_fp32_weights_are_in_the_file_once(tmp_path):
    train_and_save(tmp_path, num_replicas=1, max_duration="4ba", interval="4ba")
    model, ours = part_of(tmp_path / "0/ba4.pt")
    # The global parameters are the model; the inner optimizer's state is Composer's.
    assert ours.keys() == {"progress", "in_flight", "local", "momentum"}
    stored = [t for part in (model, ours["local"], ours["momentum"]) for t in part.values()]
    num_bytes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in stored}
    assert sum(num_bytes.values()) == 3 * 4 * sum(p.numel() for p in TinyMLP().parameters())


# ---- evaluation --------------------------------------------------------------------------------


def evaluating(interval, **arguments):
    """Arguments of a Trainer that evaluates."""
    evaluator = Evaluator(label="eval", dataloader=data(7), metric_names=["Mean*"])
    return {
        "model": Evaluated,
        "optimizer": adamw,
        "eval_dataloader": evaluator,
        "eval_interval": interval,
        "max_duration": "14ba",
    } | arguments


def loss_seen_by(trainer):
    return float(trainer.state.eval_metrics["eval"]["MeanSquaredError"].compute())


def loss_of(weights):
    model = TinyModel()
    model.load_state_dict(weights)
    parts = [(model(batch), batch[1]) for batch in data(7)]
    return torch.nn.functional.mse_loss(*(torch.cat(part) for part in zip(*parts, strict=True)))


@pytest.mark.parametrize("interval", ["7ba", "5ba"])  # the last one in the fit, or after fit_end
def test_the_result_of_any_job_has_its_last_evaluation(tmp_path, interval):
    fit = fit_alone(diloco=STREAMING | {"run_dir": str(tmp_path)}, **evaluating(interval))
    written = result_of(tmp_path / "replica_0")["eval"]
    assert fit.result["eval"] == written == {"MeanSquaredError": loss_seen_by(fit.trainer)}


def test_training_is_bitwise_the_same_with_and_without_evaluations():
    class Dropping(Evaluated):
        def forward(self, batch):
            return torch.nn.functional.dropout(super().forward(batch), 0.5, self.training)

    # One replica: the simulation's are threads, and torch has one generator for all of them.
    without, *others = (
        fit_alone(Thetas, diloco=STREAMING, **evaluating(interval, model=Dropping))
        for interval in ("100ba", "1ba", "4ba")
    )
    for fit in others:
        assert fit.digest == without.digest
        for (_, weights), (_, its) in zip(*map(seen_by, (without, fit)), strict=True):
            assert are_equal(weights, its)


def seen_by(fit):
    [thetas] = fit.others
    return thetas.seen.values()


@pytest.mark.parametrize("eval_weights", ["global", "local"])
def test_the_evaluated_loss_is_that_of_the_saved_weights(tmp_path, eval_weights):
    logged = [InMemoryLogger(), InMemoryLogger()]

    def own(group):
        return evaluating("1ba", loggers=[logged[group]]) | saving(tmp_path, group, "1ba")

    fit_groups(2, own=own, diloco=STREAMING | {"eval_weights": eval_weights})
    for group in range(2):
        evaluated = [float(v) for _, v in logged[group].data["metrics/eval/MeanSquaredError"]]
        same = [
            evaluated[batch - 1] == pytest.approx(loss_of(part_of(path)[0]).item(), rel=1e-6)
            for batch in range(1, 15)
            if (path := tmp_path / f"{group}/ba{batch}.pt")
        ]
        assert all(same) if eval_weights == "global" else sum(same) < 4


@pytest.mark.parametrize("final_sync", [True, False])
def test_after_the_fit_evaluators_and_savers_see_the_global_weights(tmp_path, final_sync):
    def replica(sim):
        callback = callback_of(sim, **STREAMING | {"final_sync": final_sync})
        thetas = Thetas(callback)
        trainer = trainer_of(callback, thetas, **evaluating("100ba"))
        trainer.fit()
        model = trainer.state.model
        before = parameters_of(model)
        theta = before if final_sync else thetas.seen[14][0]
        trainer.eval()
        trainer.save_checkpoint(str(tmp_path / "after.pt"))
        assert are_equal(before, parameters_of(model))
        assert final_sync == are_equal(before, theta)
        trainer.close()
        return theta, loss_seen_by(trainer)

    [(theta, seen)] = simulate(replica, num_replicas=1)
    assert seen == pytest.approx(loss_of(theta).item(), rel=1e-6)
    assert are_equal(part_of(tmp_path / "after.pt")[0], theta)


# ---- going on ----------------------------------------------------------------------------------


@pytest.mark.parametrize("batches", [(9, 9), (9, 3), (9, 6), (6, 9)])
def test_groups_whose_newest_checkpoints_differ_or_end_a_run_end_together(tmp_path, batches):
    # That of batch 9 was saved before the final sync, which the longer run does not have there.
    train_and_save(tmp_path, diloco=STREAMING, max_duration="9ba")

    def own(group):
        return {"load_path": tmp_path / f"{group}/ba{batches[group]}.pt"}

    one, other = fit_groups(2, own=own, diloco=STREAMING, max_duration="16ba")
    for fit in (one, other):
        assert fit.trainer.state.timestamp.batch == 16
        assert fit.digest == one.digest and fit.result["outer_steps"] == one.result["outer_steps"]
    if batches == (9, 9):
        whole, _ = fit_groups(2, diloco=STREAMING, max_duration="16ba")
        assert one.digest == whole.digest


def test_a_start_and_a_resume_say_how_far_the_process_before_had_come(tmp_path):
    diloco = {"run_dir": str(tmp_path / "run"), "sync_every": 4}
    began = time.time()
    train_and_save(tmp_path, num_replicas=1, max_duration="9ba", diloco=diloco)
    ended = time.time()
    fit_alone(diloco=diloco, load_path=tmp_path / "0/ba3.pt", max_duration="9ba")
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


# ---- a start that fails ----------------------------------------------------------------------


@of_each_place
@pytest.mark.parametrize("algorithms", [[], [EMA(half_life="2ba")]], ids=["plain", "EMA"])
@pytest.mark.filterwarnings("ignore")
def test_a_fit_after_a_start_that_failed_still_continues_from_the_checkpoint(
    where, algorithms, tmp_path
):
    def train_to(end, fails=False, **arguments):
        callback = DiLoCoCallback(num_replicas=1, **STREAMING)
        loader = ReplicaDataLoader(data().dataset, 8, dataset_id="d", unit_size=8)
        own = {"train_dataloader": loader, "algorithms": algorithms, "max_duration": end}
        trainer = trainer_of(callback, **own, **arguments)
        if fails:
            with failed_start(where):
                trainer.fit()
            trainer.save_checkpoint(str(tmp_path / "failed.pt"))
        trainer.fit()
        trainer.close()
        return callback.result

    train_to("7ba", **saving(tmp_path, 0, "7ba"))
    path = str(tmp_path / "0/ba7.pt")  # one fragment is in flight
    expected = train_to("14ba", load_path=path)
    assert train_to("14ba", fails=True, load_path=path) == expected
    assert train_to("14ba", load_path=str(tmp_path / "failed.pt")) == expected


def test_after_a_start_that_failed_another_process_may_save_in_the_folder(tmp_path):
    callback, other = DiLoCoCallback(replica_id=0, num_replicas=1), object()
    trainer = trainer_of(callback, max_duration="2ba", **saving(tmp_path, 0))
    with failed_start():
        trainer.fit()
    hold([f"{tmp_path}/0"], "1", other, "a save_folder")  # no error
    release(other)
    trainer.fit()
    with pytest.raises(ValueError, match="is in use by process"):
        hold([f"{tmp_path}/0"], "1", other, "a save_folder")
    trainer.close()


# ---- never from nothing by accident -----------------------------------------------------------


def test_a_run_that_has_begun_is_not_begun_anew_without_a_word(tmp_path):
    job = {"diloco": {"run_dir": str(tmp_path / "run"), "sync_every": 4}}
    saved = saving(tmp_path, 0)
    fit_alone(max_duration="9ba", **job, **saved)
    with pytest.raises(
        SimulationError, match="NothingToContinueFromError: 1 of 1 replica"
    ) as caught:
        fit_alone(max_duration="9ba", **job, **saved, save_overwrite=True)
    message = str(caught.value)
    assert f"{tmp_path / 'run'} says that this run has made 3 outer steps" in message
    latest = f"{tmp_path}/0/ba9.pt"
    assert f"load_path={latest}" in message
    # With that, it goes on.
    fit = fit_alone(max_duration="12ba", load_path=latest, **job)
    assert fit.result["inner_steps"] == 12


# ---- bad state -------------------------------------------------------------------------------


def to_another_format(callbacks):
    ours = callbacks["DiLoCoCallback"]
    ours["progress"] = ours["progress"].replace('"format": 3', '"format": 99')


BAD = [
    (dict.clear, "it is of batch 3 and has no DiLoCo state"),
    (to_another_format, "its format is 99 and this version reads 3"),
    (
        lambda callbacks: callbacks["DiLoCoCallback"]["local"].pop("mlp.layers.0.bias"),
        "mlp.layers.0.bias is only in the model: the checkpoint is",
    ),
    (
        lambda callbacks: callbacks["DiLoCoCallback"].update(in_flight="scrambled"),
        "its sync in flight cannot be read",
    ),
]
"""What is done to the callbacks' parts of a checkpoint, and what is said then."""


@pytest.mark.parametrize(("damage", "message"), BAD)
def test_bad_state_is_an_error_before_any_peer_hears_of_it(tmp_path, monkeypatch, damage, message):
    train_and_save(tmp_path, num_replicas=1)
    path = tmp_path / "0/ba3.pt"
    saved = torch.load(path, weights_only=False)
    damage(saved["state"]["callbacks"])
    torch.save(saved, path)
    connect = "composer_replication.group.replica_group.connect"
    monkeypatch.setattr(connect, lambda _: pytest.fail("a manager was built"))
    callback = DiLoCoCallback(replica_id=0, lighthouse_addr="http://nowhere:1", sync_every=2)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        trainer_of(callback, load_path=str(path), max_duration="6ba").fit()
    assert "load_weights_only: true" in str(caught.value) and str(path) in str(caught.value)


def test_buffers_that_were_each_group_s_own_stay_so_and_without_any_nothing_changes(
    tmp_path,
):
    for model in (BufferedModel, TinyModel):
        diloco = {"sync_buffers": "none"}
        train_and_save(tmp_path / model.__name__, num_replicas=1, diloco=diloco, model=model)
    refused, adopted = (f"{tmp_path}/{name}/0/ba3.pt" for name in ("BufferedModel", "TinyModel"))
    callback = DiLoCoCallback(sync_every=2, replica_id=0)
    with pytest.raises(ValueError, match="sync_buffers: 'mean' here, 'none' there") as caught:
        trainer_of(callback, load_path=refused, model=BufferedModel, max_duration="6ba").fit()
    assert "Use the settings that it was saved with" in str(caught.value)
    assert fit_alone(max_duration="6ba", load_path=adopted).result["inner_steps"] == 6


def test_a_model_that_is_cut_at_other_blocks_than_the_checkpoint_s_is_refused(
    tmp_path, monkeypatch
):
    diloco = {"sync_every": 4, "num_fragments": 2}
    train_and_save(tmp_path, num_replicas=1, diloco=diloco)
    callback = DiLoCoCallback(**diloco, replica_id=0)
    path = str(tmp_path / "0/ba3.pt")
    trainer = trainer_of(callback, load_path=path, max_duration="6ba")
    monkeypatch.setattr(fragments, "balanced_cuts", lambda sizes, parts: [2])
    message = "fragment 1 begins with mlp.layers.2.weight, and with mlp.layers.4.weight here"
    with pytest.raises(ValueError, match=message):
        trainer.fit()


@pytest.mark.integration
def test_under_a_coordinator_a_checkpoint_may_be_loaded_at_init(tmp_path):
    """Its settings are known only later, at BEFORE_LOAD."""
    train_and_save(tmp_path, num_replicas=1, diloco={"sync_every": 4})
    service = {"num_replicas": 1, "state_dir": tmp_path / "state", "bind": "127.0.0.1:0"}
    coordinator = Coordinator(DiLoCoSettings(sync_every=4), "x.yaml", **service)
    try:
        callback = DiLoCoCallback(
            coordinator_addr=coordinator.address, replica_id=0, hostname="127.0.0.1"
        )
        loads = LoadCheckpoint(str(tmp_path / "0" / "ba3.pt"), event="INIT")
        fit = train(callback, loads, max_duration="8ba")
    finally:
        coordinator.shutdown()
    assert (fit.result["inner_steps"], fit.result["outer_steps"]) == (8, 2)
