"""What only Hugging Face's Trainer has, and TRL. Run: pytest tests/hosts/test_hf.py

Real: transformers' Trainer on the CPU, a process for each group, a lighthouse, gloo.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from common import TinyMLP
from integration.replicas import Group, run_groups

from hosts.host import held_out, own_batches, weights_of

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

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


def end_early(group: Group, folder: Path, strategy: str) -> dict[str, Any]:
    steps = {"eval_steps": 2, "save_steps": 2} if strategy == "steps" else {}
    args = arguments_of(
        folder / str(group.replica_id),
        num_train_epochs=9,
        max_steps=-1,
        eval_strategy=strategy,
        save_strategy=strategy,
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


@pytest.mark.parametrize("strategy", ["steps", "epoch"])
def test_an_early_stop_ends_on_the_best_model_and_all_groups_agree_on_it(strategy, tmp_path):
    from safetensors.torch import load_file

    first, second = run_groups(end_early, folder=tmp_path, strategy=strategy)
    assert first["digest"] == second["digest"]
    assert first["steps"] == second["steps"] == (4 if strategy == "steps" else 16)
    best = load_file(Path(first["best"]) / "model.safetensors")
    saved = load_file(tmp_path / "saved_0" / "model.safetensors")
    for name, tensor in best.items():
        for other in (first["model"][name], second["model"][name], saved[name]):
            torch.testing.assert_close(other, tensor, rtol=0, atol=0)


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


# ---- what cannot be a group -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"auto_find_batch_size": True}, "auto_find_batch_size.*: set the batch size"),
        ({"_n_gpu": 2}, "nn.DataParallel over 2 GPUs: start the job with torchrun"),
    ],
)
def test_what_cannot_be_a_group_is_refused_before_any_peer_waits(changed, message, tmp_path):
    private = {name: value for name, value in changed.items() if name.startswith("_")}
    args = arguments_of(tmp_path, **{k: v for k, v in changed.items() if k not in private})
    trainer = Trainer(
        model=_Model(TinyMLP()),
        args=args,
        train_dataset=_rows(own_batches(0, 8)),
        callbacks=[DiLoCoTrainerCallback(num_replicas=1, replica_id="0")],
    )
    vars(trainer.args).update(private)
    with pytest.raises(ValueError, match=message):
        trainer.train()


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
    diloco = DiLoCoTrainerCallback(num_replicas=1, replica_id="0", sync_every=4)
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
