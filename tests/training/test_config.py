"""A config is checked before anything is started: each mistake is a sentence with the fix.

Those that people make are in tests/test_mistakes.py. At the end: what a coordinator reads of
anybody's YAML. Run: pytest tests/training/test_config.py.
"""

import stat
from pathlib import Path

import pytest
from text_config import DILOCO, text_job

from composer_replication.config_file import (
    ConfigError,
    diloco_section,
    load_settings,
    model_section,
    read_diloco,
    save_config,
    with_values,
)
from composer_replication.settings import DiLoCoSettings
from composer_replication.training import load_config

ROOT = Path(__file__).parents[2]
LLM_FOUNDRY = ROOT / "tests" / "llmfoundry" / "mpt_tiny.yaml"

MINIMAL = text_job(f"max_duration: 4ba\ncallbacks: {{diloco: {{{DILOCO}, sync_every: 2}}}}\n")


@pytest.fixture
def written(tmp_path):
    def write(text):
        path = tmp_path / "config.yaml"
        path.write_text(text)
        return path

    return write


def test_a_config_comes_back_with_overrides_applied(written):
    path = written(MINIMAL + "variables: {lr: 0.5}\n")
    overrides = ["callbacks.diloco.sync_every=8", "optimizers.lr=${variables.lr}", "seed=3"]
    config = load_config(path, overrides)
    assert diloco_section(config) == {"sync_every": 8}
    assert config.optimizers.lr == 0.5 and config.seed == 3


SECRET = "${oc.env:A_SECRET}"


def test_a_secret_of_the_environment_is_not_saved_and_is_there_when_it_is_read_again(
    written, tmp_path, monkeypatch
):
    monkeypatch.setenv("A_SECRET", "hunter2")
    path = written(
        MINIMAL + f"variables: {{key: '{SECRET}', size: 3}}\nseed: '${{variables.size}}'\n"
    )
    config = load_config(path, [f"run_name=run-{SECRET}"])
    assert config.variables.key == "hunter2" and config.run_name == "run-hunter2"
    # As a launch changes it.
    changed = with_values(config, run_dir="here", callbacks={"diloco": {"digest_every": 1}})
    saved = tmp_path / "saved.yaml"
    save_config(changed, saved)
    assert "hunter2" not in saved.read_text() and saved.read_text().count(SECRET) == 2
    assert load_config(saved) == changed


def test_a_saved_config_can_be_read_by_its_owner_alone(written, tmp_path):
    path = tmp_path / "saved.yaml"
    path.touch(mode=0o644)
    save_config(load_config(written(MINIMAL)), path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize(("override", "message"), [
    ("callbacks.dilco.sync_every=4", "callbacks.dilco has no _target_: name what builds it"),
    ("schedulers={t_warmup: 2ba}", "schedulers has no _target_"),
    ("eval_dataloader={path: null}", "eval_dataloader has no _target_"),
    ("loggers=3", "loggers=3: write a name and its _target_ for each part"),
    ("callbacks.diloco.timeout=0", "timeout=0: use a number of seconds above 0"),
    ("callbacks.diloco.sync_evry=4", "callbacks.diloco has no 'sync_evry': did you mean 'sync_ev"),
    ("train_dataloader=null", "train_dataloader has no _target_"),
    ("algorithms.clip={clipping_type: norm}", "algorithms.clip has no _target_"),
    ("callbacks=null", "the config has no callbacks.diloco"),
    ("loggers.mine=3", "loggers.mine has no _target_"),
    ("max_duration=1800", "max_duration=1800: write 400ba (batches)"),
    ("seed", "override 'seed': write key=value"),
    ("seed=${nothing}", "cannot be resolved"),
])  # fmt: skip
def test_a_mistake_is_named_with_its_fix(written, override, message):
    with pytest.raises(ConfigError) as caught:
        load_config(written(MINIMAL), [override])
    assert message in str(caught.value)


def test_an_entry_of_a_list_cannot_be_replaced_and_the_error_says_what_can(written):
    fix = r"does not fit into .*: write the whole list, e.g. key=\[1,2\]$"
    with pytest.raises(ConfigError, match=f"^override variables.sizes.7=3 {fix}"):
        load_config(written(MINIMAL + "variables: {sizes: [1, 2]}\n"), ["variables.sizes.7=3"])
    path = written("schedule: [{outer_step: 1, outer_lr: 0.5}]")
    with pytest.raises(ConfigError, match=f"^--set schedule.0.outer_lr=1 {fix}"):
        load_settings(path, ["schedule.0.outer_lr=1"])


@pytest.mark.parametrize(
    ("text", "message"), [("- a\n- b\n", "holds no key: value pairs"), ("a: [", "be read")]
)
def test_a_file_that_is_no_config_is_refused(written, text, message):
    with pytest.raises(ConfigError, match=message):
        load_config(written(text))


# ---- settings of anybody's YAML ------------------------------------------------------------------


def settings_of(config):
    return read_diloco(diloco_section(config))[0]


def test_an_llm_foundry_yaml_gives_the_settings_of_its_callback():
    with pytest.raises(ConfigError):
        load_config(LLM_FOUNDRY)  # it is no config of ours
    config, source, _ = load_settings(LLM_FOUNDRY)
    settings = settings_of(config)
    assert (settings.sync_every, settings.num_fragments) == (4, 2)
    assert source == str(LLM_FOUNDRY) and str(settings) == "sync_every=4, num_fragments=2"


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.name)
def test_a_config_of_ours_gives_what_its_groups_have(path):
    ours = load_config(path)
    config, _, _ = load_settings(path)
    assert settings_of(config) == settings_of(ours)
    assert config["model"] == model_section(ours)  # the coordinator compares the groups' with it


def test_a_file_of_settings_alone_is_enough(written):
    path = written("sync_every: 20\nouter_lr: 0.5\n")
    rows = "schedule=[{outer_step: 1, outer_lr: 0.5}]"
    config, source, _ = load_settings(path, ["sync_every=30", rows])
    assert settings_of(config) == DiLoCoSettings(
        sync_every=30, outer_lr=0.5, schedule=[{"outer_step": 1, "outer_lr": 0.5}]
    )
    assert source == f"{path} --set sync_every=30 --set {rows}"


def test_no_file_is_needed():
    config, source, _ = load_settings(None, ["sync_every=20"])
    assert settings_of(config) == DiLoCoSettings(sync_every=20) and source == "--set sync_every=20"
    config, source, _ = load_settings(None)
    assert settings_of(config) == DiLoCoSettings() and source == "the defaults"


def test_the_rest_of_the_file_is_not_judged(written):
    """Keys that nobody knows, and ``${...}`` that the job alone can resolve."""
    path = written(
        "max_seq_len: ${variables.length}\nrun_name: ${oc.env:NOT_SET_HERE}\nwhatever: [1]\n"
        "model: {max_seq_len: '${max_seq_len}'}\nvariables: {h: 7}\n"
        "callbacks:\n  other: {key: '${nowhere}'}\n"
        "  diloco: {sync_every: '${variables.h}', run_dir: '${variables.run}', digest_every: 2}\n"
    )
    config, _, left_out = load_settings(path)
    values = {"sync_every": 7, "digest_every": 2}
    assert config == {"callbacks": {"diloco": values}} and left_out == ["run_dir"]


def test_what_cannot_be_resolved_may_be_set(written):
    path = written("callbacks: {diloco: {sync_every: '${variables.h}', num_fragments: 2}}")
    with pytest.raises(ConfigError, match=r"sync_every='\$\{variables.h\}' .* --set sync_every=.."):
        load_settings(path)
    config, _, left_out = load_settings(path, ["sync_every=8"])
    values = {"sync_every": 8, "num_fragments": 2}
    assert config == {"callbacks": {"diloco": values}} and left_out == []


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
