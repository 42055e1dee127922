"""Where an editor goes from a keyword, asked of pyright's language server, and what it shows.

Run: pytest tests/diloco/test_editor.py. It starts the server, which reads the package in seconds.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SERVER = Path(sys.executable).with_name("pyright-langserver")

CALLS = """\
from composer_replication import DiLoCo, DiLoCoCallback, make_manager
DiLoCoCallback(sync_every=100)
DiLoCoCallback(run_dir="runs/a")
DiLoCo(..., ..., ..., wire_format="int8")
make_manager(timeout=60.0)
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.integration,
    pytest.mark.skipif(not SERVER.exists(), reason="pyright is not installed"),
]


class Editor:
    """An editor that has opened one file, over the language server's protocol."""

    def __init__(self, file: Path) -> None:
        self._process = subprocess.Popen(
            [SERVER, "--stdio"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._number = 0
        self.uri = file.as_uri()
        folder = {"uri": ROOT.as_uri(), "name": "package"}
        self.ask("initialize", processId=None, workspaceFolders=[folder], capabilities={})
        self._send(method="initialized", params={})
        opened = {"uri": self.uri, "languageId": "python", "version": 1, "text": file.read_text()}
        self._send(method="textDocument/didOpen", params={"textDocument": opened})

    def ask(self, method, **params):
        self._number += 1
        self._send(id=self._number, method=method, params=params)
        while True:
            message = self._read()
            if message.get("id") == self._number and "method" not in message:
                return message["result"]
            if "id" in message:  # a question of the server's, such as for its configuration
                items = message.get("params", {}).get("items", [])
                self._send(id=message["id"], result=[{} for _ in items])

    def at(self, line, word):
        """The parameters of a request about a word in a line of the file."""
        place = {"line": line, "character": CALLS.splitlines()[line].index(word)}
        return {"textDocument": {"uri": self.uri}, "position": place}

    def close(self):
        self._process.kill()
        self._process.communicate()

    def _send(self, **message):
        body = json.dumps({"jsonrpc": "2.0"} | message).encode()
        self._process.stdin.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        self._process.stdin.flush()

    def _read(self):
        size = 0
        while header := self._process.stdout.readline().strip():
            name, _, value = header.partition(b":")
            size = int(value) if name.lower() == b"content-length" else size
        return json.loads(self._process.stdout.read(size))


@pytest.fixture(scope="module")
def editor(tmp_path_factory):
    file = tmp_path_factory.mktemp("user") / "train.py"
    file.write_text(CALLS)
    opened = Editor(file)
    yield opened
    opened.close()


@pytest.mark.parametrize(
    ("line", "name", "definition", "description"),
    [
        (1, "sync_every", "sync_every: Annotated[int, 100]", "Inner steps in a round."),
        (2, "run_dir", "run_dir: Annotated[str | None, None]", "The run's folder."),
        (3, "wire_format", 'wire_format: Annotated[WireFormatName, "float32"]', "The format of"),
        (4, "timeout", "timeout: Annotated[float, 60.0]", "Limit of a collective and of a vote"),
    ],
)
def test_the_definition_of_a_keyword_is_its_type_its_default_and_its_description(
    editor, line, name, definition, description
):
    (found,) = editor.ask("textDocument/definition", **editor.at(line, name))
    source = Path(found["uri"].removeprefix("file://")).read_text().splitlines()
    first = found["range"]["start"]["line"]
    assert source[first].strip() == definition
    assert source[first + 1].strip().startswith(f'"""{description}')
    hover = editor.ask("textDocument/hover", **editor.at(line, name))["contents"]["value"]
    assert description in hover
