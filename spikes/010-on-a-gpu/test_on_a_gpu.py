"""The trainings on a GPU, with a tiny model on a CPU. Run: pytest spikes/010-on-a-gpu"""

import importlib.util
import json
import sys
from itertools import accumulate
from pathlib import Path

import pytest
import torch

from composer_replication.settings import DiLoCoSettings

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location(
        "on_a_gpu", Path(__file__).with_name("on_a_gpu.py")
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules["on_a_gpu"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["on_a_gpu"]


@pytest.fixture
def one_thread():
    """The threads of several groups would wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def few(script, tmp_path, monkeypatch):
    """A site-packages of few files, of which some are held out."""
    for number in range(200):
        (tmp_path / f"module_{number}.py").write_text(f"value_{number} = {number}\n" * 20)
    monkeypatch.setattr(script.sysconfig, "get_paths", lambda: {"purelib": str(tmp_path)})


@pytest.mark.slow
def test_all_arms_are_trained_once_and_a_line_that_was_cut_off_again(
    script, few, one_thread, tmp_path
):
    path = tmp_path / "results.jsonl"
    script.run(path, "tiny", CPU, minutes=9)
    lines = path.read_text().splitlines()
    results = [json.loads(line) for line in lines]
    assert [result["arm"] for result in results] == [arm.name for arm in script.ARMS]
    for result in results:
        assert len(result["curve"]) == script.POINTS and result["curve"][-1] == result["bits"]
        assert 0 < result["bits"] < result["curve"][0] < 8
    assert len({result["bits"] for result in results}) == len(results)
    path.write_text("\n".join(lines)[:-99])
    script.run(path, "tiny", CPU, minutes=0)  # not enough for the longest one
    assert len(script.read(path, "tiny")) == len(lines) - 1
    script.run(path, "tiny", CPU, minutes=9)
    again = script.read(path, "tiny")[script.ARMS[-1].name]
    assert again["bits"] == results[-1]["bits"]
    table = script.report(path, "tiny")
    assert table.count("one group alone") == 6 and "nan" not in table


def test_the_loss_is_evaluated_at_the_end_of_rounds(script):
    for size in script.SIZES.values():
        settings = DiLoCoSettings(sync_every=size.sync_every)
        ends = set(accumulate(settings.sync_every_at(n) for n in range(1, size.steps)))
        assert {n * size.steps // script.POINTS for n in range(1, script.POINTS + 1)} <= ends


def test_samples_of_all_groups_are_data_parallels_and_no_held_out_file_is_among_them(script, few):
    text, size = script.Text(1.0, CPU), script.SIZES["tiny"]
    whole = text.batch(size, 1, 7, slice(size.batch))
    parts = [text.batch(size, 1, 7, slice(n, n + 2)) for n in range(0, size.batch, 2)]
    assert torch.equal(torch.cat(parts), whole) and whole.shape == (8, 17)
    assert not torch.equal(whole, text.batch(size, 1, 8, slice(size.batch)))
    lines = [set(bytes(part).splitlines()) for part in (text.train, text.held_out)]
    assert len(lines[1]) > 1 and not lines[0] & lines[1] - {b""}
    for ids in text.evaluation(size):
        assert ids.shape == whole.shape


def test_the_published_fit_is_that_of_the_page(script):
    page = (Path(__file__).parents[2] / "docs" / "learning.md").read_text()
    for groups in script.GROUPS:
        assert f"{100 * (script.published(443_648, groups) - 1):.2f} %" in page
