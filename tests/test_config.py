"""A config is checked before anything is started: each mistake is a sentence with the fix."""

import pytest

from composer_replication.config import ConfigError, load_config, save_config

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
    assert type(config) is dict and type(config["callbacks"]["diloco"]) is dict
    assert config["callbacks"]["diloco"]["sync_every"] == 8
    assert config["optimizer"]["lr"] == 0.5 and config["seed"] == 3


def test_a_config_survives_being_saved(written, tmp_path):
    config = load_config(written(MINIMAL))
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml") == config


@pytest.mark.parametrize(("override", "message"), [
    ("max_duratoin=5ba", "has no 'max_duratoin': did you mean 'max_duration'?"),
    ("callbacks.dilco.sync_every=4", "callbacks has no 'dilco': did you mean 'diloco'?"),
    ("callbacks.diloco.sync_steps=4", "callbacks.diloco has no 'sync_steps'"),
    ("callbacks.diloco.sync_evry=4", "did you mean 'sync_every'?"),
    ("callbacks.diloco.num_fragments=3", "sync_every=2 is not divisible by num_fragments=3"),
    ("callbacks.diloco.timeout=0", "timeout=0: use a number of seconds above 0"),
    ("callbacks.diloco.digest_every=-1", "digest_every=-1: use an integer of at least 0"),
    ("optimizer.lrr=3", "optimizer has no 'lrr': did you mean 'lr'?"),
    ("model.d_modle=8", "model has no 'd_modle': did you mean 'd_model'?"),
    ("callbacks.speed_monitor.window=3", "callbacks.speed_monitor has no 'window'"),
    ("optimizer.name=adam", "optimizer.name has no 'adam': did you mean 'adamw'?"),
    ("model=null", "the config lacks model"),
    ("model.name=null", "model.name has no None"),
    ("train_loader.path=nowhere/at/all", "train_loader.path: "),
    ("callbacks=null", "the config lacks callbacks.diloco"),
    ("max_duration=soon", "max_duration='soon': write e.g. 400ba"),
    ("loggers=3", "loggers: 3 is no section"),
    ("seed", "override 'seed': write key=value"),
    ("seed=${nothing}", "cannot be read"),
])  # fmt: skip
def test_a_mistake_is_named_with_its_fix(written, override, message):
    with pytest.raises(ConfigError) as caught:
        load_config(written(MINIMAL), [override])
    assert message in str(caught.value)


@pytest.mark.parametrize(("text", "message"), [("- a\n- b\n", "is a list"), ("a: [", "be read")])
def test_a_file_that_is_no_config_is_refused(written, text, message):
    with pytest.raises(ConfigError, match=message):
        load_config(written(text))


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="there is no config at"):
        load_config(tmp_path / "none.yaml")
