"""The pages have the numbers of the learning study. Run: pytest tests/test_learning.py

The study's own tests are beside it, in ``spikes/009-learning``.
"""

import json
import re

import pytest
from study_modules import FOLDER, study_modules

from composer_replication.settings import DiLoCoSettings
from composer_replication.training.config import load_config


@pytest.fixture
def load():
    """Imports a script of the study."""
    with study_modules() as load:
        yield load


def test_the_pages_have_the_tables_of_the_results_file(load, tmp_path, monkeypatch):
    report = load("report")
    results = report.Results(report.read_all())
    for document in (report.DOCUMENT, report.CLAIMS, report.TRIED):
        page = document.read_text()
        assert report.with_tables(document, results) == page, "run spikes/009-learning/report.py"
        assert re.search(r"\| (\d\.\d{3}) \|", page)
    changed = tmp_path / "tried.md"
    changed.write_text(re.sub(r"\| (\d\.\d{3}) \|", "| ? |", page))
    monkeypatch.setattr(report, "TRIED", changed)
    assert report.with_tables(changed, results) == page


def test_the_quickstart_is_a_training_of_the_study_and_its_reference_is_data_parallels(load):
    study, arms = load("study"), load("arms")
    config, done = load_config(FOLDER.parents[1] / "configs" / "quickstart.yaml"), study.read()
    seed = config["seed"]
    assert config["train_loader"]["seed"] == seed
    base, own = (cell.with_seed(seed) for cell in (arms.DATA_PARALLEL_COMPOSER, arms.QUICKSTART))
    assert config["reference"]["data_parallel_bits_per_byte"] == round(done[base.key]["bits"], 3)
    its = json.loads((FOLDER.parents[1] / "benchmarks/measured/quickstart.json").read_text())
    assert its["heldout_bits_per_byte"]["diloco"] == round(done[own.key]["bits"], 3)
    assert {line["text"] for line in done.values()} == {config["reference"]["text"]}
    assert config["reference"]["tokens"] == base.steps * base.batch * 128
    own_settings, optimizer = config["callbacks"]["diloco"], config["optimizer"]
    assert (own.inner, own.lr) == (optimizer["name"], optimizer["lr"])
    assert own.batch == 2 * config["global_train_batch_size"]
    assert config["max_duration"] == f"{own.steps}ba"
    assert own_settings.keys() == {"sync_every", "digest_every"}  # nothing else is set
    settings = DiLoCoSettings(sync_every=own_settings["sync_every"])
    rounds = DiLoCoSettings(
        sync_every=own.sync_every,
        outer_lr=own.outer_lr,
        outer_momentum=own.outer_momentum,
        schedule=load("train")._schedule(own),
    )
    for outer_step in range(1, 199):
        assert settings.sync_every_at(outer_step) == rounds.sync_every_at(outer_step)
        assert settings.outer_numbers_at(outer_step) == rounds.outer_numbers_at(outer_step)


def test_the_page_of_the_defaults_is_that_of_the_results_file(load):
    defaults, study = load("defaults"), load("study")
    page = (FOLDER / "defaults-so-far.md").read_text()
    assert page == defaults.report(study.read(study.DEFAULTS), study.read()), (
        "run spikes/009-learning/defaults.py"
    )
