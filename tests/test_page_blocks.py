"""Every command of a page is run by a test, or says that none runs it.

Run: pytest tests/test_page_blocks.py
"""

import re

import pytest
from page_blocks import MARK, PAGES, ROOT, fenced

BLOCKS = [
    (page.relative_to(ROOT).as_posix(), text) for page in PAGES for text in fenced(page, "bash")
]
READ = {
    key
    for path in (ROOT / "tests").rglob("*.py")
    for key in re.findall(r'\bblock\(\s*"([^"]+)",\s*"([^"]+)"\s*\)', path.read_text())
}
"""Page and beginning of each block that a test reads. That it is there, the test finds out."""


@pytest.mark.parametrize(
    ("page", "text"),
    BLOCKS,
    ids=[f"{page}: {text.splitlines()[0][:40]}" for page, text in BLOCKS],
)
def test_a_block_is_read_by_a_test_or_says_why_none_runs_it(page, text):
    if text.startswith("#"):
        assert re.match(rf"{re.escape(MARK)}[`\w].{{10}}", text)
    else:
        read = [start for of, start in READ if of == page and text.startswith(start)]
        assert read, f"mark the block with {MARK!r}, or let a test run block({page!r}, ...)"
