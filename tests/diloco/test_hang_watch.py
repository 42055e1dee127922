"""What is taken for a hang and what is not, each in a process of its own, which it may end."""

import math
import signal
import subprocess
import sys
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest

from composer_replication.diloco.torchft_api import StockManager
from composer_replication.replica.single_group import SingleGroupManager

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


def run(training):
    """How a process ends, and after how many seconds."""
    began = time.monotonic()
    command = [sys.executable, "-c", BEGIN + training]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240)
    return ended, time.monotonic() - began


IN_A_SYNC = "clock = SyncClock(watch, 1.0)\nwith clock.blocking():\n    "
LIMIT_OF_A_SYNC = ["hang_timeout_s=0.5 and the 1 s of its wait"]
HANGS = [
    ("wait_in_vain(20.0)", 0.5,
     ["completed nothing for", "hang_timeout_s=0.5", "in wait_in_vain", "Current thread"]),
    ("with watch.waiting_for_others(9.0): pass\nwait_in_vain(20.0)", 0.5, []),
    ("while True: pass", 2.0, ["no step, sync, save or evaluation for"]),
    (f"{IN_A_SYNC}wait_in_vain(20.0)", 1.5, LIMIT_OF_A_SYNC),
    (f"{IN_A_SYNC}clock.quorum_formed(); wait_in_vain(20.0)", 1.5, LIMIT_OF_A_SYNC),
    (f"{IN_A_SYNC}clock.vote_over(); wait_in_vain(20.0)", 1.5, LIMIT_OF_A_SYNC),
]  # fmt: skip


@pytest.mark.parametrize(("training", "at_least_s", "texts"), HANGS)
def test_a_hang_ends_the_process_and_says_where(training, at_least_s, texts):
    ended, seconds = run(training)
    assert ended.returncode == HANG_STATUS and at_least_s < seconds < 15
    assert all(text in ended.stderr for text in texts)


NO_HANG = {
    "a long computation": "end = time.monotonic() + 1.5\nwhile time.monotonic() < end: pass",
    "an evaluation that moves": "for _ in range(15): wait_in_vain(0.1); watch.note_progress()",
    "a wait for other groups": "with watch.waiting_for_others(9.0):\n    wait_in_vain(1.5)",
    "a wait for the coordinator": "watch.stop()\n"
    "from composer_replication.replica import ranks\n"
    "watch.start()\n"
    "ranks.POLL_S = 0.1\n"
    "begun = ranks.begin_on_rank_0(lambda: wait_in_vain(1.5))\n"
    "ranks.await_on_rank_0(begun, watch.note_progress)",
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


def test_a_wait_of_a_sync_is_as_long_as_the_managers_timeouts():
    seconds = {"_quorum_timeout": timedelta(seconds=30), "_timeout": timedelta(seconds=5)}
    assert StockManager(SimpleNamespace(**seconds)).longest_wait_s == 35.0
    assert SingleGroupManager().longest_wait_s == math.inf


def test_a_process_that_was_stopped_for_long_has_not_hung():
    script = BEGIN + "for _ in range(40):\n    wait_in_vain(0.05)\n    watch.note_progress()\n"
    script = script.replace("for _", "print('began', flush=True)\nfor _") + "print('went on')"
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "began\n"
    process.send_signal(signal.SIGSTOP)
    time.sleep(1.5)
    process.send_signal(signal.SIGCONT)
    assert process.communicate(timeout=240)[0] == "went on\n"
