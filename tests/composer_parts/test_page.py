"""docs/composer.md says of every part of Composer what its tests say. Run: pytest
tests/composer_parts/test_page.py"""

import re
from pathlib import Path

import composer.algorithms
import composer.callbacks
import pytest
from composer import Algorithm, Callback
from composer_parts.algorithms import ALGORITHMS
from composer_parts.callbacks import CALLBACKS
from composer_parts.combinations import COMBINATIONS
from composer_parts.fits import REJECTED

PAGE = Path(__file__).parents[2] / "docs" / "composer.md"


def rows(heading):
    """The parts under a heading: name, status, note. Lists have those without a note."""
    [section] = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.M | re.S)
    lists = re.findall(r"^\*\*(.*?)\*\*(.*?): (.*)\.$", section, re.MULTILINE)
    listed = [[name, status, note] for status, note, names in lists for name in names.split("; ")]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [*listed, *([cell.strip() for cell in line.strip("|").split("|")] for line in lines)]


def public(module, base):
    """The names of a module's public classes of one kind."""
    found = {name: getattr(module, name) for name in module.__all__}
    return {name for name, one in found.items() if isinstance(one, type) and issubclass(one, base)}


def test_no_algorithm_and_no_callback_of_composer_is_missing():
    assert public(composer.algorithms, Algorithm) == ALGORITHMS.keys()
    assert public(composer.callbacks, Callback) == CALLBACKS.keys()


SECTIONS = {"Algorithms": ALGORITHMS, "Callbacks": CALLBACKS, "Other combinations": COMBINATIONS}


@pytest.mark.parametrize("heading", SECTIONS)
def test_the_page_has_the_tests_names_and_statuses(heading):
    code = "" if SECTIONS[heading] is COMBINATIONS else "`"
    page = [(name, status) for name, status, _ in rows(heading)]
    tested = [(f"{code}{name}{code}", part.status) for name, part in SECTIONS[heading].items()]
    assert sorted(page) == sorted(tested)


@pytest.mark.parametrize("heading", SECTIONS)
def test_a_note_is_there_where_one_is_promised_and_an_error_is_quoted(heading):
    for name, status, note in rows(heading):
        assert note or status == "works", name
        if status == REJECTED:
            part = SECTIONS[heading].get(name) or SECTIONS[heading][name.strip("`")]
            assert part.error in note
