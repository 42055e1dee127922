"""The files for Slurm, on a real Slurm. Run: pytest tests/deploy/test_slurm.py -s

Real: the controller, two nodes, and every job; Slurm is Debian's, unpacked and not installed.
Stood in for: two machines, by two daemons of nodes on this one; GPUs.
"""

import contextlib
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from debian import MissingProgram
from harness.commands import free_port
from pace import paced
from run_events import result_of, syncs_of
from slurm_cluster import NODES, SlurmCluster, fetch_slurm
from waiting import wait_until

DEPLOY = Path(__file__).parents[2] / "deploy" / "slurm"
TRAIN = DEPLOY.parents[1] / "examples" / "train.py"
KILLS = int(os.environ.get("TEST_KILLS", "1"))
"""How often a group is killed; several, to measure how long it takes to come back."""

# What docs/slurm.md tells people to edit, here: no GPU, no memory accounting, a free port.
COORDINATOR_EDITS = {
    "$(hostname)": "localhost",
    "#SBATCH --mem=2G ": "#",
    "--set sync_every=100 --replicas 4": "--set sync_every=10 --replicas 3",
}
GROUPS_EDITS = {
    "--array=0-3": "--array=0-2",
    "#SBATCH --gpus-per-node=8 ": "#",
    "--cpus-per-task=64": "--cpus-per-task=1",
}
COMMAND = "composer --nproc 8 --world_size $((8 * SLURM_NNODES)) train.py"
TELL_PLACE = """
    echo "place $REPLICA_GROUP_ID $NODE_RANK $SLURM_NNODES $MASTER_ADDR:$MASTER_PORT"
    echo "token ${#COMPOSER_REPLICATION_TOKEN} $COMPOSER_REPLICATION_COORDINATOR"
    sleep 600
"""


def edited(name, edits):
    text = (DEPLOY / name).read_text()
    for old, new in edits.items():
        assert old in text, f"{name} has no {old!r}"
        text = text.replace(old, new)
    return text


@pytest.mark.parametrize("name", ["coordinator.sbatch", "groups.sbatch"])
def test_the_files_are_scripts_whose_options_are_read(name):
    subprocess.run(["bash", "-n", DEPLOY / name], check=True)
    lines = (DEPLOY / name).read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    # Slurm reads no option after the first command.
    assert not [line for line in lines[first:] if line.startswith("#SBATCH")]
    assert all("edit" in line or "docs/slurm.md" in line for line in lines if "##SBATCH" in line)


class Run:
    """A run of three groups on a Slurm, by the files as they are edited here."""

    def __init__(self, slurm):
        self.slurm, self.folder = slurm, slurm.folder / "run"
        self.port = free_port()

    def submit(self, name, edits, *options):
        path = self.slurm.folder / name
        path.write_text(edited(name, edits))
        return re.findall(r"\d+", self.slurm.run("sbatch", *options, name))[0]

    def said(self, group, job):
        path = self.slurm.folder / f"group-{job}_{group}.txt"
        return path.read_text(errors="replace") if path.exists() else ""

    def rows(self, group):
        return syncs_of(self.folder / f"replica_{group}")

    def wait(self, is_so, seconds=180):
        """Wait until something is so, and return the seconds that it took."""
        began = time.monotonic()
        wait_until(is_so, seconds, self.slurm.logs)
        return time.monotonic() - began

    def wait_for_commit(self, group, participants, seconds=180):
        """Wait until a group commits a sync with so many groups from now on."""
        before = len(self.rows(group))

        def has_committed():
            rows = self.rows(group)[before:]
            return any(row["diloco/num_participants"] == participants for row in rows)

        return self.wait(has_committed, seconds)

    def members(self):
        """The processes of all jobs of this Slurm."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("SLURM_CONF") == self.slurm.environ["SLURM_CONF"]:
                    yield process

    def processes(self, group):
        """The processes that train in a group."""
        found = []
        for process in self.members():
            with contextlib.suppress(psutil.Error):
                is_own = process.environ().get("REPLICA_GROUP_ID") == str(group)
                if is_own and is_trainer(process):
                    found.append(process)
        return found


def is_trainer(process):
    return str(TRAIN) in process.cmdline() and "python" in process.name()


@pytest.fixture
def slurm(pytestconfig, tmp_path):
    try:
        root = fetch_slurm(pytestconfig.cache.mkdir("slurm"))
    except MissingProgram as missing:
        pytest.skip(str(missing))
    environ = paced(0.05) | {
        "COMPOSER_REPLICATION_RUN_DIR": str(tmp_path / "slurm" / "run"),
        "COMPOSER_REPLICATION_HOSTNAME": "127.0.0.1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    with SlurmCluster(root, tmp_path / "slurm", environ) as slurm:
        yield slurm


@pytest.mark.integration
@pytest.mark.slow
@pytest.mark.alone
def test_a_run_on_slurm(slurm):
    # One test: Slurm and the run serve all of it.
    run = Run(slurm)
    run.submit("coordinator.sbatch", COORDINATOR_EDITS | {"29512": str(run.port)})
    a_group_of_two_nodes_knows_its_place_and_goes_on_after_the_time_limit(run)
    groups = run.submit("groups.sbatch", GROUPS_EDITS | {COMMAND: f"python {TRAIN} 1000000ba"})
    run.wait_for_commit(0, participants=3)
    a_killed_group_comes_back(run)
    a_killed_coordinator_comes_back(run)
    a_node_without_its_daemon_trains_on(run)
    a_group_is_back_when_its_node_is(run)
    a_cancelled_group_leaves(run, groups)
    the_others_have_lost_nothing_and_end_equal(run)


def a_group_of_two_nodes_knows_its_place_and_goes_on_after_the_time_limit(run):
    options = "--nodes=2", "--array=7"
    job = run.submit("groups.sbatch", GROUPS_EDITS | {COMMAND: TELL_PLACE}, *options)
    places = re.compile(r"place (\d+) (\d+) (\d+) (\S+):\d+")
    run.wait(lambda: len(places.findall(run.said(7, job))) == 2)
    host = socket.gethostname()
    expected = [("7", rank, "2", host) for rank in "01"]
    assert sorted(places.findall(run.said(7, job))) == expected
    assert run.said(7, job).count(f"token 32 http://localhost:{run.port}") == 2
    # The signal of --signal=B:USR1@120.
    run.slurm.run("scancel", "--signal=USR1", "--batch", f"{job}_7")
    run.wait(lambda: len(places.findall(run.said(7, job))) == 4)  # in the same file
    assert sorted(places.findall(run.said(7, job))[2:]) == expected
    run.slurm.run("scancel", job)
    run.wait(lambda: "group_7" not in run.slurm.jobs())


def a_killed_group_comes_back(run):
    times = []
    for _ in range(KILLS):
        for process in run.processes(1):
            process.send_signal(signal.SIGKILL)
        times.append(run.wait_for_commit(1, participants=3))
    print(f"a killed group has committed again after {statistics.median(times):.1f} s, {times}")


def a_killed_coordinator_comes_back(run):
    (coordinator,) = [each for each in run.members() if "--state-dir" in each.cmdline()]
    coordinator.kill()
    run.wait_for_commit(0, participants=3)
    run.wait_for_commit(1, participants=3)


def a_node_without_its_daemon_trains_on(run):
    before = run.processes(2)
    run.slurm.kill_daemon(NODES[1])
    run.wait_for_commit(2, participants=3)
    run.slurm.start_node(NODES[1])
    run.wait(lambda: run.slurm.nodes()[NODES[1]] == "mix")
    assert run.processes(2) == before != []


def a_group_is_back_when_its_node_is(run):
    assert set(run.slurm.jobs().values()) == {"RUNNING"}
    run.slurm.kill_node(NODES[1])
    run.wait_for_commit(0, participants=2)
    run.wait(lambda: run.slurm.jobs()["group_2"] == "PENDING")  # it is requeued
    assert run.processes(2) == []
    run.slurm.start_node(NODES[1])
    seconds = run.wait_for_commit(2, participants=3)
    print(f"a group has committed again {seconds:.1f} s after its node has come back")


def a_cancelled_group_leaves(run, groups):
    run.slurm.run("scancel", f"{groups}_1")
    seconds = run.wait_for_commit(0, participants=2, seconds=10)
    print(f"a cancelled group has left after {seconds:.1f} s")
    run.wait(lambda: run.processes(1) == [])  # Python takes seconds to end where all are busy


def the_others_have_lost_nothing_and_end_equal(run):
    (run.folder / "STOP").touch()
    run.wait(lambda: run.slurm.jobs() == {"coordinator": "RUNNING"})
    rows = run.rows(0)
    assert [row["diloco/outer_step"] for row in rows] == list(range(1, len(rows) + 1))
    assert [row["inner_steps"] for row in rows] == [10 * n for n in range(1, len(rows) + 1)]
    assert {row["diloco/steps_lost"] for row in rows} == {0}
    results = [result_of(run.folder / f"replica_{i}") for i in (0, 2)]
    assert results[0]["outer_steps"] == results[1]["outer_steps"] == len(rows)
    assert results[0]["global_digest"] == results[1]["global_digest"]
