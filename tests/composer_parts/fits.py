"""Short fits with a part of Composer: without DiLoCo, with it, and in two groups."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from common import parameters_of
from composer import Callback, Trainer
from composer.loggers import InMemoryLogger
from composer_parts.models import image_data, images
from harness.trainers import building, callback_of, sgd, trainer_of

from composer_replication.callback import DiLoCoCallback
from composer_replication.simulation.simulation import simulate

WORKS, WITH_NOTE, REJECTED, NOT_TESTED = "works", "works with a note", "rejected", "not tested here"

IDENTITY = {"outer_lr": 1.0, "outer_momentum": 0.0}
"""With these one group's outer step puts the global parameters on the local ones."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A row of docs/composer.md, and how to try it.

    Args:
        status: As on the page.
        build: Trainer's arguments with the part in them.
        model: Builds the model, from a seed.
        data: Builds the loader, from a seed.
        needs: The packages without which it is skipped.
        needs_gpu: Whether it is tried on a GPU alone (``test_on_gpu.py``).
        error: What a refusal says, or why it cannot be tried on a CPU.
        averages: The weights after the fit are an average, so that losses alone are compared.
        changes: Whether the fit ends on other parameters than without the part.
        resumes: Whether to resume it, as Composer itself does exactly.
        steps: What is done with the Trainer, if more than one fit.
        did: Looks whether the part has done its work; gets the ``Fit`` and that without DiLoCo.
    """

    status: str = WORKS
    build: Callable[[], Mapping[str, Any]] = dict
    model: Callable[[int], Any] = images
    data: Callable[[int], Any] = image_data
    needs: Sequence[str] = ()
    needs_gpu: bool = False
    error: str = ""
    averages: bool = False
    changes: bool = False
    resumes: bool = False
    steps: Callable[[Trainer], None] | None = None
    did: Callable[["Fit", "Fit"], None] = lambda fit, alone: None

    def check_needs(self):
        """Skip the test if a package is missing."""
        for package in self.needs:
            pytest.importorskip(package)


def names(parts: Iterable[str], table: Mapping[str, Part]):
    """Of parts, for ``parametrize``; those that need more packages run with llm-foundry's."""
    return [
        pytest.param(name, marks=[pytest.mark.llmfoundry] if table[name].needs else [])
        for name in parts
    ]


class Losses(Callback):
    """The loss of every batch."""

    def __init__(self):
        self.values = []

    def batch_end(self, state, logger):
        self.values.append(float(state.total_loss_dict["loss/train/total"]))


@dataclass
class Fit:
    """What a fit leaves."""

    trainer: Trainer
    diloco: DiLoCoCallback | None
    losses: list[float]
    logged: InMemoryLogger
    arguments: Mapping[str, Any]
    parameters: dict[str, torch.Tensor] = field(init=False)

    def __post_init__(self):
        self.parameters = parameters_of(self.trainer.state.model)

    @property
    def callback(self):
        """The callback that is tried."""
        [callback] = self.arguments["callbacks"]
        return callback


def fit(part: Part, diloco=None, group=0, **more) -> Fit:
    """Train one group, or without DiLoCo, with what the part wants of a Trainer."""
    with building:
        given = dict(part.build()) | more
        losses, logged = Losses(), InMemoryLogger()
        model = part.model(group)
        optimizers = given.pop("optimizers", sgd)(model.parameters())
        build_scheduler = given.pop("torch_scheduler", None)
        if build_scheduler is not None:  # torch's own want the optimizer
            given["schedulers"] = build_scheduler(optimizers)
        arguments = {
            "train_dataloader": part.data(group),
            "max_duration": "3ep",
            "run_name": f"group{group}",
        } | given
        arguments["loggers"] = [logged, *given.get("loggers", ())]
        callbacks = [losses, *arguments.pop("callbacks", ()), *([diloco] if diloco else [])]
        trainer = trainer_of(*callbacks, model=model, optimizer=lambda _: optimizers, **arguments)
    with closing(trainer):
        (part.steps or Trainer.fit)(trainer)
        return Fit(trainer, diloco, losses.values, logged, given)


def fit_alone(part: Part, **more) -> Fit:
    """Train one group without others, with ``IDENTITY``."""
    return fit(part, DiLoCoCallback(num_replicas=1, sync_every=3, **IDENTITY), **more)


def fit_groups(
    part: Part, num_replicas=1, settings=None, faults=(), own=lambda group: {}, **more
) -> list[Fit]:
    """Train simulated groups, each on its own data from weights of its own.

    Args:
        part: What is tried.
        num_replicas: How many groups.
        settings: Of DiLoCo.
        faults: Scripted ones.
        own: Returns arguments of a group's Trainer by its number.
        **more: Arguments of all Trainers.
    """

    def replica(sim):
        diloco = callback_of(sim, **{"sync_every": 3} | (settings or {}))
        return fit(part, diloco, group=sim.replica_id, **own(sim.replica_id) | more)

    return simulate(replica, num_replicas=num_replicas, faults=faults)


def difference(one: Fit, other: Fit) -> float:
    """The largest between two fits' parameters."""
    assert one.parameters.keys() == other.parameters.keys()
    pairs = ((p, other.parameters[name]) for name, p in one.parameters.items())
    return max(float((p - q).abs().max()) for p, q in pairs)


def check_identity(part: Part, **ours_alone):
    """One group with ``IDENTITY`` ends where Composer alone ends.

    Args:
        part: What is tried.
        ours_alone: More arguments for the Trainer with DiLoCo.

    Returns:
        The fit with DiLoCo, and the one without.
    """
    theirs, ours = fit(part), fit_alone(part, **ours_alone)
    assert ours.diloco.result["inner_steps"] == len(ours.losses)
    assert ours.diloco.result["outer_steps"] > 0
    torch.testing.assert_close(ours.losses, theirs.losses, rtol=0, atol=1e-5)
    if not part.averages:
        assert difference(ours, theirs) < 1e-5
    return ours, theirs


def check_equal(part: Part, **more):
    """Two groups end on the same global parameters; their fits."""
    one, other = fit_groups(part, num_replicas=2, **more)
    ours, theirs = one.diloco.result, other.diloco.result
    assert ours["global_digest"] == theirs["global_digest"]
    assert ours["outer_steps"] == theirs["outer_steps"] > 0
    return one, other
