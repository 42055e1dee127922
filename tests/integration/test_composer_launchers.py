"""Two replica groups of two ranks each, four processes that hold one model.

Run: pytest tests/integration/test_composer_launchers.py. Real: everything, as on two machines:
Composer's launcher or torchrun, DDP inside a group, the lighthouse and gloo between them.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from composer_replication.lighthouse import start_lighthouse

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

SCRIPT = Path(__file__).with_name("composer_group.py")
DEADLINE_S = 180.0  # below the timeout above, after which nobody would stop the groups
GROUPS, RANKS = (0, 1), (0, 1)
COMPOSER = ["composer.cli.launcher", "--nproc", "2", "--master_addr", "127.0.0.1"]
TORCHRUN = ["torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]
PORT_OPTION = {"composer.cli.launcher": "--master_port", "torch.distributed.run": "--master-port"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launch(launcher: list[str], group: int, lighthouse_addr: str, *arguments: object):
    module = launcher[0]
    rest = [PORT_OPTION[module], str(free_port()), str(SCRIPT), *map(str, arguments)]
    paths = [str(SCRIPT.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        [sys.executable, "-m", *launcher, *rest],
        env=os.environ
        | {
            "REPLICA_GROUP_ID": str(group),
            "NUM_REPLICA_GROUPS": str(len(GROUPS)),
            "TORCHFT_LIGHTHOUSE": lighthouse_addr,
            "PYTHONPATH": os.pathsep.join(paths),
            "OMP_NUM_THREADS": "1",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # its ranks too are ended with it
    )


def run_groups(launcher: list[str], *arguments: object) -> None:
    """Run all groups to their end, or end all of them with the output of the first that failed."""
    lighthouse = start_lighthouse()
    groups = [launch(launcher, group, lighthouse.address(), *arguments) for group in GROUPS]
    deadline = time.monotonic() + DEADLINE_S
    try:
        for group in groups:
            output, _ = group.communicate(timeout=max(1.0, deadline - time.monotonic()))
            assert group.returncode == 0, output
    finally:
        for group in groups:
            with suppress(ProcessLookupError):
                os.killpg(group.pid, signal.SIGKILL)
            group.wait()
        lighthouse.shutdown()


@pytest.mark.parametrize(
    ("launcher", "dtype", "microbatch_size"),
    [
        pytest.param(COMPOSER, "float32", 8, id="composer"),
        pytest.param(TORCHRUN, "bfloat16", 4, id="torchrun_with_bf16_weights_and_microbatches"),
    ],
)
def test_all_ranks_of_all_groups_hold_the_same_model(tmp_path, launcher, dtype, microbatch_size):
    run_groups(launcher, tmp_path, dtype, microbatch_size)
    lines = {
        (group, rank): [json.loads(line) for line in (tmp_path / f"{group}_{rank}.jsonl").open()]
        for group in GROUPS
        for rank in RANKS
    }
    first = lines[0, 0]
    # The start, and a sync every two batches; each batch is one inner step.
    assert [line["outer_step"] for line in first] == [0, 1, 2, 3]
    assert [line["batch"] for line in first] == [0, 2, 4, 6]
    assert [line["inner_steps"] for line in first] == [0, 2, 4, 6]
    assert all(line["is_level"] for line in first)
    assert len({line["global"] for line in first}) == 4  # it did train
    for seen in lines.values():
        assert seen == first
    results = [
        json.loads((tmp_path / f"{group}_{rank}.result.json").read_text())
        for group in GROUPS
        for rank in RANKS
    ]
    assert {result["outer_steps"] for result in results} == {4}  # the last one in mid-round
    assert {result["inner_steps"] for result in results} == {7}
    assert len({result["global_digest"] for result in results}) == 1
    assert [result["replica_id"] for result in results] == ["0", "0", "1", "1"]
