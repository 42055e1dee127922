"""The display of a run on a terminal and in a file. Run: pytest tests/launch/test_display.py.

Real: the display, rich, the files of the groups. Replaced: the clock, and the terminal by a string.
"""

import io
import logging
import re
import sys
import time
from types import SimpleNamespace

import pytest
from recorded_groups import recorded, run_of, sync_line, write_group
from rich.console import Console
from rich.text import Text

from composer_replication.launch import display as display_module
from composer_replication.launch.display import Display, LiveRun, live_table
from composer_replication.launch.outcome import print_rows
from composer_replication.util import fence


@pytest.fixture
def clock(monkeypatch):
    """The display's clock, which the test moves."""
    clock = SimpleNamespace(now=1000.0, monotonic=lambda: clock.now, strftime=time.strftime)
    monkeypatch.setattr(display_module, "time", clock)
    return clock


def file_console():
    return Console(file=io.StringIO(), highlight=False)


def terminal(width, height=30, **more):
    return Console(file=io.StringIO(), width=width, height=height, force_terminal=True, **more)


def lines_of(console):
    return console.file.getvalue().splitlines()


def texts_of(console):
    """The lines without their time of day, which each of them has."""
    matches = [re.fullmatch(r"\d\d:\d\d:\d\d  (.*)", line) for line in lines_of(console)]
    assert all(matches), lines_of(console)
    return [match[1] for match in matches if match]


def take_step(run_dir, outer_step, count=2, **changes):
    for replica_id in range(count):
        line = sync_line(outer_step, participants=count)
        write_group(run_dir, replica_id, outer_step=outer_step, syncs=[line], **changes)


@pytest.mark.parametrize(
    ("step_s", "until", "steps"), [(200, 601, [1, 2, 3]), (1, 62, [1, 31, 61])]
)
def test_in_a_file_there_is_one_line_an_outer_step_and_one_in_thirty_seconds(
    tmp_path, clock, step_s, until, steps
):
    console = file_console()
    display = Display(console, LiveRun(tmp_path, range(2)))
    for second in range(1, until):
        clock.now = 1000.0 + second
        if second % step_s == 0:
            take_step(tmp_path, second // step_s)
        display.refresh()
    assert [int(re.match(r"outer step (\d+)", text)[1]) for text in texts_of(console)] == steps


@pytest.mark.parametrize(("since", "lines"), [({}, 1), ({"phase": "finished"}, 2)])
def test_the_last_line_is_written_once(tmp_path, since, lines):
    console = file_console()
    run = recorded(tmp_path, 2)
    with Display(console, run) as display:
        display.refresh()
        for replica_id in range(2):
            write_group(tmp_path, replica_id, **since)
    assert len(texts_of(console)) == lines


def test_a_warning_on_the_same_terminal_does_not_break_the_table(tmp_path, monkeypatch):
    console = terminal(80)
    stderr = io.StringIO()
    stderr.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", stderr)
    warner = logging.getLogger("composer_replication.test_display")
    warner.propagate = False
    warner.addHandler(logging.lastResort)
    try:
        with Display(console, LiveRun(tmp_path, range(2))) as display:
            display.refresh(is_last=True)
            display.say("group 1 was ended by SIGKILL")
            assert "SIGKILL" in console.file.getvalue()
            warner.warning("Cannot write a file")
            assert "Cannot write a file" in console.file.getvalue() and stderr.getvalue() == ""
        warner.warning("Later")
        assert stderr.getvalue() == "Later\n"
    finally:
        warner.removeHandler(logging.lastResort)


def test_warnings_that_go_to_a_file_stay_there(tmp_path, monkeypatch):
    console = terminal(80)
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    with Display(console, LiveRun(tmp_path, range(2))):
        print("a warning", file=sys.stderr)
    assert stderr.getvalue() == "a warning\n"


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_display_without_columns_ends_nothing(tmp_path, is_terminal):
    for width in (0, 1):
        console = Console(file=io.StringIO(), width=width, height=0, force_terminal=is_terminal)
        with Display(console, LiveRun(tmp_path, range(2))) as shown:
            shown.say("group 1 has joined")
            shown.refresh(is_last=True)
        print_rows([("time", "3 s")])


def test_a_display_that_cannot_be_written_is_said_once_and_the_groups_go_on(
    tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr(fence, "_logged", set())
    # As stdout is when it is a file on a full disk.
    with open("/dev/full", "wb", buffering=0) as full:
        console = Console(file=io.TextIOWrapper(full, write_through=True))
        with Display(console, LiveRun(tmp_path, range(2))) as shown:
            for _ in range(3):
                shown.refresh(is_last=True)
    assert caplog.text.count("Cannot show") == 1


def drawn(groups, width, height=30):
    """The lines that a terminal would show."""
    console = terminal(width, height, color_system="standard")
    with console.capture() as capture:
        console.print(live_table(groups, height))
    return [line.rstrip() for line in Text.from_ansi(capture.get()).plain.splitlines()]


def groups_in_trouble(run_dir):
    """Groups with the longest texts that there are in each column."""
    syncs = [sync_line(12345, participants=16)]
    long = {"batch": 123_456, "max_batches": 200_000, "outer_step": 12_345}
    long |= {"seconds_left": 359_000.0, "loss": 11.25}
    troubles = [
        {},
        {"phase": "restarting", "restart_at": time.time() + 30},
        {"phase": "restarting", "restart_at": 0.0},
        {"trained_at": time.time() - 3000},
        {"phase": "left out"},
    ]
    for i, trouble in enumerate(troubles):
        write_group(run_dir, i, syncs=syncs, **long | trouble)
    return run_of(run_dir, len(troubles))


def test_each_group_has_a_bar_and_what_matters(tmp_path):
    lines = drawn(recorded(tmp_path, 4), 80)
    assert lines[0].split() == "group state step groups loss time left".split()
    assert len(lines) == 6
    for replica_id, line in enumerate(lines[1:5]):
        assert line.split()[:2] == [str(replica_id), "training"]
        assert " ".join(line.split()).endswith(" 25 / 200 4 3.142 1 min 15 s")
        assert "━━" in line
    assert lines[5] == "outer step 2: 4 of 4 groups, parameters equal: abababab"


@pytest.mark.parametrize("width", [20, 40, 60, 80, 120, 160, 250])
def test_nothing_is_wrapped_at_any_width_and_nothing_cut_from_80_on(tmp_path, width):
    lines = drawn(groups_in_trouble(tmp_path), width)
    assert len(lines) == 7, "a line was wrapped"
    assert max(map(len, lines)) <= width
    if width >= 80:
        assert "…" not in "".join(lines)
        assert all(state in "\n".join(lines) for state in ("restarts in 30 s", "starting again"))
        assert "no step for 50 min" in lines[4] and "left out" in lines[5]


def test_groups_whose_end_is_unknown_have_no_bar(tmp_path):
    lines = drawn(recorded(tmp_path, 2, max_batches=None, seconds_left=None), 160)
    assert "━" not in "".join(lines)
    assert lines[1].split()[:2] == ["0", "training"] and lines[1].endswith("-")


def test_of_more_groups_than_lines_those_in_trouble_are_shown(tmp_path):
    recorded(tmp_path, 40)
    write_group(tmp_path, 33, phase="left out")
    lines = drawn(run_of(tmp_path, 40), 80, height=24)
    assert len(lines) <= 22
    assert [line.split()[0] for line in lines[1:20]] == [*map(str, range(18)), "33"]
    assert lines[20] == "and 21 other groups"


def test_different_parameters_are_red(tmp_path):
    for i, digest in enumerate("ab"):
        write_group(tmp_path, i, syncs=[sync_line(2, digest=digest)])
    *_, last = live_table(run_of(tmp_path, 2), 24).renderables
    assert "DIFFER" in str(last) and "red" in str(last.style)
