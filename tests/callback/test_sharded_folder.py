"""A sharded checkpoint is read without running what is in it.

Run: pytest tests/callback/test_sharded_folder.py

Real: folders that torch has written, honest ones and ones whose pickles call a function.
"""

import json
import pickle
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from composer_replication.callback.checkpoint_files import (
    newest_whole,
    usable_checkpoint,
    what_is_wrong,
)
from composer_replication.callback.export import export
from composer_replication.callback.sharded_folder import read_metadata

PROGRESS = json.dumps({"outer_step": 3, "inner_steps": 6})
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's, of a process without ranks


class Trap:
    """Makes a file when it is unpickled."""

    def __init__(self, sprung):
        self.sprung = sprung

    def __reduce__(self):
        return Path.touch, (self.sprung,)


def save(folder, progress=PROGRESS, **other):
    model = {str(dtype): torch.ones(2, 3).to(dtype) for dtype in DTYPES}
    state = {"model": model, "callbacks": {"DiLoCoCallback": {"progress": progress}}, **other}
    dcp.save({"state": state}, checkpoint_id=folder, no_dist=True)
    return folder


def test_an_honest_checkpoint_is_whole_and_exported(tmp_path):
    nested = {"optimizers": OrderedDict(a=[{"lr": 0.1, "betas": (0.9, 0.99)}]), "rng": [None, 1]}
    folder = save(tmp_path / "ba1", **nested)
    assert what_is_wrong(folder) is None and newest_whole(tmp_path) == folder
    told = export(folder, tmp_path / "out.safetensors")
    assert (told["outer_step"], told["inner_steps"]) == (3, 6)
    weights = load_file(tmp_path / "out.safetensors")
    assert {name: t.dtype for name, t in weights.items()} == {str(d): d for d in DTYPES}
    assert all(t.float().sum() == 6 for t in weights.values())


def test_what_torch_has_written_is_read_as_torch_reads_it(tmp_path):
    folder = save(tmp_path / "ba1", optimizers={"a": {"step": torch.tensor(1.0)}})
    with (folder / ".metadata").open("rb") as file:
        assert read_metadata(folder) == pickle.load(file)


def test_code_in_the_metadata_is_not_run(tmp_path):
    folder, sprung = save(tmp_path / "ba1"), tmp_path / "sprung"
    (folder / ".metadata").write_bytes(pickle.dumps(Trap(sprung)))
    assert "needs pathlib.Path.touch, which no checkpoint needs" in what_is_wrong(folder)
    assert newest_whole(tmp_path) is None
    with pytest.raises(ValueError, match=r"cannot be read as a Composer checkpoint \(it needs"):
        export(folder, tmp_path / "out.safetensors")
    config = {"load_path": str(folder)}
    with pytest.raises(ValueError, match="cannot continue from"):
        usable_checkpoint(config, None, "error")
    assert not sprung.exists() and not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize("name", ["os", "os.system", "Metadata.__init__", "dataclass", "Enum"])
def test_the_metadata_s_module_leads_to_nothing_else(tmp_path, name):
    folder = save(tmp_path / "ba1")
    module = "torch.distributed.checkpoint.metadata"
    program = b"".join(
        [b"\x80\x04", *(b"\x8c" + bytes([len(t)]) + t.encode() for t in (module, name)), b"\x93."]
    )
    (folder / ".metadata").write_bytes(program)
    with pytest.raises(pickle.UnpicklingError, match=f"needs {module}.{name}, which no"):
        read_metadata(folder)


def test_code_in_an_entry_is_not_run(tmp_path):
    sprung = tmp_path / "sprung"
    folder = save(tmp_path / "ba1", progress=Trap(sprung))
    sprung.unlink(missing_ok=True)  # torch looks at what it saves
    with pytest.raises(ValueError, match=r"its entry .*\.progress holds more than plain data"):
        export(folder, tmp_path / "out.safetensors")
    assert not sprung.exists()


@pytest.mark.parametrize("content", [b"", b"\x80", bytes(50), pickle.dumps([1])])
def test_metadata_that_is_none_is_an_error_that_says_so(tmp_path, content):
    folder = save(tmp_path / "ba1")
    (folder / ".metadata").write_bytes(content)
    assert "its .metadata cannot be read" in what_is_wrong(folder)


def test_a_cut_file_is_an_error_of_the_export(tmp_path):
    folder = save(tmp_path / "ba1")
    part = next(folder.glob("*.distcp"))
    part.write_bytes(part.read_bytes()[:100])
    with pytest.raises(ValueError, match="cannot be read as a Composer checkpoint"):
        export(folder, tmp_path / "out.safetensors")


def test_an_export_writes_through_no_symbolic_link(tmp_path):
    folder = save(tmp_path / "ba1")
    victim, out = tmp_path / "victim", tmp_path / "out.safetensors"
    victim.write_text("mine")
    for link in (out, tmp_path / "out.safetensors.part"):
        link.symlink_to(victim)
    export(folder, out)
    assert victim.read_text() == "mine"
    assert not out.is_symlink() and len(load_file(out)) == len(DTYPES)
    assert {path.name for path in tmp_path.iterdir()} == {
        "ba1", "victim", "out.safetensors", "out.safetensors.part"
    }  # fmt: skip
