"""Groups under a coordinator. Run: pytest tests/integration/test_coordinator.py

Real: the commands `coordinator` and `train` in processes of their own, lighthouse and gloo.
"""

import signal
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from forked_commands import ForkedCommand
from harness.commands import free_port
from pace import paced
from run_events import syncs_of
from text_config import DILOCO, text_job
from waiting import wait_until

from composer_replication.launch.output import BAD_INPUT, FAILED

pytestmark = pytest.mark.integration

TOKEN = "a-secret"


def config_of(diloco: str) -> str:
    """A config with these settings and options of DiLoCo."""
    callbacks = f"callbacks: {{diloco: {{{DILOCO}, {diloco}}}}}"
    return text_job(f"max_duration: 100000ba\n{callbacks}\n", n_layers=2, batch=8)


def command(*arguments: object, **environ: str) -> ForkedCommand:
    """Start composer-replication with these words, in an environment without its variables."""
    own = {name: v for name, v in paced(0.04).items() if not name.startswith("COMPOSER_")}
    return ForkedCommand(
        [sys.executable, "-m", "composer_replication", *map(str, arguments)],
        env=own | {"COMPOSER_REPLICATION_TOKEN": TOKEN} | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


class Run:
    """A coordinator and its groups."""

    replicas = 3

    def __init__(
        self, folder: Path, diloco: str = "sync_every: 20, num_fragments: 2, schedule: []"
    ) -> None:
        self.folder = folder
        self.config = folder / "tiny.yaml"
        self.config.write_text(config_of(diloco))
        # A third group has a share of the data, and is not waited for any longer after 8 s.
        own = "digest_every: 1, start_timeout_s: 8, on_start_timeout: start"
        (folder / "groups.yaml").write_text(config_of(own))
        self.port = free_port()
        self.address = f"http://127.0.0.1:{self.port}"
        self.processes: list[ForkedCommand] = []
        self.coordinator = self.start_coordinator()

    def start_coordinator(self) -> ForkedCommand:
        """Start the coordinator, and wait until it answers."""
        options = ["--bind", f"127.0.0.1:{self.port}", "--state-dir", self.folder / "state"]
        options += ["--replicas", self.replicas]
        process = command("coordinator", self.config, *options)
        self.processes.append(process)

        def ask() -> dict | None:
            assert process.poll() is None, process.communicate()[0]
            with suppress(httpx.TransportError):
                return self.status()

        wait_until(ask)
        return process

    def status(self) -> dict:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        # Else it would read the system's certificates each time: 24 ms of a processor.
        return httpx.get(f"{self.address}/v1/status", headers=headers, verify=False).json()

    def start(self, replica_id: int, *overrides: str, **environ: str) -> ForkedCommand:
        place = {
            "REPLICA_GROUP_ID": str(replica_id),
            "COMPOSER_REPLICATION_COORDINATOR": self.address,
        }
        run_dir = f"run_dir={self.folder / 'run'}"
        process = command(
            "train", self.folder / "groups.yaml", run_dir, *overrides, **place | environ
        )
        self.processes.append(process)
        return process

    def metrics(self, replica_id: int) -> list[dict]:
        return syncs_of(self.folder / "run" / f"replica_{replica_id}")

    def wait_for_syncs(self, count: int, groups: Iterable[int] = range(2)) -> None:
        before = {i: len(self.metrics(i)) for i in groups}
        wait_until(lambda: all(len(self.metrics(i)) >= before[i] + count for i in groups))


@pytest.fixture
def start(tmp_path):
    runs = []

    def start(*settings):
        runs.append(Run(tmp_path, *settings))
        return runs[-1]

    yield start
    for process in runs[-1].processes:
        process.kill()
        process.communicate()


MISFITS = {
    "another setting": (
        ["callbacks.diloco.outer_lr=0.3"],
        {},
        "outer_lr: 0.3 here, 0.7 there",
    ),
    "another model of the same shapes": (
        ["model.n_heads=4"],
        {},
        "model.n_heads of this config",
    ),
    "another model by its shapes": (
        ["model.expansion_ratio=8"],
        {},
        "torch.float32' here, '(",
    ),
    "a living group's name": ([], {"REPLICA_GROUP_ID": "1"}, "'1' is alive"),
}


def test_misfits_are_refused_and_those_in_training_lose_no_step(start, tmp_path):
    run = start()
    groups = [run.start(i) for i in range(2)]
    run.wait_for_syncs(3)
    misfits = {}
    for name, (overrides, environ, _) in MISFITS.items():
        overrides = [*overrides, f"run_dir={tmp_path / 'misfit'}"]
        misfits[name] = run.start(2, *overrides, **environ)
    for name, process in misfits.items():
        output, _ = process.communicate(timeout=240)
        # A name may be free the next time: the supervisor of a group tries again.
        status = FAILED if name == "a living group's name" else BAD_INPUT
        assert process.returncode == status, (name, output)
        assert MISFITS[name][2] in output, (name, output)
        assert len([line for line in output.splitlines() if "Error" in line]) == 1, (name, output)
    run.wait_for_syncs(3)
    assert [group.poll() for group in groups] == [None, None]
    (tmp_path / "run" / "STOP").touch()
    assert [group.wait(240) for group in groups] == [0, 0]

    ones, others = run.metrics(0), run.metrics(1)
    for lines in (ones, others):
        steps = [line["diloco/outer_step"] for line in lines]
        assert steps == list(range(1, steps[-1] + 1))
        assert not any(line["diloco/steps_lost"] or line["diloco/healed"] for line in lines)
        assert not any(line["diloco/retries"] for line in lines)
        assert {line["diloco/num_participants"] for line in lines[:-2]} == {2}
    for one, other in zip(ones, others, strict=True):
        assert one["diloco/global_digest"] == other["diloco/global_digest"]


def test_groups_go_on_while_the_coordinator_is_dead_and_are_known_when_it_is_back(start):
    row = "{outer_step: 6, outer_lr: 0.5, outer_momentum: 0.0}"
    run = start(f"sync_every: 20, num_fragments: 2, schedule: [{row}]")
    groups = [run.start(i) for i in range(2)]
    run.wait_for_syncs(2)
    for _ in range(2):
        run.coordinator.send_signal(signal.SIGKILL)
        run.coordinator.wait()
        options = ["--set", "outer_lr=0.3", "--state-dir", run.folder / "state"]
        said, _ = command("coordinator", run.config, *options).communicate()
        assert "outer_lr 0.7 before, 0.3 now" in said and "--new-settings" in said, said
        run.coordinator = run.start_coordinator()
        run.wait_for_syncs(3)

    def replicas():
        return run.status()["replicas"]

    wait_until(
        lambda: [r["is_alive"] and bool(r.get("outer_step")) for r in replicas()] == [True, True],
        90,
        replicas,
    )
    assert [r["registrations"] for r in replicas()] == [1, 1]
    (run.folder / "run" / "STOP").touch()
    assert [group.wait(240) for group in groups] == [0, 0]
    ones, others = run.metrics(0), run.metrics(1)
    for key in ("diloco/global_digest", "diloco/outer_lr", "diloco/outer_momentum"):
        assert [line[key] for line in ones] == [line[key] for line in others]
    numbers = [(line["diloco/outer_lr"], line["diloco/outer_momentum"]) for line in ones]
    assert len(numbers) > 6 and numbers == [(0.7, 0.5)] * 5 + [(0.5, 0.0)] * (len(numbers) - 5)
