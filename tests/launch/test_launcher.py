"""Starting, watching and ending replica groups. Run: pytest tests/launch/test_launcher.py.

Real: processes, sessions, signals, and the lighthouse. Stood in for: a group's training, by the
scripts below; the coordinator where a launcher is a process of its own, which then starts at once.
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
from waiting import wait_until

from composer_replication.launch.job import Job
from composer_replication.launch.launcher import LaunchOptions, launch_groups

HEAD = """
import json, os, pathlib, signal, subprocess, sys, time
replica_id = os.environ["REPLICA_GROUP_ID"]
run_dir = pathlib.Path(os.environ["COMPOSER_REPLICATION_RUN_DIR"])
folder = run_dir / f"replica_{replica_id}"
(folder / "environ.json").write_text(json.dumps(dict(os.environ)))
(run_dir / f"{os.getpid()}.pid").touch()
def record(event, fields):
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps({"time": time.time(), "event": event} | fields) + "\\n")
"""

TRAINS = """
digest = (sys.argv[1] if replica_id == "1" else "ab") * 32
status = {"phase": "training", "batch": 20, "max_batches": 20, "inner_steps": 20, "outer_step": 2}
status |= {"sync_every": 10}
(folder / "status.json").write_text(json.dumps(status | {"loss": 3.0}))
for step in (1, 2):
    sync = {"outer_step": step, "fragment": 0, "num_participants": 2, "bytes_sent": 4000}
    sync["bytes_float32"] = 4000
    sync |= {"sync_seconds": 0.1, "compute_fraction": 0.9, "global_digest": digest}
    line = {f"diloco/{key}": value for key, value in sync.items()}
    record("sync", line | {"inner_steps": 10 * step, "loss": 4.0 - step})
bits = {"BitsPerByte": 3.2}
result = {"replica_id": replica_id, "inner_steps": 20, "outer_steps": 2, "final_loss": 2.0}
record("end", result | {"global_digest": digest, "eval": bits})
"""

DIVERGES = TRAINS
for old, new in {
    '"ab"': '"cd"',  # equal parameters, also with the argument that makes them differ
    '"fragment": 0': '"total_contribution": 0.0',
    '"outer_step": step': '"outer_step": 0',
    '"outer_step": 2': '"outer_step": 0',
    '"outer_steps": 2': '"outer_steps": 0',
}.items():
    DIVERGES = DIVERGES.replace(old, new)

CRASHES = """
if replica_id == "1":
    int("no number")
time.sleep(60)
"""

# The first group stays until the second one, which dies after its first syncs, has come back.
COMES_BACK = """
with (folder / "lives").open("a") as file:
    file.write("x")
lives = (folder / "lives").read_text()
if replica_id == "1":
    record("start", {"started": lives})
if replica_id == "1" and lives == "x":
    record("sync", {"diloco/outer_step": 1})
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    os.kill(os.getpid(), signal.SIGKILL)
other = run_dir / "replica_1" / "events.jsonl"
while replica_id == "0" and not (other.exists() and '"end"' in other.read_text()):
    time.sleep(0.05)
"""

WAITS = """
time.sleep(60)
"""

# As bad as it gets: neither it nor a descendant in a session of its own ends on SIGTERM.
CLINGS = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if len(sys.argv) == 1:
    subprocess.Popen([sys.executable, __file__, "grandchild"], start_new_session=True)
time.sleep(60)
"""


def write_script(folder, body):
    path = folder / "group.py"
    path.write_text(HEAD + body)
    return path


def launch_script(folder, body, *arguments, replicas=2):
    """Launch groups that run a script, in this process."""
    script = write_script(folder, body)
    config = {"run_dir": str(folder / "run"), "callbacks": {"diloco": {"sync_every": 10}}}
    job = Job(
        config=config,
        source="tiny.yaml",
        name="tiny.yaml",
        command=[sys.executable, str(script), *arguments],
    )
    return launch_groups(job, LaunchOptions(replicas=replicas))


LAUNCHER = """
import sys
from composer_replication.launch import launcher
from composer_replication.launch.job import Job
script, run_dir = sys.argv[1:]
config, command = {"run_dir": run_dir}, [sys.executable, script]
job = Job(config=config, source="tiny", name="tiny", command=command)
sys.exit(launcher.launch_groups(job, launcher.LaunchOptions()))
"""


def start_launcher(folder, body, num_pids):
    """Launch groups in a process of its own, and wait until so many processes are theirs."""
    script = write_script(folder, body)
    command = [sys.executable, "-c", LAUNCHER, str(script), str(folder / "run")]
    environ = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ)
    return launcher, wait_for_pids(folder, num_pids)


def wait_for_pids(folder, count):
    wait_until(lambda: len(pids_of(folder)) >= count)
    return pids_of(folder)


def alive(pids):
    running = [p for p in psutil.process_iter(["status"]) if p.info["status"] != "zombie"]
    return [process.pid for process in running if process.pid in pids]


def pids_of(folder):
    return [int(path.stem) for path in (folder / "run").glob("*.pid")]


@pytest.mark.integration
def test_a_run_ends_with_a_summary_a_page_and_what_came_out(tmp_path, capsys):
    assert launch_script(tmp_path, TRAINS, "ab") == 0
    run_dir = tmp_path / "run"
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["outer_steps"] == 2
    assert summary["eval"]["BitsPerByte"] == 3.2
    assert 0.0 <= summary["replicas"][1].pop("share_of_time_in_inner_steps") <= 1.0
    assert summary["replicas"][1] == {
        "replica_id": "1",
        "inner_steps": 20,
        "outer_steps": 2,
        "global_digest": "ab" * 32,
        "restarts": 0,
        "steps_lost": 0,
        "final_loss": 2.0,
    }
    assert (run_dir / "report.html").stat().st_size > 10_000
    assert "sync_every: 10" in (run_dir / "config.yaml").read_text()
    said = capsys.readouterr().out
    assert (
        "\nSettings from tiny.yaml: sync_every=10, schedule=[{outer_step: 1, outer_lr: 1.0, "
        in said
    )
    assert "BitsPerByte 3.2" in said
    assert "equal in 2 groups after 2 outer steps: abababab" in said
    # Two syncs of 4000 bytes; data parallel sends as much in each of 20 inner steps.
    assert "8 kB in 2 syncs; data parallel: 80 kB in 20 inner steps (10 times as much)" in said
    # Every group knows its number, and where the others are.
    for replica_id in "01":
        environ = json.loads((run_dir / f"replica_{replica_id}" / "environ.json").read_text())
        assert environ["REPLICA_GROUP_ID"] == replica_id
        assert environ["NUM_REPLICA_GROUPS"] == "2"
        assert environ["TORCHFT_LIGHTHOUSE"].startswith("http://")
        assert environ["RUST_LOG"] == "warn"
        assert environ["COMPOSER_REPLICATION_HANG_TIMEOUT_S"] == "600"


HAS_JOINED = "(folder / 'status.json').write_text('{\"trained_at\": 1}'); print('goodbye')"
BAD_INPUT = "print('a setting'); print('Error: t_warmup=5xx'); raise SystemExit(2)"


@pytest.mark.integration
@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (TRAINS, 1, "The groups ended with different global parameters"),
        (DIVERGES, 1, r"\AError: this run has learned nothing: in its last 2 syncs [^\n]+\n\Z"),
        (CRASHES, 1, r"\AError: ValueError: .*'no number' \(group 1, \S+/replica_1/log.txt\)\n\Z"),
        (BAD_INPUT, 2, r"\AError: t_warmup=5xx \(groups? \d.*, \S+/replica_\d/log.txt\)\n\Z"),
        (HAS_JOINED, 1, "(?s)replica_0/events.jsonl has no end with a result.*goodbye"),
    ],
)
def test_a_run_that_fails_ends_all_groups_and_says_why(tmp_path, capsys, body, status, said):
    assert launch_script(tmp_path, body, "cd") == status
    assert re.search(said, capsys.readouterr().err)
    assert alive(pids_of(tmp_path)) == []


@pytest.mark.integration
def test_a_group_that_is_killed_is_started_again_and_the_summary_says_so(tmp_path, capsys):
    assert launch_script(tmp_path, COMES_BACK + TRAINS, "ab") == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [replica["restarts"] for replica in summary["replicas"]] == [0, 1]
    assert (tmp_path / "run" / "replica_1" / "lives").read_text() == "xx"
    said = capsys.readouterr().out
    assert "lost and came back      group 1 (1 time)" in said
    assert "group 1 was ended by SIGKILL, starts again in 1 s (restart 1 of 3)\n" in said
    assert alive(pids_of(tmp_path)) == []


SAVES = """
import zipfile
checkpoints = folder / "checkpoints"
checkpoints.mkdir()
with zipfile.ZipFile(checkpoints / "ba20.pt", "w") as file:
    file.writestr("data", "a file of torch's")
(checkpoints / "ba30.pt").write_bytes((checkpoints / "ba20.pt").read_bytes()[:-1])
record("start", {"checkpoints": f"{checkpoints}/ba*.pt", "joined": 1.0, "trained_at": None})
(run_dir / "ready").touch()
"""


@pytest.mark.integration
@pytest.mark.parametrize(
    ("saves", "argv", "again"),
    [
        (SAVES, "launch a.yaml run_dir=r", "launch a.yaml autoresume=true run_dir={}\n"),
        (SAVES, "launch -- python t.py", "launch --resume --run-dir={} -- python t.py"),
        (SAVES, "launch --resume --run-dir=r -- t", "launch --resume --run-dir={} -- t\n"),
        (SAVES, "launch --run-dir r --resume -- t", "launch --resume --run-dir={} -- t\n"),
        (SAVES, "launch -- t --resume --run-dir x", "launch --resume --run-dir={} -- t --resume"),
        (SAVES, "launch a.yaml autoresume=true", "launch a.yaml autoresume=true run_dir={}\n"),
        ("", "launch a.yaml", ""),
    ],
)
def test_ctrl_c_says_what_was_saved_and_how_to_go_on(
    tmp_path, capsys, monkeypatch, saves, argv, again
):
    def press():
        wait_for_pids(tmp_path, 1)
        wait_until(lambda: not saves or (tmp_path / "run" / "ready").exists())
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(sys, "argv", ["composer-replication", *argv.split()])
    threading.Thread(target=press).start()
    assert launch_script(tmp_path, saves + WAITS, replicas=1) == 130
    said, run_dir = capsys.readouterr().out, tmp_path / "run"
    if not again:
        assert "No checkpoint was saved" in said and "To go on" not in said
        return
    assert f"Saved: {run_dir / 'replica_0' / 'checkpoints' / 'ba20.pt'}\n" in said
    assert f"To go on: composer-replication {again.format(run_dir)}" in said


@pytest.mark.integration
@pytest.mark.alone
def test_ctrl_c_leaves_no_process_within_ten_seconds(tmp_path):
    launcher, pids = start_launcher(tmp_path, CLINGS, num_pids=4)
    began = time.monotonic()
    launcher.send_signal(signal.SIGINT)
    said, _ = launcher.communicate(timeout=60)
    assert time.monotonic() - began < 10
    assert launcher.returncode == 130
    assert alive(pids) == []
    assert "Ctrl-C again kills them at once" in said


@pytest.mark.integration
@pytest.mark.alone
def test_a_second_ctrl_c_kills_at_once(tmp_path):
    def press_twice():
        wait_for_pids(tmp_path, 2)
        times.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGTERM)  # the same as Ctrl-C
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGINT)

    times = []
    before = signal.getsignal(signal.SIGINT)
    presses = threading.Thread(target=press_twice)
    presses.start()
    assert launch_script(tmp_path, CLINGS, replicas=1) == 130
    assert time.monotonic() - times[0] < 4  # of the five seconds of grace
    presses.join()
    assert alive(pids_of(tmp_path)) == []
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.integration
@pytest.mark.parametrize(("body", "num_pids"), [(WAITS, 2), (CLINGS, 4)])
def test_groups_end_when_the_launcher_is_killed(tmp_path, body, num_pids):
    launcher, pids = start_launcher(tmp_path, body, num_pids)
    launcher.kill()
    launcher.communicate(timeout=60)
    wait_until(lambda: alive(pids) == [], 40)  # they would end by themselves after 60 s
