"""The numbers of the pages, each beside the source that its mark names.

A mark belongs to a paragraph, list, table or block of output, and stands in ``tests/pages`` (see
``page_marks.py``). It has one Python expression for each number of the block, in reading order, or
values of which each gives several:

    numbers: sync_100m_147.arguments.repetitions, plan(params="7B", ...)

The names in it are those of ``number_sources.py``, and the files in ``benchmarks/measured``. A
number of the page is right if it is the value, rounded to as many digits as are shown.

Not looked at are code (inline, and blocks that name a language), link targets, the digits of names
such as ``int8``, versions of products, and 0 and 1 in a block without a mark.
"""

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from page_marks import line_of

_TOKEN = re.compile(
    r"(?<![\w.])(?<![A-Za-z]-)"
    r"(\d{4}-\d\d-\d\d|\d++(?:\.\d++){2,}"  # a date, a version
    r"|(?:\d{1,3}(?:,\d{3})++|\d++)(?:\.\d++)?(?:e[+-]?\d++)?)(?![A-Za-z]*\d)"
)
_MARK = re.compile(r"<!-- numbers:(.*?)-->", re.DOTALL)
_ASIDE = re.compile(
    r"<!-- (\w+): written by .*?<!-- end of \1 -->|^( *)```\w+\n.*?^\2```$"
    r"|<!-- (?:not run|needs|run|run python):.*?-->",
    re.DOTALL | re.MULTILINE,
)
_OUTPUT = re.compile(r"(^```\n.*?^```$)", re.DOTALL | re.MULTILINE)
_NO_FINDING = re.compile(
    r"(?<!`)(`+)(?!`)[^\n]+?(?<!`)\1(?!`)|^ *\d+\. "
    r"|\b(?:Composer|License|Python|Ray|Version|torch|torchvision)(?: [a-z]+)* \d+(?:\.\d+)+",
    re.MULTILINE,
)
_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]*)\)")
_FREE = {"0", "1"}
_HELP = "name its source in a mark before the block: CONTRIBUTING.md, Numbers in the pages"


@dataclass(frozen=True)
class Block:
    """What stands between two blank lines: its line, mark, and numbers with their places."""

    line: int
    mark: str | None
    numbers: Sequence[re.Match[str]]


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match[0])


def _link(match: re.Match[str]) -> str:
    """The text of a link without the numbers that its target has, as long as it was."""
    shown = _TOKEN.sub(lambda each: _blank(each) if each[0] in match[2] else each[0], match[1])
    return f"[{shown}]".ljust(len(match[0]))


def blocks(page: str) -> Iterator[Block]:
    """The blocks of a page, with its marks as comments, that have numbers or a mark."""
    marks = {match.start(): match for match in _MARK.finditer(page)}
    text = _MARK.sub(lambda match: "<" + _blank(match)[1:].replace("\n", " "), page)
    parts = _OUTPUT.split(_ASIDE.sub(_blank, text))
    parts[::2] = [_LINK.sub(_link, _NO_FINDING.sub(_blank, part)) for part in parts[::2]]
    parts[1::2] = [part.replace("\n\n", "\n;") for part in parts[1::2]]
    text = "".join(parts)
    for block in re.finditer(r"(?:^[ \t]*\S.*\n?)+", text, re.MULTILINE):
        # Several marks in one paragraph or list: each holds what follows it.
        inner = [start for start in marks if block.start() < start < block.end()]
        edges = [block.start(), *inner, block.end()]
        for start, end in zip(edges, edges[1:], strict=False):
            numbers = [*_TOKEN.finditer(text, start, end)]
            if numbers or start in marks:
                mark = marks[start][1] if start in marks else None
                yield Block(line_of(page, start), mark, numbers)


def problems(name: str, page: str, sources: Mapping[str, Any], is_strict: bool) -> list[str]:
    """Compare the numbers of a page with their sources.

    Args:
        name: Of the page, for the messages.
        page: Its Markdown, with its marks as comments.
        sources: What a mark may name.
        is_strict: A number without a mark is wrong.

    Returns:
        A line for each number that is wrong or has no source, and for each mark that fails.
    """
    found: list[str] = []
    for block in blocks(page):
        if block.mark is not None:
            try:
                found += [f"{name}:{block.line}: {text}" for text in _wrong(block, sources)]
            except Exception as error:
                found.append(
                    f"{name}:{block.line}: the mark fails: {type(error).__name__}: {error}"
                )
        elif is_strict:
            shown = [number[0] for number in block.numbers if number[0] not in _FREE]
            found += [f"{name}:{block.line}: {text} has no source: {_HELP}" for text in shown]
    return found


def _wrong(block: Block, sources: Mapping[str, Any]) -> Iterator[str]:
    tree = ast.parse(f"[{(block.mark or '').strip()}]", mode="eval")
    assert isinstance(tree.body, ast.List)
    for element in tree.body.elts:
        is_free = isinstance(element, ast.Constant) and str(element.value) in _FREE
        if not is_free and not any(isinstance(each, ast.Name) for each in ast.walk(element)):
            raise ValueError(f"{ast.unparse(element)} names no source: {_HELP}")
    values = [*_flat(eval(compile(tree, "mark", "eval"), {"__builtins__": {}, **sources}))]
    shown = [number[0] for number in block.numbers]
    if len(values) != len(shown):
        yield f"the mark has {len(values)} values for {len(shown)} numbers: {values} for {shown}"
        return
    for text, value in zip(shown, values, strict=True):
        if not _shows(text, value):
            yield f"{text} is {value} in its source: correct the text"


def _flat(value: Any) -> Iterator[int | float | str]:
    """The numbers of a value and all in it; of a text those that stand in it."""
    if isinstance(value, str):
        yield from _TOKEN.findall(value)
    elif isinstance(value, Mapping):
        yield from _flat([*value.values()])
    elif isinstance(value, Sequence):
        for each in value:
            yield from _flat(each)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value
    else:
        raise ValueError(f"{value!r} is no number")


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
