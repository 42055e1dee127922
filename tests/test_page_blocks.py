"""Every command of a page is run by a test, or says that none runs it.

Run: pytest tests/test_page_blocks.py
"""

import ast
import re
from functools import cache

import pytest
from page_blocks import MARK, PAGES, ROOT, RUN_BY, block, fenced

BLOCKS = [
    (page.relative_to(ROOT).as_posix(), text) for page in PAGES for text in fenced(page, "bash")
]
PROGRAMS = (
    "composer-replication composer curl kubectl llmfoundry make pip python sbatch sky torchrun "
    "torchx uv"
).split()


@pytest.mark.parametrize(
    ("page", "text"),
    BLOCKS,
    ids=[f"{page}: {text.splitlines()[0][:40]}" for page, text in BLOCKS],
)
def test_a_block_is_run_by_one_test_or_says_why_none_does(page, text):
    tests = [key for key in RUN_BY if key[0] == page and text.startswith(key[1])]
    if text.startswith("#"):
        assert re.match(rf"{re.escape(MARK)}[`\w].{{10}}", text) and tests == []
    else:
        assert len(tests) == 1, f"mark the block with {MARK!r}, or write its test into RUN_BY"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_is_a_command_stands_in_such_a_block(page):
    lines = "\n".join(fenced(page, "")).splitlines()
    assert [line for line in lines if line.partition(" ")[0] in PROGRAMS] == []
    assert fenced(page, "sh") == fenced(page, "console") == []


@cache
def parsed(path):
    return ast.parse(path.read_text())


def reads(path, key):
    """Whether a file calls ``block`` with these two strings."""
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == block.__name__
        and tuple(getattr(argument, "value", None) for argument in node.args) == key
        for node in ast.walk(parsed(path))
    )


@pytest.mark.parametrize(("key", "test"), RUN_BY.items(), ids=[" ".join(key) for key in RUN_BY])
def test_the_test_that_is_named_is_there_and_reads_the_block(key, test):
    assert block(*key)
    path, _, name = test.partition("::")
    tree = parsed(ROOT / path)
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    modules = {
        node.module.replace(".", "/")
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
    }
    helpers = [ROOT / "tests" / f"{module}.py" for module in modules]
    assert any(reads(file, key) for file in [ROOT / path, *filter(lambda f: f.exists(), helpers)])
