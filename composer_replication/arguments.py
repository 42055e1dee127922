"""What functions of ours are given: names and defaults of keywords, and checks of single values.

Each error contains the name, the value and the fix. Imports nothing of ours.
"""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import json
import math
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from itertools import pairwise
from typing import Any, Literal, TypeVar, get_args, get_origin

Function = TypeVar("Function", bound=Callable[..., Any])

# ---- keywords: a TypedDict has the type, the default and the description of each ----------------


def defaults_of(keywords: type) -> dict[str, Any]:
    """The default of each keyword: it stands behind the type, as in ``Annotated[int, 100]``.

    Args:
        keywords: A TypedDict, whose module does without ``from __future__ import annotations``.
    """
    return {name: kind.__metadata__[0] for name, kind in keywords.__annotations__.items()}


def among(values: Mapping[str, Any], keywords: type) -> dict[str, Any]:
    """Those of the values whose names are keywords of a TypedDict."""
    return {name: value for name, value in values.items() if name in keywords.__annotations__}


def check_names(named: Iterable[str], keywords: type, function: str) -> None:
    """Reject a keyword that a function does not take.

    Raises:
        TypeError: It names the closest keyword.
    """
    known = keywords.__annotations__
    for name in named:
        if name not in known:
            close = closest(name, known)
            hint = f"did you mean {close}?" if close else f"use one of {', '.join(known)}"
            raise TypeError(f"{name} is no argument of {function}: {hint}")


def shows(keywords: type) -> Callable[[Function], Function]:
    """Have ``help`` and ``inspect.signature`` show the keywords of a function's ``**named``.

    Type checkers and editors read them from the annotation, ``**named: Unpack[TheKeywords]``.

    Args:
        keywords: The same TypedDict.
    """

    def add(function: Function) -> Function:
        own = inspect.signature(function)
        kept = [each for each in own.parameters.values() if each.kind is not each.VAR_KEYWORD]
        more = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=kind.__metadata__[0],
                annotation=getattr(kind.__origin__, "__forward_arg__", kind.__origin__),
            )
            for name, kind in keywords.__annotations__.items()
        ]
        function.__signature__ = own.replace(parameters=[*kept, *more])  # pyright: ignore
        # The keywords are the last arguments: their descriptions end the section Args.
        described = inspect.getdoc(function) or ""
        text, *rest = re.split(r"(?=\n\n(?:Returns|Raises):\n)", described, maxsplit=1)
        lines = [
            textwrap.fill(f"{name}: {' '.join(each.split())}", 96, subsequent_indent="    ")
            for name, each in descriptions_of(keywords).items()
        ]
        if lines:
            text += "\n" if "\nArgs:\n" in text else "\n\nArgs:\n"
            text += textwrap.indent("\n".join(lines), "    ")
        function.__doc__ = "".join([text, *rest])
        return function

    return add


@functools.cache
def descriptions_of(keywords: type) -> dict[str, str]:
    """The text under each keyword of a TypedDict; empty where the source is not installed."""
    try:
        source = inspect.getsource(keywords)
    except (OSError, TypeError):
        return {}
    statement = ast.parse(source).body[0]
    assert isinstance(statement, ast.ClassDef), "it is the source of a class"
    found: dict[str, str] = {}
    for base in statement.bases:  # a TypedDict forgets its bases
        assert isinstance(base, ast.Name), "a TypedDict's base is a name"
        if base.id != "TypedDict":
            found |= descriptions_of(getattr(sys.modules[keywords.__module__], base.id))
    for one, other in pairwise(statement.body):
        match one, other:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=text)):
                found[name] = str(text)
    return found


# ---- texts --------------------------------------------------------------------------------------


def in_yaml(value: object) -> str:
    """A value in YAML's flow style, as one writes it in a config: ``[{outer_step: 61}]``."""
    text = json.dumps(value, default=str, ensure_ascii=False).replace("Infinity", ".inf")
    return re.sub(r'"([A-Za-z_]\w*)"', r"\1", text)  # JSON is YAML, where words need no quotes


def closest(name: object, known: Iterable[str]) -> str | None:
    """Return the known name that is most similar to an unknown one; None if none is similar."""
    return next(iter(difflib.get_close_matches(str(name), [*known], n=1)), None)


# ---- values -------------------------------------------------------------------------------------


def check_types(values: Any) -> None:
    """Reject values of a dataclass that do not have their field's type, as YAML may give them.

    Raises:
        ValueError: A value is of another type than its field.
    """
    for field in fields(values):
        value = getattr(values, field.name)
        if field.type is bool and not isinstance(value, bool):
            raise ValueError(f"{field.name}={value!r}: use true or false")
        if field.type == str | None and not isinstance(value, str | os.PathLike | None):
            raise ValueError(f"{field.name}={value!r}: use a text in quotes")
        if get_origin(field.type) is Literal and value not in get_args(field.type):
            choices = " or ".join(filter(None, get_args(field.type)))
            raise ValueError(f"{field.name}={value!r}: use {choices}")


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
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:  # pyright: ignore
        bounds = "a number of seconds above 0" + (f", or {alternative}" if alternative else "")
        raise ValueError(f"{name}={value!r}: use {bounds}")
