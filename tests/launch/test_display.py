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
from recorded_groups import recorded, sync_line, write_group
from rich.console import Console
from rich.text import Text

from composer_replication.diloco.settings import DiLoCoSettings
from composer_replication.launch import display as display_module
from composer_replication.launch.display import Display, print_settings
from composer_replication.launch.output import CurrentStderr


@pytest.fixture
def clock(monkeypatch):
    """The display's clock, which the test moves."""
    clock = SimpleNamespace(now=1000.0, monotonic=lambda: clock.now, strftime=time.strftime)
    monkeypatch.setattr(display_module, "time", clock)
    return clock


def file_console():
    return Console(file=io.StringIO(), highlight=False)


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


def test_in_a_file_there_is_one_line_an_outer_step_if_steps_are_rare(tmp_path, clock):
    console = file_console()
    display = Display(console, tmp_path, 2)
    for second in range(1, 601):  # an outer step in 200 s
        clock.now = 1000.0 + second
        if second % 200 == 0:
            take_step(tmp_path, second // 200)
        display.refresh({})
    assert [text.split(":")[0] for text in texts_of(console)] == [
        "outer step 1",
        "outer step 2",
        "outer step 3",
    ]


def test_in_a_file_there_is_one_line_in_thirty_seconds_if_steps_are_frequent(tmp_path, clock):
    console = file_console()
    display = Display(console, tmp_path, 2)
    for second in range(1, 122):  # an outer step a second
        clock.now = 1000.0 + second
        take_step(tmp_path, second)
        display.refresh({})
    steps = [int(re.match(r"outer step (\d+)", text)[1]) for text in texts_of(console)]
    assert steps == [1, 31, 61, 91, 121]


def test_a_line_in_a_file_is_short_for_any_number_of_groups(tmp_path, clock):
    console = file_console()
    recorded(tmp_path, 32)
    Display(console, tmp_path, 32).refresh({}, is_last=True)
    (line,) = lines_of(console)
    assert line[10:].startswith("outer step 2: 32 of 32 groups, round 2 / 20")
    assert len(line) < 120


def test_events_are_written_when_they_happen(tmp_path, clock):
    console = file_console()
    display = Display(console, tmp_path, 2)
    recorded(tmp_path, 2)
    events = [
        {"phase": "restarting", "restart_at": 0.0},
        {"phase": "joining"},
        {"phase": "training", "outer_step": 3},
    ]
    display.refresh({}, is_last=True)
    for event in events:
        clock.now += 1.0
        write_group(tmp_path, 1, **event)
        display.refresh({})
    display.say("group 7 was ended by SIGKILL")
    assert [re.sub(r"\d+ s,", "N s,", text) for text in texts_of(console)[1:]] == [
        "group 1 is back after N s, at outer step 3",
        "group 7 was ended by SIGKILL",
    ]


def test_the_table_of_a_terminal_is_drawn_several_times_a_second(tmp_path, clock, monkeypatch):
    console = Console(file=io.StringIO(), width=80, height=30, force_terminal=True)
    recorded(tmp_path, 2)
    drawn = []
    with Display(console, tmp_path, 2) as display:
        monkeypatch.setattr(display._live, "update", lambda *a, **named: drawn.append(named))
        for _ in range(100):
            clock.now += 0.1
            display.refresh({})
    assert 25 <= len(drawn) <= 34 and all(named["refresh"] for named in drawn)


def test_on_a_terminal_events_stand_above_the_table(tmp_path):
    console = Console(file=io.StringIO(), width=80, height=30, force_terminal=True)
    recorded(tmp_path, 2)
    with Display(console, tmp_path, 2) as display:
        display.refresh({}, is_last=True)
        display.say("group 1 was ended by SIGKILL, starts again in 1 s (restart 1 of 3)")
        display.refresh({1: None}, is_last=True)
    text = Text.from_ansi(console.file.getvalue()).plain
    assert text.index("SIGKILL") < text.rindex("group  state")


def test_a_warning_on_the_same_terminal_does_not_break_the_table(tmp_path, monkeypatch):
    console = Console(file=io.StringIO(), width=80, height=30, force_terminal=True)
    stderr = io.StringIO()
    stderr.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", stderr)
    warner = logging.getLogger("composer_replication.test_display")
    warner.propagate = False
    handler = CurrentStderr()
    warner.addHandler(handler)
    try:
        with Display(console, tmp_path, 2) as display:
            display.refresh({}, is_last=True)
            warner.warning("Cannot write a file")
            assert "Cannot write a file" in console.file.getvalue() and stderr.getvalue() == ""
        warner.warning("Later")
        assert stderr.getvalue() == "Later\n"
    finally:
        warner.removeHandler(handler)


def test_warnings_that_go_to_a_file_stay_there(tmp_path, monkeypatch):
    console = Console(file=io.StringIO(), width=80, height=30, force_terminal=True)
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    with Display(console, tmp_path, 2):
        print("a warning", file=sys.stderr)
    assert stderr.getvalue() == "a warning\n"


def test_a_display_that_cannot_be_written_is_said_once_and_the_groups_go_on(tmp_path, caplog):
    # As stdout is when it is a file on a full disk.
    with open("/dev/full", "wb", buffering=0) as full:
        console = Console(file=io.TextIOWrapper(full, write_through=True))
        with Display(console, tmp_path, 2) as shown:
            for _ in range(3):
                shown.refresh({0: None, 1: None}, is_last=True)
    assert caplog.text.count("Cannot show how the groups are doing") == 1


@pytest.mark.parametrize("is_terminal", [True, False])
@pytest.mark.parametrize(
    ("other", "verdict"),
    [("ab", "equal at step 1: abababab"), ("cd", "DIFFERENT at step 1")],
)
def test_the_display_compares_the_last_digests_that_all_have(tmp_path, is_terminal, other, verdict):
    write_group(tmp_path, 0, syncs=[sync_line(1), sync_line(2)])  # one outer step ahead
    write_group(tmp_path, 1, syncs=[sync_line(1, digest=other)])
    console = Console(file=io.StringIO(), force_terminal=is_terminal, width=100, height=30)
    with Display(console, tmp_path, 2) as shown:
        shown.refresh({0: None, 1: None}, is_last=True)
    said = console.file.getvalue()
    assert "outer step 2: 2 of 2 groups, " in said and f"parameters {verdict}" in said
    assert "2 / 20" in said and "3.142" in said and ("training" in said) == is_terminal


def test_the_settings_are_printed_with_their_source():
    console = Console(file=io.StringIO(), width=80)
    print_settings(console, DiLoCoSettings(sync_every=24), "tiny.yaml")
    (line,) = lines_of(console)
    assert line.startswith("Settings from tiny.yaml: ") and "sync_every=24" in line
