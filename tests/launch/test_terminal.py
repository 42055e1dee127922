"""``launch`` in a real terminal. Run: pytest tests/launch/test_terminal.py (needs tmux).

Real: tmux, the command, its processes, coordinator and display. Stood in for: the groups' training,
by a script that writes what a callback writes.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.integration,
    pytest.mark.together,
    pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed"),
]

WIDTH = 80
"""The narrowest in which nothing is cut; test_display.py draws others."""

GROUP = """
import json, os, pathlib, signal, sys, time
from recorded_groups import sync_line, write_group
from run_events import write_events
run_dir, name = pathlib.Path(sys.argv[1]), sys.argv[2]
folder = run_dir / f"replica_{name}"
with (folder / "lives").open("a") as lives:
    lives.write("x")
if name == "3" and (folder / "lives").read_text() == "x":
    while not (run_dir / "replica_2" / "events.jsonl").exists():
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGKILL)
syncs = [sync_line(step, participants=4) for step in (1, 2)]
write_group(run_dir, name, syncs=syncs)
while not (run_dir / "go").exists():
    # Group 2 is one that a missing partner stops.
    write_group(run_dir, name, trained_at=time.time() - 40 * (name == "2"))
    time.sleep(0.1)
write_group(run_dir, name, batch=200, inner_steps=200, round=20.0, seconds_left=0.0)
result = {"replica_id": name, "inner_steps": 200, "outer_steps": 2, "final_loss": 2.0}
write_events(folder, "end", result | {"global_digest": "ab" * 32})
"""


class Terminal:
    """A tmux server of its own with one terminal, in which a command runs."""

    def __init__(self, environ):
        self.environ = environ

    def tmux(self, *arguments):
        command = ["tmux", "-L", f"display-{os.getpid()}", "-f", "/dev/null", "-u", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=self.environ, check=True)
        return done.stdout.splitlines()

    def start(self, command):
        kept = f"{shlex.join(command)}; echo status $?; exec cat"  # the screen stays at the end
        self.tmux("new-session", "-d", "-x", str(WIDTH), "-y", "40", kept)

    def lines(self, *, joined=False):
        """What stands on the screen. ``joined``: with lines that the terminal wrapped in one."""
        return list(map(str.rstrip, self.tmux("capture-pane", "-p", *(["-J"] if joined else []))))

    def wait_for(self, pattern):
        """Return the screen's lines once a line matches."""
        deadline = time.monotonic() + 300
        while not any(re.search(pattern, line) for line in self.lines()):
            assert time.monotonic() < deadline, "\n".join([f"no {pattern}:", *self.lines()])
            time.sleep(0.1)
        return self.lines()


@pytest.fixture(scope="module")
def screens(tmp_path_factory):
    """The lines while the groups train, at the end, and the last without wraps."""
    folder = tmp_path_factory.mktemp("t")
    run_dir = folder / "run"
    (folder / "group.py").write_text(GROUP)
    places = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]
    environ = os.environ | {"LC_ALL": "C.UTF-8", "PYTHONPATH": os.pathsep.join(places)}
    for name in ("TMUX", "COLUMNS", "LINES", "NO_COLOR"):
        environ.pop(name, None)
    launch = [sys.executable, "-m", "composer_replication", "launch", "--replicas", "4"]
    launch += ["--run-dir", str(run_dir), "--set", "sync_every=10", "--"]
    group = [sys.executable, str(folder / "group.py"), str(run_dir), "{replica_id}"]
    terminal = Terminal(environ)
    try:
        terminal.start([*launch, *group])
        terminal.wait_for("group 3 is back")
        terminal.wait_for("^3 +training")
        training = terminal.lines()
        (run_dir / "go").touch()
        yield training, terminal.wait_for(r"^status \d+"), terminal.lines(joined=True)
    finally:
        terminal.tmux("kill-server")


def test_while_groups_train_each_has_a_row_with_what_it_does(screens):
    lines, _, _ = screens
    head = next(i for i, line in enumerate(lines) if line.startswith("group  state"))
    assert lines[head].split() == "group state round groups loss time left".split()
    rows = lines[head + 1 : head + 5]
    for replica_id, row in enumerate(rows):
        state = r"no step for \d\d s" if replica_id == 2 else "training"
        assert re.match(rf"{replica_id} +{state} +━", row), row
        assert "2 / 20" in row and "3.142" in row
        assert row.endswith(" -" if replica_id == 2 else "1 min 15 s")
    assert lines[head + 5] == "outer step 2: 4 of 4 groups, parameters equal: abababab"


def test_a_death_and_a_return_stand_above_the_table(screens):
    lines, _, _ = screens
    events = [line[10:] for line in lines if re.match(r"\d\d:\d\d:\d\d  ", line)]
    assert events[0] == "group 3 was ended by SIGKILL, starts again in 1 s (restart 1 of 3)"
    assert re.fullmatch(r"group 3 is back after \d+ s, at outer step 2", events[1])


def test_nothing_is_wrapped_by_the_terminal_or_cut(screens):
    _, end, joined = screens
    assert "status 0" in end
    ours = joined[next(i for i, line in enumerate(joined) if line.startswith("group  state")) :]
    assert max(map(len, ours)) <= WIDTH
    assert not any("…" in line for line in ours)
    values = next(line for line in ours if line.startswith("global parameters"))
    assert values.endswith("equal in 4 groups after 2 outer steps: abababab")
    assert len([line for line in ours if line.startswith("group  state")]) == 1, "drawn twice"
