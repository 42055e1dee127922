"""The figures of the pages are those of their sources. Run: pytest tests/test_numbers.py"""

import re

import pytest
from number_sources import ROOT, sources
from page_marks import marked
from page_numbers import blocks, problems

README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
STRICT = ["README.md", "learning.md", "performance.md"]
"""What these pages say are findings: each number of theirs has a source."""


def of_each(paths):
    """A case for each page; that of the study is slow, since it reads all trainings."""
    for path in paths:
        marks = [pytest.mark.slow] * (path.name == "learning.md")
        yield pytest.param(path, id=path.name, marks=marks)


@pytest.fixture(scope="module")
def check():
    names = sources()
    return lambda page, name="README.md": problems(name, page, names, name in STRICT)


@pytest.mark.parametrize("path", of_each(PAGES))
def test_a_number_with_a_mark_is_that_of_its_source(check, path):
    assert check(marked(path), path.name) == []


@pytest.mark.parametrize("path", of_each(path for path in PAGES if path.name in STRICT))
def test_every_number_with_a_mark_is_compared(check, path):
    """All of them are made wrong at once, and each is named."""
    page = marked(path)
    held = [number for block in blocks(page) if block.mark for number in block.numbers]
    wrong = [*page]
    for number in held:
        for at in range(*number.span()):
            wrong[at] = str((int(page[at]) + 1) % 10) if page[at].isdigit() else page[at]
    found = check("".join(wrong), path.name)
    assert len(held) > 5 and len(found) == len(held)
    assert all(line.endswith("in its source: correct the text") for line in found)


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("A sync takes 17 s.", "README.md:1: 17 has no source: name its source in a mark"),
        ("The [paper](https://arxiv.org/abs/2501.18512) has 9.1.", "9.1 has no source"),
        ("<!-- numbers: 17 -->\nA sync takes 17 s.", "the mark fails: ValueError: 17 names no"),
        ("<!-- numbers: chosen(17) -->\n\nIt is 17.", "the mark has 1 values for 0 numbers"),
        ("Text\n<!-- numbers: chosen(1.26) -->\nIt is 1.2.", "README.md:2: 1.2 is 1.26 in its"),
    ],
)
def test_what_is_wrong_is_named_with_its_place_and_the_fix(check, page, message):
    assert message in check(page)[0]


def test_what_needs_no_mark_and_what_a_mark_holds(check):
    held = '<!-- numbers: chosen(1.26, 1234,\n6e-9, 15, [2.0], "3 of 4") -->\n'
    page = (
        "Run `make 17` with int8 and SHA-256, for 0 or 1 group.\n\n```bash\nmake 17\n\n18\n```\n\n"
        f"1. [arXiv 2501.18512](https://arxiv.org/abs/2501.18512)\n\n{held}"
        "From 1.3 to 1,234, 6e-09, a 15th: 2\n```\n3 groups\n\n4\n```"
    )
    assert check(page) == []
    assert re.findall("is .* in its", check(page.replace("3 groups", "5 groups"))[0])
