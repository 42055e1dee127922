"""The numbers of the pages, each beside the source that its mark names.

A mark is a comment before a paragraph, list, table or block of output. It has one Python expression
for each number of the block, in reading order, or values of which each gives several:

    <!-- numbers: sync_100m_147.arguments.repetitions, plan(params=7e9, ...) -->

The names in it are those of ``number_sources.py``, and the files in ``benchmarks/measured``. A
number of the page is right if it is the value, rounded to as many digits as are shown.

Not looked at are code (inline, and blocks that name a language), link targets, the digits of names
such as ``int8``, versions that ``pyproject.toml`` has, and 0 and 1 in a block without a mark.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

_TOKEN = re.compile(
    r"(?<![\w.])(?<![A-Za-z]-)"
    r"(\d{4}-\d\d-\d\d|\d++(?:\.\d++){2,}"  # a date, a version
    r"|(?:\d{1,3}(?:,\d{3})++|\d++)(?:\.\d++)?(?:e[+-]?\d++)?)(?![A-Za-z]*\d)"
)
_MARK = "<!-- numbers:"
_GENERATED = re.compile(r"<!-- (\w+): written by .*?<!-- end of \1 -->", re.DOTALL)
_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]*)\)")
_FENCE = re.compile(r"^\s*```(\S*)")
_VERSION = re.compile(
    r"\b(Apache License|Composer|Python|Ray|Version|torch|torchvision)"
    r"(?: [a-z]+){0,3} (\d+(?:\.\d+)+)"
)
_FREE = {"0", "1"}
_HELP = "name its source in a mark before the block: CONTRIBUTING.md, Numbers in the pages"


class UnknownNumber(ValueError):
    """A number of a page is not that of its source, or has none. The message says which."""


@dataclass(frozen=True)
class Token:
    """A number as a page shows it.

    Args:
        text: Its digits, with commas and points.
        line: Where it is, from 1 on.
        column: Where it begins there, from 0 on.
    """

    text: str
    line: int
    column: int


@dataclass(frozen=True)
class Block:
    """What stands between two blank lines, and the mark before it."""

    tokens: Sequence[Token]
    mark: str | None
    line: int


def numbers_in(text: str) -> list[str]:
    """The numbers of a text, as they stand there."""
    return _TOKEN.findall(text)


def problems(
    name: str, page: str, sources: Mapping[str, Any], versions: Mapping[str, set[str]]
) -> list[str]:
    """Compare the numbers of a page with their sources.

    Args:
        name: Of the page, for the messages.
        page: Its Markdown.
        sources: What a mark may name.
        versions: The versions of each product that a page may name.

    Returns:
        A line for each number that is wrong or has no source, and for each mark that fails.
    """
    found: list[str] = []
    for block in blocks(page, versions):
        try:
            wrong = [] if block.mark is None else [*_compare(block, sources)]
        except Exception as error:
            wrong = [f"{block.line}: the mark fails: {type(error).__name__}: {error}"]
        if block.mark is None:
            shown = [token for token in block.tokens if token.text not in _FREE]
            wrong = [f"{token.line}: {token.text} has no source: {_HELP}" for token in shown]
        found += [f"{name}:{line}" for line in wrong]
    return found


def blocks(page: str, versions: Mapping[str, set[str]]) -> Iterator[Block]:
    """The blocks of a page that have numbers or a mark."""
    page = _GENERATED.sub(lambda match: "\n" * match[0].count("\n"), page)
    lines = iter(enumerate([*page.splitlines(), ""], 1))
    mark: tuple[int, str] | None = None
    tokens: list[Token] = []
    fence: str | None = None
    for number, line in lines:
        begins_mark = fence is None and line.startswith(_MARK)
        opened = _FENCE.match(line)
        ends = opened if fence is not None else begins_mark or opened or not line.strip()
        # A mark belongs to the block of output that begins right after it.
        if ends and (tokens or mark) and not (opened and fence is None and not tokens):
            yield Block(tokens, mark and mark[1], mark[0] if mark else tokens[0].line)
            mark, tokens = None, []
        if begins_mark:
            mark = number, _until_end(line.removeprefix(_MARK), lines)
        elif opened:
            fence = opened[1] if fence is None else None
        elif not fence:  # a block that names a language is code
            text = _prose(line, versions) if fence is None else line
            tokens += [Token(each[0], number, each.start()) for each in _TOKEN.finditer(text)]


def _until_end(text: str, lines: Iterator[tuple[int, str]]) -> str:
    while "-->" not in text:
        text += next(lines, (0, "-->"))[1]
    return text.partition("-->")[0]


def _prose(line: str, versions: Mapping[str, set[str]]) -> str:
    """A line with blanks in the places of code, link targets, list marks and known versions."""

    def blank(match: re.Match[str]) -> str:
        return " " * len(match[0])

    def link(match: re.Match[str]) -> str:
        shown = _TOKEN.sub(lambda each: blank(each) if each[0] in match[2] else each[0], match[1])
        return f"[{shown}]".ljust(len(match[0]))

    def version(match: re.Match[str]) -> str:
        return blank(match) if match[2] in versions.get(match[1], ()) else match[0]

    line = re.sub(r"^\s*\d+\. ", blank, re.sub(r"(`+).+?\1", blank, line))
    return _VERSION.sub(version, _LINK.sub(link, line))


def _compare(block: Block, sources: Mapping[str, Any]) -> Iterator[str]:
    values = list(_flat(_evaluate(block.mark or "", sources)))
    if len(values) != len(block.tokens):
        shown = ", ".join(token.text for token in block.tokens)
        yield (
            f"{block.line}: the mark has {len(values)} values for {len(block.tokens)} numbers: "
            f"{', '.join(map(str, values))} for {shown}"
        )
        return
    for token, value in zip(block.tokens, values, strict=True):
        if not _shows(token.text, value):
            yield f"{token.line}: {token.text} is {value} in its source: correct the text"


def _evaluate(mark: str, sources: Mapping[str, Any]) -> list[Any]:
    tree = ast.parse(f"[{mark.strip()}]", mode="eval")
    assert isinstance(tree.body, ast.List)
    for element in tree.body.elts:
        is_free = isinstance(element, ast.Constant) and str(element.value) in _FREE
        if not is_free and not any(isinstance(each, ast.Name) for each in ast.walk(element)):
            raise UnknownNumber(f"{ast.unparse(element)} names no source: {_HELP}")
    return eval(compile(tree, "mark", "eval"), {"__builtins__": {}, **sources})


def _flat(value: Any) -> Iterator[int | float | str]:
    """The numbers of a value and all in it; of a text those that stand in it."""
    if isinstance(value, str):
        yield from numbers_in(value)
    elif isinstance(value, Mapping):
        yield from _flat([*value.values()])
    elif isinstance(value, Sequence):
        for each in value:
            yield from _flat(each)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value
    else:
        raise UnknownNumber(f"{value!r} is no number")


def _shows(shown: str, value: int | float | str) -> bool:
    """Whether these digits are the value, rounded to as many as there are."""
    if isinstance(value, str):
        return shown == value
    if re.search(r"-\d\d-|\..*\.", shown):
        return False
    digits = Decimal(shown.replace(",", ""))
    exponent = digits.as_tuple().exponent
    assert isinstance(exponent, int)
    return abs(digits - Decimal(repr(value))) <= Decimal(10) ** exponent / 2
