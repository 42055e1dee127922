"""Every check, provoked: what it reports has the value and the fix.

Run: pytest tests/launch/doctor/test_checks.py. Real: files and sockets; what a
machine has installed or measured is handed to the checks as arguments.
"""

import ast
import socket
import sys
import time
from pathlib import Path

import pytest

import composer_replication.launch.doctor as package
from composer_replication.diloco.settings import DiLoCoSettings
from composer_replication.launch.doctor import (
    accelerators,
    composer_traps,
    folders,
    link,
    machine,
    network,
    rounds,
    settings,
    versions,
)
from composer_replication.launch.doctor.accelerators import Gpus
from composer_replication.launch.doctor.results import State
from composer_replication.launch.doctor.versions import Installed
from composer_replication.plan import PlannedRun
from composer_replication.replica.lighthouse import LighthouseStatus, Member
from composer_replication.replica.options import ReplicaEnv, ReplicaOptions

GB = 10**9
PINS = {
    "composer-replication": ["torch>=2.7", "torchft-nightly==2026.10.26", "tqdm<5; extra == 'x'"],
    "mosaicml": ["torch<2.7.1,>=2.4.0", "torchvision<0.22.1", "numpy<2.3"],
    "torchvision": ["torch==2.7.0"],
    "llm-foundry": ["mosaicml<0.33,>=0.32", "torch<2.7.1"],
}
HEALTHY = {
    "composer-replication": "0.1.0",
    "torch": "2.7.0",
    "torchft-nightly": "2026.10.26",
    "torchvision": "0.22.0",
    "mosaicml": "0.32.1",
    "numpy": "2.2.0",
}
H200 = Gpus("12.8", ("sm_80", "sm_90", "compute_90"), (("H200", (9, 0)),), True, (2, 26, 2))


def installed(**changes):
    """A healthy environment with other versions; None: not installed."""
    named = {name.replace("_", "-"): version for name, version in changes.items()}
    return Installed({k: v for k, v in {**HEALTHY, **named}.items() if v is not None}, PINS)


def environment(**variables):
    return ReplicaEnv.from_env(variables)


def run(**changes):
    return PlannedRun(
        **{"params": GB, "link_bits_per_s": 1e9, "step_s": 1.0, "groups": 2} | changes
    )


def section(**values):
    return settings.read_settings(values)[2]


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


class Skewed:
    """A coordinator's clock that is wrong by so many seconds."""

    def __init__(self, seconds):
        self.seconds = seconds

    def __call__(self):
        return time.time() + self.seconds, None


def peer(address):
    name = "1:uuid"
    return LighthouseStatus((Member(name, 3, address),), alive=frozenset([name]))


def not_a_folder(tmp_path):
    (tmp_path / "file").write_text("")
    return folders.check_folder("run folder", str(tmp_path / "file" / "run"), "run_dir")


WARNING, FAILURE, SKIPPED = State.WARNING, State.FAILURE, State.SKIPPED
CASES = {
    "another torch": (
        lambda _: versions.check_versions(installed(torch="2.6.0")),
        FAILURE, "2.6.0, and composer-replication needs >=2.7", "pip install 'torch>=2.7'",
    ),
    "another torchft": (
        lambda _: versions.check_versions(installed(torchft_nightly="2026.11.1")),
        FAILURE, "2026.11.1, and composer-replication needs ==2026.10.26",
        "pip install 'torchft-nightly==2026.10.26'",
    ),
    "no torchft": (
        lambda _: versions.check_versions(installed(torchft_nightly=None)),
        FAILURE, "not installed", "pip install composer-replication",
    ),
    "no Composer": (
        lambda _: versions.check_composer(installed(mosaicml=None)),
        WARNING, "DiLoCoCallback does not", "pip install 'composer-replication[composer]'",
    ),
    "Composer beside an untested torch": (
        lambda _: versions.check_composer(installed(torch="2.9.1")),
        WARNING, "0.32.1 requires torch<2.7.1,>=2.4.0, not 2.9.1", "docs/newer-torch.md",
    ),
    "another of Composer's packages": (
        lambda _: versions.check_composer(installed(numpy="2.3.1")),
        WARNING, "0.32.1 requires numpy<2.3, not 2.3.1", "pip install 'numpy<2.3'",
    ),
    "no torchvision": (
        lambda _: versions.check_torchvision(installed(torchvision=None)),
        FAILURE, "Composer imports it", "docs/newer-torch.md",
    ),
    "torchvision for another torch": (
        lambda _: versions.check_torchvision(installed(torch="2.13.0")),
        FAILURE, "0.22.0 is built for torch==2.7.0, not 2.13.0", "a torchvision of torch 2.13.0",
    ),
    "torchvision from another index": (
        lambda _: versions.check_torchvision(installed(torch="2.7.0+cpu")),
        FAILURE, "a build of PyPI beside a torch of cpu", "install both from one index",
    ),
    "llm-foundry beside another torch": (
        lambda _: versions.check_llmfoundry(installed(torch="2.13.0", llm_foundry="0.21.0")),
        WARNING, "0.21.0 requires torch<2.7.1, not 2.13.0", "in an environment of its own",
    ),
    "a torch for CPUs on a machine with a GPU": (
        lambda _: accelerators.check_gpus(Gpus(device_files=True)),
        FAILURE, "torch is a build for CPUs", "install the build of torch for CUDA",
    ),
    "a driver that is too old": (
        lambda _: accelerators.check_gpus(Gpus("12.8", device_files=True)),
        FAILURE, "built for CUDA 12.8, cannot use it", "nvidia-smi",
    ),
    "an architecture that torch has no code for": (
        lambda _: accelerators.check_gpus(
            Gpus("12.6", ("sm_80", "sm_90a"), (("B200", (10, 0)),), True)
        ),
        FAILURE, "B200 is sm_100, and torch has code for sm_80, sm_90a only", "built for sm_100",
    ),
    "no NCCL": (
        lambda _: accelerators.check_nccl(Gpus("12.8", capabilities=(("H200", (9, 0)),))),
        WARNING, "no NCCL", "callbacks.diloco.backend: gloo",
    ),
    "device: gpu without a GPU": (
        lambda _: accelerators.check_device({}, "gpu", Gpus()),
        FAILURE, "torch can use none here", "device: cpu",
    ),
    "nccl without a GPU": (
        lambda _: accelerators.check_device({"backend": "nccl"}, None, Gpus()),
        FAILURE, "nccl, which only averages between GPUs", "backend: gloo",
    ),
    "few open files": (
        lambda _: machine.check_open_files(512), WARNING, "512 at most", "ulimit -n 4096",
    ),
    "hardly any open files": (
        lambda _: machine.check_open_files(64), FAILURE, "64 at most", "ulimit -n 4096",
    ),
    "no shared memory": (
        lambda tmp_path: machine.check_shared_memory(tmp_path / "none"),
        FAILURE, "missing, or not writable", "mount -t tmpfs",
    ),
    "little shared memory": (
        lambda tmp_path: machine.check_shared_memory(tmp_path, least=2**70),
        WARNING, "bus error", "--shm-size=8g",
    ),
    "too little memory between syncs": (
        lambda _: machine.check_memory(7 * GB, run(), 1),
        FAILURE, "7.0 GB free; 1,000,000,000 parameters in float32 need 8.0 GB", "num_fragments",
    ),
    "too little memory at the peak": (
        lambda _: machine.check_memory(11 * GB, run(), 1),
        FAILURE, "12.0 GB at the peak of a sync", "num_fragments",
    ),
    "little memory": (
        lambda _: machine.check_memory(20 * GB, run(), 1),
        WARNING, "20.0 GB free", "more memory",
    ),
    "a short token": (
        lambda _: machine.check_token(environment(COMPOSER_REPLICATION_TOKEN="abc"), True),
        WARNING, "3 characters", "openssl rand -hex 16",
    ),
    "no token, as asked": (
        lambda _: machine.check_token(environment(COMPOSER_REPLICATION_NO_TOKEN="1"), True),
        WARNING, "COMPOSER_REPLICATION_NO_TOKEN", "export COMPOSER_REPLICATION_TOKEN=...",
    ),
    "no token": (
        lambda _: machine.check_token(environment(), True),
        FAILURE, "none, and other machines reach this run", "export COMPOSER_REPLICATION_TOKEN=...",
    ),
    "no token and no address": (
        lambda _: machine.check_token(environment(), None),
        SKIPPED, "not checked", "export COMPOSER_REPLICATION_TOKEN=...",
    ),
    "RUST_LOG=off": (
        lambda _: machine.check_variables({"RUST_LOG": "off"}),
        WARNING, "off, which torchft ignores", "use error",
    ),
    "RUST_LOG=info": (
        lambda _: machine.check_variables({"RUST_LOG": "info"}),
        WARNING, "info: torchft prints some 25 lines a sync", "use warn",
    ),
    "torchft's timeouts": (
        lambda _: machine.check_variables({"TORCHFT_TIMEOUT_SEC": "5"}),
        WARNING, "5, which beats the option of the config", "unset TORCHFT_TIMEOUT_SEC",
    ),
    "FSDP_VERSION=1": (
        lambda _: machine.check_variables({"FSDP_VERSION": "1"}),
        FAILURE, "1: DiLoCo needs FSDP2", "export FSDP_VERSION=2",
    ),
    "a config for FSDP without FSDP_VERSION": (
        lambda _: composer_traps.check_fsdp({"fsdp_config": {"mixed": 1}}, "2.7.0", None),
        FAILURE, "Composer takes FSDP version 1", "export FSDP_VERSION=2",
    ),
    "microbatches of auto with FSDP": (
        lambda _: composer_traps.check_fsdp(
            {"parallelism_config": {"fsdp": {"a": 1}}, "device_train_microbatch_size": "auto"},
            "2.13.0+cpu", "2",
        ),
        FAILURE, "auto with FSDP on torch 2.13.0+cpu", "give a number",
    ),
    "SWA with a schedule": (
        lambda _: composer_traps.check_algorithms(
            {"algorithms": {"swa": {"schedule_swa_lr": True}}}, "2.13.0"
        ),
        FAILURE, "KeyError 'anneal_func'", "leave schedule_swa_lr out",
    ),
    "the environment in llm-foundry": (
        lambda _: composer_traps.check_foreign({"run_name": "${oc.env:RUN}"}),
        FAILURE, "switched it off", "variables.NAME=...",
    ),
    "the same samples": (
        lambda _: composer_traps.check_foreign({"train_loader": {"dataset": {"local": "c4"}}}),
        WARNING, "the same samples, of c4", "data/group_${variables.group}",
    ),
    "the same save_folder": (
        lambda _: composer_traps.check_foreign({"save_folder": "ckpt"}),
        WARNING, "ckpt is that of every group", "{run_name}",
    ),
    "an unknown setting": (
        lambda _: section(sync_evry=10),
        FAILURE, "callbacks.diloco has no 'sync_evry'", "did you mean 'sync_every'?",
    ),
    "fragments that do not divide the round": (
        lambda _: section(sync_every=10, num_fragments=3),
        FAILURE, "sync_every=10 is not divisible by num_fragments=3", "use 9 or 12",
    ),
    "a delay that is too long": (
        lambda _: section(sync_every=10, num_fragments=2, fragment_sync_delay=10),
        FAILURE, "fragment_sync_delay=10 is not below sync_every=10", "use at most 9",
    ),
    "an option out of range": (
        lambda _: section(num_replicas=2, min_replica_size=3),
        FAILURE, "min_replica_size=3", "Use at most that",
    ),
    "steps that are thrown away": (
        lambda _: settings.check_overlap(
            DiLoCoSettings(fragment_sync_delay=5, fragment_update_alpha=0.0)
        ),
        WARNING, "throws away the 5 inner steps", "use fragment_update_alpha=0.5",
    ),
    "much momentum with short rounds": (
        lambda _: settings.check_outer(DiLoCoSettings(sync_every=10), 2),
        WARNING, "outer_momentum 0.9 with rounds of 10 inner steps", "outer_momentum: 0.5",
    ),
    "auto for an unknown number of groups": (
        lambda _: settings.check_outer(DiLoCoSettings(outer_lr="auto"), None),
        SKIPPED, "not checked", "--replicas",
    ),
    "few outer steps": (
        lambda _: settings.check_duration("1500ba", DiLoCoSettings()),
        WARNING, "max_duration=1500ba is 15 rounds of 100", "6000ba or more, or sync_every: 25",
    ),
    "a last round that is cut": (
        lambda _: settings.check_duration("6010ba", DiLoCoSettings()),
        WARNING, "60 rounds of 100 inner steps and 10", "max_duration: 6100ba",
    ),
    "a last round that is cut, after a warm-up": (
        lambda _: settings.check_duration(
            "1801ba", DiLoCoSettings(sync_every=15, warmup_sync_every=5, warmup_outer_steps=60)
        ),
        WARNING, "100 rounds of 15 inner steps after a warm-up of 300 and 1", "1815ba",
    ),
    "a duration in epochs": (
        lambda _: settings.check_duration("2ep", DiLoCoSettings()),
        SKIPPED, "not checked", "in batches",
    ),
    "save_interval without save_folder": (
        lambda _: settings.check_saving({"save_interval": "17ba"}, False),
        FAILURE, "17ba without save_folder: Composer saves nothing", "save_folder:",
    ),
    "autoresume without save_folder": (
        lambda _: settings.check_saving({"autoresume": True}, False),
        FAILURE, "true without save_folder", "save_folder:",
    ),
    "autoresume without run_name": (
        lambda _: settings.check_saving({"autoresume": True, "save_folder": "x"}, False),
        FAILURE, "true without run_name", "run_name: group-0",
    ),
    "a group that cannot be started again": (
        lambda _: settings.check_saving({"save_folder": "x"}, False),
        WARNING, "x, without autoresume", "autoresume: true",
    ),
    "a folder that cannot be written": (
        not_a_folder, FAILURE, "cannot be written (", "run_dir: another folder",
    ),
    "a disk that is too small": (
        lambda tmp_path: folders.check_folder("checkpoints", str(tmp_path), "save_folder", 2**70),
        WARNING, "one checkpoint has", "free some space",
    ),
    "no folder": (
        lambda _: folders.check_folder("run folder", None, "run_dir"),
        SKIPPED, "not checked", "run_dir",
    ),
    "a bucket": (
        lambda _: folders.check_folder("checkpoints", "s3://bucket/x", "save_folder"),
        SKIPPED, "not checked", "composer_validate_remote_path",
    ),
    "a name that does not resolve": (
        lambda _: network.check_name("no-such-host.invalid", True, None),
        FAILURE, "does not resolve here", "export COMPOSER_REPLICATION_HOSTNAME=...",
    ),
    "a loopback name, and others": (
        lambda _: network.check_name("127.0.0.1", True, True),
        FAILURE, "127.0.0.1 is a loopback address", "export COMPOSER_REPLICATION_HOSTNAME=...",
    ),
    "a loopback name": (
        lambda _: network.check_name("127.0.0.1", True, None),
        WARNING, "127.0.0.1 is a loopback address", "export COMPOSER_REPLICATION_HOSTNAME=...",
    ),
    "a name of a gateway": (
        lambda _: network.check_name("198.51.100.7", True, True),  # TEST-NET-2: nobody's
        WARNING, "198.51.100.7 is no address of this machine", "COMPOSER_REPLICATION_HOSTNAME",
    ),
    "two networks": (
        lambda _: network.check_interfaces("eth7", "wg0", {}),
        WARNING, "leads to eth7, and the way to the coordinator is wg0", "COMPOSER_REPLICATION_",
    ),
    "gloo on another network": (
        lambda _: network.check_interfaces("eth7", None, {"GLOO_SOCKET_IFNAME": "ib0"}),
        WARNING, "ib0, and the name leads to eth7", "unset GLOO_SOCKET_IFNAME",
    ),
    "no lighthouse": (
        lambda _: network.check_lighthouse_port(f"http://127.0.0.1:{free_port()}", 0.1),
        FAILURE, "no lighthouse answers at http://127.0.0.1", "open this port",
    ),
    "no address of a lighthouse": (
        lambda _: network.check_lighthouse_port("somewhere"),
        FAILURE, "lighthouse_addr='somewhere'", "use http://host:port",
    ),
    "a peer behind a wall": (
        lambda _: network.check_peers(peer(f"http://127.0.0.1:{free_port()}"), 0.5),
        FAILURE, "replica group 1 at http://127.0.0.1", "docs/security.md",
    ),
    "no peers": (
        lambda _: network.check_peers(LighthouseStatus()), SKIPPED, "not checked", "no replica",
    ),
    "no way back": (
        lambda _: network.check_way_back("127.0.0.1", True, lambda *_: "no connection to 10.0.0.7"),
        FAILURE, "no connection to 10.0.0.7", "open its ports",
    ),
    "a clock that is behind": (
        lambda _: network.check_clock(Skewed(30)), WARNING, "30 s behind", "timedatectl set-ntp",
    ),
    "a clock that is ahead": (
        lambda _: network.check_clock(Skewed(-30)), WARNING, "30 s ahead of", "set-ntp true",
    ),
    "a slow link": (
        lambda _: link.check_link(link.Link(2e6, 90e6, 0.04)),
        WARNING, "2 Mbit/s to the coordinator, 90 from it, round trip 40 ms", "wire_format: fp4",
    ),
    "rounds that wait": (
        lambda _: rounds.check_round(run()),
        # 4 GB at 1 Gbit/s are 32 s, and 6 s of the host: 100 / 138, and 19 * 38.
        WARNING, "a round of 100 steps trains 72% of its time", "sync_every: 722 for 95%, or wire",
    ),
    "nothing to plan with": (
        lambda _: rounds.check_round(None), SKIPPED, "not checked", "--params and --step-time",
    ),
    "no step time": (
        lambda _: rounds.check_step_times(ReplicaOptions(), 100, None),
        SKIPPED, "not checked", "--step-time",
    ),
    "a step that looks like a hang": (
        lambda _: rounds.check_step_times(ReplicaOptions(hang_timeout_s=5.0), 100, 4.0),
        FAILURE, "5 s, and an inner step takes 4 s", "at least 40",
    ),
    "a quorum that does not wait": (
        lambda _: rounds.check_step_times(ReplicaOptions(quorum_timeout=60.0), 100, 2.0),
        WARNING, "60 s, and a round of 100 steps lasts 200 s", "quorum_timeout: at least 400",
    ),
    "groups that are late": (
        lambda _: rounds.check_step_times(ReplicaOptions(), 500, 2.0),
        WARNING, "a round of 500 steps lasts 1000 s", "--straggler-timeout-s 200",
    ),
    "a message that takes too long": (
        lambda _: rounds.check_transfer_times(
            ReplicaOptions(), DiLoCoSettings(), run(link_bits_per_s=1e6)
        ),
        FAILURE, "a message of 32 MiB takes 537 s", "timeout: 1074",
    ),
    "a state that takes too long": (
        lambda _: rounds.check_transfer_times(
            ReplicaOptions(), DiLoCoSettings(), run(link_bits_per_s=1e8, step_s=0.1)
        ),
        WARNING, "8 bytes a parameter in 640 s", "timeout: 2880",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_check_that_finds_something_says_what_and_what_to_do(case, tmp_path):
    check, state, value, fix = CASES[case]
    found = [result for result in check(tmp_path) if result.state is state]
    assert found, case
    assert any(value in result.value and fix in result.fix for result in found), found
    for result in found:
        assert "\n" not in result.line.plain and result.fix in result.line.plain


def reports(path):
    """The lines of a module on which something other than ok begins to be reported."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in ("warning", "failure", "skipped", "from_error"):
                yield path.name, node.lineno


def test_nothing_is_reported_that_no_case_provokes(tmp_path):
    modules = [
        accelerators, composer_traps, folders, link, machine, network, rounds, settings, versions,
    ]  # fmt: skip
    files = {module.__file__: Path(module.__file__) for module in modules}
    executed = set()

    def trace(frame, event, argument):
        path = files.get(frame.f_code.co_filename)
        if path is None:
            return None
        executed.add((path.name, frame.f_lineno))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for number, (check, *_) in enumerate(CASES.values()):
            folder = tmp_path / str(number)
            folder.mkdir()
            list(check(folder))
    finally:
        sys.settrace(before)
    expected = {line for path in files.values() for line in reports(path)}
    assert len(expected) > 50
    assert sorted(expected - executed) == []


def test_each_check_is_made_by_the_command():
    folder = Path(package.__file__).parent
    checks = {
        node.name
        for path in folder.glob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")
    }
    called = {
        node.func.id
        for path in (folder / "examination.py", folder / "coordinator.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert len(checks) > 25 and checks <= called


# ---- what is well ----------------------------------------------------------------------------


WELL = {
    "this package's versions": lambda _: versions.check_versions(installed()),
    "Composer's torch": lambda _: versions.check_composer(installed()),
    "the newer torch": lambda _: versions.check_composer(
        installed(torch="2.13.0", torchvision="0.28.0")
    ),
    "a torchvision of this torch": lambda _: versions.check_torchvision(installed()),
    "a GPU that torch is built for": lambda _: accelerators.check_gpus(H200),
    "NCCL": lambda _: accelerators.check_nccl(H200),
    "files": lambda _: machine.check_open_files(1024),
    "shared memory": lambda tmp_path: machine.check_shared_memory(tmp_path, 1),
    "memory": lambda _: machine.check_memory(25 * GB, run(), 1),
    "memory of four ranks": lambda _: machine.check_memory(50 * GB, run(ranks=4), 4),
    "a token": lambda _: machine.check_token(environment(COMPOSER_REPLICATION_TOKEN="x" * 16), 1),
    "two tokens": lambda _: machine.check_token(
        environment(COMPOSER_REPLICATION_TOKEN="x" * 16 + "," + "y" * 16), True
    ),
    "this machine alone": lambda _: machine.check_token(environment(), False),
    "variables": lambda _: machine.check_variables({"FSDP_VERSION": "2", "RUST_LOG": "warn"}),
    "FSDP2": lambda _: composer_traps.check_fsdp({"fsdp_config": {"a": 1}}, "2.7.0", "2"),
    "settings": lambda _: settings.check_overlap(DiLoCoSettings()),
    "the quickstart's momentum": lambda _: settings.check_outer(
        DiLoCoSettings(sync_every=15, outer_momentum=0.5), 2
    ),
    "auto": lambda _: settings.check_outer(DiLoCoSettings(outer_lr="auto"), 2),
    "a run that ends with a round after a warm-up": lambda _: settings.check_duration(
        "1800ba", DiLoCoSettings(sync_every=15, warmup_sync_every=5, warmup_outer_steps=60)
    ),
    "60 rounds": lambda _: settings.check_duration("1500ba", DiLoCoSettings(sync_every=25)),
    "a folder to be made": lambda tmp_path: folders.check_folder(
        "run folder", str(tmp_path / "a" / "{run_name}"), "run_dir"
    ),
    "a name of the coordinator's machine": lambda _: network.check_name("127.0.0.1", True, False),
    "one network": lambda _: network.check_interfaces("lo", "lo", {"GLOO_SOCKET_IFNAME": "eth,lo"}),
    "a way back": lambda _: network.check_way_back("127.0.0.1", True, lambda *_: ""),
    "the same clock": lambda _: network.check_clock(Skewed(0.2)),
    "a link": lambda _: link.check_link(link.Link(9e8, 1e9, 0.001)),
    "rounds": lambda _: rounds.check_round(run(sync_every=800)),
    "rounds that are nearly long enough": lambda _: rounds.check_round(run(sync_every=500)),
    "timeouts": lambda _: rounds.check_step_times(ReplicaOptions(), 100, 1.0),
    "joining": lambda _: rounds.check_transfer_times(
        ReplicaOptions(), DiLoCoSettings(), run(link_bits_per_s=1e10)
    ),
}


@pytest.mark.parametrize("case", WELL)
def test_what_is_well_needs_no_fix(case, tmp_path):
    found = list(WELL[case](tmp_path))
    assert found and {(result.state, result.fix) for result in found} == {(State.OK, "")}


def test_what_does_not_concern_a_job_is_not_mentioned():
    assert not list(versions.check_llmfoundry(installed()))
    assert not list(accelerators.check_device({}, "cpu", Gpus()))
    assert not list(composer_traps.check_fsdp({"model": {}}, "2.7.0", None))
    assert not list(composer_traps.check_algorithms({"algorithms": ["swa"]}, "2.13.0"))
    varied = {"train_loader": {"dataset": {"local": "c4/${variables.group}"}}}
    assert not list(composer_traps.check_foreign({"save_folder": "x/{run_name}", **varied}))
    saved = {"save_interval": "1ep", "save_folder": "x", "autoresume": True, "run_name": "a"}
    assert not list(settings.check_saving(saved, False))
    assert not list(settings.check_saving({"save_interval": "1ep"}, True))


def test_how_much_of_a_round_trains_and_how_long_it_should_be():
    (result,) = rounds.check_round(run(sync_every=500))
    assert result.value == "a round of 500 steps trains 93% of its time; 722 for 95%"


def test_an_architecture_runs_code_of_its_major_version_and_any_earlier_ptx():
    torch = Gpus(architectures=("sm_80", "sm_90a", "compute_90"))
    runs = {(8, 0): True, (8, 6): True, (9, 0): True, (10, 0): True, (7, 5): False}
    assert {capability: torch.runs_on(capability) for capability in runs} == runs
    assert not Gpus(architectures=("sm_86",)).runs_on((8, 0))
    assert not Gpus(architectures=("sm_80", "sm_90")).runs_on((10, 0))


def test_a_link_is_measured_by_transfers_that_grow_until_one_takes_long_enough(monkeypatch):
    now, sizes = [0.0], []
    monkeypatch.setattr(link.time, "monotonic", lambda: now[0])

    def transfer(size):
        sizes.append(size)
        now[0] += 0.6 + size / 1e6  # a round trip of 0.6 s, and 8 Mbit/s

    assert link.measured_rate(transfer, 0.6) == pytest.approx(8e6)
    assert sizes == [2**14, 2**16, 2**18, 2**20]


def test_a_transfer_that_takes_no_time_beside_the_round_trip_measures_nothing(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(link.time, "monotonic", lambda: now[0])

    def transfer(size):
        now[0] += (
            0.04 if size < 2**20 else 0.05 + size / 1e8
        )  # quicker than the round trip at first

    assert link.measured_rate(transfer, 0.05) == pytest.approx(8e8)


def test_the_quickest_answer_of_the_clock_counts(monkeypatch):
    now = [1000.0]
    delays = iter([3.0, 0.5, 0.01, 0.5, 3.0])
    monkeypatch.setattr(network.time, "time", lambda: now[0])
    monkeypatch.setattr(network.time, "monotonic", lambda: now[0])

    def clock():  # the answer takes its time on the way back alone
        theirs = now[0]
        now[0] += next(delays)
        return theirs, None

    (result,) = network.check_clock(clock)
    assert result.value == "0.005 s ahead of the coordinator's"
