"""What is taken for a hang and what is not, each in a process of its own, which it may end."""

import signal
import subprocess
import sys
import time

import pytest

# Of half a second: when others have the processor, a busy process is taken for an idle one.
pytestmark = [pytest.mark.integration, pytest.mark.alone]

HANG_STATUS = 1

BEGIN = """
import logging, sys, time
logging.basicConfig()
from composer_replication.diloco.hang_watch import HangWatch
def wait_in_vain(seconds):
    time.sleep(seconds)
watch = HangWatch(0.5)
watch.start()
"""


def run(training, *, limit_s=240):
    began = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-c", BEGIN + training], capture_output=True, text=True, timeout=limit_s
    )
    return ended, time.monotonic() - began


def test_a_thread_that_waits_in_vain_ends_the_process_with_every_stack():
    ended, seconds = run("wait_in_vain(20.0)")
    assert ended.returncode == HANG_STATUS
    assert "completed nothing for" in ended.stderr and "hang_timeout_s=0.5" in ended.stderr
    assert "in wait_in_vain" in ended.stderr and "Current thread" in ended.stderr
    assert seconds < 15


NO_HANG = {
    "a long computation": "end = time.monotonic() + 1.5\nwhile time.monotonic() < end: pass",
    "an evaluation that moves": "for _ in range(15): wait_in_vain(0.1); watch.note_progress()",
    "a wait for other groups": "with watch.waiting_for_others():\n    wait_in_vain(1.5)",
    "what comes after training": "watch.stop()\nwait_in_vain(1.5)",
}


@pytest.mark.parametrize("training", NO_HANG.values(), ids=NO_HANG)
def test_no_hang_is(training):
    ended, _ = run(training + "\nprint('went on')")
    assert ended.stdout == "went on\n", ended.stderr


def test_a_computation_without_end_is_a_hang_in_the_end():
    ended, seconds = run("while True: pass")
    assert ended.returncode == HANG_STATUS and 2.0 < seconds
    assert "no step, sync, save or evaluation for" in ended.stderr


def test_a_process_that_was_stopped_for_long_has_not_hung():
    script = BEGIN + "for _ in range(40):\n    wait_in_vain(0.05)\n    watch.note_progress()\n"
    script = script.replace("for _", "print('began', flush=True)\nfor _") + "print('went on')"
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "began\n"
    process.send_signal(signal.SIGSTOP)
    time.sleep(1.5)
    process.send_signal(signal.SIGCONT)
    assert process.communicate(timeout=240)[0] == "went on\n"
