"""The display in a real terminal. Run: pytest tests/launch/test_terminal.py (needs tmux).

Real: tmux, and a process with the display. Stood in for: the groups, by what their callbacks write.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import wait_until

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed"),
]

WIDTH = 80
"""The narrowest in which nothing is cut; test_display.py draws others."""

PROGRAM = """
import pathlib, sys, time
from recorded_groups import recorded, write_group
from rich.console import Console
from composer_replication.launch.display import Display
from composer_replication.launch.display import LiveRun
from composer_replication.launch.outcome import print_rows
run_dir = pathlib.Path(sys.argv[1])
recorded(run_dir, 4)
write_group(run_dir, 2, trained_at=time.time() - 40)
display = Display(Console(), LiveRun(run_dir, range(4)))
print("above\\n" * 60)  # a terminal with an empty end would move rows out of reach
with display:
    display.say("group 3 was ended by SIGKILL, starts again in 1 s (restart 1 of 3)")
    time.sleep(1)
    print("ready", file=sys.stderr)
    while not (run_dir / "go").exists():
        time.sleep(0.1)
print_rows([("global parameters", "equal in 4 groups"), ("all files", "/folder" * 20)])
"""


def test_nothing_is_drawn_twice_wrapped_by_the_terminal_or_cut(tmp_path):
    places = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]
    environ = os.environ | {"LC_ALL": "C.UTF-8", "PYTHONPATH": os.pathsep.join(places)}
    for name in ("TMUX", "COLUMNS", "LINES", "NO_COLOR"):
        environ.pop(name, None)

    def tmux(*arguments):
        command = ["tmux", "-L", f"display-{os.getpid()}", "-f", "/dev/null", "-u", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=environ, check=True)
        return [line.rstrip() for line in done.stdout.splitlines()]

    def wait_for(pattern):
        def screen():
            return "\n".join(tmux("capture-pane", "-p"))

        wait_until(lambda: re.search(pattern, screen(), re.MULTILINE), 120, screen)
        return tmux("capture-pane", "-p", "-J")  # lines that the terminal has wrapped are one

    command = shlex.join([sys.executable, "-c", PROGRAM, str(tmp_path)])
    kept = f"{command}; echo status $?; exec cat"  # the screen stays at the end
    try:
        tmux("new-session", "-d", "-x", str(WIDTH), "-y", "40", kept)
        lines = wait_for("ready")
        (tmp_path / "go").touch()
        wait_for(r"^status 0")
        end = tmux("capture-pane", "-p", "-J", "-S", "-")
    finally:
        tmux("kill-server")
    head = next(i for i, line in enumerate(lines) if line.startswith("group  state"))
    assert "ended by SIGKILL" in "".join(lines[:head])
    for replica_id, row in enumerate(lines[head + 1 : head + 5]):
        state = r"no step for \d\d s" if replica_id == 2 else "training"
        assert re.match(rf"{replica_id} +{state} +━", row), row
        assert row.endswith(" -" if replica_id == 2 else "1 min 15 s")
    assert len([line for line in end if line.startswith("group  state")]) == 1
    assert max(map(len, end)) <= WIDTH and not any("…" in line for line in end)
