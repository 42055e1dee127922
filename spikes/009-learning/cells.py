"""The trainings of the study: what each one is, and in which order they are worth running."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

TUNING_SEEDS = (101, 102, 103)
"""Seeds that inner and outer settings are chosen on. No claim uses them."""

EARLY_STEPS = 300

CLAIM_SEEDS = tuple(range(1, 12))
"""Seeds of the claims. 11 of them show an equivalence within 0.5 % if pairs spread by 0.86 %."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One training. Two cells with equal settings are the same training.

    Args:
        groups: Number of replica groups. 0 is data parallel: one model, and no DiLoCo.
        lr: Peak learning rate of the inner optimizer.
        outer_lr: Learning rate of the outer optimizer. Unused by data parallel, as all below.
        outer_momentum: Its Nesterov momentum.
        sync_every: Inner steps in a round.
        num_fragments: Fragments of the model.
        delay: ``fragment_sync_delay``.
        alpha: ``fragment_update_alpha``.
        wire_format: The format of pseudo-gradients on the network.
        inner: The inner optimizer, ``adamw`` or ``muon``.
        merge: How the groups' pseudo-gradients are merged.
        steps: Inner steps.
        batch: Samples in a step of all groups together.
        clip: Largest norm of the gradient of an inner step; 0 for none.
        seed: Of the initial weights and of the order of the data.
        away: How many of the groups die after a quarter of the steps; as many others join for the
            last quarter.
        heal_inner_state: Which inner state these begin with: their ``own``, or the ``donor``'s.
        early: Inner steps in a round at the beginning, for ``EARLY_STEPS``; 0 for ``sync_every``.
        step_times: How long an inner step of each group takes, beside the first one's; all take
            their steps in the same time then (``round_seconds: auto``), and ``steps`` and
            ``sync_every`` are the first one's. Empty: all groups take the same number of steps.
        batches: Samples in a step of data parallel, in each quarter of the steps. Empty: ``batch``.
        momentum: Muon's momentum.
        beta2: The decay of AdamW's squared gradients, for what Muon does not train too.
        final_lr: The learning rate at the end, as a part of the peak; 1 for a constant one.
        model: What is trained, one of ``jobs.MODELS``.
        data: On what, one of ``jobs.DATA``.
        ramp: If not 0, the outer momentum of outer step t is the smaller one of t / (t + ramp) and
            ``outer_momentum``.
        rounds: Further numbers of inner steps in a round, each with the outer step from which on it
            holds.
        outer: Further outer learning rates and momenta, each with the outer step from which on they
            hold.
        periods: At which syncs the inner momenta are averaged, and at which AdamW's squared
            gradients: 1 for each one, 3 for each third. Empty: never.
        slow: If not 0, Muon's step is a mix of its momentum, in this share, and of the gradient.
        curve: After each so many steps the held-out loss is evaluated, and not only at the end.
            They are steps of a sync, so that the model holds the global weights. 0: never.
        lag: How many steps the learning rate is behind. 1 under Composer's Trainer, which sets the
            rate of a step by the time before the step that it follows (0.32.1, trainer.py).
        warmup: Steps in which the learning rate rises.
        alone_of: If not 0, one group alone, of so many: ``groups`` is 0, and the model has the
            first group's part of each batch.
        after: If not 0, the model is not fresh: it was trained in so many steps before, on another
            text (``train.PRETRAINED``).
    """

    groups: int = 0
    lr: float = 4e-3
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    sync_every: int = 30
    num_fragments: int = 1
    delay: int = 0
    alpha: float = 0.0
    wire_format: str = "float32"
    inner: str = "adamw"
    merge: str = "mean"
    steps: int = 1800
    batch: int = 16
    clip: float = 1.0
    seed: int = 101
    away: int = 0
    heal_inner_state: str = "own"
    early: int = 0
    step_times: tuple[float, ...] = ()
    batches: tuple[int, ...] = ()
    momentum: float = 0.95
    beta2: float = 0.95
    final_lr: float = 0.1
    model: str = "gpt"
    data: str = "stdlib"
    ramp: float = 0.0
    rounds: tuple[tuple[int, int], ...] = ()
    periods: tuple[int, ...] = ()
    slow: float = 0.0
    curve: int = 0
    lag: int = 0
    warmup: int = 50
    alone_of: int = 0
    outer: tuple[tuple[int, float, float], ...] = ()
    after: int = 0

    def __post_init__(self) -> None:
        for name in ("step_times", "batches", "periods"):  # JSON has lists
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name in ("rounds", "outer"):
            object.__setattr__(self, name, tuple(map(tuple, getattr(self, name))))

    @property
    def key(self) -> str:
        """All settings that matter to the training, as one line."""
        settings = dataclasses.asdict(self)
        if not self.after:  # as all results have it that are older than this setting
            del settings["after"]
        if not self.groups:
            for name in _OUTER:
                del settings[name]
        return json.dumps(settings, sort_keys=True)

    def with_seed(self, seed: int) -> Cell:
        """The same training from other weights, on data in another order."""
        return dataclasses.replace(self, seed=seed)


_OUTER = (
    "outer_lr",
    "outer_momentum",
    "sync_every",
    "num_fragments",
    "delay",
    "alpha",
    "wire_format",
    "merge",
    "away",
    "heal_inner_state",
    "early",
    "step_times",
    "ramp",
    "rounds",
    "outer",
    "periods",
)
