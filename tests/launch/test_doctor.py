"""The command ``doctor``. Run: pytest tests/launch/test_doctor.py

Real: this machine, configs on the disk, a coordinator with its lighthouse, HTTP on loopback.
"""

import os
import socket
import subprocess
import sys
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from harness.coordinators import coordinator_in
from torchft.coordination import LighthouseClient
from typer.testing import CliRunner

from composer_replication.cli import app
from composer_replication.launch import doctor as checks
from composer_replication.options import ReplicaOptions

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
TINY = ROOT / "tests" / "llmfoundry" / "mpt_tiny.yaml"
TOKEN = "0123456789abcdef"
ELSEWHERE = "http://192.0.2.1:29510"  # an address for documents: no machine has it


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory):
    own = {"tokens": [TOKEN], "straggler_timeout_s": 0.1}
    with coordinator_in(tmp_path_factory.mktemp("state"), **own) as coordinator:
        yield coordinator


@pytest.fixture(autouse=True)
def environment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in filter(checks.VARIABLES.match, list(os.environ)):
        monkeypatch.delenv(name)
    monkeypatch.setenv("COMPOSER_REPLICATION_TOKEN", TOKEN)
    monkeypatch.setattr(checks, "CONNECT_TIMEOUT_S", 0.5)


@pytest.fixture
def closed_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def doctor(*arguments):
    """The exit status, and the rows of the table: state, check and text."""
    runner = CliRunner(env={"COLUMNS": "1000"})
    answer = runner.invoke(app, ["doctor", *map(str, arguments)])
    assert answer.exit_code in (0, 1), answer.exception
    lines = [line.split("│")[1:-1] for line in answer.output.splitlines()]
    rows = [tuple(cell.strip() for cell in line) for line in lines if line]
    assert answer.exit_code == any(state == "error" for state, _, _ in rows)
    return answer.exit_code, rows


def troubles(*arguments):
    """The checks that found something, with their texts."""
    return {name: text for state, name, text in doctor(*arguments)[1] if state != "ok"}


def rows_of(rows, state):
    return [(name, text) for its, name, text in rows if its == state]


def of(coordinator, *arguments):
    return troubles("--coordinator", coordinator.address, "--hostname", "127.0.0.1", *arguments)


def checked(check, **options):
    """The state and the text of one check of a group with these options."""
    try:
        [(state, _, text)] = check(checks.Job(None, (), {}, ReplicaOptions(**options)))
    except ValueError as error:  # it becomes a row
        return "error", str(error)
    return state, text


def test_a_machine_alone():
    status, rows = doctor()
    shown = {name: text for state, name, text in rows if state == "ok"}
    assert status == 0 and f"torch {version('torch')}" in shown["versions"]
    assert "gloo" in shown["gpu"]
    assert dict(rows_of(rows, "warning")).keys() <= {"lighthouse", "name", "versions"}


@pytest.mark.parametrize("place", ["option", "environment", "config"])
def test_a_group_that_fits_has_nothing_to_do(coordinator, monkeypatch, tmp_path, place):
    lines, options = ["sync_every: 100", "replica_id: a"], ["two.yaml", "--hostname", "127.0.0.1"]
    if place == "option":
        options += ["--coordinator", coordinator.address]
    elif place == "environment":
        monkeypatch.setenv("COMPOSER_REPLICATION_COORDINATOR", coordinator.address)
    else:
        lines.append(f"coordinator_addr: {coordinator.address}")
    (tmp_path / "two.yaml").write_text("\n".join(lines))
    rows = doctor(*options)[1]
    found = {name for state, name, _ in rows if state != "ok"}
    assert found <= {"versions"}  # on a torch past Composer's pin
    assert "coordinator" in dict(rows_of(rows, "ok"))


def test_settings_that_learn_badly(tmp_path):
    diloco = "{outer_momentum: 0.9, fragment_sync_delay: 1, fragment_update_alpha: 0}"
    (tmp_path / "own.yaml").write_text(f"max_duration: 900ba\ncallbacks: {{diloco: {diloco}}}\n")
    texts = [text for name, text in rows_of(doctor("own.yaml")[1], "warning") if name == "settings"]
    assert "throws away the 1 inner steps" in texts[0]
    assert (
        "outer_momentum=0.9 overshoots in fewer than 200 rounds, and this training has 45"
        in texts[1]
    )


def test_another_version(coordinator, monkeypatch):
    monkeypatch.setattr(checks, "__version__", "0.0.9")
    text = of(coordinator)["coordinator"]
    assert "'0.0.9'" in text and "install the same" in text


def test_a_group_in_training_that_cannot_be_reached_from_here(coordinator, closed_port):
    client = LighthouseClient(coordinator.lighthouse_addr, timedelta(seconds=5))
    client.quorum(
        replica_id="far:0b1c",
        timeout=timedelta(seconds=10),
        address=f"http://127.0.0.1:{closed_port}",
        store_address="s",
    )
    client.heartbeat("far:0b1c")
    text = of(coordinator)["peers"]
    assert f"replica group far at http://127.0.0.1:{closed_port} cannot be reached" in text
    assert "COMPOSER_REPLICATION_HOSTNAME" in text


@pytest.mark.parametrize(
    ("name", "lighthouse", "state", "text"),
    [
        ("127.0.1.1", ELSEWHERE, "error", "and the lighthouse is on another machine: set COMPOSER"),
        ("127.0.1.1", None, "warning", "is loopback, enough on one machine"),
        ("no.such.name.invalid", ELSEWHERE, "error", "does not resolve here"),
        ("127.0.0.1", "http://127.0.0.1:1", "ok", ""),
    ],
)
def test_the_name_of_this_machine(name, lighthouse, state, text):
    found = checked(checks.check_name, hostname=name, lighthouse_addr=lighthouse)
    assert found[0] == state and text in found[1]


def test_a_name_on_another_network_than_the_way_out(monkeypatch):
    monkeypatch.setattr(checks.addresses, "address_towards", lambda address: "10.9.8.7")
    monkeypatch.setattr(checks.addresses, "is_loopback", lambda name: False)
    state, text = checked(
        checks.check_name, hostname="127.0.0.1", coordinator_addr=ELSEWHERE, lighthouse_addr=None
    )
    assert state == "warning" and "the way out begins at 10.9.8.7" in text


@pytest.mark.parametrize(
    ("token", "insists", "state"),
    [("short", "", "warning"), ("", "", "error"), ("", "1", "warning")],
)
def test_the_token_where_others_reach_the_run(monkeypatch, token, insists, state):
    monkeypatch.setenv("COMPOSER_REPLICATION_TOKEN", token)
    monkeypatch.setenv("COMPOSER_REPLICATION_NO_TOKEN", insists)
    found = checked(checks.check_token, coordinator_addr=ELSEWHERE)
    assert found[0] == state and "openssl rand" in found[1]


def test_variables_are_shown_without_the_token(monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    text = {name: text for _, name, text in doctor()[1]}["variables"]
    assert text == "COMPOSER_REPLICATION_TOKEN=(set), NCCL_DEBUG=INFO"
    for name in ("COMPOSER_REPLICATION_TOKENS", "COMPOSER_REPLICATON_TOKEN", "COMPOSER_REPL_TOKEN"):
        monkeypatch.setenv(name, "a secret")
        state, text = {name: (state, text) for state, name, text in doctor()[1]}["variables"]
        assert state == "warning" and f"{name}=(nothing reads it)" in text
        assert "a secret" not in text


AWAY, RUN = "http://127.0.0.1:{closed}", "--coordinator {run} --hostname 127.0.0.1"
DILOCO = "quickstart.yaml callbacks.diloco."
TROUBLES = [
    (f"--coordinator {AWAY}", "coordinator", "correct COMPOSER_REPLICATION_COORDINATOR"),
    ("--coordinator http://host:port", "coordinator", "='http://host:port': Invalid port: 'port'"),
    (f"TORCHFT_LIGHTHOUSE={AWAY}", "lighthouse", "no lighthouse answers at"),
    (f"COMPOSER_REPLICATION_TOKEN=no {RUN}", "coordinator", "set COMPOSER_REPLICATION_TOKEN to "),
    ("NUM_REPLICA_GROUPS=two", "variables", "use the number of replica groups"),
    (f"{DILOCO}sync_every=7 {RUN}", "settings", "make them equal"),
    (f"{DILOCO}hostname=nope", "name", "hostname='nope' does not resolve here"),
    (f"{TINY} callbacks.diloco.sync_evry=4", "settings", "did you mean 'sync_every'"),
    (f"{DILOCO}sync_evry=4", "settings", "did you mean 'sync_every'"),
    ("quickstart.yaml run_dir=/proc/none", "run_dir", "/proc/none cannot be written: set run_dir"),
    pytest.param(
        *(f"{DILOCO}backend=nccl", "gpu", "set callbacks.diloco.backend: gloo"),
        marks=pytest.mark.skipif(torch.cuda.is_available(), reason="nccl is right here"),
    ),
]


@pytest.mark.parametrize(("words", "check", "text"), TROUBLES)
def test_what_is_wrong_is_named_with_what_to_do(
    coordinator, closed_port, monkeypatch, words, check, text
):
    places = {"run": coordinator.address, "closed": closed_port}
    words = words.format(**places).replace("quickstart.yaml", str(QUICKSTART)).split()
    if words[0].partition("=")[0].isupper():  # a variable of the environment
        monkeypatch.setenv(*words.pop(0).split("="))
    status, rows = doctor(*words)
    found = [said for state, name, said in rows if (state, name) == ("error", check)]
    assert status == 1 and any(text in said for said in found)


def test_a_full_disk(monkeypatch):
    monkeypatch.setattr(checks, "LITTLE_SPACE_GB", 1e9)
    assert "make some room" in troubles(QUICKSTART)["run_dir"]


def test_what_only_another_program_can_resolve_is_left_to_it(tmp_path):
    assert not {"settings"} & troubles(TINY).keys()
    (tmp_path / "job.yaml").write_text(
        "model: {name: mpt}\nseed: ${sum:1,2}\ncallbacks: {diloco: {sync_every: 100}}\n"
    )
    assert "settings" not in troubles("job.yaml")


def test_a_group_that_trains_alone_needs_no_network():
    assert (
        not {"lighthouse", "name"} & troubles(QUICKSTART, "callbacks.diloco.num_replicas=1").keys()
    )


def test_versions_that_do_not_go_together(monkeypatch):
    pinned = {"torchvision": ["torch==2.0"], "mosaicml": ["torch<2.1", "numpy<1; extra == 'x'"]}
    monkeypatch.setattr(checks, "requires", lambda name: pinned.get(name))
    rows = [row for row in doctor()[1] if row[1] == "versions" and row[0] != "ok"]
    assert [(state, text.partition(",")[0]) for state, _, text in rows] == [
        ("error", "torchvision needs torch==2.0"),
        ("warning", "mosaicml needs torch<2.1"),
    ]
    monkeypatch.setattr(checks, "PACKAGES", ("torch",))
    assert "pip install '.[composer]'" in troubles()["versions"]


@pytest.mark.parametrize(
    ("version", "variable", "own"),
    [("2.14.1", None, "nccl-legacy"), ("2.14.1", "1", "nccl2"), ("2.15.0", None, "nccl2"),
     ("2.15.0", "0", "nccl-legacy")],
)  # fmt: skip
def test_which_nccl_the_ranks_of_a_group_use_and_how_to_go_back(
    version, variable, own, monkeypatch
):
    monkeypatch.setattr("torch.__version__", torch.torch_version.TorchVersion(version))
    monkeypatch.setattr("torch.distributed.is_backend_available", lambda name: True)
    monkeypatch.delenv("TORCH_DIST_USE_NCCL2", raising=False)
    if variable:
        monkeypatch.setenv("TORCH_DIST_USE_NCCL2", variable)
    found = {name: text for _, name, text in doctor()[1]}["nccl"]
    assert found.startswith(f"of a group's ranks: {own};")
    assert "TORCH_DIST_USE_NCCL2=0 goes back" in found


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_that_torch_has_code_for():
    found = {name: text for _, name, text in doctor()[1]}["gpu"]
    assert torch.cuda.get_device_name(0) in found and "nccl" in found


@pytest.mark.integration
def test_it_does_not_import_composer():
    program = (
        "import sys; sys.modules['composer'] = None; "
        "from composer_replication.cli import main; main()"
    )
    command = [sys.executable, "-c", program, "doctor", QUICKSTART]
    environ = {**os.environ, "COMPOSER_REPLICATION_COORDINATOR": "http://127.0.0.1:1"}
    answer = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert answer.returncode == 1 and answer.stderr == ""
    assert "no coordinator answers at" in answer.stdout
