"""What only Hugging Face's Trainer has, and TRL. Run: pytest tests/hosts/test_hf.py

Real: transformers' Trainer on the CPU, a process for each group, a lighthouse, gloo.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from common import TinyMLP
from integration.replicas import Group, run_groups

from hosts.host import held_out, own_batches, weights_of

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from safetensors.torch import load_file  # noqa: E402
from transformers import (  # noqa: E402
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from composer_replication.hf import DiLoCoTrainerCallback  # noqa: E402
from hosts.hf_host import _Model, _rows  # noqa: E402


def arguments_of(folder: Path | str, **changed: Any) -> TrainingArguments:
    own = {
        "per_device_train_batch_size": 8,
        "max_steps": 8,
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "save_strategy": "no",
        "learning_rate": 0.01,
    }
    return TrainingArguments(output_dir=str(folder), **own | changed)


def trainer_of(group: Group, manager: Any, args: TrainingArguments, **more: Any) -> Trainer:
    callback = DiLoCoTrainerCallback(
        manager=manager,
        replica_id=str(group.replica_id),
        num_replicas=more.pop("num_replicas", group.num_replicas),
        sync_every=more.pop("sync_every", 4),
    )
    callbacks = [callback, *more.pop("callbacks", [])]
    trainer = Trainer(
        model=_Model(TinyMLP(group.replica_id)),
        args=args,
        train_dataset=_rows(own_batches(group.replica_id, 8)),
        eval_dataset=more.pop("eval_dataset", _rows([held_out()])),
        callbacks=callbacks,
        **more,
    )
    trainer.callback = callback
    return trainer


# ---- evaluations, saves and ends ------------------------------------------------------------


class Worse(TrainerCallback):
    """From the second evaluation on, the held-out loss is said to be worse."""

    def __init__(self) -> None:
        self._num = 0

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        self._num += 1
        metrics["eval_loss"] = float(self._num)


def end_early(group: Group, folder: Path, strategy: str, only_model: bool) -> dict[str, Any]:
    steps = {} if strategy == "epoch" else {"eval_steps": 2, "save_steps": 2}
    args = arguments_of(
        folder / str(group.replica_id),
        num_train_epochs=9,
        max_steps=-1,
        eval_strategy="steps" if strategy == "best" else strategy,
        save_strategy=strategy,
        save_only_model=only_model,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        **steps,
    )
    with group.manager() as manager:
        stopping = [Worse(), EarlyStoppingCallback(early_stopping_patience=1)]
        trainer = trainer_of(group, manager, args, callbacks=stopping)
        trainer.train()
        trainer.save_model(str(folder / f"saved_{group.replica_id}"))
        return {
            "digest": trainer.callback.result["global_digest"],
            "steps": trainer.state.global_step,
            "model": weights_of(trainer.model),
            "best": trainer.state.best_model_checkpoint,
        }


@pytest.mark.parametrize(
    ("strategy", "only_model"),
    [("steps", False), ("epoch", False), ("best", False), ("steps", True)],
)
def test_an_early_stop_ends_on_the_best_model_and_all_groups_agree_on_it(
    strategy, only_model, tmp_path
):
    first, second = run_groups(end_early, folder=tmp_path, strategy=strategy, only_model=only_model)
    assert first["digest"] == second["digest"]
    assert first["steps"] == second["steps"] == (16 if strategy == "epoch" else 4)
    best = load_file(Path(first["best"]) / "model.safetensors")
    saved = load_file(tmp_path / "saved_0" / "model.safetensors")
    for name, tensor in best.items():
        for other in (first["model"][name], second["model"][name], saved[name]):
            torch.testing.assert_close(other, tensor, rtol=0, atol=0)


def save_in_ranks(process: Group, folder: Path) -> list[Any]:
    group = process.of_rank(str(folder), 2)
    os.environ |= {"RANK": str(process.replica_id % 2), "WORLD_SIZE": "2"}
    args = arguments_of(
        folder / str(group.replica_id),
        eval_strategy="steps",
        eval_steps=3,
        save_strategy="steps",
        save_steps=3,
        load_best_model_at_end=True,
        ddp_backend="gloo",
    )
    digests = []
    for resumes in (False, folder / str(group.replica_id) / "checkpoint-3"):
        with group.manager() as manager:
            trainer = trainer_of(group, manager, args)
            trainer.train(resume_from_checkpoint=str(resumes) if resumes else None)
        digests.append(trainer.callback.result["global_digest"])
    return digests


def test_ranks_of_a_group_evaluate_save_and_resume_together(tmp_path):
    (whole, resumed), *others = run_groups(save_in_ranks, 4, folder=tmp_path)
    assert whole == resumed
    assert all(other == [whole, resumed] for other in others)


def evaluate_two(group: Group, folder: Path) -> list[dict[str, float]]:
    args = arguments_of(
        folder / str(group.replica_id), eval_strategy="steps", eval_steps=3, eval_on_start=True
    )
    rows = _rows([held_out()])
    with group.manager() as manager:
        datasets = {"a": rows, "b": rows}
        trainer = trainer_of(group, manager, args, eval_dataset=datasets)
        trainer.train()
        return [at for at in trainer.state.log_history if any("eval_" in key for key in at)]


def test_each_of_several_datasets_is_evaluated_with_the_global_weights(tmp_path):
    first, second = run_groups(evaluate_two, folder=tmp_path)

    def losses(history):
        names = ("eval_a_loss", "eval_b_loss")
        return [at[name] for at in history for name in names if name in at]

    assert losses(first) == losses(second) and len(losses(first)) == 2 * 4
    assert losses(first)[0::2] == losses(first)[1::2]


def train_twice(group: Group, folder: Path) -> list[Any]:
    results = []
    with group.manager() as manager:
        trainer = trainer_of(group, manager, arguments_of(folder / str(group.replica_id)))
        trainer.train()
        results.append(dict(trainer.callback.result))
    with pytest.raises(ValueError, match="manager= can be used for one fit only"):
        trainer.train()
    return results


def test_a_manager_that_was_passed_is_good_for_one_training(tmp_path):
    (first,), (second,) = run_groups(train_twice, folder=tmp_path)
    assert first["global_digest"] == second["global_digest"]


# ---- joiners and the dead -------------------------------------------------------------------


class At(TrainerCallback):
    """Calls a function at the end of a step."""

    def __init__(self, step: int, act) -> None:
        self._step, self._act = step, act

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self._step:
            self._act()


class EndTogether(TrainerCallback):
    """Ends training two rounds after both groups are in a sync; it never ends before."""

    def __init__(self, group: Group, manager: Any) -> None:
        self._group, self._manager = group, manager
        self._end: int | None = None

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 6:
            self._group.signal.set()
        if self._end is None and len(self._manager.members) == 2:
            self._end = state.global_step // 4 * 4 + 8
        if self._end is None:
            time.sleep(0.01)
        elif state.global_step >= self._end:
            control.should_training_stop = True


def join_late(group: Group, folder: Path) -> dict[str, Any]:
    args = arguments_of(folder / str(group.replica_id), max_steps=10_000)
    if group.replica_id == 1:
        group.signal.wait()
    with group.manager() as manager:
        ending = [EndTogether(group, manager)]
        trainer = trainer_of(group, manager, args, num_replicas=1, callbacks=ending)
        trainer.train()
        history = trainer.state.log_history
        return {
            "digest": trainer.callback.result["global_digest"],
            "inner_steps": trainer.callback.result["inner_steps"],
            "steps": trainer.state.global_step,
            "rates": {at["step"]: at["learning_rate"] for at in history if "learning_rate" in at},
        }


def test_a_joiner_continues_at_the_others_step_and_learning_rate(tmp_path):
    first, second = run_groups(join_late, folder=tmp_path)
    assert first["digest"] == second["digest"]
    assert first["steps"] == second["steps"] == first["inner_steps"]
    assert second["inner_steps"] == 8
    assert len(second["rates"]) == 8
    for step, rate in second["rates"].items():
        assert rate == pytest.approx(first["rates"][step], rel=1e-12)


def lose_a_peer(group: Group, folder: Path) -> dict[str, Any]:
    args = arguments_of(folder / str(group.replica_id), max_steps=16)
    dies = [At(6, group.kill)] if group.replica_id == 1 else []
    with group.manager() as manager:
        trainer = trainer_of(group, manager, args, callbacks=dies)
        trainer.train()
        return dict(trainer.callback.result)


def test_a_group_goes_on_when_its_peer_is_killed(tmp_path):
    first, _ = run_groups(lose_a_peer, folder=tmp_path, killed=[1])
    assert (first["inner_steps"], first["outer_steps"]) == (16, 4)


# ---- Ctrl-C and SIGTERM ---------------------------------------------------------------------


def interrupt(group: Group, folder: Path) -> dict[str, Any]:
    """Group 1 waits for group 0 in the sync of step 8, for ever, when Ctrl-C comes."""
    args = arguments_of(folder / str(group.replica_id), max_steps=12)
    press = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    acts = [At(6, group.over.wait if group.replica_id == 0 else press.start)]
    with group.manager() as manager:
        trainer = trainer_of(group, manager, args, callbacks=acts)
        if group.replica_id == 0:
            trainer.train()
            return dict(trainer.callback.result)
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
    group.over.set()
    return {}


def test_ctrl_c_ends_a_group_that_waits_and_the_others_go_on(tmp_path):
    first, _ = run_groups(interrupt, folder=tmp_path)
    assert (first["inner_steps"], first["outer_steps"]) == (12, 3)


class Terminates(TrainerCallback):
    """SIGTERM in an event of step 6. What saves then asks for it in the Trainer's next event."""

    def __init__(self, event: str) -> None:
        setattr(self, event, self._terminate)

    def _terminate(self, args, state, control, **kwargs):
        if state.global_step == 6:
            os.kill(os.getpid(), signal.SIGTERM)
            while not self.saving.is_checkpoint_requested:
                time.sleep(0.01)


def terminate(group: Group, folder: Path, event: str) -> str:
    def trainer(*callbacks: TrainerCallback, **changed: Any) -> Trainer:
        own = arguments_of(folder / str(group.replica_id), max_steps=12, **changed)
        return trainer_of(group, manager, own, callbacks=callbacks)

    digests = []
    for step in ("whole", "ended", "resumed"):
        with group.manager() as manager:
            if step == "ended":
                at = Terminates(event)
                ended = trainer(at, enable_jit_checkpoint=True, save_strategy="epoch")
                callbacks = ended.callback_handler.callbacks
                (at.saving,) = [c.jit_manager for c in callbacks if hasattr(c, "jit_manager")]
                at.saving.kill_wait = 0
                ended.train()
                assert ended.callback.result == {}, "it has not waited for the others' sync"
                continue
            of_step = trainer()
            of_step.train(resume_from_checkpoint=step == "resumed")
            digests.append(of_step.callback.result["global_digest"])
    assert digests[0] == digests[1]
    return digests[0]


@pytest.mark.parametrize("event", ["on_step_end", "on_step_begin", "on_pre_optimizer_step"])
def test_sigterm_ends_a_group_with_the_checkpoint_that_it_is_asked_for(event, tmp_path):
    first, second = run_groups(terminate, folder=tmp_path, event=event)
    assert first == second


# ---- what cannot be a group -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "changed", "message"),
    [
        ("args", {"auto_find_batch_size": True}, "auto_find_batch_size.*: set the batch size"),
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
    trainer = Trainer(
        model=_Model(TinyMLP()),
        args=arguments_of(tmp_path),
        train_dataset=_rows(own_batches(0, 8)),
        callbacks=[diloco := DiLoCoTrainerCallback(num_replicas=1, replica_id="0")],
    )

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
    assert diloco.diloco is None and diloco._group.manager is None


def test_a_checkpoint_without_diloco_s_part_is_refused(tmp_path):
    def trainer(*callbacks):
        args = arguments_of(tmp_path, save_strategy="steps", save_steps=4)
        rows = _rows(own_batches(0, 8))
        return Trainer(
            model=_Model(TinyMLP()), args=args, train_dataset=rows, callbacks=list(callbacks)
        )

    trainer().train()
    diloco = DiLoCoTrainerCallback(num_replicas=1, replica_id="0")
    with pytest.raises(ValueError, match="checkpoint-8: it is of batch 8 and has no DiLoCo state"):
        trainer(diloco).train(resume_from_checkpoint=True)


# ---- alone, with what people use ------------------------------------------------------------


def alone(tmp_path: Path, **more: Any) -> Trainer:
    settings = more.pop("settings", {})
    diloco = DiLoCoTrainerCallback(num_replicas=1, replica_id="0", sync_every=4, **settings)
    trainer = Trainer(
        model=more.pop("model", None) or _Model(TinyMLP()),
        args=arguments_of(tmp_path, **more.pop("args", {})),
        train_dataset=_rows(own_batches(0, 8)),
        callbacks=[diloco, *more.pop("callbacks", [])],
        **more,
    )
    trainer.callback = diloco
    return trainer


class Overflows(TrainerCallback):
    """A stand-in for a gradient scaler: every third step is not taken."""

    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        inner = optimizer.optimizer
        if state.global_step % 3 == 2:
            inner.step = lambda *_, **__: None
        elif "step" in vars(inner):
            del inner.step


def test_steps_that_a_scaler_skips_are_not_counted(tmp_path):
    trainer = alone(tmp_path, callbacks=[Overflows()])
    trainer.train()
    assert trainer.state.global_step == 8
    assert trainer.callback.result["inner_steps"] == 6


def test_a_second_training_continues_with_the_same_outer_momentum(tmp_path):
    trainer = alone(tmp_path)
    trainer.train()
    trainer.train()
    assert trainer.callback.result["outer_steps"] == 4
    assert trainer.callback.result["inner_steps"] == 16


class FailsOnce(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3 and "has_failed" not in vars(self):
            self.has_failed = True
            raise RuntimeError("once")


def test_a_training_after_one_that_failed_counts_each_batch_once(tmp_path):
    trainer = alone(tmp_path, settings={"weight_by": "samples"}, callbacks=[FailsOnce()])
    with pytest.raises(RuntimeError, match="once"):
        trainer.train()
    trainer.train()
    assert trainer.callback.result["inner_steps"] == 3 + 8
    history = trainer.state.log_history
    contributions = [at["diloco/contribution"] for at in history if "diloco/round" in at]
    assert contributions == [4 * 8, 4 * 8, 3 * 8]


def test_gradient_checkpointing_counts_each_step_once(tmp_path):
    config = transformers.GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=2, n_head=2)
    tokens = torch.arange(64 * 8).reshape(64, 8) % 32
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = Trainer(
        model=transformers.GPT2LMHeadModel(config),
        args=arguments_of(tmp_path, gradient_checkpointing=True),
        train_dataset=rows,
        callbacks=[diloco := DiLoCoTrainerCallback(num_replicas=1, replica_id="0", sync_every=4)],
    )
    trainer.train()
    assert (diloco.result["inner_steps"], diloco.result["outer_steps"]) == (8, 2)


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
        self._pushed = pushed

    def create_repo(self, name, **kwargs):
        return SimpleNamespace(repo_id=name)

    def upload_folder(self, *, folder_path, **kwargs):
        saved = load_file(Path(folder_path) / "model.safetensors")
        # It is mapped into memory, and the next one takes the file's place.
        self._pushed.append({name: tensor.clone() for name, tensor in saved.items()})
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
                local.update({n: p.detach().clone() for n, p in trainer.model.named_parameters()})

    trainer = alone(tmp_path, args=args, callbacks=[Looks()])
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
