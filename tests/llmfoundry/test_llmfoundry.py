"""llm-foundry trains an MPT in two replica groups, or one, from a YAML. Run: make test-llmfoundry

Real: llm-foundry's own command in two processes on the CPU, MosaicML streaming, a torchft
lighthouse, Gloo. The tokenizer and the text are made here, so that nothing is downloaded.
"""

import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import yaml
from harness import foundry
from harness.commands import RunningGroup
from harness.foundry import NUM_GROUPS, foundry_command, offline_environ, write_data
from run_events import result_of, syncs_of

pytestmark = [
    pytest.mark.llmfoundry,
    pytest.mark.skipif(
        not foundry.is_installed(),
        reason=foundry.NOT_INSTALLED,
    ),
]

YAML = Path(__file__).with_name("mpt_tiny.yaml")


def start(group, folder, lighthouse, overrides):
    """A replica group, which is llm-foundry's own command; and the file of what it says."""
    command = foundry_command(
        "train",
        YAML,
        f"variables.group={group}",
        f"variables.data={folder / 'data'}",
        f"variables.run_dir={folder / 'run'}",
        *overrides,
    )
    environ = offline_environ(
        TORCHFT_LIGHTHOUSE=lighthouse,
        REPLICA_GROUP_ID=str(group),
        NUM_REPLICA_GROUPS=str(NUM_GROUPS),
        # StreamingDataset leaves lock files here, and looks for those of others.
        TMPDIR=str(folder),
    )
    output = folder / f"group_{group}.log"
    with output.open("w") as log:
        options = {"stdout": log, "stderr": subprocess.STDOUT, "start_new_session": True}
        return subprocess.Popen(command, env=environ, cwd=folder, **options), output


MUON = [
    f"code_paths=[{Path(__file__).parent / 'register_muon.py'}]",
    "optimizer.name=muon",
    "optimizer.param_groups=[{param_str_match: 'wte|wpe|lm_head', use_muon: false}]",
]


@pytest.mark.parametrize("overrides", [[], MUON], ids=["adamw", "muon"])
def test_both_groups_of_a_yaml_are_equal_after_every_outer_step(overrides, tmp_path):
    from torchft.coordination import LighthouseServer

    folder = tmp_path
    write_data(folder / "data")
    # One is enough for it: that a cold start waits for both groups is the callback's doing.
    lighthouse = LighthouseServer(bind="0.0.0.0:0", min_replicas=1, join_timeout_ms=60_000)
    address = f"http://127.0.0.1:{lighthouse.address().rsplit(':', 1)[1]}"
    with ExitStack() as opened:
        opened.callback(lighthouse.shutdown)
        first = start(0, folder, address, overrides)
        alone = RunningGroup(first)
        opened.callback(alone.kill)
        # Two StreamingDatasets that start together on one machine can choose the same name for
        # their shared memory. llm-foundry says this when its loaders have theirs.
        while "Initializing model..." not in first[1].read_text():
            alone.check()
            time.sleep(0.2)
        both = RunningGroup(first, start(1, folder, address, overrides))
        opened.callback(both.kill)
        both.wait()
    check_equal([read_group(folder / "run", group) for group in range(NUM_GROUPS)])


def read_group(run_dir, group):
    replica = run_dir / f"replica_{group}"
    checkpoint = torch.load(
        run_dir / "checkpoints" / f"group_{group}" / "latest-rank0.pt", weights_only=False
    )
    return syncs_of(replica), result_of(replica), checkpoint["state"]["callbacks"]


def check_equal(groups):
    """``groups`` has of each its syncs, its result and the callbacks of its last checkpoint."""
    digests = []
    for syncs, result, saved_callbacks in groups:
        digests.append(
            [(sync["diloco/outer_step"], sync["diloco/global_digest"]) for sync in syncs]
        )
        assert {sync["diloco/num_participants"] for sync in syncs} == {NUM_GROUPS}
        assert result["outer_steps"] == groups[0][1]["outer_steps"] > 2
        assert result["global_digest"] == groups[0][1]["global_digest"]
        assert saved_callbacks["DiLoCoCallback"]
    assert digests[0] == digests[1]
    # Parameters that never move would be equal too.
    assert len(set(digests[0])) == len(digests[0])


def test_three_lines_train_one_group_without_a_lighthouse(tmp_path):
    write_data(tmp_path / "data")
    config = yaml.safe_load(YAML.read_text())
    config["callbacks"] = {"diloco": {"num_replicas": 1}}
    path = tmp_path / "alone.yaml"
    path.write_text(yaml.safe_dump(config))
    places = [f"variables.data={tmp_path / 'data'}", f"variables.run_dir={tmp_path / 'run'}"]
    of_a_run = ("TORCHFT_LIGHTHOUSE", "REPLICA_GROUP_ID", "NUM_REPLICA_GROUPS")
    environ = offline_environ(TMPDIR=str(tmp_path))
    ended = subprocess.run(
        foundry_command("train", path, *places),
        env={name: value for name, value in environ.items() if name not in of_a_run},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=400,
    )
    output = ended.stdout + ended.stderr
    assert ended.returncode == 0, output[-4000:]
    assert "outer step 1: 1 replica groups" in output  # the sync at the end


def test_llmfoundry_lists_the_callback():
    found = subprocess.run(
        foundry_command("registry", "find", "callbacks", "diloco"),
        env=offline_environ(COLUMNS="200"),  # narrower, it breaks the module's name in two
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert found.returncode == 0, found.stderr
    assert "composer_replication.callback.callback" in found.stdout
