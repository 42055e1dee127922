"""Stopped in mid-round and resumed in new processes: bit for bit the run that was never stopped.

Run: pytest tests/integration/test_resume.py. Real: two replica groups, each a Composer job of two
processes under DDP (monolithic checkpoints) or FSDP2 (sharded ones), lighthouse and gloo.
"""

import json
from contextlib import ExitStack
from pathlib import Path

import pytest
from composer_jobs import read_checkpoint
from integration import groups
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from composer_replication.replica.lighthouse import start_lighthouse

pytestmark = [pytest.mark.integration, pytest.mark.slow]

SCRIPT = Path(__file__).with_name("resume_group.py")

# The batch at which they are stopped is one of the second epoch, in the middle of a round.
SETTINGS = {
    "vanilla": ({"sync_every": 4}, 7),
    # Fragments take turns every 4 steps; 2 steps before, what is sent is formed: at batch 7 the
    # first has been synchronised, and the second is in flight.
    "in_flight": (
        {
            "sync_every": 8,
            "num_fragments": 2,
            "fragment_sync_delay": 2,
            "fragment_update_alpha": 0.25,
            "weight_by": "samples",
        },
        7,
    ),
    "alpha": (
        {
            "sync_every": 8,
            "num_fragments": 2,
            "fragment_sync_delay": 1,
            "fragment_update_alpha": 0.5,
        },
        6,
    ),
}
# Stopped after outer step 1, while the momentum is 0; it comes back in outer step 3.
SETTINGS["schedule"] = (
    SETTINGS["in_flight"][0]
    | {
        "schedule": [
            {"outer_step": 1, "outer_lr": 0.5, "outer_momentum": 0.0},
            {"outer_step": 3, "outer_lr": 0.7, "outer_momentum": 0.9},
        ]
    },
    7,
)
SETTINGS["int8"] = (SETTINGS["in_flight"][0] | {"wire_format": "int8"}, 7)


def case(settings, optimizer, fsdp, **more):
    diloco, stop = SETTINGS[settings]
    return {
        "name": "-".join([settings, optimizer, fsdp or "ddp", *more.values()]),
        "diloco": diloco,
        "stop": stop,
        "optimizer": optimizer,
        "fsdp": fsdp,
        "max_duration": "13ba",
    } | more


def run_groups(
    tmp_path: Path,
    cases: list[dict],
    *,
    ranks: int,
    resumes: bool,
    launcher: list[str] | None = None,
) -> None:
    """Run the cases in two replica groups, processes of their own, to their end."""
    with ExitStack() as stack:
        lighthouses = [start_lighthouse(heartbeat_timeout_ms=2_000) for _ in cases]
        for lighthouse in lighthouses:
            stack.callback(lighthouse.shutdown)
        plan = tmp_path / f"plan_{resumes}.json"
        addresses = [lighthouse.address() for lighthouse in lighthouses]
        plan.write_text(
            json.dumps(
                {"out": str(tmp_path), "cases": cases, "resumes": resumes, "lighthouses": addresses}
            )
        )
        both = [
            groups.start(
                group,
                ranks,
                SCRIPT,
                plan,
                folder=tmp_path,
                launcher=launcher,
                NUM_REPLICA_GROUPS="2",
            )
            for group in range(2)
        ]
        for group in both:
            stack.callback(group.kill)
        for group in both:
            group.wait()


def results(tmp_path: Path, case: dict, resumes: bool) -> dict[str, dict]:
    paths = sorted(tmp_path.glob(f"{case['name']}.{resumes}.*.json"))
    return {path.name.split(".", 2)[2]: json.loads(path.read_text()) for path in paths}


def check_samples(found: dict[str, dict]) -> None:
    """In an epoch of five batches every sample comes once, in whatever rounds it is cut into."""
    for epoch in range(2):
        batches = [
            b
            for one in found.values()
            for at, b in one["batches"].items()
            if 5 * epoch < int(at) <= 5 * (epoch + 1)
        ]
        samples = sorted(sample for batch in batches for sample in batch["samples"])
        assert samples == list(range(80))


def check_resumed(tmp_path: Path, cases: list[dict], ranks: int) -> None:
    for each in cases:
        whole, resumed = (results(tmp_path, each, resumes) for resumes in (False, True))
        assert len(whole) == len(resumed) == 2 * ranks
        check_samples(whole)
        joined = {
            name: {"batches": one["batches"] | resumed[name]["batches"]}
            for name, one in whole.items()
        }
        check_samples(joined)
        for name, one in whole.items():
            other = resumed[name]
            rest = {int(at): b for at, b in one["batches"].items() if int(at) > each["stop"]}
            assert list(rest) == list(range(each["stop"] + 1, 14))
            assert {int(at): b for at, b in other["batches"].items()} == rest, (each, name)
            for key in ("model", "inner"):
                assert one[key] == other[key], (each, name, key)
            for key in ("global_digest", "inner_steps", "outer_steps"):
                assert one["result"][key] == other["result"][key], (each, name, key)


def test_stopped_in_mid_round_and_resumed_in_new_processes_is_bitwise_uninterrupted(tmp_path):
    # One group of one rank is tests/callback/test_resume.py.
    cases = [
        case("vanilla", "sgd", "sharded"),
        case("in_flight", "adamw", None),
        case("alpha", "adamw", "sharded"),
        case("int8", "adamw", "sharded"),
        case("schedule", "adamw", "sharded"),
        case("in_flight", "adamw", None, dtype="bfloat16", ema="2ba"),
        *[case("in_flight", "adamw", fsdp, ema="2ba") for fsdp in ("full", "sharded")],
        *[case("in_flight", "muon", fsdp) for fsdp in ("full", "sharded")],
    ]
    run_groups(tmp_path, cases, ranks=2, resumes=False)
    run_groups(tmp_path, cases, ranks=2, resumes=True)
    check_resumed(tmp_path, cases, ranks=2)
    check_averages(tmp_path, [each for each in cases if "ema" in each])


def check_averages(tmp_path: Path, cases: list[dict]) -> None:
    """EMA's weights and the global ones are equal in both groups, also in what is saved."""
    for each in cases:
        found = results(tmp_path, each, False)
        assert len({one["batches"]["13"]["ema"][0] for one in found.values()}) == (
            2 if each["fsdp"] else 1  # each rank has its shard
        )
        saved = []
        for group in range(2):
            path = tmp_path / each["name"] / str(group) / name_of(each)
            if path.is_dir():
                dcp_to_torch_save(path, tmp_path / "whole.pt")
                path = tmp_path / "whole.pt"
            state = read_checkpoint(path)["state"]
            weights = state["model"], state["callbacks"]["DiLoCoCallback"]["theta"]
            saved.append([{name: t.tolist() for name, t in each.items()} for each in weights])
        assert saved[0] == saved[1] and saved[0][0] != saved[0][1]


def name_of(case: dict) -> str:
    """Of the checkpoint from which a case is resumed."""
    stop = case["stop"]
    return f"ep{(stop - 1) // 5}-ba{stop}" if case["fsdp"] == "sharded" else f"ba{stop}.pt"


def test_a_group_may_go_on_with_another_number_of_ranks(tmp_path):
    # A sync is in flight, of sharded parameters and of replicated ones.
    cases = [case("in_flight", "adamw", "sharded"), case("in_flight", "adamw", None)]
    cases += [case("in_flight", "adamw", None, ema="2ba")]
    run_groups(tmp_path, cases, ranks=2, resumes=False)
    at_start = []
    for ranks, launcher in ((2, groups.TORCHRUN), (1, None)):
        run_groups(tmp_path, cases, ranks=ranks, resumes=True, launcher=launcher)
        found = [results(tmp_path, each, True) for each in cases]
        assert [len(each) for each in found] == [2 * ranks] * 3
        at_start.append([{name[0]: one["at_start"] for name, one in r.items()} for r in found])
        for path in tmp_path.glob("*.True.*.json"):
            path.unlink()
        if ranks == 1:
            for each in found:
                one, other = (each[f"{group}.0.json"]["result"] for group in range(2))
                assert one["inner_steps"] == 13
                # Of one rank a group, the digest is that of whole parameters.
                assert one["global_digest"] == other["global_digest"]
            averages = [one["batches"]["13"]["ema"] for one in found[2].values()]
            assert averages[0] == averages[1]
    assert at_start[0] == at_start[1]
