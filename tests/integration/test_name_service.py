"""A host name that does not resolve for a moment.

Run: pytest tests/integration/test_name_service.py

Real: the command `run`, its restarts, Composer's Trainer, a lighthouse. The name service of Python
is made to fail while a file exists.
"""

import os
import sys

import pytest
from forked_commands import ForkedCommand, run
from run_events import events_of, result_of

from composer_replication.replica.lighthouse import start_lighthouse

pytestmark = [pytest.mark.integration, pytest.mark.slow]

GROUP = """
import os, signal, socket
from pathlib import Path
from harness.trainers import Each, trainer_of
from composer_replication import DiLoCoCallback

starts, outage, real = Path("starts"), Path("outage"), socket.getaddrinfo
with starts.open("a") as file:
    file.write("x")

def getaddrinfo(host, *rest, **more):
    if host == "localhost" and outage.exists():
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
    return real(host, *rest, **more)

def die_once(state):
    if state.timestamp.batch == 1 and len(starts.read_text()) == 1:
        outage.touch()
        os.kill(os.getpid(), signal.SIGKILL)

socket.getaddrinfo = getaddrinfo
diloco = DiLoCoCallback(num_replicas=1, sync_every=2, hostname="localhost")
trainer = trainer_of(diloco, Each(die_once), max_duration="4ba")
try:
    trainer.fit()
finally:
    if len(starts.read_text()) > 1:
        outage.unlink(missing_ok=True)  # the third start finds the name again
trainer.close()
"""


def test_at_a_restart_it_is_asked_for_again(tmp_path):
    (tmp_path / "group.py").write_text(GROUP)
    lighthouse = start_lighthouse(heartbeat_timeout_ms=1_000)
    command = "-m composer_replication run --restarts 3 --backoff 0.1 --run-dir run --"
    environ = {"TORCHFT_LIGHTHOUSE": lighthouse.address(), "REPLICA_GROUP_ID": "a"}
    environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    try:
        ended = run(
            ForkedCommand,
            [sys.executable, *command.split(), sys.executable, "group.py"],
            cwd=tmp_path,
            env=os.environ | environ,
            timeout=240,
        )
    finally:
        lighthouse.shutdown()
    [rejection] = events_of(tmp_path / "run" / "replica_a", "rejection")
    assert "hostname='localhost' does not resolve here" in rejection["error"]
    assert ended.returncode == 0 and (tmp_path / "starts").read_text() == "xxx", ended.stderr
    assert result_of(tmp_path / "run" / "replica_a")["outer_steps"] == 2
