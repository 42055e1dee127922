"""docs/tutorial.ipynb, executed: it runs, and its pictures show what its text says.

Run: pytest tests/test_tutorial.py. After a change of the notebook, store its outputs again with
``python tests/test_tutorial.py``. Real: everything, in a Jupyter kernel.
"""

import json
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from traitlets.config import Config

NOTEBOOK = Path(__file__).parent.parent / "docs" / "tutorial.ipynb"

# What the pictures are drawn from, as JSON.
FACTS = """
import json

def as_dict(life):
    syncs = [(s.num_participants, s.retries, s.steps_lost, s.bytes_sent) for s in life.syncs]
    return vars(life) | {"syncs": syncs, "cosines": [s.group_cosine for s in life.syncs]}

runs = {"four": four, "alone": alone, "faulty": faulty, "fragments": fragments}
compared = {"sync_every": by_sync_every, "lr": by_lr, "momentum": by_momentum, "alpha": by_alpha}
facts = {name: [as_dict(life) for life in lives] for name, lives in runs.items()}
facts |= {name: [as_dict(life) for life in by.values()] for name, by in compared.items()}
print(json.dumps(facts | {"digests": len(at_the_end)}))
"""

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.together]


def execute(notebook):
    """Execute a notebook in a kernel of its own, which is reached through files and no port."""
    config = Config({"KernelManager": {"transport": "ipc"}})
    NotebookClient(
        notebook, timeout=600, kernel_name="python3", record_timing=False, config=config
    ).execute()
    return notebook


@pytest.fixture(scope="module")
def stored():
    return nbformat.read(NOTEBOOK, as_version=4)


@pytest.fixture(scope="module")
def executed():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell(FACTS))
    return execute(notebook)


@pytest.fixture(scope="module")
def facts(executed):
    (output,) = executed.cells[-1].outputs
    return json.loads(output.text)


def shown(cell):
    """What a cell shows, without numbers and without what it logs."""
    outputs = [output for output in cell.get("outputs", ()) if output.get("name") != "stderr"]
    texts = re.sub(r"[\d.,]+", "N", "".join(output.get("text", "") for output in outputs))
    return re.sub(r" +", " ", texts), [sorted(output.get("data", ())) for output in outputs]


def test_the_stored_outputs_are_those_of_an_execution(stored, executed):
    assert [shown(cell) for cell in stored.cells] == [shown(cell) for cell in executed.cells[:-1]]
    cells = [cell for cell in stored.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert NOTEBOOK.stat().st_size < 500_000
    assert NOTEBOOK.read_text().count('"image/png"') == 5


def test_every_cell_of_code_is_preceded_by_what_it_teaches(stored):
    kinds = [cell.cell_type for cell in stored.cells]
    assert kinds[0] == "markdown" and ("code", "code") not in zip(kinds, kinds[1:], strict=False)


def test_all_groups_end_on_one_model_that_is_better_than_that_of_one(facts):
    losses = {life["held_out"] for life in facts["four"]}
    assert len(losses) == 1 and losses.pop() < facts["alone"][0]["held_out"] - 0.1
    cosines = facts["four"][0]["cosines"]
    assert cosines[-1] < cosines[0] - 0.3


def test_a_sync_takes_every_group_to_theta(facts):
    for life in facts["four"]:
        at_theta = [step for step, d in zip(life["when"], life["distance"], strict=True) if d == 0]
        assert at_theta == list(range(20, 161, 20))
    (*_, last) = facts["fragments"]
    assert min(last["distance"]) > 0


def test_a_dead_group_costs_the_others_nothing_and_comes_back_with_theta(facts):
    zero, one, two, again, three = facts["faulty"]
    assert [sync[0] for sync in zero["syncs"]] == [4] * 5 + [3] * 3
    assert [bool(sync[1]) for sync in zero["syncs"]] == [False, False, True] * 2 + [False] * 2
    assert {sync[2] for life in (zero, one) for sync in life["syncs"]} == {0}
    assert [life["held_out"] is None for life in (two, again, three)] == [True, False, True]
    assert again["when"][0] == 61 and three["when"][-1] == 119
    assert again["loss"][0] < two["loss"][0] - 1
    assert again["distance"][18] > 1.5 * zero["distance"][78]
    assert facts["digests"] == 1


def test_the_settings_do_what_the_text_says(facts):
    def held_out(name):
        return [life["held_out"] for life in facts[name]]

    sent = [sum(sync[3] for sync in life["syncs"]) for life in facts["sync_every"]]
    assert sent == sorted(sent, reverse=True) and sent[0] == 20 * sent[2]
    low, middle, high = held_out("sync_every")
    assert middle < low + 0.05 < high
    low, middle, high = held_out("lr")
    assert middle < min(low, high) - 0.05
    low, middle, _ = held_out("momentum")
    assert middle < low
    little, much = (sum(life["distance"][80:]) for life in facts["alpha"])
    assert much > 1.5 * little


if __name__ == "__main__":
    nbformat.write(execute(nbformat.read(NOTEBOOK, as_version=4)), NOTEBOOK)
