"""A rank that waits for others in Trainer.close, and what must not be taken for it.

Real: processes, signals, gloo, Composer, and where there is a replica group its lighthouse. Shorter
than in a run: the grace. Run: pytest tests/callback/test_trainer_watch.py
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from forked_commands import ForkedCommand
from harness.commands import free_port

pytestmark = pytest.mark.integration

HEAD = """
import datetime, os, signal, sys, threading, time
import torch, torch.distributed as dist
from composer import Callback
from harness.trainers import Each, trainer_of
from composer_replication import DiLoCoCallback
from composer_replication.callback import trainer_watch as stopping
from composer_replication.replica.lighthouse import start_lighthouse
stopping.GRACE_S = 1.0

def diloco():
    global lighthouse
    lighthouse = start_lighthouse()
    return DiLoCoCallback(replica_id=0, lighthouse_addr=lighthouse.address(), sync_every=2)

def fail(state):
    raise RuntimeError("of the first model")
"""

# Rank 0 fails, and closes; rank 1 never comes.
RANK = """
class Ends(Callback):
    def close(self, state, logger):
        stopping.end_if_stuck_in_close(sys.exc_info()[1])

import composer.utils
from harness import trainers
samples = trainers.data().dataset
sampler = composer.utils.dist.get_sampler
trainers.data = lambda _: torch.utils.data.DataLoader(samples, 8, sampler=sampler(samples))

def part(state):
    if dist.get_rank() == 0:
        {ends}
    time.sleep(100)

trainer = trainer_of(Ends(), Each(part), max_duration="2ba")
try:
    trainer.fit()
finally:
    trainer.close()
"""

# As in a sweep: an error is caught, and the next model's backward takes its time.
SWEEP = """
trainer = trainer_of(diloco(), Each(fail), max_duration="2ba")
try:
    trainer.fit()
except RuntimeError:
    trainer.close()
exec(compile("time.sleep(6)", "/torch/autograd/graph.py", "exec"))
print("trained the second model")
sys.stdout.flush()
os._exit(0)
"""


def start(script, **environ):
    return ForkedCommand(
        [sys.executable, "-c", HEAD + script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[1],
        env=os.environ | environ,
    )


@pytest.mark.parametrize(
    ("ends", "status"), [("fail(state)", 1), ("os.kill(os.getpid(), signal.SIGTERM)", 143)]
)
def test_a_rank_whose_others_never_come_to_close_ends_with_every_thread_s_traceback(ends, status):
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "0"}
    place |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    script = RANK.replace("{ends}", ends)
    ranks = [start(script, **place, RANK=str(i), LOCAL_RANK=str(i)) for i in range(2)]
    try:
        _, said = ranks[0].communicate(timeout=240)
        assert ranks[0].returncode == status, said
        assert f"this rank ends with status {status}" in said
        assert 'trainer.py", line' in said and "in close" in said and "in barrier" in said
        assert ranks[1].poll() is None
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def test_a_long_backward_after_a_caught_error_is_left_alone():
    process = start(SWEEP)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert "trained the second model" in out
