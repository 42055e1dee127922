"""The learning study. Run: pytest spikes/009-learning"""

import itertools
import json
import math
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from study_modules import study_modules
from torch import nn
from torch.utils.data import Dataset

from composer_replication import settings as settings_module
from composer_replication.diloco.averaging import quantized_mean, wire_sizes
from composer_replication.settings import DiLoCoSettings


@pytest.fixture
def load():
    """A function that imports a script of the study by its name, and returns the module."""
    with study_modules() as load:
        yield load


def test_a_difference_is_that_worked_out_by_hand(load):
    compare = load("paired").compare
    # 1 % and 3 % above: mean 2, standard deviation sqrt(2), t(1) = 6.314, so 2 -+ 6.314.
    found = compare({1: 2.02, 2: 4.12, 9: 5.0}, {1: 2.0, 2: 4.0})
    assert found[:2] == (2, pytest.approx(2.0)) and found.spread == pytest.approx(2**0.5)
    assert (found.low, found.high) == (pytest.approx(-4.314), pytest.approx(8.314))
    assert found.is_within(8.4) and not found.is_within(8.3)
    assert compare({1: 2.0}, {2: 2.0}) is None
    assert str(compare({1: 2.02}, {1: 2.0})) == "+1.00 %"


def test_a_training_is_known_by_all_of_its_settings_and_no_line_is_double(load):
    cells, study = load("cells"), load("study")
    done = study.read()
    assert len(done) == len(study.RESULTS.read_text().splitlines())
    assert len({line["text"] for line in done.values()}) == 1
    for line in done.values():
        assert cells.Cell(**line["cell"]).key in done
    # Data parallel has no outer settings: they do not make another training of it.
    assert cells.Cell(outer_lr=0.1).key == cells.Cell(outer_lr=0.2).key
    assert cells.Cell(groups=2, outer_lr=0.1).key != cells.Cell(groups=2, outer_lr=0.2).key


def test_each_two_factors_of_the_jobs_have_all_pairs_of_levels_equally_often(load):
    jobs = load("defaults").JOBS
    columns = {
        "kind": [(job.model, job.inner) for job in jobs],
        **{
            name: [getattr(job, name) for job in jobs] for name in ("groups", "sync_every", "steps")
        },
    }
    for one, other in itertools.combinations(columns.values(), 2):
        pairs = Counter(zip(one, other, strict=True))
        assert set(pairs) == set(itertools.product(one, other))
        assert len(set(pairs.values())) == 1
    rates, texts = (Counter(getattr(job, name) for job in jobs) for name in ("rate", "data"))
    assert set(rates.values()) == {9} and set(texts.values()) == {6}


@pytest.mark.slow
def test_candidates_have_the_rate_of_the_best_reference_and_the_best_get_more_seeds(load):
    defaults = load("defaults")
    done = {}

    def train(bits, cell=None):
        cell = cell or next(iter(defaults.wanted(done)))
        done[cell.key] = {"cell": json.loads(cell.key), "bits": bits(cell), "cpu_seconds": 1.0}
        return cell

    cheapest = min(defaults.JOBS, key=lambda job: job.cost)
    rates = [train(lambda cell: 1 + cell.lr).lr for _ in load("candidates").GRID]
    first = train(lambda cell: math.nan)  # diverged
    assert (first.groups, first.lr, first.outer_momentum) == (cheapest.groups, min(rates), 0.9)
    assert defaults.gaps(cheapest, done) == {"0.7 / 0.9": math.inf}
    while left := [cell for cell in defaults.wanted(done) if cell.seed == 1]:
        for cell in left:
            # 1.0 / 0 is the best, then less momentum is better; 0.7 / 0.9 diverges in one job.
            train(
                lambda cell: 2 + cell.outer_momentum - cell.outer_lr / 10 if cell.groups else 2,
                cell,
            )
    # In the most expensive job no candidate is trained that cannot win any more.
    last = max(defaults.JOBS, key=lambda job: job.cost)
    # With H = 10 what was chosen is the same training as 0.7 / 0.5.
    assert defaults.gaps(last, done).keys() == {"plain mean", defaults.PLAIN, defaults.CHOSEN}
    assert defaults._not_beaten(done) == ["plain mean"]
    finalists = defaults._finalists(done)
    assert finalists == ["plain mean", defaults.PLAIN]
    named = {cell.outer_lr for cell in defaults.wanted(done) if cell.seed == 2 and cell.groups}
    assert {0.7, 1.0} <= named
    assert "+inf" in defaults.report(done)
    for line in done.values():
        line["cpu_seconds"] = 3600.0
    over = list(defaults.wanted(done))
    assert {cell.steps for cell in over} == {1800}  # the hours of the jobs are over
    assert not list(defaults.wanted(done, {cell.key: {} for cell in over}))


def test_the_worst_quarter_is_that_worked_out_by_hand(load):
    worst_quarter = load("defaults").worst_quarter
    assert worst_quarter([1, 9, 2, 3]) == 9
    assert worst_quarter([1, 9, 2, 3, 5]) == 7
    # Of 18 jobs the five largest count, and others can only take the place of smaller ones.
    assert load("defaults").floor([1, 9, 2, 3, 5, 7]) == 26 / 5


def test_rounds_that_follow_the_rate_grow_to_their_limit_and_stay(load):
    cell = load("defaults").equal_bytes(4)["H by the rate"]
    rounds = [cell.sync_every, *(steps for _, steps in cell.rounds)]
    assert rounds == sorted(set(rounds)) and rounds[0] == 15 and rounds[-1] == 120
    settings = DiLoCoSettings(sync_every=5, schedule=load("train")._schedule(cell))
    assert settings.sync_every_at(60) == 5 and settings.sync_every_at(61) == 15
    assert settings.sync_every_at(1000) == 120


def test_the_outer_momentum_rises_with_the_outer_steps_alone(load):
    cell = load("cells").Cell(outer_momentum=0.5, ramp=2.0)
    theta = nn.Parameter(torch.zeros(1))
    outer, found = load("inner_state").RisingMomentum.of(cell)([theta]), []
    for _ in range(4):
        theta.grad = torch.ones(1)
        outer.step()
        found.append(outer.param_groups[0]["momentum"])
        theta.grad = None
        outer.step()
    assert found == [1 / 3, 0.5, 0.5, 0.5]
    # Worked out by hand: momentum 1, 1.5, 1.75, 1.875; each step is 0.7 (1 + momentum * that).
    moved = 1 + 1 / 3 + 1 + 0.5 * 1.5 + 1 + 0.5 * 1.75 + 1 + 0.5 * 1.875
    assert theta.item() == pytest.approx(-0.7 * moved)


def test_two_bits_are_the_means_of_four_bins_worked_out_by_hand(load):
    two_bits = load("two_bits")
    fmt, block = two_bits.TwoBits(), two_bits.BLOCK
    # The squares add up to 2,048, and the mean of 512 is 4: a bin is 1.5 * 2 wide, and the bins end
    # at -3, 0 and 3. Their means are -232 / 50, -1, 278 / 302 and 3.25; bfloat16 has 8 bits.
    counts = {-8.0: 8, -4.0: 42, -1.0: 128, 0.0: 72, 1.0: 198, 2.5: 32, 3.25: 32}
    level = {-8.0: -4.625, -4.0: -4.625, -1.0: -1.0, 3.25: 3.25} | dict.fromkeys(
        (0.0, 1.0, 2.5), 236 / 256
    )
    values = [value for value, count in counts.items() for _ in range(count)]
    encoded = torch.empty(3 * (block // 4 + 2 * 4), dtype=torch.uint8)
    decoded, zeros = torch.empty(3 * block), [0.0] * block
    fmt.encode(torch.tensor(values + zeros + values), encoded)
    fmt.decode(encoded, decoded)
    wanted = [level[value] for value in values]
    assert decoded.tolist() == wanted + zeros + wanted


SMALL = [
    {"model": "gpt", "inner": "muon", "periods": (1, 1), "slow": 0.9},
    {"model": "gru", "inner": "adamw", "periods": (2, 3), "ramp": 10.0},
    {"model": "cnn", "inner": "muon", "rounds": ((3, 2),)},
    {"model": "gpt", "inner": "adamw", "periods": (1, 1), "groups": 2, "away": 1},
    {"model": "gpt", "inner": "adamw", "wire_format": "2bit", "groups": 3, "batch": 6},
]


@pytest.mark.slow
@pytest.mark.parametrize("settings", SMALL, ids=lambda settings: settings["model"])
def test_a_small_training_of_each_kind(load, monkeypatch, settings):
    cells, jobs, train = load("cells"), load("jobs"), load("train")
    images = settings["model"] == "cnn"
    monkeypatch.setitem(jobs.DATA, "stdlib", lambda split: _Few(images))
    jobs.data_of.cache_clear()
    # What two_bits.register changes is as before after the test.
    monkeypatch.setattr(settings_module, "WIRE_FORMATS", settings_module.WIRE_FORMATS)
    field = settings_module.DiLoCoSettings.__dataclass_fields__["wire_format"]
    monkeypatch.setattr(field, "type", field.type)
    monkeypatch.setattr(wire_sizes, "SIZES", dict(wire_sizes.SIZES))
    monkeypatch.setattr(quantized_mean, "make_wire_format", quantized_mean.make_wire_format)
    cell = cells.Cell(**{"groups": 2, "batch": 4, "sync_every": 1, "steps": 8, **settings})
    inner_state, averaged = load("inner_state"), []

    def average(manager, optimizer, periods, outer_step, share):
        inner_state.average_inner_state(manager, optimizer, periods, outer_step, share)
        state = [value for own in optimizer.state.values() for value in own.values()]
        averaged.append((outer_step, share, [float(value.sum()) for value in state]))

    monkeypatch.setattr(train, "average_inner_state", average)
    results = [train.train(cell) for _ in range(2)]
    assert results[0]["bits"] == results[1]["bits"] > 0
    assert len(averaged) > 8 if cell.periods else not averaged
    if cell.periods == (1, 1):  # equal in all groups after each average, also in a joiner
        for step in {step for step, _, _ in averaged}:
            (first, *others) = [state for own, _, state in averaged if own == step]
            assert others and all(other == first for other in others)
    assert (0.0 in {share for _, share, _ in averaged}) == bool(cell.away)


@pytest.mark.slow
def test_the_loss_along_a_run_is_of_global_weights_and_changes_nothing(load, monkeypatch):
    cells, jobs, train = load("cells"), load("jobs"), load("train")
    monkeypatch.setitem(jobs.DATA, "stdlib", lambda split: _Few(False))
    jobs.data_of.cache_clear()
    shown, evaluate = [], train._evaluate
    monkeypatch.setattr(train, "_evaluate", lambda *of: shown.append(of[1]) or evaluate(*of))
    plain = cells.Cell(groups=2, batch=4, sync_every=2, steps=8)
    results = [train.train(cell) for cell in (plain, replace(plain, curve=4))]
    assert results[0]["bits"] == results[1]["bits"] == results[1]["held_out"][-1]
    assert "held_out" not in results[0] and len(results[1]["held_out"]) == 2
    assert len(shown) == 4 and shown[1] is shown[2] is shown[3]  # the first group's model
    base = train.train(cells.Cell(batch=4, steps=8, curve=4))
    assert base["bits"] == base["held_out"][1] != base["held_out"][0]


class _Few(Dataset):
    """Sixteen samples, of a text or of pictures."""

    name = "few"

    def __init__(self, images):
        shape = (16, 1, 12, 12) if images else (16, 128)
        random = torch.Generator().manual_seed(0)
        ids = torch.randint(10, shape, generator=random)
        self._ids = ids.float() if images else ids
        self._labels = torch.randint(10, (16, 1 if images else 128), generator=random)

    def __len__(self):
        return 16

    def __getitem__(self, index):
        return {"input_ids": self._ids[index], "labels": self._labels[index]}


@pytest.mark.slow
def test_a_text_has_the_same_name_wherever_its_samples_are_the_same(load):
    jobs = load("jobs")
    one, again, held_out = (jobs.DATA["manual"](split) for split in ("train", "train", "eval"))
    assert one.name == again.name != held_out.name and one.name.endswith(f" by {jobs.SHORT}")


def test_a_study_that_was_stopped_goes_on_and_two_workers_share_it(load, tmp_path, monkeypatch):
    cells, study, train = load("cells"), load("study"), load("train")
    wanted = [cells.Cell(seed=seed) for seed in range(4)]
    monkeypatch.setattr(load("jobs"), "data_of", lambda *which: _Few(False))
    task = study.Work(
        tmp_path / "results.jsonl", lambda done: wanted, time.time() + 60, tmp_path / "stop"
    )

    def trains(cell):
        if cell.seed == 1:
            task.stop.touch()
        return {"text": "few", "bits": 1.0, "seconds": 0.0}

    monkeypatch.setattr(train, "train", trains)
    study.work(task)
    assert [line["cell"]["seed"] for line in study.read(task.results).values()] == [0, 1]
    task.stop.unlink()
    claims = subprocess.Popen(  # another worker has the next one
        [
            sys.executable,
            "-c",
            CLAIM,
            str(study._lock_file(task.results)),
            str(study._place(wanted[2])),
        ],
        stdout=subprocess.PIPE,
    )
    with claims:
        assert claims.stdout is not None and claims.stdout.read(1) == b"x"
        study.work(task)
        assert [line["cell"]["seed"] for line in study.read(task.results).values()] == [0, 1, 3]
        claims.kill()
    study.work(task)  # a worker that was killed claims nothing any more
    lines = list(study.read(task.results).values())
    assert [line["cell"]["seed"] for line in lines] == [0, 1, 3, 2] and lines[0]["commit"]
    monkeypatch.setattr(load("jobs"), "data_of", lambda *which: SimpleNamespace(name="another"))
    more = task._replace(wanted=lambda done: [cells.Cell(seed=9)])
    with pytest.raises(ValueError, match="the results are for few, and here is another"):
        study.work(more)


CLAIM = """
import fcntl, sys, time
file = open(sys.argv[1], "a")
fcntl.lockf(file, fcntl.LOCK_EX, 1, int(sys.argv[2]))
print("x", flush=True)
time.sleep(60)
"""
