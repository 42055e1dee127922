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
        family: ``IPv4`` or ``IPv6``.
        num_samples: Of the one epoch.
    """

    def __init__(self, folder: Path, family: str, num_samples: int) -> None:
        super().__init__()
        self.folder = folder
        self.plan = {
            "run_dir": str(folder / "run"),
            "length": num_samples,
            "fragments": 1,
            "step_s": 0.1,
        }
        self.hosts = Hosts(5, family, folder)
        self.enter_context(self.hosts.connected())
        self.num_coordinators = 0

    def start_coordinator(self, host: int) -> subprocess.Popen[str]:
        """Start it on a host, under the name ``coordinator``."""
        self.hosts.name({"coordinator": host})
        address = self.hosts.address(host)
        bind = f"[{address}]:{PORT}" if ":" in address else f"{address}:{PORT}"
        options = ["--bind", bind, "--hostname", "coordinator", "--replicas", "3"]
        # On a busy machine a group must not look dead while it is not.
        options += ["--set", "sync_every=12", "--heartbeat-timeout-s", "6"]
        options += ["--state-dir", str(self.folder / "state")]
        self.num_coordinators += 1
        path = self.folder / f"coordinator_{self.num_coordinators}.txt"
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

    def start_groups(self, **vanish_at: int) -> None:
        """Start all three; ``group_1=5``: group 1 vanishes in the sync after outer step 5."""
        (self.folder / "run").mkdir()
        self.groups = [
            context.Process(
                target=train_on_host,
                args=(self.hosts, group, self.plan, vanish_at.get(f"group_{group}")),
                daemon=True,
            )
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

    def wait_for_syncs(self, count: int, *groups: int, participants: int) -> None:
        """Until these groups have committed so many syncs more with so many participants."""
        before = {group: len(self.metrics(group)) for group in groups}

        def has_all(group: int) -> bool:
            new = self.metrics(group)[before[group] :]
            sizes = [line["diloco/num_participants"] for line in new]
            return sizes.count(participants) >= count

        wait_until(lambda: all(map(has_all, groups)), 200, lambda: list(map(self.said, groups)))

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


def train_on_host(hosts: Hosts, group: int, plan: dict, vanish_at: int | None) -> None:
    """The process of a group. It says what it has to say in ``group_<id>.txt``."""
    hosts.enter(group)
    with open(f"{plan['run_dir']}/group_{group}.txt", "a") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    if vanish_at is not None:
        _vanish_in_sync(hosts, group, vanish_at)
    begin_fork()
    os.environ |= {
        "COMPOSER_REPLICATION_COORDINATOR": f"http://coordinator:{PORT}",
        "COMPOSER_REPLICATION_TOKEN": TOKEN,
        "COMPOSER_REPLICATION_HOSTNAME": hosts.address(group),
        "REPLICA_GROUP_ID": str(group),
    }
    train(plan)


def _vanish_in_sync(hosts: Hosts, group: int, outer_step: int) -> None:
    """End this host without a word when its peers wait for it in a collective."""
    allreduce = InterruptibleManager.allreduce

    def vanish(manager, *arguments, **options):
        if manager.current_step() > outer_step:  # the cold start is its step 1
            hosts.silence(group)  # first, so that no RST and no FIN tells of the death
            os.kill(os.getpid(), signal.SIGKILL)
        return allreduce(manager, *arguments, **options)

    InterruptibleManager.allreduce = vanish


@pytest.mark.alone
def test_the_coordinator_moves_and_a_host_vanishes_in_a_sync(tmp_path):
    with Run(tmp_path, "IPv6", num_samples=1200) as run:
        coordinator = run.start_coordinator(COORDINATOR)
        run.start_groups(group_1=6)
        run.wait_for_syncs(2, *GROUPS, participants=3)
        coordinator.terminate()
        coordinator.wait()
        run.start_coordinator(OTHER_PLACE)
        run.check_end(0, 2)
        assert run.groups[1].exitcode == -signal.SIGKILL
        moved = (tmp_path / "coordinator_2.txt").read_text()
        assert "uncommitted samples of replica group 1 are available again" in moved
        assert "Replica group 0 has left" in moved and "Replica group 2 has left" in moved
        # All three have found the new place: until group 1 vanished, no sync was without it.
        sizes = [line["diloco/num_participants"] for line in run.metrics(0)]
        assert sizes[:6] == [3] * 6 and set(sizes[6:]) == {2}
        for group in (0, 2):
            first_without = run.metrics(group)[6]
            assert first_without["diloco/retries"] == 1
            assert TIMEOUT_S - 1.0 < first_without["diloco/sync_seconds"] < TIMEOUT_S + 5.0
            assert not any(line["diloco/steps_lost"] for line in run.metrics(group))
            said = run.said(group)
            [failed] = re.findall("The sync after outer step .* did not commit, .*", said)
            assert "after outer step 6 " in failed
            # Whose wait is over first says how long it was; then gloo closes, as the other says.
            timed_out = f"Timed out waiting {1000 * TIMEOUT_S:.0f}ms"
            assert timed_out in failed or "Application timeout caused pair closure" in failed
