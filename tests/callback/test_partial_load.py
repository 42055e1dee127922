"""A checkpoint of which the model takes only a part.

Run: pytest tests/callback/test_partial_load.py.

Real: Composer's Trainer and its checkpoints in ``tmp_path``. The network is the simulation's.
"""

import copy
import json

import pytest
import torch
from composer import Callback
from composer_jobs import STREAMING, building, callback_of, train_and_save, trainer_of

from composer_replication.callback.checksums import checksums
from composer_replication.callback.export import read_checkpoint
from composer_replication.simulation.simulation import SimulationError, simulate

HEAD = ("mlp.layers.4.weight", "mlp.layers.4.bias")
NEW_HEAD = ["state/model/mlp.layers.4*"]
WARNING = "tensors of the model are not the checkpoint's"
HEAD_FIRST = STREAMING | {"fragment_patterns": ["mlp.layers.4*", "*"]}


class Start(Callback):
    """What this group starts from, as of before its first batch."""

    def __init__(self, diloco):
        self._diloco = diloco
        self.theta = {}

    def fit_start(self, state, logger):
        diloco = self._diloco.diloco
        self.packed = copy.deepcopy(self._diloco.state_dict())
        self.local = {n: p.detach().clone() for n, p in state.model.named_parameters()}
        self.theta = {n: t.clone() for n, t in diloco.global_parameters().items()}


def resume(sim, path, ignored=(), *, replaces=None, batches=12, diloco=None, seed=None, **more):
    """Resume one group from a checkpoint; what its model held before the fit, and at its start."""
    callback = callback_of(sim, **{"sync_every": 4} | (diloco or {}))
    start = Start(callback)
    trainer = trainer_of(
        callback,
        start,
        replica_id=sim.replica_id if seed is None else seed,
        load_path=str(path),
        load_ignore_keys=list(ignored),
        load_strict_model_weights=not ignored,
        max_duration=f"{batches}ba",
        **more,
    )
    if replaces is not None:
        with building, torch.no_grad():
            replaces(trainer.state.model)
    fresh = {n: p.detach().clone() for n, p in trainer.state.model.named_parameters()}
    trainer.fit()
    trainer.close()
    return callback, start, fresh


def resume_alone(path, *args, **kwargs):
    return simulate(lambda sim: resume(sim, path, *args, **kwargs), num_replicas=1)[0]


def saved_in(path):
    state = read_checkpoint(path)["state"]
    return state["model"], state["callbacks"]["DiLoCoCallback"]


def replace_head(model):
    model.mlp.layers[4].weight.fill_(0.25)
    model.mlp.layers[4].bias.zero_()


def check_start(start, fresh, path, kept):
    """What was kept is the model's own; of the rest all is the checkpoint's."""
    model, ours = saved_in(path)
    for name, theta in start.theta.items():
        if name in kept:
            assert torch.equal(start.local[name], fresh[name])
            assert torch.equal(theta, fresh[name])
            assert not start.packed["momentum"][name].any()
            assert not torch.equal(theta, model[name])
        else:
            assert torch.equal(start.local[name], ours["local"][name])
            assert torch.equal(theta, model[name])
            assert torch.equal(start.packed["momentum"][name], ours["momentum"][name])
            assert ours["momentum"][name].any()


@pytest.mark.parametrize("how", ["ignored", "by_hand"])
def test_a_new_head_is_what_trains_and_what_is_global(tmp_path, caplog, how):
    train_and_save(tmp_path, num_replicas=1)
    path = tmp_path / "0" / "ba6.pt"
    given = {"ignored": NEW_HEAD, "seed": 5} if how == "ignored" else {"replaces": replace_head}
    callback, start, fresh = resume_alone(path, **given)
    check_start(start, fresh, path, HEAD)
    told = [text for text in caplog.messages if WARNING in text]
    assert len(told) == 1
    assert told[0].startswith("2 of 6 tensors") and told[0].endswith(", ".join(HEAD))
    assert callback.result["outer_steps"] == 3 and callback.result["inner_steps"] == 12


def test_a_model_of_which_nothing_was_loaded_is_kept_whole(tmp_path, caplog):
    train_and_save(tmp_path, num_replicas=1)
    path = tmp_path / "0" / "ba6.pt"
    callback, start, fresh = resume_alone(path, ["state/model/*"], seed=5)
    check_start(start, fresh, path, fresh.keys())
    assert any(text.startswith("6 of 6 tensors") for text in caplog.messages)
    assert json.loads(start.packed["progress"])["since_sync"] == [[0, 0]]  # of it nothing is left
    assert callback.result["outer_steps"] == 3


def test_what_was_loaded_whole_is_not_warned_of(tmp_path, caplog):
    train_and_save(tmp_path, num_replicas=1)
    resume_alone(tmp_path / "0" / "ba6.pt", seed=5)
    assert not any(WARNING in text for text in caplog.messages)


def test_a_checkpoint_without_checksums_loads_as_it_always_has(tmp_path, caplog):
    train_and_save(tmp_path, num_replicas=1)
    path = tmp_path / "0" / "ba6.pt"
    saved = torch.load(path, weights_only=False)
    ours = saved["state"]["callbacks"]["DiLoCoCallback"]
    progress = json.loads(ours["progress"])
    del progress["checksums"]
    ours["progress"] = json.dumps(progress)
    torch.save(saved, path)
    _, start, _ = resume_alone(path, NEW_HEAD, seed=5)
    assert all(torch.equal(start.local[name], ours["local"][name]) for name in HEAD)
    assert not any(WARNING in text for text in caplog.messages)


@pytest.mark.parametrize(("batch", "is_kept"), [(3, False), (7, True)])
def test_what_is_in_flight_is_formed_anew_if_a_part_of_it_was_not_loaded(tmp_path, batch, is_kept):
    # The head is the first of two fragments: it is in flight at batch 3, and the other one at 7.
    run = {"diloco": HEAD_FIRST, "num_replicas": 1, "interval": "1ba", "max_duration": "8ba"}
    train_and_save(tmp_path, **run)
    path = tmp_path / "0" / f"ba{batch}.pt"
    assert saved_in(path)[1]["in_flight"]["packs"][0]["fragment"] == int(is_kept)
    callback, start, _ = resume_alone(path, NEW_HEAD, diloco=HEAD_FIRST, seed=5, batches=16)
    assert bool(start.packed["in_flight"]) == is_kept
    assert callback.result["outer_steps"] > 2


@pytest.mark.parametrize("wire_format", ["float32", "int8"])
@pytest.mark.slow
def test_groups_that_are_given_the_same_new_head_go_on_together(tmp_path, wire_format):
    diloco = HEAD_FIRST | {"wire_format": wire_format}
    train_and_save(tmp_path, diloco=diloco, max_duration="7ba", interval="7ba")

    def replica(sim):
        path = tmp_path / f"{sim.replica_id}" / "ba7.pt"
        return resume(sim, path, NEW_HEAD, diloco=diloco, seed=5, batches=16)

    (one, start, fresh), (other, *_) = simulate(replica, num_replicas=2)
    assert all(torch.equal(start.theta[name], fresh[name]) for name in HEAD)
    assert one.result["global_digest"] == other.result["global_digest"]
    assert one.result["outer_steps"] == other.result["outer_steps"]


def test_groups_with_different_new_heads_end_by_name(tmp_path):
    train_and_save(tmp_path)

    def replica(sim):
        path = tmp_path / f"{sim.replica_id}" / "ba6.pt"
        return resume(sim, path, NEW_HEAD, seed=5 + sim.replica_id)

    with pytest.raises(SimulationError, match="DivergenceError: .* groups 0, 1 .* differ in the"):
        simulate(replica, num_replicas=2)


# ---- the checksum itself -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_checksum_is_of_the_bits_and_of_no_layout(dtype):
    tensor = torch.randn(3, 5, 4, 2).to(dtype)
    before = tensor.clone()
    [whole] = checksums({"a": tensor}).values()
    assert torch.equal(tensor, before)
    [permuted] = checksums({"a": tensor.to(memory_format=torch.channels_last)}).values()
    assert whole == permuted
    parts = sum(checksums({str(i): t for i, t in enumerate(tensor.split(2))}).values())
    assert (parts - whole) % 2**64 == 0
    for other in (-tensor, tensor.nextafter(tensor + 1), tensor * 2, torch.zeros_like(tensor)):
        assert checksums({"a": other})["a"] != whole


def test_an_empty_shard_and_a_number_have_checksums():
    found = checksums({"empty": torch.empty(0, 3), "number": torch.tensor(2.0)})
    assert found["empty"] == 0 != found["number"]
    assert found["number"] != checksums({"number": torch.tensor(-2.0)})["number"]
