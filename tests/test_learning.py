"""The pages have the numbers of the learning study. Run: pytest tests/test_learning.py

The study's own tests are beside it, in ``spikes/009-learning``.
"""

import json
import re

import pytest
from study_modules import FOLDER, study_modules

from composer_replication.config_file import diloco_section
from composer_replication.settings import DiLoCoSettings
from composer_replication.training import load_config


@pytest.fixture
def load():
    """Imports a script of the study."""
    with study_modules() as load:
        yield load


@pytest.mark.slow
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


def test_the_quickstart_is_a_training_of_the_study(load):
    study, arms = load("study"), load("arms")
    path = FOLDER.parents[1] / "configs" / "quickstart.yaml"
    config, done = load_config(path), study.read()
    seed = config["seed"]
    assert config["train_dataloader"]["seed"] == seed
    base, own = (cell.with_seed(seed) for cell in (arms.DATA_PARALLEL_COMPOSER, arms.QUICKSTART))
    bits = round(done[base.key]["bits"], 2)
    assert f"data parallel reaches {bits:.2f} bits per byte" in path.read_text()
    its = json.loads((FOLDER.parents[1] / "benchmarks/measured/quickstart.json").read_text())
    assert its["heldout_bits_per_byte"]["diloco"] == round(done[own.key]["bits"], 3)
    own_settings, optimizer = diloco_section(config), config["optimizers"]
    assert optimizer["_target_"].endswith(".Muon") and own.inner == "muon"
    assert own.lr == optimizer["lr"]
    assert own.batch == base.batch == 2 * config["train_dataloader"]["batch_size"]
    assert base.steps == own.steps
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


@pytest.mark.slow
def test_the_page_of_the_defaults_is_that_of_the_results_file(load):
    defaults, study = load("defaults"), load("study")
    page = (FOLDER / "defaults-so-far.md").read_text()
    assert page == defaults.report(study.read(study.DEFAULTS), study.read()), (
        "run spikes/009-learning/defaults.py"
    )
