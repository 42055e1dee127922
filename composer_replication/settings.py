"""The settings that all replica groups of a run must agree on, checked before anything is sent.

Imports neither torch nor Composer.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from typing import Annotated, Any, Literal, TypedDict, Unpack, get_args

from composer_replication.arguments import (
    check_integer,
    check_names,
    check_number,
    check_types,
    closest,
    defaults_of,
    in_yaml,
    shows,
)

WireFormatName = Literal["float32", "bfloat16", "int8", "fp4"]
WIRE_FORMATS: tuple[WireFormatName, ...] = get_args(WireFormatName)

WeightBy = Literal["uniform", "steps", "samples", "tokens"]
SyncBuffers = Literal["mean", "none"]
Rows = Sequence[Mapping[str, Any]]

AUTO = "auto"
"""A value of ``round_seconds``: as long as the fastest group takes for ``sync_every`` steps."""

OUTER_LR, OUTER_MOMENTUM = 0.7, 0.5
"""What ``outer_lr`` and ``outer_momentum`` are if they are not given."""

SHORT_ROUNDS = 60
"""How many rounds at the start have a fifth of ``sync_every``, if no schedule is given."""

SHORT_BELOW = 20
"""Rounds of fewer inner steps are short already, and stay as they are."""

PLAIN_ROUNDS = 20
"""How many rounds at the start end in a plain average, if neither a schedule nor outer numbers are
given."""

ROUNDS_FOR_MOMENTUM = 20
"""Above the default momentum, a training has to have this many times ``1 / (1 - momentum)`` rounds,
the number of rounds that a pseudo-gradient acts for."""


class SettingKeywords(TypedDict, total=False):
    """The settings of one run as one writes them, with their defaults: :class:`DiLoCoSettings`."""

    sync_every: Annotated[int, 100]
    """Inner steps in a round. Every fragment is synchronised once a round."""

    round_seconds: Annotated[float | Literal["auto"] | None, None]
    """Make a round a time instead of a number of inner steps, for groups of unequal speed: each
    takes as many inner steps as it can in that time, in seconds, and all arrive at a sync together.
    ``auto``: as long as the fastest group takes for ``sync_every`` inner steps. No group takes more
    than ``sync_every``, nor fewer than a tenth of it. None: all groups take ``sync_every`` inner
    steps.
    """

    num_fragments: Annotated[int, 1]
    """Number of fragments that the model is cut into, at block boundaries. 1 is DiLoCo (arXiv
    2311.08105), more is Streaming DiLoCo (arXiv 2501.18512).
    """

    fragment_patterns: Annotated[Sequence[str | Sequence[str]] | None, None]
    """Instead of ``num_fragments``: one entry per fragment, each a shell pattern over parameter
    names or a list of patterns, for example ``["*blocks.0.*", ["*blocks.1.*", "*"]]``. A parameter
    belongs to the first fragment that matches it. A LoRA parameter that no pattern matches is also
    matched under the name that PEFT saves it with (``lora_A.weight``, without the adapter's name).
    """

    fragment_sync_delay: Annotated[int, 0]
    """Inner steps between computing a fragment's pseudo-gradient and applying the outer step (tau
    in 2501.18512), below ``sync_every / num_fragments``: one fragment is in flight at a time. With
    0 the sync waits for the allreduce at once.
    """

    fragment_update_alpha: Annotated[float | None, None]
    """The share of the local parameters that a sync keeps: ``local = alpha * local + (1 - alpha) *
    global`` (2501.18512, alg. 2), in [0, 1]. None: 0.5 with a delay, 0 without. With a delay, 0
    throws away the inner steps taken meanwhile.
    """

    outer_lr: Annotated[float | None, None]
    """Learning rate of the outer SGD. None: 0.7."""

    outer_momentum: Annotated[float | None, None]
    """Momentum of the outer SGD, in [0, 1). The published 0.9 (arXiv 2311.08105) is for trainings
    of many rounds, and overshoots in short ones. None: 0.5.
    """

    outer_nesterov: Annotated[bool, True]
    """Whether that momentum is Nesterov's."""

    schedule: Annotated[Rows | None, None]
    """Rows such as ``{outer_step: 61, sync_every: 30}``, each with any of ``sync_every``,
    ``outer_lr`` and ``outer_momentum``. They hold for the outer step of that number, with the inner
    steps before it, and for all after it, until a row changes them again. Each sync of a fragment
    is an outer step. Momentum 0 forgets the momentum so far. None: the first ``PLAIN_ROUNDS``
    rounds of each fragment end in a plain average (``outer_lr`` 1, no momentum), unless one of the
    two is given, since the first pseudo-gradients of a fresh model soon point elsewhere. And the
    first ``SHORT_ROUNDS`` have a fifth of ``sync_every``, since groups drift apart most while the
    loss falls fast (post-local SGD, arXiv 1808.07217); rounds that are a time, or shorter than
    ``SHORT_BELOW``, stay. An empty list: no schedule.
    """

    weight_by: Annotated[WeightBy | None, None]
    """The contribution of a group that has trained: 1 (``uniform``), its inner steps (``steps``),
    its samples (``samples``) or its tokens (``tokens``) since the fragment was last synchronised.
    With ``uniform`` a joiner's first round counts fully, although the joiner has trained in only a
    part of it. With ``steps`` it counts as much as the joiner has trained. None: ``steps`` with
    ``round_seconds``, ``uniform`` without.
    """

    sync_buffers: Annotated[SyncBuffers, "mean"]
    """How the model's persistent buffers are treated, such as BatchNorm's running statistics.
    ``mean``: they are part of the global state. Floating-point buffers are averaged with the
    parameters. All groups take integer, boolean, float64 and infinite ones from the first group of
    each sync, as they were when that group sent them; if it contributes nothing, these go back to
    their global values. ``none``: each group keeps its own, and the groups end with different
    models if they differ.
    """

    wire_format: Annotated[WireFormatName, "float32"]
    """The format of pseudo-gradients on the network: ``float32``, or ``bfloat16``, ``int8`` or
    ``fp4`` in half, a quarter or an eighth of the bytes. Sums are in fp32 in any case, and each
    group adds its rounding error to its next pseudo-gradient (error feedback).
    """

    max_sync_retries: Annotated[int, 8]
    """How often in a row a sync is retried that did not commit, if no group is known to have caused
    it. It is also in how many committed syncs in a row a group's pseudo-gradient may be left out as
    not sound: at the next, it leaves.
    """


DEFAULTS = defaults_of(SettingKeywords)


@dataclass(frozen=True, init=False)
class DiLoCoSettings:
    """The settings of one run, checked, equal in every replica group.

    The groups compare them, as the fingerprint, when they join. What may be left open, as None, has
    been chosen here, so that equal settings are equal however they were written.

    Raises:
        TypeError: A keyword is no setting; the message has the closest one.
        ValueError: A value is out of range; the message has the value and the fix.
    """

    sync_every: int
    round_seconds: float | Literal["auto"] | None
    num_fragments: int
    fragment_patterns: Sequence[str | Sequence[str]] | None
    fragment_sync_delay: int
    fragment_update_alpha: float
    outer_lr: float
    outer_momentum: float
    outer_nesterov: bool
    schedule: Rows
    weight_by: WeightBy
    sync_buffers: SyncBuffers
    wire_format: WireFormatName
    max_sync_retries: int

    @shows(SettingKeywords)
    def __init__(self, **named: Unpack[SettingKeywords]) -> None:
        check_names(named, SettingKeywords, "DiLoCoSettings")
        own = vars(self)  # it can be written, though the class is frozen
        own |= DEFAULTS | named
        check_integer("sync_every", self.sync_every, at_least=1)
        check_integer("num_fragments", self.num_fragments, at_least=1)
        check_integer("fragment_sync_delay", self.fragment_sync_delay, at_least=0)
        check_integer("max_sync_retries", self.max_sync_retries, at_least=0)
        self._check_patterns()
        for name, value in self._choices().items():
            if own[name] is None:
                own[name] = value
        check_types(self)
        _check_scheduled(own)
        check_number("fragment_update_alpha", self.fragment_update_alpha, 0.0, 1.0)
        own["schedule"] = check_rows(self.schedule)
        self._check_schedule()
        for name in ("fragment_update_alpha", "outer_lr", "outer_momentum", "round_seconds"):
            if own[name] not in (None, AUTO):
                own[name] = float(own[name])  # 0 has another digest than 0.0

    def __str__(self) -> str:
        """The length of a round, and the settings that are not the defaults, for people."""
        default = asdict(DiLoCoSettings(schedule=[]))
        named = asdict(self).items()
        own = [f"{k}={in_yaml(v)}" for k, v in named if k == "sync_every" or v != default[k]]
        return ", ".join(own)

    def _check_schedule(self) -> None:
        self._check_fits(self.sync_every)
        for number, row in enumerate(self.schedule):
            if "sync_every" not in row:
                continue
            if self.round_seconds is not None:
                raise ValueError(
                    f"schedule[{number}]: sync_every={row['sync_every']} with "
                    f"round_seconds={self.round_seconds}: rounds are a time there, use one of both"
                )
            self._check_fits(row["sync_every"], f"schedule[{number}]: ")
        if self.round_seconds not in (None, AUTO):
            check_number("round_seconds", self.round_seconds, 1e-3, math.inf, alternative=AUTO)
        if self.round_seconds is not None and self.weight_by == "uniform":
            raise ValueError(
                f"round_seconds={self.round_seconds} with weight_by=uniform: groups that train "
                "less than others would count as much, use weight_by=steps, samples or tokens"
            )

    def _check_fits(self, sync_every: int, where: str = "") -> None:
        """Check that every fragment gets its turn in a round, and that its sync ends within it.

        One fragment is in flight at a time (torchft ``local_sgd.py``, ``DiLoCo.__init__``).

        Args:
            sync_every: Inner steps in the round.
            where: What an error begins with.

        Raises:
            ValueError: The round cannot be divided among the fragments, or the delay is too long.
        """
        count = self.fragment_count
        delay = self.fragment_sync_delay
        if sync_every % count:
            below = sync_every - sync_every % count
            fits = f"{below} or {below + count}" if below else f"{count}"
            raise ValueError(
                f"{where}sync_every={sync_every} is not divisible by num_fragments={count}: "
                f"use sync_every={fits}"
            )
        between = sync_every // count
        if delay >= between:
            others = ""
            for fewer in range(1, count):
                if not sync_every % fewer and delay < sync_every // fewer:
                    others = f", or num_fragments={fewer}"
            raise ValueError(
                f"{where}fragment_sync_delay={delay} is not below sync_every / num_fragments = "
                f"{sync_every} / {count} = {between}, and one fragment is in flight at a time: "
                f"use at most {between - 1}{others}"
            )

    def _choices(self) -> dict[str, Any]:
        """What is chosen where it is left open: equal settings are equal however written."""
        return {
            "fragment_update_alpha": 0.5 if self.fragment_sync_delay else 0.0,
            "outer_lr": OUTER_LR,
            "outer_momentum": OUTER_MOMENTUM,
            "schedule": self._default_schedule(),
            "weight_by": "uniform" if self.round_seconds is None else "steps",
        }

    def _default_schedule(self) -> Rows:
        """Plain averages and short rounds at the start, each unless something rules it out."""
        count, steps = self.fragment_count, self.sync_every // 5
        rows: dict[int, dict[str, Any]] = {1: {}}
        if self.outer_lr is None and self.outer_momentum is None:
            rows[1] |= {"outer_lr": 1.0, "outer_momentum": 0.0}
            later = {"outer_lr": OUTER_LR, "outer_momentum": OUTER_MOMENTUM}
            rows[PLAIN_ROUNDS * count + 1] = later
        steps = max(steps - steps % count, count * (self.fragment_sync_delay + 1))
        if self.round_seconds is None and steps < self.sync_every >= SHORT_BELOW:
            rows[1]["sync_every"] = steps
            rows[SHORT_ROUNDS * count + 1] = {"sync_every": self.sync_every}
        return [{"outer_step": step, **row} for step, row in rows.items() if row]

    def _check_patterns(self) -> None:
        """Check ``fragment_patterns``, and give them one form: lists, and no ``num_fragments``."""
        patterns = self.fragment_patterns
        if patterns is None:
            return
        if isinstance(patterns, str) or not patterns or not all(patterns):
            raise ValueError(
                f"fragment_patterns={patterns!r}: give a list with one entry per fragment, each a "
                'pattern or a list of patterns, e.g. ["*blocks.0.*", "*"]'
            )
        if self.num_fragments not in (1, len(patterns)):
            raise ValueError(
                f"num_fragments={self.num_fragments} but fragment_patterns has {len(patterns)} "
                "entries: leave num_fragments out"
            )
        lists = [[entry] if isinstance(entry, str) else [*entry] for entry in patterns]
        vars(self).update(fragment_patterns=lists, num_fragments=1)

    @property
    def fragment_count(self) -> int:
        """Number of fragments, from ``num_fragments`` or ``fragment_patterns``."""
        return self.num_fragments if self.fragment_patterns is None else len(self.fragment_patterns)

    def sync_every_at(self, outer_step: int) -> int:
        """Inner steps in a round that ends with this outer step, from 1."""
        return self._at(outer_step, "sync_every")

    def steps_between_syncs(self, outer_step: int = 1) -> int:
        """Inner steps between two syncs, each of another fragment, before this outer step."""
        return self.sync_every_at(outer_step) // self.fragment_count

    def steps_allowed(self, outer_step: int) -> range:
        """How many inner steps a group may take between two syncs, before this outer step."""
        most = self.steps_between_syncs(outer_step)
        if self.round_seconds is None:
            return range(most, most + 1)
        # torchft's hook sends the fragment by the delay before the outer step.
        return range(max(math.ceil(most / 10), self.fragment_sync_delay + 1), most + 1)

    @property
    def discards_overlapped_steps(self) -> bool:
        """Whether the inner steps taken while a sync is in flight are thrown away (alpha 0)."""
        return self.fragment_sync_delay > 0 and self.fragment_update_alpha == 0.0

    @property
    def overlap_warning(self) -> str:
        """A warning about how syncs are overlapped; empty if there is none."""
        if not self.discards_overlapped_steps:
            return ""
        delay = self.fragment_sync_delay
        return (
            f"fragment_sync_delay={delay} with fragment_update_alpha=0 throws away the {delay} "
            "inner steps taken during every sync: use fragment_update_alpha=0.5, as arXiv "
            "2501.18512 does"
        )

    def momentum_warning(self, inner_steps: int | None) -> str:
        """Return a warning about the outer momentum in a training of this length; empty if none.

        Args:
            inner_steps: The most inner steps of a group in the training. None: not known.
        """
        if inner_steps is None or self.round_seconds is not None or self.changes_outer_numbers:
            return ""
        needed = round(ROUNDS_FOR_MOMENTUM / (1 - self.outer_momentum))
        ends = accumulate(map(self.steps_between_syncs, range(1, needed * self.fragment_count + 1)))
        rounds = sum(end <= inner_steps for end in ends) // self.fragment_count
        if self.outer_momentum <= OUTER_MOMENTUM or rounds >= needed:
            return ""
        return (
            f"outer_momentum={self.outer_momentum:g} overshoots in fewer than {needed} rounds, and "
            f"this training has {rounds} at most: use outer_momentum={OUTER_MOMENTUM}, or a "
            "smaller sync_every"
        )

    @property
    def keeps_residual(self) -> bool:
        """Whether rounding errors are kept for the next sync (error feedback)."""
        return self.wire_format != WIRE_FORMATS[0]

    @property
    def changes_outer_numbers(self) -> bool:
        """Whether the schedule changes the learning rate or the momentum of the outer SGD."""
        return any("outer_lr" in row or "outer_momentum" in row for row in self.schedule)

    def outer_numbers_at(self, outer_step: int) -> tuple[float, float, bool]:
        """The outer SGD's learning rate, momentum, and whether that is Nesterov's.

        torch refuses Nesterov without momentum; plain SGD is the same then.

        Args:
            outer_step: The number of the step, from 1. 0: before the schedule.
        """
        momentum = self._at(outer_step, "outer_momentum")
        nesterov = self.outer_nesterov and momentum != 0
        return self._at(outer_step, "outer_lr"), momentum, nesterov

    def _at(self, outer_step: int, key: str) -> Any:
        """The value of one of ``KEYS`` for an outer step: of the last row so far that has it."""
        value = getattr(self, key)
        for row in self.schedule:
            if row["outer_step"] <= outer_step:
                value = row.get(key, value)
        return value

    def fingerprint(self) -> dict[str, Any]:
        """Return the settings that must be equal in all groups, as plain containers.

        The outer optimizer is not among them: it may be the user's own, so ``DiLoCo`` describes it.
        The number of inner steps may differ if ``weight_by`` weights groups by what they have
        trained.
        """
        agreed = asdict(self)
        for name in ("max_sync_retries", "outer_lr", "outer_momentum"):
            del agreed[name]
        agreed["schedule"] = [*agreed["schedule"]]
        if not self.changes_outer_numbers:
            del agreed["outer_nesterov"]  # it is part of the description of the outer optimizer
        if self.weight_by != "uniform":
            for each in (agreed, *agreed["schedule"]):
                each.pop("sync_every", None)
            agreed["schedule"] = [row for row in agreed["schedule"] if len(row) > 1]
        return agreed


# ---- the schedule: a step function of the outer step, equal in all groups, so that it needs no
# message: a group that resumes, or that joins late, knows its row from the outer step alone.

KEYS = ("sync_every", "outer_lr", "outer_momentum")
"""What a row may change."""

MAX_ROWS = 64
"""Groups compare the whole schedule when they start, in a message of a fixed size."""

_FORM = "{outer_step: 61, sync_every: 30}"


def check_rows(schedule: object) -> Rows:
    """Check a schedule.

    Args:
        schedule: Rows, each a mapping with ``outer_step`` and any of ``KEYS``.

    Returns:
        The rows, with floats where numbers may be fractions.

    Raises:
        ValueError: It is no list of such rows, a number is out of range, or the outer steps do not
            ascend. The message has the row, the value and the fix.
    """
    if not isinstance(schedule, Sequence) or isinstance(schedule, str | bytes):
        raise ValueError(f"schedule={schedule!r}: give a list of rows such as {_FORM}, or []")
    if len(schedule) > MAX_ROWS:
        raise ValueError(f"schedule has {len(schedule)} rows: use at most {MAX_ROWS}")
    rows = tuple(_check_row(f"schedule[{number}]", row) for number, row in enumerate(schedule))
    for number, (one, other) in enumerate(pairwise(row["outer_step"] for row in rows), 1):
        if other <= one:
            raise ValueError(
                f"schedule[{number}]: outer_step={other} does not come after {one}: put the rows "
                "in ascending order, one for each outer step"
            )
    return rows


def _check_row(where: str, row: object) -> Mapping[str, Any]:
    if not isinstance(row, Mapping) or "outer_step" not in row or len(row) < 2:
        raise ValueError(
            f"{where}={row!r}: write a row with outer_step and any of {', '.join(KEYS)}, such as "
            f"{_FORM}"
        )
    known = ("outer_step", *KEYS)
    for key in row:
        if key not in known:
            close = closest(key, KEYS)
            fix = f"did you mean {close}?" if close else f"use {', '.join(KEYS)}"
            raise ValueError(f"{where}: {key} cannot change during a run: {fix}")
    check_integer(f"{where}: outer_step", row["outer_step"], at_least=1)
    _check_scheduled(row, f"{where}: ")
    fractions = ("outer_lr", "outer_momentum")
    return {key: float(row[key]) if key in fractions else row[key] for key in known if key in row}


def _check_scheduled(values: Mapping[str, Any], where: str = "") -> None:
    """Check the values of those ``KEYS`` that there are, in the settings or in a row."""
    if "sync_every" in values:
        check_integer(f"{where}sync_every", values["sync_every"], at_least=1)
    if "outer_lr" in values:
        check_number(f"{where}outer_lr", values["outer_lr"], 0.0, 1000.0)
    if "outer_momentum" in values:
        check_number(f"{where}outer_momentum", values["outer_momentum"], 0.0, 1.0, below=True)


# ---- same settings?

FIXED = ("num_fragments", "fragment_patterns", "wire_format")
"""Settings that a resume cannot change: they define the fragments and the messages, and a
checkpoint holds parts of both. A checkpoint without one of these keys cannot be resumed: a further
key needs the value that older checkpoints had."""

FIXED_WITH_BUFFERS = (*FIXED, "sync_buffers")
"""The same for a model of which ``sync_buffers`` decides what is synchronised."""

COUNTED = ("samples", "tokens")
"""Values of ``weight_by`` that need a count which a checkpoint of another ``weight_by`` lacks."""


TENSORS = "tensors"
"""Key of the shapes and dtypes by name, which say in which tensor two models differ."""


class SettingsMismatch(ValueError):
    """Two replica groups of one run have different settings or models.

    The message names each key that differs, with both values.
    """


def differing(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Return the keys whose values differ: this defines "the same settings" everywhere."""
    return [key for key in sorted(mine.keys() | theirs.keys()) if mine.get(key) != theirs.get(key)]


def compare_fingerprints(mine: Mapping[str, Any], theirs: Mapping[str, Any], whose: str) -> None:
    """Check that two groups have the same fingerprint.

    Args:
        mine: This group's fingerprint.
        theirs: The other one.
        whose: Who has the other one, for the message.

    Raises:
        SettingsMismatch: They differ. The message lists every differing key with both values.
    """
    mine, theirs = dict(mine), dict(theirs)
    tensors = mine.pop(TENSORS, None), theirs.pop(TENSORS, None)
    if all(tensors) and mine["model"] != theirs["model"]:
        mine["model"], theirs["model"] = tensors
    if keys := differing(mine, theirs):
        both = [describe_difference(key, mine.get(key), theirs.get(key)) for key in keys]
        raise SettingsMismatch(
            f"this replica group's settings differ from those of {whose}, make them equal: "
            + "; ".join(both)
        )


def compare_groups(
    settings: Mapping[str, Mapping[str, Any]],
    own_name: str,
    run_name: str,
) -> dict[str, str]:
    """Compare the settings of the groups in a quorum with the run's.

    Args:
        settings: By the lighthouse's name of the group.
        own_name: The name of this group.
        run_name: The group whose settings are the run's.

    Returns:
        What to log of each group that has to leave, by its name.

    Raises:
        SettingsMismatch: This group has to leave.
    """
    others: dict[str, str] = {}
    for name in (run_name, *settings):
        group = name.partition(":")[0]
        try:
            compare_fingerprints(settings[own_name], settings[name], f"replica group {group}")
        except SettingsMismatch as error:
            if name == run_name:
                raise
            others[name] = f"Not connecting to a replica group, which has to leave: {error}"
    return others


def describe_difference(name: str, mine: Any, theirs: Any) -> str:
    """Describe two values that differ; of two models, the first of their tensors that does."""
    if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
        name = min(n for n in mine.keys() | theirs.keys() if mine.get(n) != theirs.get(n))
        mine, theirs = mine.get(name, "missing"), theirs.get(name, "missing")
    return f"{name}: {mine!r} here, {theirs!r} there"


def check_fixed(mine: Mapping[str, Any], saved: Mapping[str, Any], fixed: Collection[str]) -> None:
    """Check that a checkpoint was saved with the settings that a resume cannot change.

    Raises:
        SettingsMismatch: It was saved with others. The message has both values.
    """
    mine, saved = ({key: each.get(key) for key in fixed} for each in (mine, saved))
    compare_fingerprints(mine, saved, "the checkpoint")


def adopt_changes(mine: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    """Compare the settings of a resume with those of its checkpoint.

    Returns:
        One phrase for each change that is adopted.

    Raises:
        SettingsMismatch: A setting has changed that the saved state does not allow to change.
    """
    fixed = [*FIXED]
    if mine["model"] != saved["model"]:
        fixed += ["sync_buffers", "model"]
    if mine.get("weight_by") in COUNTED:
        fixed.append("weight_by")
    kinds = {each["outer_optimizer"].partition("(")[0] for each in (mine, saved)}
    if len(kinds) > 1:
        fixed.append("outer_optimizer")
    check_fixed(mine, saved, fixed)
    return [
        f"{key}: {saved.get(key)!r} before, {mine.get(key)!r} now" for key in differing(mine, saved)
    ]
