"""What the pages are checked against, which stands in ``tests/pages`` and not in the pages.

``tests/pages/NAME.txt`` belongs to the page ``NAME.md``. A mark of it is a line with ``@`` and how
the line begins before which the mark belongs, and then the mark:

    @ With a delay, a sync adds
    numbers: overlap.arguments.overlap_sync_every

    @ make train
    run: export ARGS="max_duration=4ba"

A mark of a block of code names its first line, and ``@ (end)`` is the end of the page. Marks are in
the order of their lines. The tests see each as a comment before its line. What marks mean is said
in ``page_numbers.py`` and ``page_blocks.py``.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "tests" / "pages"

END = "(end)"
"""The line of a mark at the end of its page."""


def marked(page: Path) -> str:
    """The text of a page with its marks as comments.

    Raises:
        ValueError: The page has no line, after that of the mark before, that begins as one says.
    """
    lines = page.read_text().splitlines()
    path = FOLDER / f"{page.stem}.txt"
    text = path.read_text() if path.exists() else ""
    at = 0
    for anchor, mark in re.findall(r"^@ (.*)\n((?:(?!@ ).*\n?)*)", text, re.MULTILINE):
        places = range(at, len(lines))
        found = next((n for n in places if lines[n].lstrip().startswith(anchor)), None)
        if anchor == END:
            found = len(lines)
        if found is None:
            raise ValueError(
                f"{page.name} has no line here that begins with {anchor!r}: correct the line with "
                f"@ in tests/pages/{path.name}"
            )
        place = found - 1 if _begins_code(lines, found) else found
        indent = "" if place == len(lines) else re.sub(r"\S.*", "", lines[place])
        comment = f"{indent}<!-- {mark.rstrip()} -->".splitlines()
        lines[place:place] = comment
        at = found + len(comment)
    return "\n".join(lines) + "\n"


def _begins_code(lines: list[str], at: int) -> bool:
    """Whether a line is the first one of a block of code or output."""
    fences = [n for n in range(at) if lines[n].lstrip().startswith("```")]
    return len(fences) % 2 == 1 and fences[-1] == at - 1


def line_of(text: str, position: int) -> int:
    """The line of a place in a marked text, in the page without the marks."""
    before = text[:position]
    inserted = sum(
        comment.count("\n") + 1
        for comment in re.findall(r"^ *<!-- .*?-->(?=\n)", before, re.MULTILINE | re.DOTALL)
    )
    return before.count("\n") + 1 - inserted
