"""What Hugging Face's Trainer is used with, alone. Run: pytest tests/hosts/test_hf_alone.py"""

from __future__ import annotations

import functools
import logging
import math
import os
import shutil
import subprocess
from concurrent.futures import Future
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from run_events import events_of, syncs_of

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from common import TinyMLP, batch, parameters_of  # noqa: E402
from harness.failed_start import failed_start, of_each_place  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers import TrainerCallback  # noqa: E402

from composer_replication.group.checkpoint_files import problem_of  # noqa: E402
from composer_replication.group.save_folder import hold, release  # noqa: E402
from composer_replication.hf import DiLoCoTrainerCallback  # noqa: E402
from hosts.hf_trainers import (  # noqa: E402
    At,
    WithLoss,
    alone,
    arguments_of,
    rows_of,
    trainer_of,
)
from hosts.host import own_batches  # noqa: E402

# ---- what cannot be a group -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "changed", "message"),
    [
        ("args", {"auto_find_batch_size": True}, "auto_find_batch_size.*: set the batch size"),
        (
            "args",
            {"optim": "galore_adamw_layerwise"},
            "optim='galore_adamw_layerwise', which steps",
        ),
        ("args", {"optim": "adalomo"}, "optim='adalomo', which steps inside of backward: use one"),
        ("args", {"_n_gpu": 2}, "nn.DataParallel over 2 GPUs: start the job with torchrun"),
        ("trainer", {"is_deepspeed_enabled": True}, "DeepSpeed: use DDP or FSDP2"),
        (
            "state",
            {"parallelism_config": SimpleNamespace(non_data_parallel_size=2)},
            "tensor, context or sequence parallelism: use DDP or FSDP2",
        ),
        ("trainer", {"is_fsdp_enabled": True}, r"FSDP version 1: set fsdp_config=\{'version': 2\}"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_a_group_is_refused_before_any_peer_waits(
    where, changed, message, tmp_path, monkeypatch
):
    trainer = alone(tmp_path)

    class Changes(TrainerCallback):
        """At once before DiLoCo's callback: the Trainer itself would prepare what is not here."""

        def on_train_begin(self, args, state, control, **kwargs):
            state = trainer.accelerator.state
            owner = {"args": trainer.args, "trainer": trainer}.get(where, state)
            for name, value in changed.items():
                monkeypatch.setattr(owner, name, value)
            monkeypatch.setattr(state, "fsdp_plugin", None, raising=False)

    trainer.callback_handler.callbacks.insert(0, Changes())
    with pytest.raises(ValueError, match=f"^DiLoCo cannot train with {message}"):
        trainer.train()
    assert trainer.callback.diloco is None


class ScheduleFree(torch.optim.AdamW):
    """As in the package schedulefree: an evaluation is of other weights than a step."""

    def move(self):
        for parameter in self.param_groups[0]["params"]:
            parameter.data.mul_(0.9)

    eval = train = move


def test_an_optimizer_that_moves_weights_between_steps_is_refused_as_it_is(tmp_path):
    trainer = alone(tmp_path)
    trainer.optimizer = ScheduleFree(trainer.model.parameters())
    with pytest.raises(ValueError, match="^DiLoCo cannot train with ScheduleFree, .* as AdamW$"):
        trainer.train()
    assert trainer.callback.diloco is None


def test_a_second_callback_in_a_trainer_is_refused_before_a_group_joins(tmp_path):
    run = {"run_dir": str(tmp_path / "run")}
    trainer = alone(tmp_path, settings=run)
    trainer.add_callback(DiLoCoTrainerCallback(num_replicas=1, replica_id="0", **run))
    with pytest.raises(ValueError, match="^2 callbacks DiLoCoTrainerCallback in one Trainer: lea"):
        trainer.train()
    assert trainer.callback.diloco is None
    (rejection,) = events_of(tmp_path / "run" / "replica_0", "rejection")
    assert rejection["error"].startswith("2 callbacks")


def test_an_error_in_training_is_in_the_group_s_folder(tmp_path):
    trainer = alone(tmp_path, settings={"run_dir": str(tmp_path / "run")})

    def fail(*event):
        raise RuntimeError("no memory")

    trainer.training_step = fail
    with pytest.raises(RuntimeError, match="no memory"):
        trainer.train()
    (error,) = events_of(tmp_path / "run" / "replica_0", "error")
    assert (error["type"], error["error"]) == ("RuntimeError", "RuntimeError: no memory")


def test_a_checkpoint_without_diloco_s_part_is_refused(tmp_path):
    saves = {"save_strategy": "steps", "save_steps": 4}
    trainer_of(None, arguments_of(tmp_path, **saves)).train()
    with pytest.raises(ValueError, match="checkpoint-8: it is of batch 8 and has no DiLoCo state"):
        alone(tmp_path, args=saves).train(resume_from_checkpoint=True)


# ---- the loss of each sync --------------------------------------------------------------------


def losses_of_syncs(folder: Path, **more: Any) -> list[float | None]:
    """Of a training of 8 steps with a sync every 4, which logs nothing on its way."""
    alone(folder, settings={"run_dir": str(folder / "run")}, **more).train()
    return [sync["loss"] for sync in syncs_of(folder / "run" / "replica_0")]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_each_sync_has_the_mean_loss_of_its_steps_whatever_the_trainer_logs(tmp_path, accumulate):
    args = {"gradient_accumulation_steps": accumulate, "max_steps": 7}
    trainer = alone(tmp_path / "logs", args=args)
    trainer.train()
    each = [at["loss"] for at in trainer.state.log_history if "loss" in at]
    expected = [mean(each[:4]), mean(each[4:])]  # the last sync is of a part of a round
    for rare in ({"logging_steps": 500}, {"logging_strategy": "no"}, {"logging_steps": 3}):
        found = losses_of_syncs(tmp_path / str(rare), args={**args, **rare})
        assert found == pytest.approx(expected, rel=1e-4)


def test_a_loss_that_is_not_a_number_is_seen_though_the_trainer_filters_it(tmp_path):
    rows = rows_of(own_batches(0, 8))
    rows[5]["labels"] = rows[5]["labels"] * math.nan
    losses = losses_of_syncs(tmp_path, train_dataset=rows)
    assert sorted(map(math.isnan, losses)) == [False, True]


def test_a_second_training_counts_each_loss_once(tmp_path):
    trainer = alone(tmp_path, settings={"run_dir": str(tmp_path / "run")})
    trainer.train()
    trainer.train()
    losses = [sync["loss"] for sync in syncs_of(tmp_path / "run" / "replica_0")]
    each = [at["loss"] for at in trainer.state.log_history if "loss" in at]
    assert losses[2:] == pytest.approx([mean(each[:4]), mean(each[4:])], rel=1e-4)


class CannotLogOurs(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if "diloco/round" in logs:
            raise RuntimeError("the service is away")


def test_a_callback_that_cannot_log_a_sync_costs_nothing_else(tmp_path, caplog):
    run = {"run_dir": str(tmp_path / "run")}
    trainer = alone(tmp_path, CannotLogOurs(), settings=run)
    trainer.train()
    syncs = syncs_of(tmp_path / "run" / "replica_0")
    assert [sync["diloco/outer_step"] for sync in syncs] == [1, 2]
    steps = [at["step"] for at in trainer.state.log_history if "loss" in at]
    assert steps == [*range(1, 9)]  # those of the syncs' steps too
    assert "Cannot show the metrics of a sync in the Trainer's callbacks" in caplog.text


# ---- a group that was killed while it saved -------------------------------------------------

SAVES = {"save_strategy": "steps", "save_steps": 4, "max_steps": 12}


def saved(folder):
    """Train until checkpoints 4, 8 and 12 are there, and return the digest."""
    trainer = alone(folder, args=SAVES)
    trainer.train()
    shutil.rmtree(folder / "checkpoint-12")
    return trainer.callback.result["global_digest"]


@pytest.mark.parametrize("resume", [True, "checkpoint-8"])
@pytest.mark.parametrize(
    "name",
    ["diloco.pt", "model.safetensors", "optimizer.pt", "trainer_state.json", "rng_state.pth"],
)
@pytest.mark.parametrize("is_empty", [False, True])
def test_it_resumes_from_the_one_before_and_says_so(tmp_path, caplog, resume, name, is_empty):
    digest = saved(tmp_path)
    torn = tmp_path / "checkpoint-8" / name
    os.truncate(torn, 0 if is_empty else torn.stat().st_size // 2)
    trainer = alone(tmp_path, args=SAVES)
    with caplog.at_level(logging.WARNING, "composer_replication"):
        trainer.train(resume_from_checkpoint=resume is True or str(tmp_path / resume))
    assert trainer.callback.result["global_digest"] == digest
    assert trainer.callback.result["inner_steps"] == 12
    assert f"{tmp_path / 'checkpoint-8'} ({name} " in caplog.text
    assert "This group continues from checkpoint-4" in caplog.text
    assert (tmp_path / "torn-checkpoint-8").is_dir()


def test_with_nothing_whole_it_begins_without_unless_the_run_has_begun(tmp_path, caplog):
    run = {"run_dir": str(tmp_path / "run")}
    trainer = alone(tmp_path, args=SAVES, settings=run)
    trainer.train()
    for step in (4, 8, 12):
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").unlink()
    for _ in range(2):  # the second time they have been set aside
        with pytest.raises(ValueError, match="made 3 outer steps, and this group starts without a"):
            alone(tmp_path, args=SAVES, settings=run).train(resume_from_checkpoint=True)
    assert "checkpoint-12 (trainer_state.json is missing)" in caplog.text
    with pytest.raises(ValueError, match="No valid checkpoint found"):  # transformers' own
        alone(tmp_path, args=SAVES).train(resume_from_checkpoint=True)


def test_what_cannot_be_unpickled_is_named_with_what_to_do(tmp_path):
    saved(tmp_path)
    path = tmp_path / "checkpoint-8" / "diloco.pt"
    path.write_bytes(path.read_bytes().replace(b"outer_step", b"\xff" * 10))
    with pytest.raises(ValueError, match=r"checkpoint-8: diloco.pt cannot be read .*Remove it to"):
        alone(tmp_path, args=SAVES).train(resume_from_checkpoint=True)


def test_a_checkpoint_is_not_whole_while_it_is_written_again(tmp_path):
    class Looks(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            seen.append(problem_of(tmp_path / f"checkpoint-{state.global_step}"))

    seen, save = [], torch.save
    alone(tmp_path, Looks(), args=SAVES).train()

    def looks(content, *target, **named):
        save(content, *target, **named)
        seen.append(problem_of(tmp_path / "checkpoint-4"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "save", looks)
        alone(tmp_path, Looks(), args=SAVES | {"max_steps": 4}).train()
    assert seen[:3] == [None] * 3 and seen[-1] is None
    assert len(seen) > 6 and set(seen[3:-1]) == {"trainer_state.json is missing"}


# ---- one folder, one group ------------------------------------------------------------------


def test_a_second_group_in_an_output_dir_is_refused_before_it_trains(tmp_path):
    def start_others():
        for resume in (None, True):
            second = alone(tmp_path, args=SAVES, settings={"replica_id": "1"})
            with pytest.raises(ValueError, match="in use by.* an output_dir of its own"):
                second.train(resume_from_checkpoint=resume)
            assert second.callback.diloco is None
        alone(tmp_path, settings={"replica_id": "1"}).train()  # it does not save

    before, after = At(2, start_others), At(6, start_others)  # its first save
    first = alone(tmp_path, before, after, args=SAVES)
    first.train()
    assert first.callback.result["inner_steps"] == 12
    alone(tmp_path, args=SAVES, settings={"replica_id": "1"}).train()


@pytest.mark.parametrize(
    "where",
    [
        "composer_replication.hf_job.TrainerJob.whole_checkpoint",
        "transformers.Trainer._load_from_checkpoint",
        "composer_replication.group.replica_group.connect",
    ],
    ids=lambda where: where.rpartition(".")[2],
)
def test_after_a_resume_that_failed_another_process_may_save_in_the_folder(
    where, tmp_path, monkeypatch
):
    saved(tmp_path)
    trainer, other = alone(tmp_path, args=SAVES), object()
    monkeypatch.setattr(where, lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.train(resume_from_checkpoint=True)
    hold([str(tmp_path)], "1", other, "an output_dir")  # no error
    release(other)


# ---- what people use ------------------------------------------------------------


def test_evaluate_and_predict_before_a_training_are_as_without_us(tmp_path):
    held_out = rows_of([batch(99, 0, 16)])
    ours, theirs = alone(tmp_path), trainer_of(None, arguments_of(tmp_path))
    for each in (ours, theirs):
        each.model.load_state_dict(theirs.model.state_dict())
    assert ours.evaluate()["eval_loss"] == theirs.evaluate()["eval_loss"]
    assert (ours.predict(held_out).predictions == theirs.predict(held_out).predictions).all()
    ours.train()
    assert ours.evaluate()["eval_loss"] < theirs.evaluate()["eval_loss"]


def test_a_training_after_one_that_failed_counts_each_batch_once(tmp_path):
    trainer = alone(tmp_path, At(3, lambda: 1 / 0), settings={"weight_by": "samples"})
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    trainer.remove_callback(At)
    trainer.train()
    assert trainer.callback.result["inner_steps"] == 3 + 8
    history = trainer.state.log_history
    contributions = [at["diloco/contribution"] for at in history if "diloco/round" in at]
    assert contributions == [4 * 8, 4 * 8, 3 * 8]


@of_each_place
def test_a_training_that_resumes_nothing_forgets_what_one_that_did_not_start_has_loaded(
    where, tmp_path
):
    saved(tmp_path)
    trainer = alone(tmp_path, args=SAVES)
    with failed_start(where):
        trainer.train(resume_from_checkpoint=True)
    trainer.train()
    assert trainer.callback.result["inner_steps"] == 12


def test_gradient_checkpointing_counts_each_step_once(tmp_path):
    config = transformers.GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=2, n_head=2)
    tokens = torch.arange(64 * 8).reshape(64, 8) % 32
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    model = transformers.GPT2LMHeadModel(config)
    args = {"gradient_checkpointing": True}
    trainer = alone(tmp_path, args=args, model=model, train_dataset=rows)
    trainer.train()
    result = trainer.callback.result
    assert (result["inner_steps"], result["outer_steps"]) == (8, 2)


@pytest.mark.parametrize(
    "changed",
    [
        {"torch_compile": True, "torch_compile_backend": "eager"},
        {"torch_compile": True, "torch_compile_backend": "aot_eager"},
        {"bf16": True},
    ],
    ids=["compiled", "compiled, aot_eager", "bf16"],
)
def test_compiled_models_and_bf16_are_counted_and_synced_as_any_other(changed, tmp_path):
    plain, trainer = alone(tmp_path), alone(tmp_path, args=changed)
    plain.train()
    trainer.train()
    counts = ("inner_steps", "outer_steps")
    assert [trainer.callback.result[name] for name in counts] == [8, 2]
    tolerance = 0.05 if "bf16" in changed else 1e-5
    for name, tensor in plain.model.state_dict().items():
        found = trainer.model.state_dict()[name]
        torch.testing.assert_close(found, tensor, rtol=0, atol=tolerance)


class Hub:
    """A stand-in for Hugging Face's hub: it keeps what it is given."""

    def __init__(self, pushed: list[dict[str, torch.Tensor]]) -> None:
        self.pushed = pushed

    def create_repo(self, name, **kwargs):
        return SimpleNamespace(repo_id=name)

    def upload_folder(self, *, folder_path, **kwargs):
        saved = load_file(Path(folder_path) / "model.safetensors")
        # It is mapped into memory, and the next one takes the file's place.
        self.pushed.append({name: tensor.clone() for name, tensor in saved.items()})
        future: Future[None] = Future()
        future.set_result(None)
        return future


def test_what_is_pushed_to_the_hub_is_the_global_model(tmp_path, monkeypatch):
    pushed: list[dict[str, torch.Tensor]] = []
    monkeypatch.setattr("transformers.trainer.hf_api", functools.partial(Hub, pushed))
    args = {"push_to_hub": True, "hub_always_push": True, "save_strategy": "steps", "save_steps": 2}
    shown, local = {}, {}

    class Looks(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            if state.global_step == 6:
                theta = trainer.callback.diloco.global_parameters()
                shown.update({name: tensor.clone() for name, tensor in theta.items()})

        def on_optimizer_step(self, args, state, control, **kwargs):
            if state.global_step == 5:  # it is counted after this event
                local.update(parameters_of(trainer.model))

    trainer = alone(tmp_path, Looks(), args=args)
    trainer.train()
    for name, tensor in pushed[2].items():  # of step 6, two steps after a sync
        torch.testing.assert_close(shown[name], tensor, rtol=0, atol=0)
        assert not torch.equal(local[name], tensor)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="accelerate's own FSDP needs two GPUs")
def test_accelerate_s_own_fsdp2_shards_a_group():
    script = Path(__file__).parents[2] / "examples" / "train_sft.py"
    command = "torchrun --nproc-per-node 2".split()
    fsdp = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "NUM_REPLICA_GROUPS": "1"}
    subprocess.run([*command, str(script), "10"], env={**os.environ, **fsdp}, check=True)


def test_a_compiled_model_is_saved_with_its_global_weights(tmp_path):
    model = WithMore(TinyMLP())
    shown = {}

    def look():
        theta = dict(trainer.callback.diloco.global_parameters())
        shown.update({n: each for n, each in model.state_dict().items() if n in theta})
        assert all(torch.equal(theta[name], each) for name, each in shown.items())

    compiled = torch.compile(model, backend="eager")
    args = {"remove_unused_columns": False}
    trainer = alone(tmp_path, At(6, look), args=args, model=compiled)
    trainer.train()
    assert shown.keys() == {f"net.{name}" for name in TinyMLP().state_dict()}


class WithMore(WithLoss):
    """The Trainer takes a compiled model for one that wants the number of items."""

    def forward(self, x, labels, **more):
        return super().forward(x, labels)
