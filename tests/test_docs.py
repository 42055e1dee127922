"""What the documents tell people to type. Run: pytest tests/test_docs.py"""

import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command

from composer_replication.cli import app
from composer_replication.replica.options import ReplicaEnv

ROOT = Path(__file__).parent.parent
SECURITY = ROOT / "docs" / "security.md"


def commands(path):
    """The lines of code blocks that call our command, without comments."""
    blocks = re.findall(r"```bash\n(.*?)```", path.read_text(), re.DOTALL)
    lines = [line.strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.startswith("composer-replication ")]


@pytest.mark.parametrize("line", commands(SECURITY))
def test_every_command_of_the_security_page_is_one_with_these_options(line):
    _, name, *arguments = shlex.split(line, comments=True)
    command = get_command(app).commands[name]
    context = command.make_context(name, arguments)  # parses; an unknown option is an error
    assert context.params


def test_there_are_such_commands():
    found = {line.split()[1] for line in commands(SECURITY)}
    assert found == {"certificates", "coordinator"}


def test_every_variable_of_the_security_page_is_read():
    named = set(re.findall(r"COMPOSER_REPLICATION_\w+", SECURITY.read_text()))
    assert named <= set(re.findall(r"\| ``(\w+)`` \|", ReplicaEnv.__doc__))


DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_every_benchmark_of_the_documents_is_where_they_say():
    text = "\n".join(path.read_text() for path in DOCUMENTS)
    paths = set(re.findall(r"\bbenchmarks/[\w/]+\.py", text))
    modules = set(re.findall(r"python -m (benchmarks[\w.]*\w)", text))
    paths |= {f"{module.replace('.', '/')}.py" for module in modules}
    assert len(paths) > 8
    assert [path for path in sorted(paths) if not (ROOT / path).is_file()] == []
