"""Which checkpoints are whole, and what becomes of the others.

Run: pytest tests/group/test_checkpoint_files.py. Real: the files, as torch and safetensors write
them.
"""

import json
import os

import pytest
import torch
from safetensors.torch import save_file

from composer_replication.group.checkpoint_files import (
    NO_STATE,
    newest_first,
    newest_whole,
    problem_of,
    set_aside,
    whole_of,
)


def checkpoint_of_trainer(folder, step):
    """A folder as Hugging Face's Trainer leaves it, with DiLoCo's part."""
    made = folder / f"checkpoint-{step}"
    made.mkdir(parents=True)
    weights = {"a": torch.randn(64, 8)}
    for name in ("diloco.pt", "optimizer.pt", "rng_state.pth", "training_args.bin"):
        torch.save(weights, made / name)
    save_file(weights, made / "model.safetensors")
    (made / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    (made / "README.md").touch()
    return made


FILES = (
    "diloco.pt model.safetensors optimizer.pt rng_state.pth trainer_state.json training_args.bin"
).split()


@pytest.mark.parametrize("name", FILES)
def test_a_folder_is_whole_until_any_of_its_files_is_cut_off(tmp_path, name):
    whole = checkpoint_of_trainer(tmp_path, 20)
    assert problem_of(whole) is None
    content = (whole / name).read_bytes()
    for size in [*range(0, len(content), max(1, len(content) // 50)), len(content) - 2]:
        (whole / name).write_bytes(content[:size])
        assert str(problem_of(whole)).startswith(name), size
        if size < len(content) - 22 and name != "model.safetensors":  # it has DiLoCo's checksum
            zeroed = content[:size] + bytes(len(content) - size)  # as a power cut may leave it
            (whole / name).write_bytes(zeroed)
            assert str(problem_of(whole)).startswith(name), size
    (whole / name).write_bytes(content)
    assert problem_of(whole) is None


@pytest.mark.parametrize(
    ("name", "problem"),
    [("diloco.pt", NO_STATE), ("trainer_state.json", "trainer_state.json is missing")],
)
def test_a_folder_without_what_is_written_first_or_last_is_not_whole(tmp_path, name, problem):
    whole = checkpoint_of_trainer(tmp_path, 20)
    (whole / name).unlink()
    assert problem_of(whole) == problem


@pytest.mark.parametrize("name", ["metrics.json", "rows.bin", "notes/config.json/x", "probe.pt"])
def test_what_others_keep_in_a_checkpoint_may_have_any_content(tmp_path, name):
    whole = checkpoint_of_trainer(tmp_path, 20)
    (whole / name).parent.mkdir(parents=True, exist_ok=True)
    for content in (b"", b'{"a": 1}\n{"a": 2}\n', bytes(64)):
        (whole / name).write_bytes(content)
        assert problem_of(whole) is None


def test_a_model_of_several_files_needs_all_that_its_index_names(tmp_path):
    whole = checkpoint_of_trainer(tmp_path, 20)
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model.safetensors"}}
    (whole / "model.safetensors.index.json").write_text(json.dumps(index))
    problem = "model.safetensors.index.json names model-1.safetensors, which is missing"
    assert problem_of(whole) == problem


def test_a_sharded_checkpoint_is_whole_with_what_torch_writes_last(tmp_path):
    folder = tmp_path / "ep0-ba20"
    folder.mkdir()
    (folder / "__0_0.distcp").write_bytes(b"shards")
    assert problem_of(folder) == ".metadata is missing"
    (folder / ".metadata").write_bytes(b"metadata")
    assert problem_of(folder) is None


def test_torch_s_old_format_and_compressed_files_count_as_whole_unless_they_are_empty(tmp_path):
    path = tmp_path / "old.pt"
    torch.save({"a": 1}, path, _use_new_zipfile_serialization=False)
    assert problem_of(path) is None
    path.write_bytes(b"")
    assert problem_of(path) == "is empty"
    assert problem_of(tmp_path / "none.pt") == "is missing"


def test_the_newest_is_by_number_and_a_torn_one_is_set_aside_for_the_one_before(tmp_path):
    for step in (9, 10, 100):
        checkpoint_of_trainer(tmp_path, step)
    pattern = f"{tmp_path}/checkpoint-*"
    assert [path.name for path in newest_first(pattern)] == [
        "checkpoint-100",
        "checkpoint-10",
        "checkpoint-9",
    ]
    os.truncate(tmp_path / "checkpoint-100" / "diloco.pt", 100)
    assert newest_whole(pattern) == tmp_path / "checkpoint-10"
    whole, torn = whole_of(newest_first(pattern))
    assert torn == {tmp_path / "checkpoint-100": "diloco.pt is cut off"}
    said = set_aside(torn, whole)
    assert f"{tmp_path / 'checkpoint-100'} (diloco.pt is cut off)" in said
    assert "This group continues from checkpoint-10" in said
    assert newest_first(pattern)[0].name == "checkpoint-10"
    checkpoint_of_trainer(tmp_path, 100)
    set_aside(torn, whole)  # in the place of the one before
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == ["checkpoint-10", "checkpoint-9", "torn-checkpoint-100"]
    assert newest_whole(f"{tmp_path}/*/none") is None
    torn = {tmp_path / "checkpoint-10": "is of another group"}
    assert "begins with" not in set_aside(torn, None, renames=False)
    assert (tmp_path / "checkpoint-10").exists()
