"""What a fork in place of a fresh interpreter has in common with one. See forked_commands.py."""

import json
import os
import signal
import subprocess
import sys

import psutil
import pytest
from forked_commands import ForkedCommand, run

pytestmark = pytest.mark.integration

LOOK = """
import beside, json, os, sys, threading
print(json.dumps({
    "argv": sys.argv[1:], "folder": os.getcwd(), "main": __name__, "beside": beside.WORD,
    "environ": sorted(os.environ), "parent": os.getppid(), "stdin": sys.stdin.read(),
    "leads": os.getsid(0) == os.getpgid(0) == os.getpid(), "executable": sys.executable,
    "threads": len(os.listdir("/proc/self/task")),
}))
print("to the other one", file=sys.stderr)
"""


@pytest.mark.parametrize("how", [["look.py"], ["-m", "look"], ["-c", LOOK]])
def test_it_is_a_child_like_a_fresh_interpreter(how, tmp_path):
    (tmp_path / "beside.py").write_text("WORD = 'beside'")
    (tmp_path / "look.py").write_text(LOOK)
    options = {"cwd": tmp_path, "env": {"PATH": os.environ["PATH"], "LC_CTYPE": "C.UTF-8"}}
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    command, seen = [sys.executable, *how, "a", "b c"], []
    for start in (subprocess.Popen, ForkedCommand):
        with start(command, text=True, start_new_session=True, **options, **pipes) as process:
            out, err = process.communicate("words\n", timeout=240)
        seen.append((process.returncode, json.loads(out), err))
    assert seen[0] == seen[1] and seen[0][1]["parent"] == os.getpid()


@pytest.mark.parametrize("code", [
    "import sys; sys.exit(3)",
    "import sys; sys.exit('a reason')",
    "1 / 0",
    "import os; os.abort()",
    "raise KeyboardInterrupt",
])  # fmt: skip
def test_it_ends_as_a_fresh_interpreter_would(code):
    ends = [
        run(start, [sys.executable, "-c", code], timeout=240)
        for start in (subprocess.Popen, ForkedCommand)
    ]
    assert ends[0].returncode == ends[1].returncode
    last, of_fork = (each.stderr.splitlines()[-1:] for each in ends)
    assert last == of_fork


STARTS = """
import json, subprocess, sys, time
code = "import os, sys, time; print(os.getppid(), 'torch' in sys.modules, flush=True)"
command = [sys.executable, "-c", code + "; time.sleep(100)"]
child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
shell = subprocess.run(["/bin/sh", "-c", "echo from a shell"], stdout=subprocess.PIPE, text=True)
print(json.dumps([child.pid, child.stdout.readline(), shell.stdout]), flush=True)
print(json.dumps(child.wait()), flush=True)
time.sleep(100)
"""


def test_what_a_launcher_starts_is_its_child_and_its_server_ends_with_it():
    command = [sys.executable, "-c", STARTS, "launch"]
    with ForkedCommand(command, text=True, stdout=subprocess.PIPE) as launcher:
        pid, said, of_shell = json.loads(launcher.stdout.readline())
        assert said == f"{launcher.pid} True\n" and of_shell == "from a shell\n"
        children = {each.pid: each for each in psutil.Process(launcher.pid).children()}
        children.pop(pid).send_signal(signal.SIGUSR1)
        assert json.loads(launcher.stdout.readline()) == -signal.SIGUSR1
        (server,) = children.values()
        launcher.kill()
    assert psutil.wait_procs([server], timeout=60)[1] == []


def test_a_group_of_a_launch_is_a_fork_too(tmp_path):
    code = "import sys; print('torch' in sys.modules)"
    launch = ["-m", "composer_replication", "launch", "--replicas", "1", "--run-dir", "run"]
    command = [sys.executable, *launch, "--", sys.executable, "-c", code]
    assert run(ForkedCommand, command, cwd=tmp_path, timeout=240).returncode
    log = (tmp_path / "run" / "replica_0" / "log.txt").read_text().splitlines()
    assert set(log) == {"True"}
