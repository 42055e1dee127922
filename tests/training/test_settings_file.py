"""What a coordinator reads of anybody's YAML. Run: pytest tests/training/test_settings_file.py."""

from pathlib import Path

import pytest

from composer_replication.arguments import REMOVED
from composer_replication.settings import DiLoCoSettings
from composer_replication.training.config import (
    ConfigError,
    diloco_section,
    load_config,
    load_settings,
    read_diloco,
)

ROOT = Path(__file__).parents[2]
LLM_FOUNDRY = ROOT / "tests" / "llmfoundry" / "mpt_tiny.yaml"


def settings_of(config):
    return read_diloco(diloco_section(config))[0]


@pytest.fixture
def written(tmp_path):
    def write(text):
        path = tmp_path / "job.yaml"
        path.write_text(text)
        return path

    return write


def test_an_llm_foundry_yaml_gives_the_settings_of_its_callback():
    with pytest.raises(ConfigError):
        load_config(LLM_FOUNDRY)  # it is no config of ours
    config, source = load_settings(LLM_FOUNDRY)
    settings = settings_of(config)
    assert (settings.sync_every, settings.num_fragments) == (4, 2)
    assert source == str(LLM_FOUNDRY) and str(settings) == "sync_every=4, num_fragments=2"


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.name)
def test_a_config_of_ours_gives_what_its_groups_have(path):
    ours = load_config(path)
    config, _ = load_settings(path)
    assert settings_of(config) == settings_of(ours)
    assert config["model"] == ours["model"]  # the coordinator compares the groups' with it


def test_a_file_of_settings_alone_is_enough(written):
    path = written("sync_every: 20\nouter_lr: 0.5\n")
    rows = "schedule=[{outer_step: 1, outer_lr: 0.5}]"
    config, source = load_settings(path, ["sync_every=30", rows])
    assert settings_of(config) == DiLoCoSettings(
        sync_every=30, outer_lr=0.5, schedule=[{"outer_step": 1, "outer_lr": 0.5}]
    )
    assert source == f"{path} --set sync_every=30 --set {rows}"


def test_no_file_is_needed():
    config, source = load_settings(None, ["sync_every=20"])
    assert settings_of(config) == DiLoCoSettings(sync_every=20) and source == "--set sync_every=20"
    config, source = load_settings(None)
    assert settings_of(config) == DiLoCoSettings() and source == "the defaults"


def test_the_rest_of_the_file_is_not_judged(written):
    """Keys that nobody knows, and ``${...}`` that the job alone can resolve."""
    path = written(
        "max_seq_len: ${variables.length}\nrun_name: ${oc.env:NOT_SET_HERE}\nwhatever: [1]\n"
        "model: {max_seq_len: '${max_seq_len}'}\nvariables: {h: 7}\n"
        "callbacks:\n  other: {key: '${nowhere}'}\n"
        "  diloco: {sync_every: '${variables.h}', run_dir: '${variables.run}', digest_every: 2}\n"
    )
    config, _ = load_settings(path)
    values = {"sync_every": 7, "digest_every": 2}
    assert config == {"callbacks": {"diloco": values}, "left_out": ["run_dir"]}


def test_what_cannot_be_resolved_may_be_set(written):
    path = written("callbacks: {diloco: {sync_every: '${variables.h}', num_fragments: 2}}")
    with pytest.raises(ConfigError, match=r"sync_every='\$\{variables.h\}' .* --set sync_every=.."):
        load_settings(path)
    config, _ = load_settings(path, ["sync_every=8"])
    values = {"sync_every": 8, "num_fragments": 2}
    assert config == {"callbacks": {"diloco": values}, "left_out": []}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sync_evry: 5", "no 'sync_evry': did you mean 'sync_every'"),
        ("callbacks: {diloco: {sync_every: 0}}", "sync_every=0: use an integer of at least 1"),
        ("callbacks: {diloco: 5}", r"callbacks.diloco=5: write key: value pairs"),
        ("callbacks: {diloco: '${nowhere}'}", "callbacks.diloco cannot be read: .*nowhere"),
        ("callbacks: {lr_monitor: {}}", "is a job without callbacks.diloco: add it"),
        ("model: {}\nseed: 1", "is a job without callbacks.diloco: add it"),
        ("- 5", "holds no key: value pairs"),
        ("", "is empty: write settings"),
        ("a: b: c", "cannot be read as YAML"),
    ],
)
def test_a_file_without_usable_settings_is_an_error_that_says_why(written, text, message):
    with pytest.raises(ConfigError, match=message):
        load_settings(written(text))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("sync_every", "write key=value"),
        ("callbacks.diloco.sync_every=5", "write --set sync_every=5"),
    ],
)
def test_a_wrong_set_is_an_error_that_says_why(given, message):
    with pytest.raises(ConfigError, match=message):
        load_settings(None, [given])


def test_a_setting_in_the_place_of_the_file_is_an_error_with_the_fix():
    with pytest.raises(ConfigError, match="as in --set sync_every=5"):
        load_settings(Path("sync_every=5"))


@pytest.mark.parametrize("text", ["gone: 1", "callbacks: {diloco: {sync_every: 5, gone: 1}}"])
def test_a_setting_that_is_gone_is_named_with_what_replaces_it(written, monkeypatch, text):
    monkeypatch.setitem(REMOVED, "gone", "use sync_every")
    with pytest.raises(ConfigError, match="has no 'gone' any more: use sync_every"):
        load_settings(written(text))
