"""What a group's events come to. Run: pytest tests/group/test_history.py

What is shown of them: tests/launch.
"""

import ast

import pytest
from own_imports import modules_of
from recorded_groups import sync_line

from composer_replication.group import run_folder
from composer_replication.group.history import History
from composer_replication.util.curves import agreement_of

READER = "history.py"
KINDS = {"START", "RESUME", "EVALUATION", "ERROR", "REJECTION", "END", "SAVED", "WARNING"}


def history_of(*events):
    history = History()
    for event in events:
        history.add({"time": 0.0} | event)
    return history


def sync(step, **changes):
    return {"event": "sync"} | sync_line(step, batch=10 * step, **changes)


@pytest.mark.parametrize("package", ["launch", "coordinator"])
def test_nobody_else_reads_the_metrics_of_a_sync_or_the_other_events(package):
    assert KINDS < vars(run_folder).keys()
    for path in modules_of(package):
        tree = ast.parse(path.read_text())
        texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        read = [text for text in texts if isinstance(text, str) and text.startswith("diloco/")]
        assert read == [], path
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        names = {
            name.name
            for node in imports
            if (node.module or "").endswith("run_folder")
            for name in node.names
        }
        assert not names & KINDS, path


def test_an_evaluation_is_its_metrics_and_not_how_long_it_took():
    measured = {"eval_loss": 2.5, "eval_runtime": 0.3}
    measured |= {"eval_samples_per_second": 40.0, "eval_steps_per_second": 5.0}
    row = {"event": "evaluation", "batch": 20, "eval": measured}
    end = {"event": "end", "outer_steps": 2, "global_digest": "ab", "eval": measured}
    history = history_of(row, end)
    assert history.evaluations[0]["eval"] == history.evaluation == {"eval_loss": 2.5}
    assert history_of(row).evaluation == {"eval_loss": 2.5}
    assert history.result["eval"] == {"eval_loss": 2.5}


def test_an_error_is_open_until_the_group_joins_or_syncs_again():
    def error(at):
        return {"event": "error", "type": "KeyError", "error": "KeyError: 3", "time": at}

    start = {"event": "start", "trained_at": None, "started": 1.0, "joined": 5.0, "time": 5.0}
    for events, number in [
        ([sync(1, time=1.0), error(2.0)], 1),
        ([error(2.0), sync(1, time=3.0)], 0),
        ([error(2.0), start], 0),
        ([error(2.0), {"event": "continued", "time": 3.0}], 0),
        ([error(2.0), start, error(6.0)], 1),
    ]:
        assert len(history_of(*events).open_errors) == number
        assert {each.kind for each in history_of(*events).errors} == {"KeyError"}


def test_a_continued_run_compares_what_it_reports_again():
    """Training is not repeated bit for bit: the first group to go on would seem to differ."""
    before = [sync(step, digest=digest) for step, digest in ((1, "aa"), (2, "bb"))]
    groups = {name: history_of(*before, {"event": "continued"}) for name in "01"}
    assert agreement_of(groups) is None
    for number, name in enumerate("01"):
        groups[name].add(sync(1, digest="cc"))
        agreement = agreement_of(groups)
        assert (agreement is None) == (number == 0)
    assert agreement is not None and agreement["differing"] == []
