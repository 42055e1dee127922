"""Every sample of an epoch is in the model once, whoever is killed and whenever.

Run: pytest tests/integration/test_leases.py. Real: groups in processes of their own, which are
killed with SIGKILL, the command `coordinator` in one more, lighthouse, gloo. The final model itself
says what it has been trained on, see leased_group.py.
"""

import json
import random
import shutil
import signal
import sqlite3
import time
from pathlib import Path

import pytest
import torch
from harness import commands
from integration.leased_group import what_is_in
from integration.test_coordinator import TOKEN, Run
from run_events import events_of, syncs_of
from waiting import wait_until

from composer_replication.group.run_folder import STATUS

pytestmark = [pytest.mark.integration, pytest.mark.slow]

SETTINGS = "{outer_lr: 0.7, sync_every: 12, num_fragments: FRAGMENTS}"
SCRIPT = Path(__file__).with_name("leased_group.py")


class LeaseRun(Run):
    """A coordinator, and groups that are started again when they have died."""

    def __init__(self, folder, replicas=3, **plan):
        self.replicas = replicas
        self.plan = {
            "run_dir": str(folder / "run"),
            "length": 4000,
            "fragments": 1,
            "step_s": 0.02,
            "ranks": 1,
        } | plan
        super().__init__(folder)
        self.groups = {}
        self.num_starts = self.num_left = 0

    def start_groups(self):
        for replica_id in range(self.replicas):
            self.start_group(replica_id)

    def start_coordinator(self):
        text = self.config.read_text()
        settings = SETTINGS.replace("FRAGMENTS", str(self.plan["fragments"]))
        head = text.partition("callbacks:")[0]
        self.config.write_text(f"{head}callbacks: {{diloco: {settings}}}\n")
        return super().start_coordinator()

    def restart_coordinator(self):
        self.coordinator.kill()
        self.coordinator.wait()
        self.coordinator = self.start_coordinator()

    def start_group(self, replica_id):
        self.status_file(replica_id).unlink(missing_ok=True)  # of the processes before
        self.groups[replica_id] = commands.start(
            replica_id,
            self.plan["ranks"],
            SCRIPT,
            json.dumps(self.plan),
            folder=self.folder,
            COMPOSER_REPLICATION_COORDINATOR=self.address,
            COMPOSER_REPLICATION_TOKEN=TOKEN,
            FSDP_VERSION="2",
        )
        self.num_starts += 1

    def metrics(self, replica_id):
        return syncs_of(Path(self.plan["run_dir"], f"replica_{replica_id}"))

    def wait_for_outer_steps(self, count):
        self.wait_until(lambda: self.status()["outer_step"] >= count)

    def wait_until(self, is_so):
        wait_until(is_so, 400, self.status)

    def those_in_training(self):
        """By themselves: to the coordinator a group that was killed trains until it is missed."""
        return {
            replica_id
            for replica_id in filter(self.is_alive, self.groups)
            if (status := self.status_file(replica_id)).exists()
            and json.loads(status.read_text())["phase"] == "training"
        }

    def status_file(self, replica_id):
        return Path(self.plan["run_dir"]) / f"replica_{replica_id}" / STATUS

    def is_alive(self, replica_id):
        return set(self.groups[replica_id].statuses()) == {None}

    def restart_the_dead(self):
        """Whether all have ended well."""
        for replica_id, group in list(self.groups.items()):
            codes = set(group.statuses())
            if None not in codes and codes != {0}:  # all its ranks have ended
                # A joiner that cannot connect twice, between two deaths, leaves with status 1.
                self.num_left += codes == {1}
                assert codes in ({-signal.SIGKILL}, {1}), (
                    f"group {replica_id}: {codes}\n{group.said()}"
                )
                assert self.num_left <= 4
                self.start_group(replica_id)
        return all(set(group.statuses()) == {0} for group in self.groups.values())

    def check_that_all_is_in_once(self):
        trained = [
            torch.load(f"{self.plan['run_dir']}/replica_{i}/trained.pt") for i in self.groups
        ]
        assert len({one["digest"] for one in trained}) == 1
        for is_in, is_in_twice in what_is_in(trained[0]["moments"]):
            assert is_in.all(), f"{(~is_in).sum()} missing: {(~is_in).nonzero()[:9].flatten()}"
            yield is_in_twice

    def check_those_in_part(self, twice):
        """What a group that died had brought into one fragment alone is in that twice, and counted.

        A sample with which several groups died looks as if only one had.
        """
        (dataset,) = self.status()["datasets"]
        total, counted = sum(int(one.sum()) for one in twice), dataset["trained_in_part"]
        assert dataset["trained_twice"] == 0
        assert total <= counted and bool(total) == bool(counted), (total, counted)


@pytest.fixture
def run_of(tmp_path):
    runs = []

    def make(*replicas, **plan):
        runs.append(LeaseRun(tmp_path, *replicas, **plan))
        return runs[-1]

    yield make
    for run in runs:
        for group in run.groups.values():
            group.kill()
        for process in run.processes:
            process.kill()
            process.communicate()


COORDINATOR_EVERY_S = 5.0


def kill_at_random(run, kills, draw):
    """Kill groups, and the coordinator, until all kills are done and all groups have ended."""
    next_kill = time.monotonic() + 3.0
    next_coordinator = time.monotonic() + COORDINATOR_EVERY_S
    coordinator_kills = 0
    while not run.restart_the_dead():
        now = time.monotonic()
        if kills and now > next_kill:
            replica_id = draw.randrange(run.replicas)
            # Whoever dies, somebody who has the state lives: this is not about checkpoints.
            if run.is_alive(replica_id) and run.those_in_training() - {replica_id}:
                run.groups[replica_id].kill()
                kills -= 1
                next_kill = now + draw.uniform(0.5, 2.0)
        if now > next_coordinator:
            run.restart_coordinator()
            coordinator_kills += 1
            next_coordinator = now + COORDINATOR_EVERY_S
        time.sleep(0.02)
    assert not kills, f"the epoch was over before the last {kills} kills"
    return coordinator_kills


def test_groups_are_killed_at_random(run_of):
    """The coordinator is killed too."""
    run = run_of(length=3300, fragments=2, step_s=0.05)
    run.start_groups()
    run.wait_for_outer_steps(2)
    assert kill_at_random(run, 6, random.Random(2)) >= 2
    assert run.num_starts == run.replicas + 6 + run.num_left

    twice = list(run.check_that_all_is_in_once())
    (dataset,) = run.status()["datasets"]
    (epoch,) = dataset["epochs"]
    assert epoch["done"] == 3300 and epoch["leased"] == epoch["available"] == 0
    run.check_those_in_part(twice)


def test_a_group_that_was_stopped_loses_its_steps_and_others_train_on_their_samples(run_of):
    """To the coordinator it is dead meanwhile, and the others take outer steps without it."""
    run = run_of(length=3200, step_s=0.1, ranks=2)
    run.start_groups()
    run.wait_for_outer_steps(2)
    sent = [row["diloco/outer_step"] for row in run.metrics(1)]
    run.wait_until(lambda: run.metrics(1)[-1]["diloco/outer_step"] > sent[-1])
    time.sleep(0.4)  # it is in the middle of a round, of 1.2 s
    run.groups[1].signal(signal.SIGSTOP)
    begun = run.status()["outer_step"]
    run.wait_until(lambda: run.status()["outer_step"] > begun + 2)
    (row,) = (row for row in run.status()["replicas"] if row["replica_id"] == "1")
    assert not row["is_alive"]
    run.groups[1].signal(signal.SIGCONT)
    run.wait_until(run.restart_the_dead)
    assert run.num_starts == run.replicas

    list(run.check_that_all_is_in_once())
    (dataset,) = run.status()["datasets"]
    assert dataset["epochs"][0]["done"] == 3200
    assert [row["diloco/steps_lost"] for row in run.metrics(1) if row["diloco/steps_lost"]] == [12]
    sent = {row["diloco/bytes_sent"] for row in run.metrics(0)}
    assert sent == {4 * (7 * 3200 // 2 + 1)}, "each rank sends half, and the contribution"


def test_everything_is_killed_and_resumed_from_checkpoints(run_of):
    """Twice; the second time the coordinator too, and one of the groups has no checkpoint."""
    saves = {"save_interval": "30ba", "save_num_checkpoints_to_keep": 3, "save_overwrite": True}
    run = run_of(2, length=3600, fragments=2, saves=saves)
    reported = []  # to the coordinator, when all were dead
    for kills in range(3):
        run.start_groups()
        if kills == 2:
            break
        begun = run.status()["outer_step"]
        run.wait_for_outer_steps(begun + 16)
        for replica_id in run.groups:
            run.groups[replica_id].kill()
        reported.append(run.status()["outer_step"])
        if kills == 1:
            run.restart_coordinator()
            shutil.rmtree(f"{run.plan['run_dir']}/replica_1/checkpoints")
    run.wait_until(run.restart_the_dead)
    assert run.num_starts == 3 * run.replicas

    twice = list(run.check_that_all_is_in_once())
    status = run.status()
    (dataset,) = status["datasets"]
    assert dataset["epochs"][0]["done"] == 3600
    run.check_those_in_part(twice)
    resumes = events_of(Path(run.plan["run_dir"], "replica_0"), "resume")
    resumed = [resume["outer_step"] for resume in resumes]
    expected = {
        f"the run continues from outer step {step}, not {last}"
        for step, last in zip(resumed, reported, strict=True)
        if step != last  # a kill right after a checkpoint
    }
    said = [event["text"] for event in status["events"]]
    assert {text for text in said if "continues from outer step" in text} == expected


@pytest.mark.parametrize(("kind", "ranks"), [("old", 1), ("lost", 2)])
def test_a_coordinator_that_has_lost_its_state_ends_no_group(run_of, kind, ranks):
    """It is killed, and comes back on an older copy, or on an empty folder.

    What was leased by then and is not in that state may be in the model twice: it says how much.
    """
    run = run_of(2, length=4000, fragments=2, ranks=ranks, step_s=0.02 * ranks)
    state = run.folder / "state"
    run.start_groups()
    run.wait_for_outer_steps(6)
    with sqlite3.connect(state / "coordinator.sqlite") as database:
        database.execute(f"VACUUM INTO '{run.folder / 'copy'}'")
    copied_at = run.status()["outer_step"]
    run.groups[1].kill()  # it comes back with another session, and another stream
    run.restart_the_dead()
    run.wait_until(lambda: len(run.those_in_training()) == run.replicas)
    run.wait_for_outer_steps(16)
    run.coordinator.kill()
    run.coordinator.wait()
    for file in state.glob("coordinator.sqlite*"):
        file.unlink()
    if kind == "old":
        shutil.move(run.folder / "copy", state / "coordinator.sqlite")
    run.coordinator = run.start_coordinator()
    if kind == "lost":
        run.wait_until(lambda: run.status()["samples_gap"])
        run.groups[1].kill()
    run.wait_until(run.restart_the_dead)
    assert run.num_starts == run.replicas + 1 + (kind == "lost")

    twice = list(run.check_that_all_is_in_once())
    status = run.status()
    gap, (dataset,) = status["samples_gap"], status["datasets"]
    assert dataset["epochs"][0]["done"] == 4000
    low, high = {"old": (5, copied_at), "lost": (0, 0)}[kind]
    assert low <= gap["outer_step"] <= high
    counted = gap["samples"] + dataset["trained_in_part"] + dataset["trained_twice"]
    for is_in_twice in twice:  # with two ranks, so may be the last sample before a pause
        assert 0 < is_in_twice.sum() <= counted + 20 * (ranks - 1), (gap, dataset)
    (event,) = (e["text"] for e in status["events"] if "record of samples" in e["text"])
    assert f"complete up to outer step {gap['outer_step']} only" in event
