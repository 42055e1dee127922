"""A group that trains alone: its ranks, and its checkpoint in a run of two groups.

Run: pytest tests/integration/test_alone.py. Real: processes, gloo, FSDP2, Composer's checkpoints,
the lighthouse and heals.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from composer import Callback
from composer.loggers import InMemoryLogger
from harness import trainers
from harness.processes import Process, run_groups
from harness.trainers import STREAMING, read_checkpoint
from integration.composer_ranks import train as train_rank
from torch.utils._pytree import keystr, tree_flatten_with_path

from composer_replication.callback import DiLoCoCallback
from composer_replication.group import replica_group
from composer_replication.options import ReplicaOptions
from composer_replication.replica.factory import connect

pytestmark = pytest.mark.integration

RANKS = 2


# ---- its ranks ------------------------------------------------------------------------------


class Failing(Callback):
    """On rank 1 something fails in the sync that follows the fourth batch, once."""

    def __init__(self, fail: Callable[[Any], None]) -> None:
        self._fail = fail
        replica_group.connect = self._connect

    def _connect(self, options: ReplicaOptions) -> Any:
        self._manager = connect(options)
        return self._manager

    def batch_start(self, state: Any, logger: Any) -> None:
        if state.timestamp.batch != 3 or dist.get_rank() != 1:
            return
        manager = self._manager
        begin = manager.start_quorum

        def begin_and_fail() -> None:
            begin()
            manager.start_quorum = begin
            self._fail(manager)

        manager.start_quorum = begin_and_fail


def report(manager: Any) -> None:
    manager.report_error(RuntimeError("on this rank alone"))


def fail(manager: Any) -> None:
    raise RuntimeError("on this rank alone")


def train_job(is_sharded: bool, fault: Any = None, **place: Any) -> dict[str, Any]:
    diloco = DiLoCoCallback(num_replicas=1, sync_every=2, digest_every=1, timeout=30.0, **place)
    logged = InMemoryLogger()
    found = train_rank(
        diloco,
        *([Failing(fault)] if fault else []),
        fsdp="full" if is_sharded else None,
        max_duration="7ba",
        seed=1,
        loggers=[logged],
    )
    return found | {"retries": [value for _, value in logged.data["diloco/retries"]]}


def train_alone_and_as_one_group(process: Process, folder: str, is_sharded: bool) -> dict[str, Any]:
    """The same job alone, alone with a fault, and as the one group of a lighthouse."""
    os.environ["FSDP_VERSION"] = "2"
    group = process.of_rank(folder, RANKS, timeout_s=20.0)  # one rank fails, and the other waits
    one_group = {"lighthouse_addr": group.lighthouse_addr, "hostname": "127.0.0.1"}
    found: dict[str, Any] = {
        "alone": train_job(is_sharded),
        "with a fault": train_job(is_sharded, report),
        "lighthouse": train_job(is_sharded, replica_id=0, **one_group),
    }
    with pytest.raises(Exception) as caught:
        train_job(is_sharded, fail)
    return found | {"error": str(caught.value)}


@pytest.mark.parametrize("is_sharded", [False, True], ids=["ddp", "fsdp2"])
def test_its_ranks_are_of_one_mind_and_bitwise_those_of_a_lighthouse(tmp_path, is_sharded):
    ranks = run_groups(
        train_alone_and_as_one_group, RANKS, folder=str(tmp_path), is_sharded=is_sharded
    )
    alone = [rank["alone"] for rank in ranks]
    assert alone[0]["result"] == alone[1]["result"]
    assert alone[0]["result"]["outer_steps"] == 4
    assert [rank["retries"] for rank in alone] == [[0, 0, 0, 0]] * RANKS
    if not is_sharded:
        one, other = (rank["batches"].values() for rank in alone)
        for key in ("local", "global"):
            assert [held[key] for held in one] == [held[key] for held in other]
    for rank in ranks:
        failed = rank["with a fault"]
        assert failed.pop("retries") == [0, 1, 0, 0]  # on the other rank too
        assert failed == {key: rank["alone"][key] for key in failed}
        assert rank["lighthouse"] == rank["alone"]
    # One that raises ends the other, which would wait for its vote.
    assert ranks[1]["error"] == "on this rank alone"
    assert ranks[0]["error"]


# ---- its checkpoint in a larger run -----------------------------------------------------------

SETTINGS = STREAMING | {"wire_format": "int8", "schedule": []}  # saved in flight
SAVED_AT = 7


class Start(Callback):
    """What a group would save when it has joined, and how many groups were there."""

    def __init__(self, diloco: DiLoCoCallback) -> None:
        self._diloco = diloco
        self.found: dict[str, Any] = {}

    def fit_start(self, state: Any, logger: Any) -> None:
        diloco = self._diloco.diloco
        assert diloco is not None
        self.found = copy.deepcopy(
            {
                "global": dict(diloco.global_parameters()),
                "outer_step": diloco.outer_step,
                "saved": self._diloco.state_dict(),
            }
        )


def train(diloco: DiLoCoCallback, **arguments: Any) -> dict[str, Any]:
    fit = trainers.train(diloco, Start, max_duration="16ba", **arguments)
    return fit.others[0].found | {"result": fit.result}


def go_on_with_others(group: Process, path: str) -> dict[str, Any]:
    """Group 0 has the checkpoint; the other one has other weights and data, and no checkpoint."""
    diloco = DiLoCoCallback(
        lighthouse_addr=group.lighthouse_addr,
        replica_id=group.replica_id,
        num_replicas=group.num_replicas,
        hostname="127.0.0.1",
        digest_every=1,
        **SETTINGS,
    )
    load_path = path if group.replica_id == 0 else None
    return train(diloco, replica_id=group.replica_id, load_path=load_path)


def leaves(tree: Any) -> dict[str, Any]:
    """The values by their place in a tree, of tensors their bytes."""
    named = ((keystr(path), leaf) for path, leaf in tree_flatten_with_path(tree)[0])
    return {
        name: leaf.numpy().tobytes() if isinstance(leaf, torch.Tensor) else leaf
        for name, leaf in named
    }


def test_its_checkpoint_is_the_first_group_of_two_and_the_other_one_heals_from_it(tmp_path):
    saving = {"save_filename": "ba{batch}.pt", "save_interval": f"{SAVED_AT}ba"}
    alone = DiLoCoCallback(num_replicas=1, **SETTINGS)
    whole = train(alone, save_folder=str(tmp_path), **saving)
    path = tmp_path / f"ba{SAVED_AT}.pt"
    state = read_checkpoint(path)["state"]
    saved = state["callbacks"]["DiLoCoCallback"]

    first, second = run_groups(go_on_with_others, path=str(path))

    assert leaves(first["saved"]) == leaves(saved)
    for group in (first, second):
        assert leaves(group["global"]) == leaves(dict(state["model"]))
        assert leaves(group["saved"]["momentum"]) == leaves(saved["momentum"])
        assert group["outer_step"] == json.loads(saved["progress"])["outer_step"] == 1
    assert any(tensor.any() for tensor in saved["momentum"].values())
    assert saved["residual"] and saved["in_flight"]
    assert first["result"]["global_digest"] == second["result"]["global_digest"]
    assert first["result"]["outer_steps"] == whole["result"]["outer_steps"]
    assert first["result"]["global_digest"] != whole["result"]["global_digest"]
