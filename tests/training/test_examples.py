"""The configs in examples/ train, as processes and simulated.

Each is launched once and simulated once, small.
"""

import ast
import importlib.util
import math
import sqlite3
import subprocess
from pathlib import Path

import pytest
import torch
from forked_commands import ForkedCommand
from hydra.utils import instantiate
from run_events import result_of
from torch.utils.data import DistributedSampler

from composer_replication.launch.job import TRAIN, Job
from composer_replication.launch.launcher import LaunchOptions, launch_groups
from composer_replication.training import load_config, simulate_replicas

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
GROUPS = 2


def needs(module):
    """Skips a test where a library is missing that its example needs."""
    reason = f"{module} is not installed, which this example needs: pip install {module}"
    return pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=reason)


@pytest.fixture(params=["launch", "simulate"])
def train(request, tmp_path, monkeypatch):
    """Trains an example in two groups, and returns their results and their last checkpoints."""
    monkeypatch.chdir(ROOT)  # where its config says that it is started
    if importlib.util.find_spec("llmfoundry") is None:  # an import of it starts a thread: no forks
        monkeypatch.setattr(subprocess, "Popen", ForkedCommand)  # the groups need not import

    def run(name, *overrides):
        folder = tmp_path / "run"
        saving = f"run_dir={folder}", "save_folder=checkpoints", "save_interval=1ep"
        config = load_config(
            EXAMPLES / name, [*overrides, *saving, "callbacks.diloco.sync_every=5"]
        )
        if request.param == "launch":
            job = Job(config=config, source=name, name=name, command=TRAIN)
            assert launch_groups(job, LaunchOptions(replicas=GROUPS)) == 0
            results = [result_of(folder / f"replica_{i}") for i in range(GROUPS)]
        else:
            results = simulate_replicas(config, GROUPS)
        assert len({result["global_digest"] for result in results}) == 1
        assert all(math.isfinite(result["final_loss"]) for result in results)
        return results, [load_model(folder / f"replica_{i}" / "checkpoints") for i in range(GROUPS)]

    run.way = request.param
    run.folder = tmp_path / "run"
    return run


def load_model(folder):
    """The model of the last checkpoint, whose file has a link."""
    return torch.load(folder / "latest-rank0.pt", weights_only=False)["state"]["model"]


@pytest.mark.integration
def test_an_image_classifier_of_torchvision_with_batch_norm(train):
    results, models = train("image_classifier.yaml", "max_duration=15ba")
    assert [result["outer_steps"] for result in results] == [3, 3]
    assert results[0]["eval"].keys() >= {"MulticlassAccuracy", "CrossEntropy"}
    assert results[0]["eval"] == results[1]["eval"]  # of one model, with one set of statistics
    means = [model["module.conv1.1.running_mean"] for model in models]
    assert torch.equal(*means) and means[0].abs().sum() > 0


@pytest.mark.integration
@needs("transformers")
def test_a_causal_language_model_of_hugging_face_with_tied_embeddings(train):
    results, models = train("causal_lm.yaml", "max_duration=20ba", "eval_subset_num_batches=2")
    assert results[0]["eval"] == results[1]["eval"]
    assert results[0]["eval"]["LanguageCrossEntropy"] < math.log(256) - 1
    for model in models:
        tied = model["model.lm_head.weight"], model["model.transformer.wte.weight"]
        assert torch.equal(*tied) and torch.equal(tied[0], models[0]["model.lm_head.weight"])


@pytest.mark.integration
@needs("streaming")
def test_a_streaming_dataset_on_disk_with_leases(train, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    from examples.streamed_shapes import write

    length = 200
    write(str(tmp_path / "shapes"), length)
    results, _ = train(
        "streaming_dataset.yaml",
        f"train_dataloader.dataset.local={tmp_path / 'shapes'}",
        "train_dataloader.unit_size=16",
        "max_duration=1ep",
    )
    assert sum(result["inner_steps"] for result in results) >= length // 8
    if train.way == "launch":
        with sqlite3.connect(train.folder / "coordinator.sqlite") as database:
            (row,) = database.execute("SELECT dataset_id, length FROM datasets").fetchall()
            (epoch,) = database.execute("SELECT done, trained_twice FROM epochs").fetchall()
        assert row == ("shapes-1", length) and epoch == (length, 0)


def test_the_examples_are_these_and_open_with_the_commands_that_run_them():
    paths = sorted(EXAMPLES.glob("*.yaml"))
    names = [path.stem for path in paths]
    assert names == ["causal_lm", "image_classifier", "streaming_dataset"]
    for path in paths:
        comment = path.read_text().partition("seed:")[0]
        for command in ("launch", "simulate"):
            assert f"composer-replication {command} examples/{path.name} --replicas" in comment


@pytest.mark.parametrize("name", ["causal_lm", "image_classifier", "streaming_dataset"])
def test_each_process_of_a_group_evaluates_its_own_part(name):
    loader = instantiate(load_config(EXAMPLES / f"{name}.yaml").eval_dataloader)
    assert isinstance(loader.sampler, DistributedSampler)  # Composer refuses another one
    assert len(loader.sampler.dataset) == len(loader.dataset)


@pytest.mark.parametrize("path", sorted(EXAMPLES.iterdir()), ids=lambda path: path.name)
def test_an_example_has_at_most_sixty_lines(path):
    assert not path.is_file() or len(path.read_text().splitlines()) <= 60


@pytest.mark.parametrize(
    ("name", "page"),
    [("plain_loop", "loop"), ("switch", "composer-job"), ("train_fsdp", "fsdp")],
)
def test_a_script_opens_with_the_commands_of_the_page_which_are_run_there(name, page):
    opening = ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text()))
    commands = str(opening).partition("\n\n")[2]
    assert commands and f"```bash\n{commands}\n```" in (ROOT / f"docs/{page}.md").read_text()
