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

BOTH = pytest.mark.parametrize("start", [subprocess.Popen, ForkedCommand])

LOOK = """
import json, os, sys, threading
print(json.dumps({
    "argv": sys.argv, "folder": os.getcwd(), "path": sys.path[0], "main": __name__,
    "environ": sorted(os.environ), "secret": os.environ.get("SECRET"), "parent": os.getppid(),
    "leads": os.getsid(0) == os.getpgid(0) == os.getpid(), "stdin": sys.stdin.read(),
    "threads": len(os.listdir("/proc/self/task")), "executable": sys.executable,
}))
print("to the other one", file=sys.stderr)
"""


@BOTH
def test_it_is_a_child_with_its_own_words_folder_environment_session_and_pipes(tmp_path, start):
    environ = {"PATH": os.environ["PATH"], "SECRET": "s", "LC_CTYPE": "C.UTF-8"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [sys.executable, "-c", LOOK, "a", "b c"]
    with start(
        command, cwd=tmp_path, env=environ, start_new_session=True, text=True, **pipes
    ) as process:
        out, err = process.communicate("words\n", timeout=240)
    assert process.returncode == 0 and err == "to the other one\n"
    assert json.loads(out) == {
        "argv": ["-c", "a", "b c"],
        "folder": str(tmp_path),
        "path": "",
        "main": "__main__",
        "environ": sorted(environ),
        "secret": "s",
        "parent": os.getpid(),
        "leads": True,
        "stdin": "words\n",
        "threads": 1,
        "executable": sys.executable,
    }


@BOTH
@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('a reason')", 1, "a reason\n"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("import os; os.abort()", -signal.SIGABRT, ""),
        ("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt\n"),
    ],
)
def test_it_ends_with_the_status_of_its_code(start, code, status, said):
    ended = run(start, [sys.executable, "-c", code], timeout=240)
    assert ended.returncode == status
    assert ended.stderr.endswith(said) and bool(said) <= bool(ended.stderr)


@BOTH
def test_a_script_and_a_module_are_run_as_main(tmp_path, start):
    (tmp_path / "beside.py").write_text("WORD = 'beside'")
    code = "import beside, sys; print(__name__, __file__, beside.WORD, *sys.argv)"
    (tmp_path / "script.py").write_text(code)
    script, here = str(tmp_path / "script.py"), {"cwd": tmp_path, "timeout": 240}
    said = run(start, [sys.executable, script, "x"], **here).stdout.split()
    assert said == ["__main__", script, "beside", script, "x"]
    said = run(start, [sys.executable, "-m", "script", "x"], **here).stdout.split()
    assert said == ["__main__", script, "beside", script, "x"]


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
