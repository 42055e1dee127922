"""The code blocks of the pages, and a page as one session in a shell. See ``test_pages.py``.

A page is run from its first block to its last. ``bash`` blocks share one shell. ``python`` blocks
are one script, which grows, and is run before the next block that is none. A block whose first
line is ``# NAME.py`` or ``# NAME.yaml`` becomes a file of that name. Marks in ``tests/pages`` (see
``page_marks.py``) say what else there is to know:

    not run: why the next block is not run
    needs: the distributions without which it is not run
    run: commands that the text leaves to its readers, such as a file that is theirs
    run python: the same in Python
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from textwrap import dedent

from harness.foundry import is_installed
from page_marks import ROOT, line_of, marked

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
_PART = re.compile(
    r"^ *<!-- (?P<mark>not run|needs|run|run python):\s+(?P<note>.*?)\s*-->"
    r"|^ *```(?P<language>[^\n{]*)\n(?P<text>(?:[^\n]*\n)*?) *```$"
    r"|^```{.*?^```$",  # a directive of the site
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A block of a page, or commands of a mark.

    Args:
        line: The line of the page in which it begins.
        language: ``bash``, ``python`` or ``yaml``; empty if it is output.
        text: What it says.
        reason: Why it is not run here; empty if it is.
    """

    line: int
    language: str
    text: str
    reason: str = ""

    @property
    def file(self) -> str | None:
        """The name of the file that it is; None if it is commands."""
        name = re.match(r"# (\w+\.(?:py|yaml))\n", self.text)
        return name[1] if name else None


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of a page in their order."""
    source, reason = marked(page), ""
    for part in _PART.finditer(source):
        mark, note, line = part["mark"], part["note"], line_of(source, part.start())
        if mark == "not run":
            reason = note
        elif mark == "needs":
            missing = [name for name in note.split(", ") if not is_installed(name)]
            reason = f"needs {', '.join(missing)}" if missing else ""
        elif mark is not None or part["text"] is not None:
            language = part["language"] if mark is None else mark.removeprefix("run") or "bash"
            text = dedent(part["text"] if mark is None else f"{note}\n")
            yield Block(line, language.strip(), text, reason)
            reason = ""


def block(page: str, start: str) -> str:
    """The text of a block.

    Args:
        page: Path of the page in the repository.
        start: How its first line begins.
    """
    found = [each.text for each in blocks(ROOT / page) if each.text.startswith(start)]
    assert len(found) == 1, f"{page} has {len(found)} blocks that begin with {start!r}"
    return found[0]


def script(page: Path) -> str:
    """The blocks of a page that are run here, as one script of bash."""
    lines = ["set -euo pipefail", "trap 'kill $(jobs -p) 2>/dev/null || true' EXIT"]
    run = [b for b in blocks(page) if not b.reason and (b.file or b.language in ("bash", "python"))]
    for each, following in zip_longest(run, run[1:]):
        lines.append(f"echo '--- {page.name}:{each.line}' >&2")
        if each.file is None and each.language == "bash":
            lines.append(each.text)
            continue
        into = f">{each.file}" if each.file else ">>page.py"
        lines.append(f"cat {into} <<'END OF BLOCK'\n{each.text}END OF BLOCK")
        # Blocks of Python in a row are run together.
        if not each.file and (following is None or following.file or following.language == "bash"):
            lines.append("python page.py")
    return "\n".join(lines) + "\n"
