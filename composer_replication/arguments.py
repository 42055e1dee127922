"""Arguments: checks of single values, and functions whose arguments are the fields of a dataclass.

Each error contains the name, the value and the fix. Imports nothing of ours.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

P = ParamSpec("P")
Self = TypeVar("Self")
Result = TypeVar("Result")
Part = TypeVar("Part")

REMOVED: dict[str, str] = {
    "connect_timeout": "leave it out, connecting may take 5 s, and timeout limits the rest",
    "heartbeat_interval_s": "leave it out, it is a third of the coordinator's "
    "--heartbeat-timeout-s",
    "bucket_cap_mb": "leave it out, messages have up to 64 MiB",
    "error_feedback": "leave it out, rounding errors are always kept for the next sync",
    "pin_memory": "leave it out, memory is pinned where there is an accelerator",
    "max_missed_outer_steps": "leave it out, a group that missed an outer step loses the inner "
    "steps since its last sync",
    "outer_schedule": "write its rows as schedule: [{outer_step: 61, outer_lr: 0.5, "
    "outer_momentum: 0.9}]",
    "warmup_outer_steps": "give the short rounds as sync_every, and schedule: [{outer_step: "
    "warmup_outer_steps + 1, sync_every: ...}]",
    "warmup_sync_every": "give it as sync_every, and the later rounds as schedule: [{outer_step: "
    "warmup_outer_steps + 1, sync_every: ...}]",
    "merge": "leave it out, the groups' pseudo-gradients are averaged",
    "quorum_retries": "leave it out, a lighthouse that is away is asked again four times a second",
    "quorum_timeout": "leave it out, give_up_after_s limits the whole wait for a quorum",
    "tls_dir": (
        "run the groups in a private network (docs/security.md has a recipe with WireGuard), and "
        "give the coordinator --ssl-certfile and --ssl-keyfile for HTTPS"
    ),
    "heal_inner_state": "leave it out, a joiner keeps its own inner optimizer state",
    "run_id": "name the runs of your loggers yourself, for example with ${oc.env:REPLICA_GROUP_ID}",
    "verbose": "leave it out, and choose by the level of the logger composer_replication",
    "on_bad_state": "a checkpoint that cannot be resumed is an error that says what to do",
}
"""Arguments of the previous version that are gone, and what to use in place of each."""


class _Decorator(Protocol[P]):
    @overload
    def __call__(
        self, function: Callable[Concatenate[Self, ...], Result], /
    ) -> Callable[Concatenate[Self, P], Result]: ...

    @overload
    def __call__(self, function: Callable[..., Result], /) -> Callable[P, Result]: ...


def takes(arguments: Callable[P, Any]) -> _Decorator[P]:
    """Give a function, or a method, the arguments of a dataclass's constructor.

    The function is written with ``**keywords``, and ``*positional`` if some fields are not
    keyword-only. It receives what its caller has given and nothing else, and usually begins with
    ``arguments = TheDataclass(**keywords)``. To the caller, to ``inspect.signature``, to ``help``
    and to a type checker it looks as if it had written out all fields, with their types, defaults
    and descriptions.

    Args:
        arguments: The dataclass. Its docstring, and those of the dataclasses it inherits from,
            describe the fields under ``Args:``.

    Raises:
        TypeError: From the function, if a keyword is none of the fields; it names the closest one.
    """
    constructor = inspect.signature(arguments)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        name = function.__qualname__.removesuffix(".__init__")

        @functools.wraps(function)
        def checked(*positional: Any, **keywords: Any) -> Any:
            for keyword in keywords:
                if keyword not in signature.parameters:
                    raise TypeError(_unknown(keyword, name, constructor.parameters))
            return function(*positional, **keywords)

        own = inspect.signature(function).parameters.values()
        kept = [each for each in own if each.kind is each.POSITIONAL_OR_KEYWORD]
        signature = constructor.replace(
            parameters=[*kept, *constructor.parameters.values()],
            return_annotation=function.__annotations__.get("return", inspect.Signature.empty),
        )
        checked.__signature__ = signature  # pyright: ignore[reportAttributeAccessIssue]
        checked.__annotations__ = {
            each.name: each.annotation
            for each in signature.parameters.values()
            if each.annotation is not each.empty
        }
        checked.__doc__ = f"{inspect.getdoc(function) or ''}\n\nArgs:\n{descriptions(arguments)}"
        return checked

    return decorate  # pyright: ignore[reportReturnType]


def pick(kind: Callable[..., Part], values: Mapping[str, Any]) -> Part:
    """Build a dataclass from those of the values that are fields of it."""
    names = [field.name for field in fields(kind)]  # pyright: ignore[reportArgumentType]
    return kind(**{name: values[name] for name in names if name in values})


def _unknown(keyword: str, function: str, known: Mapping[str, Any]) -> str:
    if keyword in REMOVED:
        return f"{keyword} has been removed from {function}: {REMOVED[keyword]}"
    close = closest(keyword, known)
    hint = f"did you mean {close}?" if close else f"use one of {', '.join(known)}"
    return f"{keyword} is no argument of {function}: {hint}"


def descriptions(arguments: Any) -> str:
    """The lines below ``Args:`` of a function, or of a dataclass and those it inherits from."""
    sections = []
    for kind in reversed(getattr(arguments, "__mro__", (arguments,))):
        _, found, rest = inspect.cleandoc(kind.__doc__ or "").partition("Args:\n")
        if found:
            sections.append(rest.partition("\n\n")[0])
    return "\n".join(sections)


def in_yaml(value: object) -> str:
    """A value in YAML's flow style, as one writes it in a config: ``[{outer_step: 61}]``."""
    text = json.dumps(value, default=str, ensure_ascii=False).replace("Infinity", ".inf")
    return re.sub(r'"([A-Za-z_]\w*)"', r"\1", text)  # JSON is YAML, where words need no quotes


def closest(name: object, known: Iterable[str]) -> str | None:
    """Return the known name that is most similar to an unknown one; None if none is similar."""
    return next(iter(difflib.get_close_matches(str(name), [*known], n=1, cutoff=0.5)), None)


def check_types(values: Any) -> None:
    """Reject values of a dataclass that do not have their field's type, as YAML may give them.

    Raises:
        ValueError: A value is of another type than its field.
    """
    for field in fields(values):
        value = getattr(values, field.name)
        if field.type == "bool" and not isinstance(value, bool):
            raise ValueError(f"{field.name}={value!r}: use true or false")
        if field.type == "str | None" and not isinstance(value, str | os.PathLike | None):
            raise ValueError(f"{field.name}={value!r}: use a text in quotes")


def check_integer(name: str, value: object, *, at_least: int) -> None:
    """Reject a value that is not an integer, or too small.

    Raises:
        ValueError: The value is not an integer of at least ``at_least``.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise ValueError(f"{name}={value!r}: use an integer of at least {at_least}")


def check_number(
    name: str,
    value: object,
    low: float,
    high: float,
    *,
    below: bool = False,
    alternative: str | None = None,
) -> None:
    """Reject a value that is not a finite number, or out of bounds.

    Args:
        name: The name of the argument.
        value: Its value.
        low: The smallest value allowed.
        high: The largest value allowed.
        below: Whether ``high`` itself is not allowed.
        alternative: What may be there instead of a number, for the message.

    Raises:
        ValueError: The value is not a finite number within the bounds.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not low <= value <= high or (below and value == high):  # pyright: ignore
        bounds = f"{low:g} or more" if high == math.inf else f"between {low:g} and {high:g}"
        bounds += (", exclusive" if below else "") + (f", or {alternative}" if alternative else "")
        raise ValueError(f"{name}={value!r}: use a number {bounds}")


def check_seconds(name: str, value: object, alternative: str = "") -> None:
    """Reject a value that is not a duration in seconds.

    Args:
        name: The name of the argument.
        value: Its value.
        alternative: What may be there instead of a number, for the message.

    Raises:
        ValueError: The value is not a finite number above 0.
    """
    if not isinstance(value, int | float) or not 0 < value < math.inf:
        bounds = "a number of seconds above 0" + (f", or {alternative}" if alternative else "")
        raise ValueError(f"{name}={value!r}: use {bounds}")


def check_choice(name: str, value: str | None, choices: Sequence[str | None]) -> None:
    """Reject a value that is none of the choices.

    Raises:
        ValueError: The value is none of them.
    """
    if value not in choices:
        raise ValueError(f"{name}={value!r}: use {' or '.join(filter(None, choices))}")
