"""Printing into a file on a full disk. Run: pytest tests/launch/test_lossy_output.py

Real: a process whose output is a file that may not grow (``RLIMIT_FSIZE``).
"""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.integration

PROGRAM = """
import resource, sys
from composer_replication.launch.lossy_output import ignore_output_errors
if sys.argv[1] == "lossy":
    ignore_output_errors()
print("before", "\\u2713", flush=True)
resource.setrlimit(resource.RLIMIT_FSIZE, (12, resource.RLIM_INFINITY))
for stream in (sys.stdout, sys.stderr):
    print("lost" * 1000, file=stream, flush=True)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print("after")
"""


def run(how, stdout):
    command = [sys.executable, "-X", "utf8", "-c", PROGRAM, how]
    return subprocess.run(command, stdout=stdout, stderr=subprocess.STDOUT).returncode


@pytest.mark.parametrize(("how", "status"), [("lossy", 0), ("as it is", 1)])
def test_a_print_that_fails_does_not_end_the_process(tmp_path, how, status):
    with (tmp_path / "log.txt").open("ab") as output:
        assert run(how, output) == status
    said = (tmp_path / "log.txt").read_text(errors="replace")
    assert said.startswith("before \u2713\n") and said.endswith("after\n") == (how == "lossy")


def test_a_pipe_stays_as_it_is():
    code = (
        "import sys; before = sys.stdout; "
        "from composer_replication.launch.lossy_output import ignore_output_errors as lose; "
        "lose(); print(sys.stdout is before)"
    )
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert seen.stdout == "True\n"
