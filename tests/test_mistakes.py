"""What a newcomer does wrong: each mistake is one line, with the value and the fix, and status 2.

Run: pytest tests/test_mistakes.py. Real: commands and programs, as processes, and the coordinator.
A program of the user's own ends with Python's traceback, without a chain of ours, and its last line
says it all.
"""

import http.server
import os
import re
import socket
import sys
import threading

import pytest
from forked_commands import ForkedCommand, run
from text_config import TINY

from composer_replication.coordinator.server import Coordinator
from composer_replication.settings import DiLoCoSettings

pytestmark = pytest.mark.integration

LONGEST = 300

PLAN = "plan --step-time 1 --groups 2 --params"

COMMANDS = [
    # Values and keys of a config.
    ("train tiny.yaml callbacks.diloco.sync_evry=30", "has no 'sync_evry': did you mean 'sync_ev"),
    ("train tiny.yaml callbacks.diloco.wire_format=int4", "wire_format='int4': use float32 or"),
    ("train tiny.yaml callbacks.diloco.sync_every=30 callbacks.diloco.num_fragments=4",
     "sync_every=30 is not divisible by num_fragments=4: use sync_every=28 or 32"),
    ("train tiny.yaml callbacks.diloco.sync_every=30 callbacks.diloco.num_fragments=50",
     "sync_every=30 is not divisible by num_fragments=50: use sync_every=50"),
    ("simulate tiny.yaml max_duration=0ba", "max_duration=0ba: write 400ba (batches) or 2ep (ep"),
    ("train tiny.yaml callbacks.diloco.sync_every=thirty", "sync_every='thirty': use an integer"),
    ("launch tiny.yaml callbacks.diloco.sync_every=0", "sync_every=0: use an integer of at least"),
    ("launch nowhere.yaml", "there is no config at nowhere.yaml: give the path of a YAML file"),
    ("train broken.yaml", "broken.yaml cannot be read as YAML: while parsing"),
    ("launch", "neither a config nor a command: give the path of a YAML file, or write -- and"),
    ("launch tiny.yaml max_duration=1800", "max_duration=1800: write 400ba (batches) or 2ep (ep"),
    ("launch tiny.yaml optimizers=null", "optimizers has no _target_: name what builds it, by its"),
    ("train tiny.yaml callbacks.diloco.outer_lr=fast", "outer_lr='fast': use a number between 0"),
    ("launch --set outer_lr=abc -- true", "outer_lr='abc': use a number between 0 and 1000"),
    ("launch -- python nosuch.py", "there is no script 'nosuch.py' here, as 'python nosuch.py'"),
    ("launch tiny.yaml --replicas 0", "--replicas 0: Input should be greater than or equal to 1"),
    ("launch tiny.yaml -replicas 2", "No such option: -replicas. Did you mean --replicas? (`comp"),
    ("launch --run-dir /proc/nope -- true", "run_dir='/proc/nope' cannot be made (No such file or"),
    ("launch --set sync_every 20 -- true", "--set sync_every: write --set sync_every=20"),
    ("lauch tiny.yaml", "No such command 'lauch'. Did you mean 'launch'?"),
    (f"{PLAN} 7B --link fast", "link='fast': write a rate such as 1Gbit, 100Mbit or 1Gb/s"),
    (f"{PLAN} 7x", "params='7x': write how many there are, e.g. 7B, 124M or 7e9"),
    ("plan --params 7B --groups 2 --step-time -2", "step_time=-2.0: use a number above 0"),
    ("plan", "all three are needed, e.g. composer-replication plan --params 7B --step-time 1.5"),
    ("report runs/none", "runs/none"),
    ("coordinator --set sync_evry=3", "has no 'sync_evry': did you mean 'sync_every'?"),
    ("launch --set sync_every=3 python train.py", "--set without a command after --: write key="),
    ("coordinator --bind 127.0.0.1:{taken}", "cannot listen at --bind 127.0.0.1:{taken}"),
    ("coordinator --set timeout=5", "timeout is no setting of the run"),
    ("launch tiny.yaml -- true", "give settings for a command with --settings FILE or --set"),
    ("launch tiny.yaml --resume", "--resume without a command after --"),
    ("launch --", "there is no command after --: write e.g. -- python train.py"),
    ("launch -- no-such-program", "there is no command 'no-such-program': give the path"),
    ("launch --settings /no/file -- true", "there is no config at /no/file"),
    # Settings that contradict a launch.
    ("launch tiny.yaml callbacks.diloco.replica_id=3", "replica_id=3: leave it out, launch"),
    ("launch tiny.yaml callbacks.diloco.lighthouse_addr=http://a:1", "starts its own lighthouse"),
    ("launch tiny.yaml callbacks.diloco.run_dir=x", "set run_dir at the top of the config"),
    ("launch tiny.yaml callbacks.diloco.num_replicas=3", "num_replicas=3 but --replicas 2"),
    ("launch tiny.yaml callbacks.diloco.min_replica_size=3", "no sync could ever commit. Use at"),
    # What is gone, or needs something else.
    ("train tiny.yaml callbacks.diloco.tls_dir=/nope", "has no 'tls_dir': see the arguments"),
    # What else is known before a process starts.
    ("launch tiny.yaml callbacks.diloco.final_sync=maybe", "final_sync='maybe': use true or"),
    ("launch tiny.yaml callbacks.diloco.hostname=7", "hostname=7: use a text in quotes"),
    ("launch tiny.yaml callbacks.diloco.give_up_after_s=x", "give_up_after_s='x': use a number of"),
]  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "tiny.yaml").write_text(TINY)
    (tmp_path / "broken.yaml").write_text("a: [1\nb: 2")
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if re.match("COMPOSER_REPL|REPLICA_GROUP|NUM_REPLICA|TORCHFT_LIGHT", name):
            monkeypatch.delenv(name)
    return tmp_path


def answer(*words, **environ):
    """What a command says."""
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **environ}
    return run(ForkedCommand, [sys.executable, *words], timeout=120, env=environ)


@pytest.mark.parametrize(("command", "line"), COMMANDS)
def test_a_mistake_in_a_command_is_one_line(folder, command, line):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = answer("-m", "composer_replication", *command.format(taken=port).split())
    assert line.format(taken=port) in said.stderr
    assert said.returncode == 2
    assert said.stderr.startswith("Error: ") and said.stderr.count("\n") == 1
    assert len(said.stderr) <= LONGEST and said.stdout == ""
    assert not (folder / "runs").exists(), "a group was started"


# ---- programs of the user's own ---------------------------------------------------------------

TRAINER = """
import torch
from composer import Trainer
from composer.models import ComposerClassifier
from torch.utils.data import DataLoader, TensorDataset
from composer_replication import DiLoCoCallback

data = TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,)))
net = torch.nn.Linear(4, 2)
Trainer(
    model=ComposerClassifier(net, num_classes=2),
    train_dataloader=DataLoader(data, 8),
    optimizers=torch.optim.SGD(net.parameters(), 0.1),
    max_duration="4ba",
    device="cpu",
    callbacks=[DiLoCoCallback()],
    progress_bar=False,
).fit()
"""
LOOP = "from composer_replication import make_manager\nmake_manager()"
START = (
    "Start the groups with `composer-replication launch --replicas 2 -- python train.py`, or set "
)

TOKEN = "COMPOSER_REPLICATION_TOKEN"
LIGHTHOUSE, COORDINATOR = "TORCHFT_LIGHTHOUSE", "COMPOSER_REPLICATION_COORDINATOR"
AS_0 = {"REPLICA_GROUP_ID": "0"}
NOBODY = "http://127.0.0.1:1"

PROGRAMS = [
    (TRAINER, {}, f"has no name. {START}REPLICA_GROUP_ID (replica_id=...) to 0, 1, ..., differen"),
    (LOOP, {LIGHTHOUSE: NOBODY}, f"has no name. {START}REPLICA_GROUP_ID (replica_id=...) to 0, 1"),
    (LOOP, AS_0 | {LIGHTHOUSE: NOBODY},
     f"no lighthouse answers at {NOBODY} ([Errno 111] Connection refused). Start one with"),
    (LOOP, AS_0, f"no lighthouse is named. {START}TORCHFT_LIGHTHOUSE (lighthouse_addr"),
    (TRAINER, AS_0 | {COORDINATOR: "{another}"}, "cannot serve: 404 File not found (text/html"),
    (TRAINER, AS_0 | {COORDINATOR: "127.0.0.1:29512"},
     "coordinator_addr='127.0.0.1:29512': write http://127.0.0.1:29512, in the argument or in COM"),
    (TRAINER, AS_0 | {COORDINATOR: NOBODY}, f"no coordinator answers at {NOBODY} ([Errno 111]"),
    (TRAINER, AS_0 | {COORDINATOR: "{run}", TOKEN: "guess"},
     "rejects: wrong token: set COMPOSER_REPLICATION_TOKEN to this run's secret"),
    (TRAINER, AS_0 | {COORDINATOR: "{run}"},
     "rejects: no token: set COMPOSER_REPLICATION_TOKEN to this run's secret"),
    (TRAINER, {"REPLICA_GROUP_ID": "a b", LIGHTHOUSE: NOBODY},
     "replica_id='a b': give each replica group a name of its own, of at most 64 letters"),
]  # fmt: skip


@pytest.fixture(scope="module")
def services(tmp_path_factory):
    """The addresses of a run's coordinator and of another HTTP service."""
    state = tmp_path_factory.mktemp("state")
    coordinator = Coordinator(
        DiLoCoSettings(),
        "x",
        num_replicas=2,
        state_dir=state,
        bind="127.0.0.1:0",
        tokens=["secret"],
    )
    handler = http.server.SimpleHTTPRequestHandler
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as another:
        threading.Thread(target=another.serve_forever, daemon=True).start()
        yield {"run": coordinator.address, "another": f"http://127.0.0.1:{another.server_port}"}
        another.shutdown()
    coordinator.shutdown()


@pytest.mark.parametrize(("program", "environ", "line"), PROGRAMS)
def test_the_last_line_of_a_mistake_in_a_program_names_it(folder, services, program, environ, line):
    (folder / "train.py").write_text(program)
    environ = {name: value.format(**services) for name, value in environ.items()}
    said = answer("train.py", **environ)
    assert said.returncode == 1
    last = said.stderr.rstrip().splitlines()[-1]
    assert line in last and len(last) <= LONGEST
    assert "callbacks.diloco" not in last, "a script has arguments, and no YAML keys"
    assert said.stderr.count("Traceback (most recent call last)") == 1, "no chain of tracebacks"


OF_THE_PROGRAM = [
    (
        "def main(lr): ...\nmain(lr=1, momentum=2)",
        "TypeError: main() got an unexpected keyword arg",
    ),
    ("import nosuchmodule", "ModuleNotFoundError: No module named 'nosuchmodule'"),
    (TRAINER.replace("()]", "(sync_every=0)]"), "ValueError: sync_every=0: use an integer of at l"),
    (
        TRAINER.replace("()]", "(sync_evry=5)]"),
        "sync_evry is no argument of DiLoCoCallback: did yo",
    ),
    (TRAINER.replace("()]", "(sync_every=7)]"), "sync_every: 7 here, 100 there"),
    (
        TRAINER.replace("DiLoCoCallback()", ""),
        "has ended without a result. What trains there needs",
    ),
    (
        TRAINER.replace('"cpu",', '"cpu", parallelism_config={"fsdp": {}},'),
        "FSDP version 1: DiLoCo needs parameters that keep their names and shapes. Use FSDP2: set ",
    ),
    (
        "from composer.algorithms import SWA\n"
        + TRAINER.replace('"cpu",', '"cpu", algorithms=[SWA()],'),
        "Error: SWA puts its average into the model, which the outer optimizer would take for",
    ),
]


@pytest.mark.parametrize(("program", "line"), OF_THE_PROGRAM)
def test_an_error_before_the_first_batch_ends_a_launch_and_is_said_once(folder, program, line):
    (folder / "train.py").write_text(program)
    said = answer("-m", "composer_replication", "launch", "--", sys.executable, "train.py")
    assert line in said.stderr and said.returncode == 2
    assert said.stderr.startswith("Error: ") and said.stderr.count("\n") == 1
    assert len(said.stderr) <= LONGEST
    # The first group may have been about to start again when the second one ended so too.
    assert said.stdout.count("starts again") <= 1
