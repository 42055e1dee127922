"""A config is checked before anything is started: each mistake is a sentence with the fix.

Those that people make are in tests/test_mistakes.py.
"""

import stat

import pytest
from omegaconf import OmegaConf

from composer_replication.training.config import ConfigError, load_config, read_value, save_config

MINIMAL = """
max_duration: 4ba
global_train_batch_size: 4
model: {name: byte_gpt, d_model: 8, n_heads: 2, n_layers: 1, max_seq_len: 16}
train_loader: {name: text, max_seq_len: 16}
optimizer: {name: adamw, lr: 0.001}
callbacks: {diloco: {sync_every: 2}}
"""


@pytest.fixture
def written(tmp_path):
    def write(text):
        path = tmp_path / "config.yaml"
        path.write_text(text)
        return path

    return write


def test_a_config_comes_back_plain_with_overrides_applied(written):
    path = written(MINIMAL + "variables: {lr: 0.5}\n")
    overrides = ["callbacks.diloco.sync_every=8", "optimizer.lr=${variables.lr}", "seed=3"]
    config = load_config(path, overrides)
    assert isinstance(config, dict) and type(config["callbacks"]["diloco"]) is dict
    assert config["callbacks"]["diloco"]["sync_every"] == 8
    assert config["optimizer"]["lr"] == 0.5 and config["seed"] == 3


def test_a_config_survives_being_saved(written, tmp_path):
    config = load_config(written(MINIMAL))
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml") == config


SECRET = "${oc.env:A_SECRET}"


def test_a_secret_of_the_environment_is_not_saved_and_is_there_when_it_is_read_again(
    written, tmp_path, monkeypatch
):
    monkeypatch.setenv("A_SECRET", "hunter2")
    path = written(
        MINIMAL + f"variables: {{key: '{SECRET}', size: 3}}\nseed: '${{variables.size}}'\n"
    )
    config = load_config(path, [f"run_name=run-{SECRET}"])
    assert config["variables"]["key"] == "hunter2" and config["run_name"] == "run-hunter2"
    # As a launch changes it.
    callbacks = {"diloco": config["callbacks"]["diloco"] | {"digest_every": 1}}
    changed = config | {"run_dir": "here", "callbacks": callbacks, "max_duration": "8ba"}
    changed.pop("train_loader")
    changed["seed"] = 5
    saved = tmp_path / "saved.yaml"
    save_config(changed, saved)
    assert "hunter2" not in saved.read_text() and saved.read_text().count(SECRET) == 2
    assert OmegaConf.to_container(OmegaConf.load(saved), resolve=True) == dict(changed)


def test_a_saved_config_can_be_read_by_its_owner_alone(written, tmp_path):
    path = tmp_path / "saved.yaml"
    path.touch(mode=0o644)
    save_config(load_config(written(MINIMAL)), path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_one_value_of_a_saved_config_is_read_without_the_others(written, tmp_path):
    path = written(
        MINIMAL.replace("sync_every: 2", "sync_every: '${variables.h}'")
        + f"variables: {{h: 4, key: '{SECRET}'}}\n"
    )
    assert read_value(path, "callbacks.diloco.sync_every") == 4
    assert read_value(path, "callbacks.diloco.outer_lr") is None
    assert read_value(path, "variables.key") is None  # not in this environment
    assert read_value(tmp_path / "none.yaml", "seed") is None
    assert read_value(written("a: ["), "a") is None and read_value(written("- 1"), "a") is None


@pytest.mark.parametrize(("override", "message"), [
    ("callbacks.dilco.sync_every=4", "callbacks has no 'dilco': did you mean 'diloco'?"),
    ("callbacks.diloco.timeout=0", "timeout=0: use a number of seconds above 0"),
    ("model=null", "the config lacks model"),
    ("model.name=null", "model.name has no None"),
    ("callbacks=null", "the config lacks callbacks.diloco"),
    ("loggers=3", "loggers=3 is not a section"),
    ("seed", "override 'seed': write key=value"),
    ("seed=${nothing}", "cannot be read"),
])  # fmt: skip
def test_a_mistake_is_named_with_its_fix(written, override, message):
    with pytest.raises(ConfigError) as caught:
        load_config(written(MINIMAL), [override])
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"), [("- a\n- b\n", "holds no key: value pairs"), ("a: [", "be read")]
)
def test_a_file_that_is_no_config_is_refused(written, text, message):
    with pytest.raises(ConfigError, match=message):
        load_config(written(text))
