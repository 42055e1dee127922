"""A process that hangs in a collective when it is told to stop. Run: pytest tests/test_stopping.py

Real: processes, signals, gloo. Rank 1 never comes.
"""

import signal
import subprocess
import sys
import time

import pytest

RANK = """
import datetime, os, signal, sys, threading, torch.distributed as dist
from composer_replication.stopping import expect_end, watch_for_stops
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
kept = []
other = threading.Thread(target=lambda: kept.append(dist.ProcessGroupGloo(
    dist.PrefixStore("x", dist.TCPStore("localhost", store.port)), 1, 2,
    datetime.timedelta(seconds=100))))
other.start()
dist.init_process_group("gloo", store=dist.PrefixStore("y", store), rank=0, world_size=1)
group = dist.ProcessGroupGloo(dist.PrefixStore("x", store), 0, 2, datetime.timedelta(seconds=100))
{before}
print("waiting", flush=True)
import torch
exec(compile("group.allreduce([torch.ones(1)]).wait()", "/torch/distributed/test.py", "exec"))
"""


def run(before):
    process = subprocess.Popen(
        [sys.executable, "-c", RANK.replace("{before}", before)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "waiting\n"
    time.sleep(0.5)
    return process, time.monotonic()


def test_without_us_a_signal_waits_as_long_as_the_collective():
    process, _ = run("")
    process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=6)
    process.kill()
    process.wait()


def test_a_signal_ends_it_after_some_seconds_with_the_signal_s_status():
    process, began = run("watch_for_stops()")
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 143
    assert time.monotonic() - began < 8


def test_so_does_an_end_that_was_announced():
    process, began = run("watch_for_stops(); expect_end(1)")
    assert process.wait(timeout=20) == 1
    assert time.monotonic() - began < 8
