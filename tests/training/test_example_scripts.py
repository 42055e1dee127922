"""The scripts in examples/, run as the lines at their top say. Run: pytest
tests/training/test_example_scripts.py

Real: the groups' processes, the lighthouse, the coordinator, gloo. The groups are forks, which have
imported torch already. Scripts that need more than the package: tests/llmfoundry/test_own_command.
"""

import ast
import re
import shlex
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from forked import Script
from page_blocks import block
from typer.main import get_command

from composer_replication.cli import app
from composer_replication.coordinator.server import Coordinator
from composer_replication.diloco.settings import DiLoCoSettings
from composer_replication.replica.lighthouse import start_lighthouse
from composer_replication.training.settings_file import load_settings

EXAMPLES = Path(__file__).parents[2] / "examples"


def commands(name, on_page):
    """The commands of a block, which stand at the top of the script too, each as its words."""
    text = ast.get_docstring(ast.parse((EXAMPLES / name).read_text()))
    assert text.partition("\n\n")[2] == on_page.rstrip()
    return [shlex.split(line.removesuffix(" &")) for line in on_page.splitlines()]


def start(words, *arguments, output, **environ):
    """Start ``NAME=value ... python examples/SCRIPT ...``, with further arguments and variables."""
    at = words.index("python")
    own = dict(word.split("=", 1) for word in words[:at])
    script = EXAMPLES.parent / words[at + 1]
    return Script(script, *words[at + 2 :], *arguments, environ=own | environ, output=output)


def finish(*scripts):
    deadline = time.monotonic() + 300
    try:
        for script in scripts:
            script.wait(deadline)
    finally:
        for script in scripts:
            script.kill()


@pytest.mark.integration
def test_a_plain_loop_in_two_groups_ends_on_one_model(tmp_path):
    lighthouse_line, (_, *exported), *groups = commands(
        "plain_loop.py", block("docs/examples.md", "torchft_lighthouse")
    )
    environ = dict(word.split("=", 1) for word in exported)
    bind = lighthouse_line[lighthouse_line.index("--bind") + 1]
    assert lighthouse_line[0] == "torchft_lighthouse"
    assert environ["TORCHFT_LIGHTHOUSE"] == f"http://{bind}"
    lighthouse = start_lighthouse(bind="127.0.0.1:0")
    try:
        environ["TORCHFT_LIGHTHOUSE"] = lighthouse.address()
        outputs = [tmp_path / f"{group}.txt" for group in range(len(groups))]
        finish(
            *(start(w, 100, output=out, **environ) for w, out in zip(groups, outputs, strict=True))
        )
    finally:
        lighthouse.shutdown()
    said = [output.read_text() for output in outputs]
    digests = [re.findall(r"^global parameters: (\w{64})$", text, re.M) for text in said]
    assert len(said) == 2 and digests[0] == digests[1] and len(digests[0]) == 1
    for text in said:
        syncs = re.findall(r"^outer step (\d): (\d) groups, loss ([\d.]+)$", text, re.M)
        assert [sync[:2] for sync in syncs] == [(str(step), "2") for step in range(1, 6)]
        assert float(syncs[-1][2]) < float(syncs[0][2])


@pytest.fixture
def launch(tmp_path):
    """Starts the groups of a ``composer-replication launch`` line, under a coordinator."""
    with ExitStack() as opened:

        def run(words, *arguments):
            at = words.index("--")
            context = get_command(app).commands["launch"].make_context("launch", words[2:at])
            count = context.params["replicas"]
            settings, source = load_settings(None, context.params["set"])
            coordinator = Coordinator(
                DiLoCoSettings(**settings["callbacks"]["diloco"]),
                source,
                num_replicas=count,
                state_dir=tmp_path / "state",
                bind="127.0.0.1:0",
            )
            opened.callback(coordinator.shutdown)
            place = {
                "NUM_REPLICA_GROUPS": str(count),
                "COMPOSER_REPLICATION_COORDINATOR": coordinator.address,
            }
            outputs = [tmp_path / f"group_{group}.txt" for group in range(count)]
            environs = [place | {"REPLICA_GROUP_ID": str(group)} for group in range(count)]
            finish(
                *(
                    start(words[at + 1 :], *arguments, output=output, **environ)
                    for output, environ in zip(outputs, environs, strict=True)
                )
            )
            return [output.read_text() for output in outputs]

        yield run


@pytest.mark.integration
def test_composer_hands_over_to_diloco_and_back(launch, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before, diloco, after = commands(
        "switch.py", block("docs/examples.md", "python examples/switch.py")
    )

    def plain(words):
        output = tmp_path / f"{words[-1]}.txt"
        finish(start(words, "60ba", output=output))
        return output.read_text()

    def accuracies(text):
        return [float(number) for number in re.findall(r"s with tensor\(([\d.]+)\)", text)]

    untrained, saved = accuracies(plain(before))
    groups = [accuracies(text) for text in launch(diloco, "60ba")]
    assert groups[0] == groups[1] and groups[0][0] == saved
    loaded, end = accuracies(plain(after))
    assert loaded == groups[0][1]
    assert untrained + 0.1 < saved < loaded < end


SCRIPTS = sorted(EXAMPLES.glob("*.py"))


@pytest.mark.parametrize("path", [*SCRIPTS, *EXAMPLES.glob("*.yaml")], ids=lambda path: path.name)
def test_an_example_has_at_most_sixty_lines(path):
    assert len(path.read_text().splitlines()) <= 60
