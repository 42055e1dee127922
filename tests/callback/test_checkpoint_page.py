"""The lines of docs/checkpoints.md, run as they stand.

Run: pytest tests/callback/test_checkpoint_page.py

Real: Composer's checkpoints and torch's folders. The network is the simulation's.
"""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from composer.algorithms import EMA
from composer_jobs import TinyModel, fit_alone, read_checkpoint
from page_blocks import block
from safetensors.torch import load_file

FOLDER = "runs/mine/replica_0/checkpoints"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def global_weights(callback):
    return {n: t for part in callback._group.ended["fragments"] for n, t in part["theta"].items()}


def test_safetensors_have_the_model_of_the_checkpoint():
    callback, _ = fit_alone(save_folder=FOLDER, save_interval="4ba")
    exec(block("docs/checkpoints.md", "import datetime"), {})
    weights = load_file("model.safetensors")
    assert all(torch.equal(weights[n], t) for n, t in global_weights(callback).items())
    TinyModel().load_state_dict(weights)  # strict


def test_with_ema_the_global_weights_are_beside_emas():
    ema = {"algorithms": [EMA(half_life="2ba")]}
    callback, _ = fit_alone(save_folder=FOLDER, save_interval="4ba", **ema)
    names = {}
    exec(block("docs/checkpoints.md", "import datetime"), names)
    exec(block("docs/checkpoints.md", "global_weights ="), names)
    saved, emas = names["global_weights"], load_file("model.safetensors")
    assert saved.keys() == global_weights(callback).keys()
    for name, tensor in global_weights(callback).items():
        assert torch.equal(saved[name], tensor) and not torch.equal(emas[name], tensor)


@pytest.mark.filterwarnings("ignore")  # torch's, of a process without ranks
def test_a_sharded_checkpoint_becomes_a_file():
    fit_alone(save_folder="file", save_interval="4ba")
    state = read_checkpoint("file/latest-rank0.pt")
    dcp.save(state, checkpoint_id=f"{FOLDER}/ep0-ba400", no_dist=True)
    exec(block("docs/checkpoints.md", "from torch.distributed.checkpoint"), {})
    model = read_checkpoint("checkpoint.pt")["state"]["model"]
    assert model.keys() == state["state"]["model"].keys()
    assert all(torch.equal(model[n], t) for n, t in state["state"]["model"].items())
