"""Replica groups on hosts of their own. Run: pytest tests/integration/test_several_machines.py.

Real: network namespaces with a router between them, the command `coordinator` in one, a group in
each of the others, lighthouse, gloo. No two share a loopback device. The final model itself says
which samples it has been trained on, see leased_group.py.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from forked import begin_fork, context
from integration.leased_group import train, what_is_in
from network_hosts import Hosts, why_not
from run_events import syncs_of
from waiting import wait_until

from composer_replication.replica.interruptible_manager import InterruptibleManager

pytestmark = [pytest.mark.integration, pytest.mark.slow]

GROUPS, COORDINATOR, OTHER_PLACE = range(3), 3, 4
VANISHES, LAST_STEP = 1, 6
"""A group, and the outer step after which its host vanishes in a sync."""
PORT, TOKEN = 29512, "a-secret"
TIMEOUT_S = 10.0  # leased_group.py's, of a collective


@pytest.fixture(autouse=True, scope="module")
def allowed():
    if (reason := why_not()) is not None:
        pytest.skip(reason)


class Run(ExitStack):
    """A coordinator and three groups, each on a host of its own.

    Args:
        folder: Of the run, which all hosts share.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.plan = {
            "run_dir": str(folder / "run"),
            "length": 1200,
            "fragments": 1,
            "step_s": 0.1,
        }
        self.hosts = Hosts(5, "IPv6", folder)
        self.enter_context(self.hosts.connected())

    def start_coordinator(self, host: int) -> subprocess.Popen[str]:
        """Start it on a host, under the name ``coordinator``."""
        self.hosts.name({"coordinator": host})
        bind = f"[{self.hosts.address(host)}]:{PORT}"
        options = ["--bind", bind, "--hostname", "coordinator", "--replicas", "3"]
        # On a busy machine a group must not look dead while it is not.
        options += ["--set", "sync_every=12", "--heartbeat-timeout-s", "6"]
        options += ["--state-dir", str(self.folder / "state")]
        path = self.folder / f"coordinator_{host}.txt"
        with path.open("w") as out:
            process = subprocess.Popen(
                self.hosts.command(
                    host, [sys.executable, "-m", "composer_replication", "coordinator", *options]
                ),
                env=os.environ | {"COMPOSER_REPLICATION_TOKEN": TOKEN},
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
            )
        self.callback(process.wait)
        self.callback(process.kill)
        wait_until(lambda: "settings: " in path.read_text() or process.poll() is not None, 120)
        assert process.poll() is None, path.read_text()
        return process

    def start_groups(self) -> None:
        (self.folder / "run").mkdir()
        self.groups = [
            context.Process(target=train_on_host, args=(self.hosts, group, self.plan), daemon=True)
            for group in GROUPS
        ]
        for process in self.groups:
            process.start()
            self.callback(process.join)
            self.callback(process.kill)

    def metrics(self, group: int) -> list[dict]:
        return syncs_of(self.folder / "run" / f"replica_{group}")

    def said(self, group: int) -> str:
        return (self.folder / "run" / f"group_{group}.txt").read_text()

    def wait_for_syncs_of_all(self) -> None:
        """Until each group has committed two with all three."""

        def has_two(group: int) -> bool:
            sizes = [line["diloco/num_participants"] for line in self.metrics(group)]
            return sizes.count(3) >= 2

        wait_until(lambda: all(map(has_two, GROUPS)), 200, lambda: list(map(self.said, GROUPS)))

    def check_end(self, *groups: int) -> None:
        """These groups end well, with equal models in which every sample is once."""
        for group in groups:
            self.groups[group].join(200)
            assert self.groups[group].exitcode == 0, self.said(group)[-4000:]
        folders = [self.folder / "run" / f"replica_{group}" for group in groups]
        trained = [torch.load(folder / "trained.pt") for folder in folders]
        assert len({one["digest"] for one in trained}) == 1
        for is_in, is_in_twice in what_is_in(trained[0]["moments"]):
            assert is_in.all(), f"{(~is_in).sum()} samples are missing"
            assert not is_in_twice.any(), f"{is_in_twice.sum()} samples are in it twice"


def train_on_host(hosts: Hosts, group: int, plan: dict) -> None:
    """The process of a group. It says what it has to say in ``group_<id>.txt``."""
    hosts.enter(group)
    with open(f"{plan['run_dir']}/group_{group}.txt", "a") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    if group == VANISHES:
        _vanish_in_sync(hosts)
    begin_fork()
    os.environ |= {
        "COMPOSER_REPLICATION_COORDINATOR": f"http://coordinator:{PORT}",
        "COMPOSER_REPLICATION_TOKEN": TOKEN,
        "COMPOSER_REPLICATION_HOSTNAME": hosts.address(group),
        "REPLICA_GROUP_ID": str(group),
    }
    train(plan)


def _vanish_in_sync(hosts: Hosts) -> None:
    """End this host without a word when its peers wait for it in a collective."""
    allreduce = InterruptibleManager.allreduce

    def vanish(manager, *arguments, **options):
        if manager.current_step() > LAST_STEP:  # the cold start is its step 1
            hosts.silence(VANISHES)  # first, so that no RST and no FIN tells of the death
            os.kill(os.getpid(), signal.SIGKILL)
        return allreduce(manager, *arguments, **options)

    InterruptibleManager.allreduce = vanish


@pytest.mark.alone
def test_the_coordinator_moves_and_a_host_vanishes_in_a_sync(tmp_path):
    with Run(tmp_path) as run:
        coordinator = run.start_coordinator(COORDINATOR)
        run.start_groups()
        run.wait_for_syncs_of_all()
        coordinator.terminate()
        coordinator.wait()
        run.start_coordinator(OTHER_PLACE)
        run.check_end(0, 2)
        assert run.groups[VANISHES].exitcode == -signal.SIGKILL
        moved = (tmp_path / f"coordinator_{OTHER_PLACE}.txt").read_text()
        assert "uncommitted samples of replica group 1 are available again" in moved
        assert "Replica group 0 has left" in moved and "Replica group 2 has left" in moved
        # All three have found the new place: until group 1 vanished, no sync was without it.
        sizes = [line["diloco/num_participants"] for line in run.metrics(0)]
        assert sizes[:LAST_STEP] == [3] * LAST_STEP and set(sizes[LAST_STEP:]) == {2}
        for group in (0, 2):
            first_without = run.metrics(group)[LAST_STEP]
            assert first_without["diloco/retries"] == 1
            assert TIMEOUT_S - 1.0 < first_without["diloco/sync_seconds"] < TIMEOUT_S + 5.0
            assert not any(line["diloco/steps_lost"] for line in run.metrics(group))
            said = run.said(group)
            [failed] = re.findall("The sync after outer step .* did not commit, .*", said)
            assert "after outer step 6 " in failed
            # Whose wait is over first says how long it was; then gloo closes, as the other says.
            timed_out = f"Timed out waiting {1000 * TIMEOUT_S:.0f}ms"
            assert timed_out in failed or "Application timeout caused pair closure" in failed
