"""Which faults chaos injects into which groups, and when. Run: pytest tests/chaos/test_chaos.py

Real: the plan, and in the tests marked ``integration`` the whole command. Replaced elsewhere: the
groups and the clock.
"""

import json
import signal
import sys
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
from chaos.driver import ChaosOptions, run_chaos
from chaos.history import History
from chaos.injector import KINDS, RandomFaultInjector, plan_faults
from forked_commands import ForkedCommand, run
from pace import paced
from text_config import TINY

from composer_replication.config_file import ConfigError
from composer_replication.launch.job import TRAIN, Job, job_of
from composer_replication.launch.run_record import Run

ROOT = Path(__file__).parents[2]


def first(number, *, seed=0, kinds=KINDS, replicas=3):
    return list(islice(plan_faults(seed, kinds, replicas), number))


def test_a_seed_stands_for_its_faults_and_every_kind_comes_before_one_comes_again():
    assert first(30) == first(30)
    assert first(30) != first(30, seed=1)
    kinds = [fault.kind for _, fault in first(len(KINDS))]
    assert kinds[0] == "first_round" and sorted(kinds) == sorted(KINDS)
    again = [fault.kind for _, fault in first(21)[11:]]
    assert sorted(again) == sorted(set(KINDS) - {"first_round"})
    assert [fault.kind for _, fault in first(5, kinds=["first_round"])] == ["first_round"]


def test_some_that_cannot_be_reached_stay_so_and_one_way_has_two_ends():
    faults = [fault for _, fault in first(200, kinds=["unreachable", "one_way"])]
    lasting = [s.seconds for s in faults if s.kind == "unreachable"]
    assert 10 < lasting.count(None) < 45
    assert all(0.5 <= s <= 20 for s in lasting if s is not None)
    assert all(len(set(s.victims)) == 2 for s in faults if s.kind == "one_way")


class Stand:
    """A supervisor whose groups recover from every fault as soon as it is over."""

    def __init__(self, run_dir, replicas=3):
        self.run, self.replicas = Run(run_dir), replicas
        self.records = {i: SimpleNamespace(deaths=[], is_training=True) for i in range(replicas)}
        self.groups = self
        self.sent = []
        for replica_id in self.records:
            (run_dir / f"replica_{replica_id}").mkdir()

    def members(self, replica_id):
        return [SimpleNamespace(send_signal=lambda number: self.sent.append((replica_id, number)))]


def injector_of(tmp_path, kinds, *, per_minute=6.0, recovers=True, step_s=0.1, speeds=None):
    """A fault_injector, its supervisor, and a function that lets time pass."""
    stand = Stand(tmp_path)
    history = History(tmp_path, 3, {})
    clock = [0.0]
    history.now = lambda: clock[0]
    history.begin = lambda: setattr(history, "began", 0.0)
    planned = plan_faults(3, kinds, 3)
    fault_injector = RandomFaultInjector(history, planned, per_minute, 600.0, speeds)

    def let_pass(duration):
        for _ in range(round(duration / step_s)):
            fault_injector(stand)
            clock[0] += step_s
            for fault in history.open_faults() if recovers else ():
                if clock[0] > fault.at + (fault.seconds or 0.0) + 1.0:
                    fault.recovered_s = clock[0] - fault.at

    return fault_injector, stand, history, let_pass


def test_it_strikes_as_often_as_asked_and_ends_the_run(tmp_path):
    _, stand, history, let_pass = injector_of(tmp_path, ["kill", "end", "stop"])
    let_pass(610)
    assert 44 < len(history.faults) < 65  # nine minutes
    assert max(fault.at for fault in history.faults) < 560
    numbers = [number for _, number in stand.sent]
    assert numbers.count(signal.SIGSTOP) == numbers.count(signal.SIGCONT) > 10
    assert signal.SIGKILL in numbers and signal.SIGTERM in numbers
    assert (tmp_path / "STOP").exists()


def test_it_never_strikes_the_last_group_that_trains(tmp_path):
    _, stand, history, let_pass = injector_of(tmp_path, ["kill"], recovers=False)
    let_pass(1)
    stand.records[0].is_training = stand.records[1].is_training = False
    let_pass(100)
    assert history.faults == []
    stand.records[1].is_training = True
    let_pass(100)
    assert len(history.faults) == 1  # then one of two has been struck, and not come back


def test_while_a_service_or_a_connection_fails_nothing_else_does(tmp_path):
    _, _, history, let_pass = injector_of(
        tmp_path, ["unreachable", "one_way", "kill"], recovers=False
    )
    let_pass(300)
    assert len(history.faults) == 1 or history.faults[0].kind == "kill"
    assert not any(fault.kind != "kill" for fault in history.faults[1:])


@pytest.mark.slow
def test_a_slow_group_runs_for_a_third_of_the_time(tmp_path):
    _, stand, history, let_pass = injector_of(tmp_path, ["slow"], per_minute=0.1, step_s=0.02)
    let_pass(700)
    (fault,) = history.faults
    numbers = [number for _, number in stand.sent]
    assert numbers[-1] == signal.SIGCONT
    assert 0.25 < numbers.count(signal.SIGCONT) / len(numbers) < 0.42
    assert len(numbers) > fault.seconds / 0.03


def test_a_group_that_is_slow_all_the_time_is_stopped_for_the_rest_of_it(tmp_path):
    _, stand, _, let_pass = injector_of(tmp_path, [], speeds={2: 0.5, 0: 0.9})
    let_pass(100)
    for replica_id, speed in ((2, 0.5), (0, 0.9)):
        numbers = [number for group, number in stand.sent if group == replica_id]
        assert numbers.count(signal.SIGCONT) / len(numbers) == pytest.approx(speed, abs=0.01)
        assert len(numbers) > 990  # at every call, so it is stopped for a tenth of a second
    assert all(group in (0, 2) for group, _ in stand.sent)


def first_fault(history, let_pass):
    """Let time pass until a fault has been injected."""
    let_pass(1)
    while not history.faults:
        let_pass(0.1)
    (fault,) = history.faults
    return fault


def test_a_slow_group_that_is_stopped_stays_so_until_the_fault_is_over(tmp_path):
    _, stand, history, let_pass = injector_of(
        tmp_path, ["stop"], per_minute=0.1, speeds=dict.fromkeys(range(3), 0.5)
    )
    fault = first_fault(history, let_pass)
    before = len(stand.sent)
    let_pass(fault.seconds - 0.2)
    victim = fault.victims[0]
    assert victim not in [group for group, _ in stand.sent[before:]]
    let_pass(10)
    assert [group for group, _ in stand.sent].count(victim) > 90


def test_a_fault_makes_a_slow_group_slower_and_it_gets_its_own_speed_back(tmp_path):
    _, stand, history, let_pass = injector_of(
        tmp_path, ["slow"], per_minute=0.1, speeds=dict.fromkeys(range(3), 0.5)
    )
    fault = first_fault(history, let_pass)

    def fraction(seconds):
        stand.sent.clear()
        let_pass(seconds)
        numbers = [number for group, number in stand.sent if group == fault.victims[0]]
        return numbers.count(signal.SIGCONT) / len(numbers)

    assert fraction(fault.seconds - 0.2) == pytest.approx(0.5 / 3, abs=0.05)
    let_pass(0.5)
    assert fraction(20) == pytest.approx(0.5, abs=0.02)


def test_orders_are_files_in_the_folder_of_the_group(tmp_path):
    _, _, history, let_pass = injector_of(tmp_path, ["one_way"], per_minute=0.1)
    fault = first_fault(history, let_pass)
    request = json.loads(
        (tmp_path / f"replica_{fault.victims[0]}" / "fault_request.json").read_text()
    )
    assert (request["kind"], request["target"]) == ("one_way", str(fault.victims[1]))


@pytest.mark.parametrize(("options", "message"), [
    ({"replicas": 1}, "one has to survive"),
    ({"kinds": "kill,flood"}, "--kinds kill,flood: use some of first_round,kill,end,hang,"),
    ({"slow": ["1"]}, "--slow 1: write a group and its speed, such as 2:0.5"),
    ({"slow": ["1:fast"]}, "--slow 1:fast: write a group and its speed"),
    ({"slow": ["2:0.5"]}, "--slow 2:0.5: there is no group 2, use 0 to 1"),
    ({"slow": ["1:0.05"]}, "--slow 1:0.05: use a speed from 0.1 to below 1"),
    ({"slow": ["1:nan"]}, "--slow 1:nan: use a speed from 0.1 to below 1"),
    ({"slow": ["1:0.5", "1:0.6"]}, "--slow 1:0.6: group 1 has a speed already"),
])  # fmt: skip
def test_what_it_refuses(options, message):
    job = Job(config={}, source="tiny.yaml", name="tiny.yaml", command=TRAIN)
    with pytest.raises(ConfigError, match=message):
        run_chaos(job, ChaosOptions(**{"replicas": 2} | options))


ENDS = """
import json, os, pathlib
id = os.environ["REPLICA_GROUP_ID"]
folder = pathlib.Path(os.environ["COMPOSER_REPLICATION_RUN_DIR"], f"replica_{id}")
digest = {"global_digest": "ab" * 32}
line = {"outer_step": 1, "fragment": 0, "num_participants": 2, "steps_lost": 0, "bytes_sent": 0}
line |= {"bytes_float32": 0, "sync_seconds": 0.1, "compute_fraction": 1.0} | digest
line = {f"diloco/{key}": value for key, value in line.items()} | {"inner_steps": 3, "loss": 1.0}
end = {"event": "end", "inner_steps": 3, "outer_steps": 1} | digest
events = [line | {"event": "sync"}, end]
(folder / "events.jsonl").write_text("".join(json.dumps(event) + "\\n" for event in events))
"""


@pytest.mark.integration
def test_the_message_for_a_command_that_ends_before_the_faults_do(tmp_path, capsys):
    command = [sys.executable, "-c", ENDS]
    given = {"command": command, "set": ["sync_every=3"], "run_dir": tmp_path / "run"}
    options = ChaosOptions(replicas=2, duration=60, **given)
    assert run_chaos(job_of(options), options) == 0
    said = capsys.readouterr().out
    assert "The groups had finished after 0 of 60 s" in said.replace("\n", " ")


def chaos(run_dir, *arguments, kind):
    """Run the command for 40 s, with less time than usual between the last fault and the end."""
    options = f"--duration 40 --faults-per-minute 12 --seed 0 --recovery-s 25 --kinds {kind}"
    command = [sys.executable, "-m", "tests.chaos", *options.split(), *map(str, arguments)]
    done = run(ForkedCommand, command, timeout=600, env=paced(0.06), cwd=ROOT)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    record = json.loads((run_dir / "chaos.json").read_text())
    assert record["is_clean"] and record["violations"] == [] and record["seed"] == 0
    assert {fault["kind"] for fault in record["injected"]} == {kind}
    assert "outer steps" in done.stdout and "is clean" in done.stdout
    return record


@pytest.mark.integration
@pytest.mark.slow
def test_a_short_run_under_a_fault_is_clean(tmp_path):
    (tmp_path / "tiny.yaml").write_text(TINY)
    own = [tmp_path / "tiny.yaml", f"run_dir={tmp_path / 'run'}", "--replicas", 2, "--slow=1:0.5"]
    record = chaos(tmp_path / "run", *own, kind="coordinator")
    assert record["slow"] == {"1": 0.5}


@pytest.mark.integration
@pytest.mark.slow
def test_a_script_under_faults_loses_nothing(tmp_path):
    script = [sys.executable, ROOT / "examples" / "train.py", "1000000ba"]
    own = ["--replicas", 3, "--set", "sync_every=10", "--run-dir", tmp_path / "run"]
    chaos(tmp_path / "run", *own, "--", *script, kind="one_way")
