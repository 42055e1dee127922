"""Stopped in mid-round and resumed in new processes: bit for bit the run that was never stopped.

Run: pytest tests/integration/test_resume.py. Real: two replica groups, each a Composer job of two
processes under DDP (monolithic checkpoints) or FSDP2 (sharded ones), lighthouse and gloo.
"""

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from harness.processes import Process, run_groups
from harness.trainers import STREAMING, read_checkpoint
from integration.composer_ranks import train
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from composer_replication import DiLoCoCallback

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.together]

DURATION = 13

# The batch at which they are stopped is one of the second epoch, in the middle of a round.
# Fragments take turns every 4 steps; 2 steps before, what is sent is formed: at batch 7 the
# first has been synchronised, and the second is in flight.
IN_FLIGHT = STREAMING | {"fragment_update_alpha": 0.25, "weight_by": "samples"}
# Stopped after outer step 1, while the momentum is 0; it comes back in outer step 3.
SCHEDULE = [
    {"outer_step": 1, "outer_lr": 0.5, "outer_momentum": 0.0},
    {"outer_step": 3, "outer_lr": 0.7, "outer_momentum": 0.9},
]
SETTINGS = {
    "vanilla": ({"sync_every": 4}, 7),
    "in_flight": (IN_FLIGHT, 7),
    "alpha": (STREAMING | {"fragment_sync_delay": 1}, 6),
    "schedule": (IN_FLIGHT | {"schedule": SCHEDULE}, 7),
    "int8": (IN_FLIGHT | {"wire_format": "int8"}, 7),
}


def case(settings: str, optimizer: str, fsdp: str | None, **more: str) -> dict[str, Any]:
    diloco, stop = SETTINGS[settings]
    name = "-".join([settings, optimizer, fsdp or "ddp", *more.values()])
    job = {"optimizer": optimizer, "fsdp": fsdp, **more}
    return {"name": name, "diloco": diloco, "stop": stop, "job": job}


def checkpoint_of(case: dict[str, Any], folder: str | Path, group: int) -> Path:
    """The one from which a group is resumed."""
    stop = case["stop"]
    is_sharded = case["job"]["fsdp"] == "sharded"
    name = f"ep{(stop - 1) // 5}-ba{stop}" if is_sharded else f"ba{stop}.pt"
    return Path(folder, case["name"], str(group), name)


def train_cases(
    process: Process, folder: str, meeting: str, cases: list[dict], ranks: int, resumes: bool
) -> list[dict[str, Any]]:
    """A rank of a group in each of the cases, one after the other."""
    os.environ["FSDP_VERSION"] = "2"
    group, found = process.of_rank(meeting, ranks), []
    place = {"lighthouse_addr": group.lighthouse_addr, "hostname": "127.0.0.1"}
    place |= {"replica_id": group.replica_id, "num_replicas": 2}
    for each in cases:
        diloco = DiLoCoCallback(timeout=30.0, start_timeout_s=90.0, **place, **each["diloco"])
        saving = {"save_folder": f"{folder}/{each['name']}/{group.replica_id}"}
        # The run that is resumed evaluates too, which must make no difference.
        more = {"eval_interval": "2ba"} if resumes else {}
        if resumes:
            more["load_path"] = str(checkpoint_of(each, folder, group.replica_id))
        found.append(
            train(
                diloco,
                groups=2,
                max_duration=f"{DURATION}ba",
                save_filename="ba{batch}.pt",
                save_interval=f"{each['stop']}ba",
                save_overwrite=True,
                **saving,
                **each["job"],
                **more,
            )
        )
    return found


def run_cases(folder: Path, cases: list[dict], *, ranks: int, resumes: bool) -> list[list[dict]]:
    """Of each case what each rank has found, in two groups of new processes."""
    found = run_groups(
        train_cases,
        2 * ranks,
        folder=str(folder),
        meeting=tempfile.mkdtemp(dir=folder),
        cases=cases,
        ranks=ranks,
        resumes=resumes,
        timeout_s=600.0,
    )
    return [list(of_case) for of_case in zip(*found, strict=True)]


def check_samples(found: list[dict[int, dict]]) -> None:
    """In an epoch of five batches every sample comes once, in whatever rounds it is cut into."""
    for epoch in range(2):
        batches = [one[at] for one in found for at in range(5 * epoch + 1, 5 * epoch + 6)]
        samples = sorted(sample for batch in batches for sample in batch["samples"])
        assert samples == list(range(80))


SHARDED = case("schedule", "adamw", "sharded", ema="2ba")
REPLICATED = case("in_flight", "adamw", None, ema="2ba")
CASES = [
    SHARDED,
    REPLICATED,
    case("vanilla", "sgd", "sharded"),
    case("alpha", "muon", "full"),
    case("int8", "muon", "sharded"),
    case("in_flight", "adamw", None, dtype="bfloat16", ema="2ba"),
    case("in_flight", "adamw", "full", ema="2ba"),
]
"""Each of the settings, inner optimizers and kinds of checkpoint at least once. One group of one
rank is in tests/callback/test_resume.py."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def runs(folder):
    """Of each case what each rank has found, uninterrupted and resumed."""
    return [run_cases(folder, CASES, ranks=2, resumes=resumes) for resumes in (False, True)]


def test_stopped_in_mid_round_and_resumed_in_new_processes_is_bitwise_uninterrupted(folder, runs):
    for each, whole, resumed in zip(CASES, *runs, strict=True):
        check_samples([one["batches"] for one in whole])
        for one, other in zip(whole, resumed, strict=True):
            rest = {at: held for at, held in one["batches"].items() if at > each["stop"]}
            assert list(rest) == list(range(each["stop"] + 1, DURATION + 1))
            assert other["batches"] == rest, each
            for key in ("model", "inner"):
                assert one[key] == other[key], (each, key)
            for key in ("global_digest", "inner_steps", "outer_steps"):
                assert one["result"][key] == other["result"][key], (each, key)
        if "ema" in each["job"]:
            check_averages(folder, each, whole)


def check_averages(folder: Path, case: dict[str, Any], found: list[dict]) -> None:
    """EMA's weights and the global ones are equal in both groups, also in what is saved."""
    averages = {one["batches"][DURATION]["ema"][0] for one in found}
    assert len(averages) == (2 if case["job"]["fsdp"] else 1)  # each rank has its shard
    saved = []
    for group in range(2):
        path = checkpoint_of(case, folder, group)
        if path.is_dir():
            dcp_to_torch_save(path, folder / "whole.pt")
            path = folder / "whole.pt"
        state = read_checkpoint(path)["state"]
        weights = state["model"], state["callbacks"]["DiLoCoCallback"]["theta"]
        saved.append([{name: t.tolist() for name, t in each.items()} for each in weights])
    assert saved[0] == saved[1] and saved[0][0] != saved[0][1]


def test_a_group_may_go_on_with_another_number_of_ranks(folder, runs):
    # A sync is in flight, of sharded parameters and of replicated ones.
    _, (of_two_sharded, of_two, *_) = runs
    of_one = run_cases(folder, [SHARDED, REPLICATED], ranks=1, resumes=True)
    for two, one in zip([of_two_sharded, of_two], of_one, strict=True):
        assert [each["at_start"] for each in two[::2]] == [each["at_start"] for each in one]
        # Of one rank a group, the digest is that of whole parameters.
        assert len({each["result"]["global_digest"] for each in one}) == 1
        assert one[0]["result"]["inner_steps"] == DURATION
    averages = [each["batches"][DURATION]["ema"] for each in of_one[1]]
    assert averages[0] == averages[1]
