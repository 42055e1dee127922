"""docs/choosing-a-host.md says what the suite finds. Run: pytest tests/hosts/test_choosing.py

All hosts pass all tests in test_hosts.py but those in ``LACKS``, of which the page has a table.
"""

from __future__ import annotations

import ast
from pathlib import Path

from hosts.host import LACKS, SOME

HOSTS = {
    "composer_host": "Composer",
    "hf_host": "Hugging Face",
    "lightning_host": "Lightning",
    "accelerate_host": "accelerate",
    "plain": "a loop of your own",
}
PAGE = Path(__file__).parents[2] / "docs" / "choosing-a-host.md"


def questions() -> list[str]:
    """The tests that every host is asked, in their order."""
    tree = ast.parse((Path(__file__).parent / "test_hosts.py").read_text())
    functions = [each for each in tree.body if isinstance(each, ast.FunctionDef)]
    tests = [each for each in functions if each.name.startswith("test_")]
    return [each.name for each in tests if "host" in [argument.arg for argument in each.args.args]]


def row(test: str) -> str:
    words = test.removeprefix("test_").replace("_", " ")
    return f"| {' | '.join([words, *(answer(host, test) for host in HOSTS)])} |"


def answer(host: str, test: str) -> str:
    if reason := LACKS.get((host, test)):
        return f"no: {reason}"
    how = SOME.get((host, test))
    return f"yes: {how}" if how else "yes"


def test_the_page_has_what_a_host_lacks_and_that_all_else_is_there():
    page, lacking = PAGE.read_text(), sorted({test for _, test in LACKS})
    table = [f"| | {' | '.join(HOSTS.values())} |", "|---" * 6 + "|", *map(row, lacking)]
    assert "\n".join(table) in page
    assert {host for host, _ in LACKS} == {"accelerate_host", "lightning_host", "plain"}
    assert len(lacking) == 3 and "what the others lack is in the first three rows:" in page


def test_what_a_host_lacks_is_asked_of_it():
    assert {test for _, test in LACKS | SOME} <= {*questions()}
    assert not LACKS.keys() & SOME.keys()
