"""Every number of README and docs is that of its source. Run: pytest tests/test_numbers.py"""

import re

import pytest
from number_sources import ROOT, code, found, read_results, sources, versions
from page_numbers import blocks, problems

DOCS = sorted((ROOT / "docs").glob("*.md"))
README = ROOT / "README.md"
CODE = re.compile(r"^```\w+\n(.*?)^```|`([^`\n]+)`", re.DOTALL | re.MULTILINE)
LINKS = re.compile(r"\]\([^)\n]*\)")
NAMES = re.compile(r"(?<![\w.])[A-Za-z]+-?\d[\w-]*")


@pytest.fixture(scope="module")
def check():
    """Compares the numbers of a page with their sources."""
    names, known = sources(), versions()
    return lambda page, name="PAGE.md": problems(name, page, names, known)


@pytest.mark.parametrize("path", [README, *DOCS], ids=lambda path: path.name)
def test_every_number_of_a_page_is_that_of_its_source(check, path):
    assert check(path.read_text(), path.name) == []


def other_digits(text):
    return re.sub(r"\d", lambda digit: str((int(digit[0]) + 1) % 10), text)


@pytest.mark.parametrize("path", [README, *DOCS], ids=lambda path: path.name)
def test_every_number_with_a_mark_is_compared(check, path):
    """All of them are made wrong at once, and each is named."""
    page, known = path.read_text(), versions()
    held = [token for block in blocks(page, known) if block.mark for token in block.tokens]
    lines = page.splitlines()
    for token in held:
        line, end = lines[token.line - 1], token.column + len(token.text)
        lines[token.line - 1] = line[: token.column] + other_digits(token.text) + line[end:]
    found = check("\n".join(lines))
    assert len(found) == len(held)
    assert all(line.endswith("in its source: correct the text") for line in found)


def strangers_in(readme, docs):
    """What has a digit in the README's code, and names with digits, that no page of docs has."""
    pages = "\n".join(path.read_text() for path in docs)
    lines = {line.strip() for line in pages.splitlines()}
    blocks_of_code, inline = zip(*CODE.findall(readme), strict=True)
    shown = [line.strip() for block in blocks_of_code for line in block.splitlines()]
    named = NAMES.findall(LINKS.sub("]", CODE.sub("", readme)))
    strange = [line for line in shown if re.search(r"\d", line) and line not in lines]
    strange += [text for text in inline if re.search(r"\d", text) and text not in pages]
    return strange + [name for name in named if not re.search(rf"\b{re.escape(name)}\b", pages)]


def test_an_example_of_the_readme_is_one_of_a_page():
    readme = README.read_text()
    assert strangers_in(readme, DOCS) == []
    assert "chosen(" not in readme  # each number is a finding


def test_another_digit_in_the_readme_is_noticed(check):
    """Digits of links are ``test_docs.py``'s, and those of marks are no text."""
    readme = README.read_text()
    spans = [*re.finditer(r"<!--.*?-->", readme, re.DOTALL), *LINKS.finditer(readme)]
    aside = {at for span in spans for at in range(*span.span())}
    places = [digit.start() for digit in re.finditer(r"\d", readme) if digit.start() not in aside]
    assert len(places) > 30
    for at in places:
        changed = readme[:at] + other_digits(readme[at]) + readme[at + 1 :]
        assert check(changed) or strangers_in(changed, DOCS), changed[at - 30 : at + 30]


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("A sync takes 17 s.", "PAGE.md:1: 17 has no source: name its source in a mark"),
        ("One\n\n| a | b |\n|---|---|\n| 2 | 0.5 |", "PAGE.md:5: 2 has no source"),
        ("```\n2 groups\n```", "PAGE.md:2: 2 has no source"),
        ("Run torch 1.2.3.", "PAGE.md:1: 1.2.3 has no source"),
        ("The [paper](https://arxiv.org/abs/2501.18512) has 9.1.", "9.1 has no source"),
        (
            "<!-- numbers: 17 -->\nA sync takes 17 s.",
            "PAGE.md:1: the mark fails: UnknownNumber: 17",
        ),
        ("<!-- numbers: sync -->\nIt takes 17 s.", "the mark fails: NameError: name 'sync'"),
        ("<!-- numbers: memory.peak -->\nIt is 17.", "there is no 'peak' in bytes_per_parameter"),
        ('<!-- numbers: published("a paper", 17) -->\nIt is 17.', "begin it with https://"),
        ("<!-- numbers: chosen(17, 18) -->\nIt is 17.", "the mark has 2 values for 1 numbers"),
        ("<!-- numbers: chosen(17) -->\n\nIt is 17.", "the mark has 1 values for 0 numbers"),
        ("<!-- numbers: chosen(1.26) -->\nIt is 1.2.", "1.2 is 1.26 in its source"),
        ("<!-- numbers: chosen('2026-11-21') -->\nOn 2026-11-22.", "2026-11-22 is 2026-11-21 in"),
    ],
)
def test_what_is_wrong_is_named_with_its_place_and_the_fix(check, page, message):
    assert message in check(page)[0]


@pytest.mark.parametrize(
    "page",
    [
        "Run `make 17` with int8, SHA-256, Python 3.11 and torch 2.7.0, for 0 or 1 group.",
        "```bash\nmake 17\n```\n\n1. One\n2. Two [arXiv 2501.18512](https://arxiv.org/abs/2501.18512)",
        "<!-- numbers: chosen(1.26, 1234,\n6e-9, 15) -->\nFrom 1.3 to 1,234, 6e-09, a 15th.",
        "<!-- numbers: chosen([2.0], '3 of 4') -->\n```\n2 groups, 3\n\n4\n```",
    ],
)
def test_what_needs_no_mark_and_what_a_mark_holds(check, page):
    assert check(page) == []


def test_code_without_one_value_is_refused():
    assert code("diloco/hang_watch.py", "HANG_TIMEOUT_S") == 1800
    with pytest.raises(ValueError, match="has no literal for NOTHING: name one"):
        code("diloco/hang_watch.py", "NOTHING")
    with pytest.raises(ValueError, match="0 times: it has to be there once"):
        found("README.md", r"nowhere (\d+)")


def test_a_file_of_results_is_there_for_a_page():
    pages = "\n".join(path.read_text() for path in [README, *DOCS])
    assert [name for name in read_results() if not re.search(rf"\b{name}\b", pages)] == []


def test_results_say_what_has_made_them(tmp_path):
    (tmp_path / "sync.json").write_text('{"measured": {"command": "make sync"}}')
    with pytest.raises(ValueError, match=r"sync.json lacks \['commit', 'date'\] in 'measured'"):
        read_results(tmp_path)
