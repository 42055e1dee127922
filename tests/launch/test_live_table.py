"""The table of the live display at fixed widths. Run: pytest tests/launch/test_live_table.py."""

import io
import time

import pytest
from recorded_groups import recorded, sync_line, view_of, write_group
from rich.console import Console, Group
from rich.text import Text

from composer_replication.launch.live_table import live_table


def drawn(groups, width, height=30):
    """The lines that a terminal would show."""
    console = Console(
        file=io.StringIO(), width=width, height=height, force_terminal=True, color_system="standard"
    )
    with console.capture() as capture:
        console.print(Group(*live_table(groups, width, height)))
    return [line.rstrip() for line in Text.from_ansi(capture.get()).plain.splitlines()]


def groups_in_trouble(run_dir):
    """Groups with the longest texts that there are in each column."""
    syncs = [sync_line(12345, participants=16, **{"diloco/sync_seconds": 1234.5})]
    long = {"batch": 123_456, "max_batches": 200_000, "inner_steps": 123_450, "round": 12_345.0}
    long |= {"outer_step": 12_345, "seconds_left": 359_000.0, "loss": 11.25}
    troubles = [
        {},
        {"phase": "restarting", "restart_at": time.time() + 30},
        {"phase": "restarting", "restart_at": 0.0},
        {"trained_at": time.time() - 3000},
        {"phase": "left out"},
    ]
    return [
        view_of(write_group(run_dir, i, syncs=syncs, **long | trouble))
        for i, trouble in enumerate(troubles)
    ]


def test_at_80_columns_each_group_has_a_bar_and_what_matters(tmp_path):
    lines = drawn(recorded(tmp_path, 4), 80)
    assert lines[0].split() == "group state done round groups loss time left".split()
    assert len(lines) == 6
    for replica_id, line in enumerate(lines[1:5]):
        assert line.split()[:2] == [str(replica_id), "training"]
        assert " ".join(line.split()[-9:]) == "2 / 20 4 3.142 1 min 15 s"
        assert "━━━━━━━━" in line and " 12% " in line
    assert lines[5] == "outer step 2: 4 of 4 groups, parameters equal: abababab"


def test_at_160_columns_there_is_more(tmp_path):
    lines = drawn(recorded(tmp_path, 2), 160)
    assert " ".join(lines[0].split()) == (
        "group state done round outer step groups loss last sync computing time left"
    )
    assert lines[1].count("━") + lines[1].count("╸") + lines[1].count("╺") >= 30
    words = " ".join(lines[1].replace("━", "").replace("╸", "").replace("╺", "").split())
    assert words == "0 training 12% 2 / 20 2 2 3.142 0.25 s 90% 1 min 15 s"


@pytest.mark.parametrize("width", [20, 40, 60, 79, 80, 81, 100, 120, 159, 160, 161, 250])
def test_nothing_is_cut_or_wrapped_at_any_width(tmp_path, width):
    groups = groups_in_trouble(tmp_path)
    lines = drawn(groups, width)
    assert len(lines) == 7, "a line was wrapped"
    assert max(map(len, lines)) <= width
    assert not any("…" in line for line in lines[:6]), "a cell was cut"
    if width >= 80:
        assert "…" not in lines[6]
        assert all(state in "\n".join(lines) for state in ("restarts in 30 s", "starting again"))
        assert "no step for 50 min" in lines[4] and "left out" in lines[5]


def test_groups_whose_end_is_unknown_have_no_bar(tmp_path):
    lines = drawn(recorded(tmp_path, 2, max_batches=None, seconds_left=None), 160)
    assert "━" not in "".join(lines)
    assert lines[1].split()[:2] == ["0", "training"] and lines[1].endswith("-")


def test_the_columns_stay_where_they_are_when_training_begins(tmp_path):
    starting = drawn([view_of(tmp_path / f"replica_{i}") for i in range(2)], 80)
    assert drawn(recorded(tmp_path, 2), 80)[0] == starting[0]


def test_of_more_groups_than_lines_those_in_trouble_are_shown(tmp_path):
    recorded(tmp_path, 40)
    write_group(tmp_path, 33, phase="left out")
    groups = [view_of(tmp_path / f"replica_{i}") for i in range(40)]
    lines = drawn(groups, 80, height=24)
    assert len(lines) <= 22
    assert [line.split()[0] for line in lines[1:20]] == [*map(str, range(18)), "33"]
    assert lines[20] == "and 21 other groups"


def test_different_parameters_are_red(tmp_path):
    folders = [write_group(tmp_path, i, syncs=[sync_line(2, digest=d)]) for i, d in enumerate("ab")]
    *_, last = live_table([view_of(folder) for folder in folders], 80, 24)
    assert "DIFFERENT" in str(last) and "red" in str(last.style)
