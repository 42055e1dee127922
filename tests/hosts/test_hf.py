"""What only Hugging Face's Trainer has, in groups. Run: pytest tests/hosts/test_hf.py

Real: transformers' Trainer on the CPU, a process for each group, a lighthouse, gloo.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from common import are_equal
from harness.processes import Process, run_groups

from hosts.host import Job, group_of, held_out, weights_of

pytest.importorskip("transformers", reason="transformers is not installed")

from safetensors.torch import load_file
from transformers import EarlyStoppingCallback, TrainerCallback

from hosts.hf_trainers import At, in_group, rows_of

# ---- evaluations, saves and ends ------------------------------------------------------------


class Worse(TrainerCallback):
    """From the second evaluation on, the held-out loss is said to be worse."""

    num = 0

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        self.num += 1
        metrics["eval_loss"] = float(self.num)


def end_early(group: Process, folder: Path, strategy: str, only_model: bool) -> dict[str, Any]:
    settings = {
        "num_train_epochs": 9,
        "max_steps": -1,
        "eval_strategy": "steps" if strategy == "best" else strategy,
        "save_strategy": strategy,
        "save_only_model": only_model,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        **({} if strategy == "epoch" else {"eval_steps": 2, "save_steps": 2}),
    }
    stopping = EarlyStoppingCallback(early_stopping_patience=1)
    with in_group(group, folder, Worse(), stopping, **settings) as trainer:
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
    for other in (first["model"], second["model"], saved):
        assert are_equal(other, best)


def save_in_ranks(process: Process, folder: Path) -> list[Any]:
    group = group_of(process, Job(ranks=2, folder=folder))
    saves = {"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 3}
    saves |= {"load_best_model_at_end": True, "ddp_backend": "gloo"}
    digests = []
    for resumes_from in (None, str(folder / str(group.replica_id) / "checkpoint-3")):
        with in_group(group, folder, **saves) as trainer:
            trainer.train(resume_from_checkpoint=resumes_from)
        digests.append(trainer.callback.result["global_digest"])
    return digests


def test_ranks_of_a_group_evaluate_save_and_resume_together(tmp_path):
    (whole, resumed), *others = run_groups(save_in_ranks, 4, folder=tmp_path)
    assert whole == resumed
    assert all(other == [whole, resumed] for other in others)


def evaluate_two(group: Process, folder: Path) -> list[dict[str, float]]:
    rows = rows_of([held_out()])
    evaluates = {"eval_strategy": "steps", "eval_steps": 3, "eval_on_start": True}
    datasets = {"eval_dataset": {"a": rows, "b": rows}}
    with in_group(group, folder, more=datasets, **evaluates) as trainer:
        trainer.train()
    return [at for at in trainer.state.log_history if any("eval_" in key for key in at)]


def test_each_of_several_datasets_is_evaluated_with_the_global_weights(tmp_path):
    first, second = run_groups(evaluate_two, folder=tmp_path)

    def losses(history):
        names = ("eval_a_loss", "eval_b_loss")
        return [at[name] for at in history for name in names if name in at]

    assert losses(first) == losses(second) and len(losses(first)) == 2 * 4
    assert losses(first)[0::2] == losses(first)[1::2]


# ---- joiners --------------------------------------------------------------------------------


def join_late(group: Process, folder: Path, **args: Any) -> dict[str, Any]:
    def let_in() -> None:
        group.signal.set()
        group.wait_until_somebody_asks()

    if group.replica_id == 1:
        group.signal.wait()
    losses: list[float] = []
    with in_group(group, folder, At(6, let_in), num_replicas=1, max_steps=16, **args) as trainer:
        step = trainer.training_step

        def noting(*inputs: Any) -> Any:
            loss = step(*inputs)
            losses.append(loss.item())
            return loss

        trainer.training_step = noting
        mean_loss = trainer.train().training_loss
    history = trainer.state.log_history
    return {
        "digest": trainer.callback.result["global_digest"],
        "inner_steps": trainer.callback.result["inner_steps"],
        "steps": trainer.state.global_step,
        "rates": {at["step"]: at["learning_rate"] for at in history if "learning_rate" in at},
        "losses": losses,
        "mean_loss": mean_loss,
        "logged": [at["loss"] for at in history if "loss" in at],
    }


def by_metric(name: str, **how: Any) -> dict[str, Any]:
    """A schedule that halves the rate after each evaluation: none is better by 10."""
    how = {"factor": 0.5, "patience": 0, "threshold": 10.0, "threshold_mode": "abs", **how}
    evaluates = {"eval_strategy": "steps", "eval_steps": 3, "metric_for_best_model": "eval_loss"}
    return {"lr_scheduler_type": name, "lr_scheduler_kwargs": how, **evaluates}


@pytest.mark.parametrize(
    "schedule",
    [{}, by_metric("reduce_lr_on_plateau"), by_metric("greedy", min_lr=1e-6, smooth=False)],
    ids=lambda args: args.get("lr_scheduler_type", "linear"),
)
def test_a_joiner_continues_at_the_others_step_and_learning_rate(schedule, tmp_path):
    first, second = run_groups(join_late, folder=tmp_path, **schedule)
    assert first["digest"] == second["digest"]
    assert first["steps"] == second["steps"] == first["inner_steps"]
    assert second["inner_steps"] == 8
    assert len(second["rates"]) == 8
    assert len({*second["rates"].values()}) > 1
    for step, rate in second["rates"].items():
        assert rate == pytest.approx(first["rates"][step], rel=1e-12)
    for each in (first, second):
        assert each["logged"] == pytest.approx(each["losses"], rel=1e-5)
        assert each["mean_loss"] == pytest.approx(mean(each["losses"]), rel=1e-5)


# ---- Ctrl-C and SIGTERM ---------------------------------------------------------------------


def interrupt(group: Process, folder: Path) -> dict[str, Any]:
    """Group 1 waits for group 0 in the sync of step 8, for ever, when Ctrl-C comes."""
    # A shell's background commands, and what they start, ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    press = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    at_6 = At(6, group.over.wait if group.replica_id == 0 else press.start)
    with in_group(group, folder, at_6, max_steps=12) as trainer:
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
        setattr(self, event, self.terminate)

    def terminate(self, args, state, control, **kwargs):
        if state.global_step == 6:
            os.kill(os.getpid(), signal.SIGTERM)
            while not self.saving.is_checkpoint_requested:
                time.sleep(0.01)


def terminate(process: Process, folder: Path, event: str, ranks: int) -> str:
    group = group_of(process, Job(ranks=ranks, folder=folder))
    at, digests = Terminates(event), []
    own = {"max_steps": 12, "ddp_backend": "gloo" if ranks > 1 else None}
    saves = {"enable_jit_checkpoint": True, "save_strategy": "epoch"}
    with in_group(group, folder, **own) as trainer:
        trainer.train()
    digests.append(trainer.callback.result["global_digest"])
    with in_group(group, folder, at, **own, **saves) as trainer:
        callbacks = trainer.callback_handler.callbacks
        (at.saving,) = [c.jit_manager for c in callbacks if hasattr(c, "jit_manager")]
        at.saving.kill_wait = 0
        trainer.train()
        assert trainer.callback.result == {}, "it has not waited for the others' sync"
    with in_group(group, folder, **own) as trainer:
        trainer.train(resume_from_checkpoint=True)
    digests.append(trainer.callback.result["global_digest"])
    assert digests[0] == digests[1]
    return digests[0]


@pytest.mark.parametrize(("event", "ranks"), [
    ("on_step_end", 1),
    ("on_step_begin", 1),
    ("on_pre_optimizer_step", 1),
    ("on_step_end", 2),
    ("on_step_begin", 2),
])  # fmt: skip
def test_sigterm_ends_a_group_with_the_checkpoint_that_it_is_asked_for(event, ranks, tmp_path):
    digests = run_groups(terminate, 2 * ranks, folder=tmp_path, event=event, ranks=ranks)
    assert len(set(digests)) == 1
