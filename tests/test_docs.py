"""What the documents tell people to type and to read. Run: pytest tests/test_docs.py"""

import ast
import importlib.util
import inspect
import json
import re
import shlex
from functools import cache
from pathlib import Path
from pkgutil import resolve_name

import pytest
from pictures import digests, taken_of
from typer.main import get_command

import composer_replication
from composer_replication.cli import app
from composer_replication.options import ReplicaEnv

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
SITE = sorted([*DOCS.glob("*.md"), DOCS / "tutorial.ipynb"])
PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")), *SITE]
ADRS = sorted((DOCS / "adrs").glob("*.md"))
PROGRAM = "composer-replication "


def text_of(path):
    """What a page says; of a notebook, what stands between its cells of code."""
    if path.suffix != ".ipynb":
        return path.read_text()
    cells = json.loads(path.read_text())["cells"]
    return "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")


def commands(path):
    """The calls of our command in a document, in blocks and inside of sentences."""
    text = text_of(path)
    lines = "\n".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL)).splitlines()
    inline = re.findall(r"`(composer-replication [^`]*)`", text)
    # A number may stand as a letter, and an optional part in brackets.
    found = [re.sub(r"\b[NM]\b", "2", line.strip()) for line in [*lines, *inline]]
    return [re.sub(r"\[\w.*\]$| &$", "", line) for line in found if line.startswith(PROGRAM)]


@pytest.mark.parametrize(
    ("page", "line"), [(page.name, line) for page in PAGES for line in commands(page)]
)
def test_every_command_of_a_page_is_one_with_these_options(page, line):
    _, name, *arguments = shlex.split(line, comments=True)
    command = get_command(app).commands[name]
    if arguments:  # else the sentence is about the command as such
        context = command.make_context(name, arguments)  # parses; an unknown option is an error
        assert context.params, page


def test_the_page_of_commands_has_all_of_them():
    named = {line.split()[1] for line in commands(DOCS / "commands.md")}
    assert named >= get_command(app).commands.keys()


def test_every_variable_of_a_page_is_read():
    named = {
        name for page in PAGES for name in re.findall(r"COMPOSER_REPLICATION_\w+", page.read_text())
    }
    assert named <= set(re.findall(r"\| ``(\w+)`` \|", ReplicaEnv.__doc__))


def anchors(path):
    """The anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, *ADRS], ids=lambda page: page.name)
def test_every_link_of_a_page_leads_to_a_file_and_a_heading(page):
    for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", text_of(page)):
        if "://" not in target:
            file = page.parent / target if target else page
            # The site has no pages for folders.
            assert file.is_file() or (file.is_dir() and page.parent == ROOT), target
            assert not anchor or anchor in anchors(file), f"{target}#{anchor}"


def test_every_benchmark_of_the_documents_is_where_they_say():
    text = "\n".join(text_of(path) for path in [*PAGES, *ADRS])
    paths = set(re.findall(r"\bbenchmarks/[\w/]+\.py", text))
    modules = set(re.findall(r"python -m (benchmarks[\w.]*\w)", text))
    paths |= {f"{module.replace('.', '/')}.py" for module in modules}
    assert len(paths) > 8
    assert [path for path in sorted(paths) if not (ROOT / path).is_file()] == []


def title_of(page):
    return re.search(r"^# (.*)$", text_of(page), re.MULTILINE)[1]


def test_every_page_is_once_in_the_navigation_under_its_title():
    trees = re.findall(r"^```{toctree}\n(.*?)^```", (DOCS / "index.md").read_text(), re.M | re.S)
    named = [line for line in "\n".join(trees).splitlines() if line and not line.startswith(":")]
    assert sorted(named) == sorted(page.stem for page in SITE if page.stem != "index")
    titles = [title_of(page) for page in SITE]
    assert len({*titles}) == len(titles)


def test_the_landing_page_and_the_ends_of_pages_name_a_page_by_its_title():
    titles = {page.name: title_of(page) for page in SITE}
    for page in SITE:
        for text, target in re.findall(r"\[([A-Z][^\]]*)\]\(([\w.-]+)\)", text_of(page)):
            if target in titles and not text.startswith("ADR"):
                assert text == titles[target], f"{page.name} calls {target} {text!r}"


def test_the_walk_through_the_code_names_classes_and_functions_that_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    found = re.findall(r"`([\w/]+)\.py`, `(?!\w+\.py`)([\w.]+)`", text)
    assert len(found) > 20
    for file, name in found:
        [path] = (ROOT / "composer_replication").rglob(f"{file}.py")
        assert resolve_name(f"{'.'.join(path.relative_to(ROOT).with_suffix('').parts)}:{name}")


PUT_TOGETHER = {
    "Waiting for replica groups for ...": ["Waiting ... for ...", "for replica groups"],
    "Waiting for a quorum for ...": ["Waiting ... for ...", "for a quorum"],
}
"""Messages that no single text of the package has, and the texts that they are made of."""


@cache
def messages():
    """All texts of the package but docstrings, with dots for what is filled in."""
    found = []
    for path in (ROOT / "composer_replication").rglob("*.py"):
        nodes = [*ast.walk(ast.parse(path.read_text()))]
        docs = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            texts = [part.value if isinstance(part, ast.Constant) else "..." for part in parts]
            if id(node) not in docs and all(isinstance(text, str) for text in texts):
                found.append(re.sub(r"%[-.\d]*[a-z]", "...", "".join(texts)))
    return found


def quoted():
    """The messages in the table of the page that helps."""
    rows = re.findall(r"^\| (`.*?) \| ", (DOCS / "troubleshooting.md").read_text(), re.M)
    return [text for row in rows for text in re.findall(r"`([^`]+)`", row)]


@pytest.mark.parametrize("message", quoted())
def test_a_message_that_a_page_explains_is_one_of_the_package(message):
    for text in PUT_TOGETHER.get(message, [message]):
        parts = [re.escape(part) for part in text.split("...")]
        assert any(re.search(".*".join(parts), each) for each in messages()), text


def num_words(text):
    return len(re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL).split())


def test_no_picture_is_older_than_what_draws_it():
    assert taken_of() == digests(), "take them again: make docs; python tests/pictures.py docs"


def test_the_documents_stay_short():
    readme = re.sub(r"```.*?```", "", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert num_words(readme) <= 650 and "<!--" not in readme
    pages = [page for page in DOCS.glob("*.md") if page.stem != "api"]
    assert sum(num_words(page.read_text()) for page in pages) <= 20_000


def test_the_reference_names_what_there_is_and_every_public_name():
    entry = re.compile(r"^\.\. auto\w+:: ([\w.]+)(?:\(.*\))?$", re.MULTILINE)
    named = entry.findall((DOCS / "api.md").read_text())
    public = {f"composer_replication.{name}" for name in composer_replication.__all__}
    assert public | {"composer_replication.make_manager"} <= {*named}
    needed = {"hf": "transformers", "lightning": "lightning"}
    for name in named:
        package = needed.get(name.split(".")[1])
        if package is not None and importlib.util.find_spec(package) is None:
            continue
        assert inspect.getdoc(resolve_name(":".join(name.rsplit(".", 1)))), name
