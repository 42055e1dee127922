"""The example for Ray Train. Run: make test-ray

Real: Ray, its lighthouse, two workers, and a worker that is killed.
"""

import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from pace import paced
from run_events import result_of, syncs_of


def this_host_resolves():
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        return False
    return True


pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray: make test-ray"),
    # torchft's lighthouse, which Ray starts, names itself by the host name (docs/machines.md).
    pytest.mark.skipif(
        not this_host_resolves(), reason=f"the host name {socket.gethostname()} does not resolve"
    ),
]

EXAMPLE = Path(__file__).parents[2] / "deploy" / "ray" / "train.py"


def rows(folder, group):
    return syncs_of(folder / f"replica_{group}")


def test_a_killed_worker_comes_back_and_the_groups_end_equal(tmp_path):
    run = tmp_path / "run"
    environ = paced(0.05) | {
        "COMPOSER_REPLICATION_TOKEN": "secret-of-the-run",
        "COMPOSER_REPLICATION_HOSTNAME": "127.0.0.1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "HOME": str(tmp_path),  # Ray writes a token of its own there
    }
    environ.pop("COMPOSER_REPLICATION_NO_TOKEN", None)
    with (tmp_path / "out.txt").open("w") as out:
        process = subprocess.Popen(
            [sys.executable, EXAMPLE, "2", "1000000ba", run],
            env=environ,
            cwd=tmp_path,
            stdout=out,
            stderr=subprocess.STDOUT,
        )

    def wait(is_so):
        deadline = time.monotonic() + 240
        while not is_so():
            said = (tmp_path / "out.txt").read_text(errors="replace")
            mine = "\n".join(
                line for line in said.splitlines() if "PlacementGroupCleaner" not in line
            )
            assert process.poll() is None and time.monotonic() < deadline, mine[-5000:]
            time.sleep(0.2)

    def commits(participants, since):
        later = [rows(run, group)[since[group] :] for group in (0, 1)]
        return [
            any(row["diloco/num_participants"] == participants for row in part) for part in later
        ]

    try:
        wait(lambda: all(commits(2, since=[0, 0])))
        victim = next(each for each in below(process) if "RayTrainWorker" in each.cmdline()[0])
        since = [len(rows(run, group)) for group in (0, 1)]
        victim.kill()
        wait(lambda: any(commits(1, since)))
        since = [len(rows(run, group)) for group in (0, 1)]
        wait(lambda: all(commits(2, since)))
        (run / "STOP").touch()
        assert process.wait(120) == 0
    finally:
        for each in [*below(process), process]:
            each.kill()
        process.wait()
    results = [result_of(run / f"replica_{i}") for i in (0, 1)]
    assert results[0]["global_digest"] == results[1]["global_digest"]
    assert results[0]["outer_steps"] == results[1]["outer_steps"] > 2


def below(process):
    """The processes that a process has started, and those that they have."""
    try:
        found = psutil.Process(process.pid).children(recursive=True)
    except psutil.Error:
        return []
    return [each for each in found if each.is_running() and each.status() != "zombie"]
