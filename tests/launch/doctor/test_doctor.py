"""The commands ``doctor`` and ``env``. Run: pytest tests/launch/doctor/test_doctor.py

Real: this machine, and configs on the disk.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from composer_replication.cli import app
from composer_replication.coordinator.server import Coordinator
from composer_replication.diloco.settings import DiLoCoSettings
from composer_replication.launch.doctor import coordinator as coordinator_checks
from composer_replication.launch.doctor import environment as environment_module
from composer_replication.launch.doctor import examination
from composer_replication.launch.doctor.accelerators import Gpus
from composer_replication.launch.doctor.link import Link
from composer_replication.launch.doctor.versions import Installed

ROOT = Path(__file__).parents[3]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
TINY = ROOT / "tests" / "llmfoundry" / "mpt_tiny.yaml"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COMPOSER_REPLICATION_NO_TOKEN", raising=False)


def doctor(*arguments):
    """The exit status, the results by name, and whether all is well."""
    answer = CliRunner().invoke(app, ["doctor", *map(str, arguments), "--json"])
    assert answer.exit_code in (0, 1), answer.exception
    found = json.loads(answer.stdout)
    assert found["ok"] is (answer.exit_code == 0)
    return answer.exit_code, {result["name"]: result for result in found["results"]}


def failures(results):
    return {name: result for name, result in results.items() if result["state"] == "failure"}


def test_the_machine_alone_a_line_for_each_check():
    answer = CliRunner().invoke(app, ["doctor"])
    assert answer.exit_code == 0, answer.output
    *lines, last = answer.output.splitlines()
    assert {line.split()[0] for line in lines} <= {"ok", "warning", "skipped"}
    names = ("versions", "composer", "gpu", "open files", "/dev/shm", "host memory", "coordinator")
    for name in names:
        assert any(line[9:].startswith(name) for line in lines), name
    counts = [int(part.split()[0]) for part in last.split(", ")]
    assert sum(counts) == len(lines)


def test_the_quickstart_is_well():
    status, results = doctor(QUICKSTART)
    assert status == 0, failures(results)
    rounds = "max_duration=1800ba is 50 rounds of 30 inner steps after a warm-up of 300"
    assert results["rounds"]["value"] == rounds
    assert results["run folder"]["value"].startswith("runs can be written")


def test_the_folder_of_the_checkpoints_is_that_of_the_run(tmp_path):
    _, results = doctor(QUICKSTART, "save_interval=15ba", f"run_dir={tmp_path}/mine")
    path = f"{tmp_path}/mine/replica_0/checkpoints"
    assert results["checkpoints"]["value"].startswith(f"{path} can be written, ")


@pytest.mark.parametrize(
    ("override", "name", "value", "fix"),
    [
        (
            "callbacks.diloco.num_fragments=4",
            "settings",
            "sync_every=30 is not div",
            "use 28 or 32",
        ),
        ("optimiser.lr=1", "config", "the config has no 'optimiser'", "did you mean 'optimizer'"),
        ("max_duration=10x", "config", "max_duration='10x'", "(batches)"),
        ("optimizer.lrr=1", "config", "optimizer has no 'lrr'", "did you mean 'lr'?"),
        ("device=gpu", "device", "gpu, and torch can use none here", "device: cpu"),
        ("run_dir=/proc/none", "run folder", "/proc/none cannot be written", "run_dir: another"),
    ],
)
@pytest.mark.slow
def test_a_config_of_ours_is_checked_as_train_does_and_more(override, name, value, fix):
    if name == "device" and Gpus.here().capabilities:
        pytest.skip("there is a GPU")
    status, results = doctor(QUICKSTART, override)
    assert status == 1 and list(failures(results)) == [name]
    assert value in results[name]["value"] and fix in results[name]["fix"]


def test_an_llmfoundry_yaml_is_not_judged_by_our_keys():
    status, results = doctor(TINY)
    assert status == 0, failures(results)
    assert results["rounds"]["state"] == "warning"
    status, results = doctor(TINY, "save_folder=null", "save_interval=8ba")
    assert list(failures(results)) == ["save_interval"]


def test_what_only_another_program_can_resolve_is_left_to_it(tmp_path):
    (tmp_path / "job.yaml").write_text(
        "model: {name: mpt}\nseed: ${sum:1,2}\nrun_name: ${oc.env:NO_SUCH_VARIABLE}\n"
        "callbacks: {diloco: {sync_every: 100}}\nmax_duration: 6000ba\n"
    )
    _, results = doctor("job.yaml")
    assert list(failures(results)) == ["${oc.env:...}"]
    assert results["rounds"]["state"] == "ok"
    (tmp_path / "ours.yaml").write_text(QUICKSTART.read_text() + "run_name: ${sum:1,2}\n")
    _, results = doctor("ours.yaml")
    assert "Unsupported interpolation type sum" in failures(results)["config"]["value"]


def test_a_file_of_settings_alone(tmp_path):
    (tmp_path / "two.yaml").write_text("sync_every: 40\nnum_fragments: 2\n")
    status, results = doctor("two.yaml")
    assert status == 0
    assert results["syncs"]["value"] == "40 inner steps, 2 fragments in float32"
    status, results = doctor("two.yaml", "num_fragments=3")
    assert "use 39 or 42" in failures(results)["settings"]["fix"]


@pytest.mark.parametrize(
    ("text", "value", "fix"),
    [
        (None, "there is no config at job.yaml", "give the path of a YAML file"),
        ("model: {name: x}\n", "has no callbacks.diloco", "add it"),
        ("callbacks: {diloco: 3}\n", "has callbacks.diloco=3", "write key: value pairs"),
        ("a: [\n", "cannot be read: while parsing", "correct it"),
    ],
)
def test_a_file_that_is_no_config(tmp_path, text, value, fix):
    if text is not None:
        (tmp_path / "job.yaml").write_text(text)
    status, results = doctor("job.yaml")
    assert status == 1
    assert value in results["config"]["value"]
    assert fix in results["config"]["fix"]
    assert "open files" in results  # the other checks are made all the same


def test_a_variable_that_is_no_number_is_a_failure(monkeypatch):
    monkeypatch.setenv("NUM_REPLICA_GROUPS", "two")
    _, results = doctor()
    assert results["environment"]["value"] == "NUM_REPLICA_GROUPS='two'"
    assert results["environment"]["fix"] == "use the number of replica groups"
    assert list(failures(results)) == ["environment"]


def test_a_check_that_fails_itself_does_not_keep_others_from_being_made(monkeypatch):
    def broken(_):
        raise KeyError("x")

    monkeypatch.setattr(examination, "check_open_files", broken)
    status, results = doctor()
    assert status == 1 and "KeyError: 'x'" in results["machine"]["value"]
    assert "composer-replication env" in results["machine"]["fix"]
    assert "coordinator" in results


def test_a_group_that_trains_alone_needs_no_network():
    _, results = doctor(QUICKSTART, "callbacks.diloco.num_replicas=1")
    assert results["network"]["state"] == "ok" and "coordinator" not in results


def test_a_lighthouse_without_a_coordinator(monkeypatch):
    monkeypatch.setattr(examination, "check_peers", lambda _: ())
    asked = []
    monkeypatch.setattr(
        examination, "check_lighthouse_port", lambda address: asked.append(address) or ()
    )
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", "http://127.0.0.1:1")
    doctor()
    assert asked == ["http://127.0.0.1:1"]


def test_the_measured_link_is_planned_with(tmp_path, monkeypatch):
    # By hand: 100 M parameters in fp32, 2 groups: 400 MB at 100 Mbit/s are 32 s, and 0.6 s of the
    # host. 100 steps of 0.3 s are 30 s of 62.6, and 95 % are 19 * 32.6 / 0.3 = 2065 steps.
    monkeypatch.setattr(coordinator_checks, "measure_link", lambda *_: Link(1e8, 1e8, 0.0))
    token = "0123456789abcdef"
    monkeypatch.setenv("COMPOSER_REPLICATION_TOKEN", token)
    coordinator = Coordinator(
        DiLoCoSettings(),
        "x.yaml",
        num_replicas=2,
        state_dir=tmp_path / "state",
        bind="127.0.0.1:0",
        tokens=[token],
    )
    _, results = doctor(
        "--coordinator", coordinator.address, "--hostname", "127.0.0.1",
        "--params", "1e8", "--step-time", "0.3",
    )  # fmt: skip
    coordinator.shutdown()
    assert failures(results) == {}
    assert results["way back"]["state"] == "ok"
    assert results["round"]["value"] == "a round of 100 steps trains 48% of its time"
    assert results["round"]["fix"].startswith("sync_every: 2065 for 95%, or wire_format: bfloat16")
    assert "in 64 s on this link, longer than a round (63 s)" in results["joining"]["value"]


def test_env_has_what_a_bug_report_needs_and_no_secret():
    shown = dict(
        environment_module.environment(
            Installed.here(),
            {"COMPOSER_REPLICATION_TOKEN": "secret", "NCCL_DEBUG": "INFO", "HOME": "/root"},
        )
    )
    assert shown["torch"] and shown["torchft-nightly"] and shown["mosaicml"] and shown["python"]
    assert shown["NCCL_DEBUG"] == "INFO" and shown["COMPOSER_REPLICATION_TOKEN"] == "(set)"
    assert "HOME" not in shown and "secret" not in str(shown)


def test_env_runs_composers_own_or_torchs_where_there_is_no_composer(monkeypatch):
    commands = []
    monkeypatch.setattr(
        environment_module.subprocess, "run", lambda command, **_: commands.append(command)
    )
    assert CliRunner().invoke(app, ["env"]).exit_code == 0
    monkeypatch.setattr(environment_module, "find_spec", lambda name: None)
    assert CliRunner().invoke(app, ["env"]).exit_code == 0
    assert [command[-1] for command in commands] == [
        "from composer.utils.collect_env import main; main()",
        "from torch.utils.collect_env import main; main()",
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not Gpus.here().capabilities, reason="no CUDA device")
def test_a_gpu_that_torch_has_code_for_is_well():
    _, results = doctor()
    assert results["gpu"]["state"] == "ok" and "(sm_" in results["gpu"]["value"]
    assert results["nccl"]["state"] == "ok"


@pytest.mark.integration
@pytest.mark.alone
def test_it_answers_in_20_s_and_does_not_import_composer():
    program = (
        "import sys; sys.modules['composer'] = None; "
        "from composer_replication.cli import main; main()"
    )
    environ = {**os.environ, "COMPOSER_REPLICATION_COORDINATOR": "http://127.0.0.1:1"}
    began = time.monotonic()
    answer = subprocess.run(
        [sys.executable, "-c", program, "doctor", QUICKSTART],
        env={**environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert time.monotonic() - began < 20
    assert answer.returncode == 1 and answer.stderr == ""
    assert "no coordinator answers at http://127.0.0.1:1" in answer.stdout
