"""The study of the warm-up. Run: pytest spikes/009-learning"""

import itertools
import json
from dataclasses import replace

import pytest
import torch
from study_modules import study_modules
from torch.utils.data import Dataset

from composer_replication.settings import DiLoCoSettings


@pytest.fixture
def load():
    """A function that imports a script of the study by its name, and returns the module."""
    with study_modules() as load:
        yield load


def settings_of(load, cell):
    return DiLoCoSettings(
        sync_every=cell.sync_every,
        outer_lr=cell.outer_lr,
        outer_momentum=cell.outer_momentum,
        schedule=load("train")._schedule(cell),
    )


def test_all_candidates_have_the_rounds_that_ship_and_the_chosen_one_all_that_ships(load):
    warm, cells = load("warm"), load("cells")
    for job in (*warm.ROWS, *warm.JOBS, *warm.OUTSIDE):
        ships = DiLoCoSettings(sync_every=job.sync_every)
        named = warm.candidates(cells.Cell(), job.groups, job.sync_every)
        assert tuple(named) == warm.CANDIDATES
        for name, cell in named.items():
            own = settings_of(load, cell)
            for step in range(1, 200):
                assert own.sync_every_at(step) == ships.sync_every_at(step)
                if name == warm.CHOSEN:
                    assert own.outer_numbers_at(step) == ships.outer_numbers_at(step)
                if step > 61 and "0.7 / 0.7" not in name:  # so do all when the warm-up is over
                    assert own.outer_numbers_at(step) == ships.outer_numbers_at(step)


@pytest.mark.slow
def test_fine_tuning_starts_from_the_weights_that_another_training_ended_with(load):
    warm, train = load("warm"), load("train")
    fresh = replace(warm.ROWS[0].base, steps=2)
    tuned = replace(fresh, after=2, data="another manual")
    assert '"after": 2' in tuned.key and "after" not in fresh.key  # as in older results
    assert {row.base.data for row in warm.FINE_TUNED} == {"another manual"}
    before = replace(train.PRETRAINED, steps=2, seed=tuned.seed)
    ended = train._model(before)
    train._steps(before, ended, train._inner(before, ended), rank=0, curve=[])
    begun, first = train._model(tuned).state_dict(), train._model(fresh).state_dict()
    assert all(torch.equal(begun[name], value) for name, value in ended.state_dict().items())
    assert any(not torch.equal(begun[name], value) for name, value in first.items())


def test_the_pictures_groups_are_as_shipped_and_evaluated_at_the_end_of_rounds(load):
    picture, lines = load("picture"), load("lines")
    ships = DiLoCoSettings(sync_every=20)
    ends = set(itertools.accumulate(ships.sync_every_at(n) for n in range(1, 99)))
    for name, cell in picture.cells().items():
        assert set(range(cell.curve, cell.steps + 1, cell.curve)) <= ends
        if "groups" in name and cell.groups:
            own = settings_of(load, cell)
            assert cell.batch == 8 * cell.groups
            for step in range(1, 200):
                assert own.sync_every_at(step) == ships.sync_every_at(step)
                assert own.outer_numbers_at(step) == ships.outer_numbers_at(step)
            assert picture.times_fewer(cell) == 600 / 78
    curves = picture.curves(lines.read(picture.LINES))
    assert curves.keys() == picture.cells().keys()
    assert {len(curve) for curve in curves.values()} == {30}


def test_the_warm_ups_numbers_are_those_worked_out_by_hand(load):
    warm, cells = load("warm"), load("cells")
    named = warm.candidates(cells.Cell(), 2, 20)
    settings = {name: settings_of(load, cell) for name, cell in named.items()}

    def numbers(name, steps):
        return [settings[name].outer_numbers_at(step)[:2] for step in steps]

    plain, ships = (1.0, 0.0), (0.7, 0.5)
    for first in (10, 20, 40, 60):
        own = numbers(f"plain in the first {first}", (1, first, first + 1))
        assert own == [plain, plain, ships]
    own = numbers("plain in 20, 0.7 / 0.7 from 61", (20, 21, 60, 61))
    assert own == [plain, ships, ships, (0.7, 0.7)]
    own = numbers("a straight line over 60", (1, 31, 61))
    assert own == [plain, (0.85, 0.25), ships]


@pytest.mark.slow
def test_the_most_telling_trainings_come_first_and_the_hours_end(load):
    warm = load("warm")
    done, others = {}, load("lines").read_all()

    def train(cell):
        done[cell.key] = {"cell": json.loads(cell.key), "bits": 2.0, "cpu_seconds": 1.0}

    wanted = list(warm.wanted(done, others))
    assert len(set(wanted)) == len(wanted)
    assert {cell.model for cell in wanted if cell.key in others} == {"cnn"}
    # All of a row, then of the next one; then the eight jobs. Two of them are on text, and have
    # the reference and what ships; that of the pictures is from another processor.
    rows = [warm.trainings(row, row.base)[name] for row in warm.ROWS for name in warm.NAMES]
    first = [*dict.fromkeys(rows)]
    assert wanted[: len(first)] == first and {cell.seed for cell in first} == {1}
    jobs = wanted[len(first) :]
    text = [*itertools.takewhile(lambda cell: cell.model != "cnn", jobs)]
    pictures = [*itertools.takewhile(lambda cell: cell.model == "cnn", jobs[len(text) :])]
    assert all(cell.outer or cell.alone_of for cell in text)
    assert {cell.model for cell in text} == {"gpt", "gru"}
    assert {cell.seed for cell in text + pictures} == {1}
    assert {cell.key for cell in pictures} & others.keys()
    for cell in wanted[:3]:
        train(cell)
    assert list(warm.wanted(done, others)) == wanted[3:]
    # The most expensive jobs have no reference yet: it is trained at three rates, then the rest.
    for cell in wanted[3:]:
        train(cell)
    rest = list(warm.wanted(done, others))
    assert {cell.steps for cell in rest} == {3000} and any(cell.alone_of for cell in rest)
    for line in done.values():
        line["cpu_seconds"] = warm.HOURS * 3600
    assert not list(warm.wanted(done, others))


def test_the_gain_is_that_worked_out_by_hand(load):
    warm = load("warm")
    assert warm.gain(alone=3.0, base=2.0, own=2.25) == 0.75
    assert warm.gain(alone=3.0, base=2.0, own=float("inf")) == -float("inf")
    assert warm.gain(alone=2.0, base=2.0, own=1.9) is None
    assert warm.gain(alone=float("inf"), base=2.0, own=2.0) is None
    row, bits = warm.ROWS[0], dict.fromkeys(warm.NAMES, 2.25)
    bits |= {warm.BASE: 2.0, warm.ALONE: 3.0, warm.MOMENTUM_AT_ONCE: 4.0}
    own = warm.trainings(row, row.base)
    done = {own[name].key: {"bits": value} for name, value in bits.items()}
    table = warm.report(warm.Known(done)).splitlines()
    assert table[2].startswith(f"| {row.name} | 2.000 | 3.000 | - | -1.00 | +0.75 |")
    assert table[3].startswith("| worst quarter of 1 |") and "-1.00 | +0.75" in table[3]
    ships = warm.report_of_shipped(warm.Known(done))
    # 60 rounds of 4 steps are 240 of its 150: 37 whole ones, so it is in no median of long ones.
    assert f"| {row.name} | 37 | 1 | 0.75 | -1.00 | +12.5 % | -43.75 % |" in ships
    assert "outer steps or more" not in ships and "2 groups: +12.5 % above data" in ships
    # It ends before the finalist's other momentum, so the two are one training.
    finalist = warm.beside_what_ships(warm.Known(done), warm.FINALIST)
    assert row.name not in finalist
    assert finalist.count(": 1 jobs, median 0.75, worst quarter 0.75") == 2
    del done[own[warm.ALONE].key]
    assert len(warm.report(warm.Known(done)).splitlines()) == 2


def test_a_rule_that_tells_is_right_in_jobs_that_it_was_not_chosen_in(load):
    verdict = load("verdict")
    numbers, are_better = [0.1, 0.5, None, 0.9, 0.2], [False, True, True, True, False]
    sides = verdict.sides(numbers, are_better)
    rule = verdict.best_rule(sides)
    assert rule == (0.5, True) and verdict.right(rule, sides) == 1.0
    some = verdict.sides(numbers[:3], [False, True, True])
    # Of those that are better a half, of the others all.
    assert verdict.right(verdict.Rule(0.6, True), some) == 0.75
    assert verdict.right(verdict.Rule(0.0, True), sides) == 0.5  # always "better"
    trainings = [
        verdict.Training(f"job {job}", (), is_better)
        for job in range(6)
        for is_better in (True, False)
    ]
    telling = [float(each.is_better) for each in trainings]
    assert set(verdict.tried(trainings, telling)) == {1.0}
    assert set(verdict.tried(trainings, [0.0] * 12)) == {0.5}
    measured = [[None, 0.4, 0.8, 2.0, 0.0], [0.2, 0.2, 0.6, 1.0, 3.0]]
    found = verdict.numbers_of(measured, 2)
    assert found["cosine with the momentum"] == 0.2
    assert found["norm of the group's, second half over first"] == 0.5
    assert found["norm of the momentum over the group's"] == 1.0
    assert verdict.numbers_of(measured, 1)["cosine with the momentum"] is None


def test_a_line_that_a_killed_worker_cut_off_loses_that_training_alone(load, tmp_path, capsys):
    lines, cells = load("lines"), load("cells")
    path, results = tmp_path / "results.jsonl", []
    for seed in range(3):
        cell = cells.Cell(seed=seed)
        results.append({"cell": json.loads(cell.key), "bits": 1.0 + seed})
    lines.append(path, results[0])
    whole = path.read_bytes()
    lines.append(path, results[1])
    path.write_bytes(path.read_bytes()[: len(whole) + 9])
    assert list(lines.read(path).values()) == results[:1]
    assert "results.jsonl:2 was cut off" in capsys.readouterr().err
    lines.append(path, results[2])
    assert list(lines.read(path).values()) == [results[0], results[2]]


class _Few(Dataset):
    """Sixteen samples of a text."""

    name = "few"

    def __init__(self):
        random = torch.Generator().manual_seed(0)
        self._ids = torch.randint(10, (16, 128), generator=random)

    def __len__(self):
        return 16

    def __getitem__(self, index):
        return {"input_ids": self._ids[index], "labels": self._ids[index]}


@pytest.fixture
def few(load, monkeypatch):
    """The text of all cells."""
    jobs = load("jobs")
    monkeypatch.setitem(jobs.DATA, "stdlib", lambda split: _Few())
    jobs.data_of.cache_clear()


@pytest.mark.slow
def test_one_group_alone_trains_as_the_first_group_does_until_its_first_sync(load, few):
    cells, train = load("cells"), load("train")
    base = cells.Cell(batch=6, steps=6)
    alone, whole = train.train(replace(base, alone_of=3)), train.train(base)
    groups = train.train(replace(base, groups=3, sync_every=6))
    assert alone["loss"] == groups["loss"] != whole["loss"]
    assert len({alone["bits"], groups["bits"], whole["bits"]}) == 3


@pytest.mark.slow
def test_a_training_with_a_warm_up_is_bitwise_repeatable_and_has_its_own_numbers(load, few):
    cells, train = load("cells"), load("train")
    plain = cells.Cell(groups=2, batch=4, sync_every=1, steps=8, outer_lr=1.0, outer_momentum=0.0)
    own = replace(plain, outer=((3, 0.7, 0.5), (6, 0.7, 0.7)))
    results = [train.train(cell) for cell in (own, own, plain, replace(plain, outer=own.outer[:1]))]
    for result in results:
        del result["seconds"], result["cpu_seconds"]
    assert results[0] == results[1]
    for one, other in itertools.combinations(results[1:], 2):
        assert one["bits"] != other["bits"]
