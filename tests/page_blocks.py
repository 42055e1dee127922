"""The commands of the pages, in ```bash blocks: each is run by a test, or says that none runs it.

A block that no test runs begins with ``MARK`` and the reason. Tests get every other one from
``block``, with the page and the beginning of the block as texts, so they run what the page says.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
MARK = "# Not run in our tests: "


def fenced(page: Path, language: str) -> list[str]:
    """The blocks of a page in one language, in their order; indented ones without the indent."""
    every = re.findall(
        r"^( *)```(.*)\n((?:.*\n)*?)\1```$", page.read_text(), re.MULTILINE
    )  # of all languages: the end of one block must not count as the beginning of another
    return [
        re.sub(f"^{indent}", "", text, flags=re.MULTILINE)
        for indent, its_language, text in every
        if its_language == language
    ]


def block(page: str, start: str) -> str:
    """The commands of a block, or its lines of Python, that a test runs.

    Args:
        page: Path of the page in the repository.
        start: How its first line begins.
    """
    texts = [text for language in ("bash", "python") for text in fenced(ROOT / page, language)]
    found = [text for text in texts if text.startswith(start)]
    assert len(found) == 1, f"{page} has {len(found)} blocks that begin with {start!r}"
    return found[0]
