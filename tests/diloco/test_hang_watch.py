"""What is taken for a hang and what is not, each in a process of its own, which it may end."""

import math
import signal
import subprocess
import sys
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest

from composer_replication.diloco.torchft_api import longest_wait_s

# Of half a second: when others have the processor, a busy process is taken for an idle one.
pytestmark = [pytest.mark.integration, pytest.mark.alone]

HANG_STATUS = 1

BEGIN = """
import logging, time
from composer_replication.diloco.hang_watch import HangWatch, SyncClock
logging.basicConfig()
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
    "a wait as long as it may be": "with watch.waiting_for_others(1.5):\n    wait_in_vain(1.5)",
    "a wait in a wait": "with watch.waiting_for_others(1.5), watch.waiting_for_others(0.1):\n"
    "    wait_in_vain(1.5)",
    "a sync whose attempts end": "clock = SyncClock(watch, 0.5)\nwith clock.blocking():\n"
    "    for _ in range(3):\n"
    "        wait_in_vain(0.5); clock.quorum_formed(); wait_in_vain(0.5); clock.vote_over()",
    "what comes after training": "watch.stop()\nwait_in_vain(1.5)",
}


@pytest.mark.parametrize("training", NO_HANG.values(), ids=NO_HANG)
def test_no_hang_is(training):
    ended, _ = run(training + "\nprint('went on')")
    assert ended.stdout == "went on\n", ended.stderr


@pytest.mark.parametrize("before", ["", "clock.quorum_formed(); ", "clock.vote_over(); "])
def test_a_sync_that_takes_longer_than_any_wait_of_it_may_is_a_hang(before):
    training = "clock = SyncClock(watch, 1.0)\nwith clock.blocking():\n    "
    ended, seconds = run(f"{training}{before}wait_in_vain(20.0)")
    assert ended.returncode == HANG_STATUS and 1.5 < seconds < 15
    assert "hang_timeout_s=0.5 and the 1 s of its wait" in ended.stderr


def test_after_a_wait_the_limit_is_the_usual_one():
    ended, seconds = run("with watch.waiting_for_others(): pass\nwait_in_vain(20.0)")
    assert ended.returncode == HANG_STATUS and seconds < 15


def test_a_wait_of_a_sync_is_as_long_as_the_managers_timeouts():
    seconds = {"_quorum_timeout": timedelta(seconds=30), "_timeout": timedelta(seconds=5)}
    assert longest_wait_s(SimpleNamespace(**seconds)) == 35.0
    assert longest_wait_s(SimpleNamespace()) == math.inf


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
