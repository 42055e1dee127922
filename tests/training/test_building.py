"""A config becomes a Trainer. Run: pytest tests/training/test_building.py

Real: hydra, Composer's Trainer, simulated groups.
"""

import os
import subprocess
import sys

import pytest
import yaml
from own_parts import seen

from composer_replication import DiLoCoCallback, ReplicaDataLoader
from composer_replication.config_file import ConfigError, diloco_section, save_config
from composer_replication.training import build_trainer, load_config, simulate_replicas

OWN = {
    "max_duration": "4ba",
    "device": "cpu",
    "precision": "fp32",
    "progress_bar": False,
    "model": {
        "_target_": "own_parts.Model",
        "mlp": {"_target_": "own_parts.mlp", "width": 4},
        "names": ["a", "b"],
    },
    "train_dataloader": {
        "_target_": "own_parts.loader",
        "size": 32,
        "batch_size": 8,
        "replica_rank": "${replica_rank}",
        "num_replica_groups": "${num_replica_groups}",
    },
    "eval_dataloader": {"_target_": "own_parts.eval_loader", "batch_size": 4},
    "optimizers": {"_target_": "torch.optim.AdamW", "lr": 0.01, "betas": [0.9, 0.95]},
    "schedulers": {"_target_": "composer.optim.ConstantScheduler", "alpha": 0.5},
    "algorithms": {"clip": {
        "_target_": "composer.algorithms.GradientClipping",
        "clipping_type": "norm",
        "clipping_threshold": 1.0,
    }},
    "callbacks": {
        "diloco": {
            "_target_": "composer_replication.DiLoCoCallback",
            "sync_every": 2,
            "digest_every": 1,
        },
        "mine": {"_target_": "own_parts.Counts", "every": 1, "label": "counted"},
        "left_out": None,
    },
    "loggers": {"memory": {"_target_": "composer.loggers.InMemoryLogger"}},
}  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_seen_so_far():
    seen.clear()


@pytest.fixture
def loaded(tmp_path):
    def load(*overrides, **sections):
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(OWN | sections))
        return load_config(path, overrides)

    return load


def built(config):
    """Build what group 0 builds of a config. Returns what its Trainer trains."""
    section = diloco_section(config) | {"num_replicas": 1}
    trainer = build_trainer(config, DiLoCoCallback(**section))
    trainer.close()
    return trainer.state


@pytest.mark.slow
def test_every_section_takes_callables_of_others(loaded, tmp_path):
    config = loaded()
    save_config(config, tmp_path / "saved.yaml")  # as launch does for its groups
    results = simulate_replicas(load_config(tmp_path / "saved.yaml"), 2)
    assert len({result["global_digest"] for result in results}) == 1
    assert {result["inner_steps"] for result in results} == {4}
    assert [each for each in seen if isinstance(each, tuple)] == [(8, 0, 2), (8, 1, 2)]
    assert seen.count(4) == 2 and seen.count("counted") == 8


def test_values_are_plain_python_and_nested_callables_are_called(loaded):
    state = built(loaded())
    assert type(state.model.names) is list
    assert [p.shape[0] for p in state.model.mlp.parameters()][:2] == [4, 4]
    assert {"DiLoCoCallback", "Counts"} <= {type(each).__name__ for each in state.callbacks}


def test_an_optimizer_is_given_names_if_it_says_so(loaded):
    built(loaded(optimizers={"_target_": "own_parts.ByNames", "lr": 0.01}))
    assert [f"mlp.layers.{i}.{of}" for i in (0, 2, 4) for of in ("bias", "weight")] in seen


def test_an_optimizer_s_checkpoint_has_no_names_that_nobody_asked_for(loaded):
    state = built(loaded(optimizers={"_target_": "torch.optim.SGD", "lr": 1.0}))
    [optimizer] = state.optimizers
    assert "param_names" not in optimizer.state_dict()["param_groups"][0]
    (group,) = optimizer.param_groups
    assert all(a is b for a, b in zip(group["params"], state.model.parameters(), strict=True))


DATASET = {"_target_": "torch.utils.data.TensorDataset", "_args_": [
    {"_target_": "torch.arange", "_args_": [40]},
]}  # fmt: skip


def test_the_leasing_loader_takes_a_dataset_of_others(loaded):
    section = {"_target_": "composer_replication.ReplicaDataLoader", "batch_size": 4}
    state = built(loaded(train_dataloader=section | {"dataset": DATASET, "unit_size": 4}))
    loader = state.train_dataloader
    assert isinstance(loader, ReplicaDataLoader)
    assert (loader.spec.length, loader.spec.unit_size) == (40, 4)


def test_a_group_whose_name_is_no_number_has_no_fixed_shard(loaded):
    with pytest.raises(ValueError, match="replica_id='site-a' does not say which shard"):
        built(loaded("callbacks.diloco.replica_id=site-a"))


BROKEN = {"_target_": "own_parts.Model", "mlp": {"_target_": "own_parts.fails"}}
MLP = {"_target_": "own_parts.mlp", "width": 4}


@pytest.mark.parametrize(("wrong", "message"), [
    ("model._target_=own_parts.Modle", "the config: Error locating target 'own_parts.Modle'"),
    ("model.mlp.widht=3", "mlp() got an unexpected keyword argument 'widht'"),
    ("model.mlp.widht=3", "full_key: model.mlp"),
    ("optimizers.learning_rate=3", "optimizers: AdamW.__init__() got an unexpected keyword"),
    ("callbacks.mine.evry=3", "unexpected keyword argument 'evry'"),
    ("max_durations=4ba", "composer.Trainer: Trainer.__init__() got an unexpected keyword"),
    ("precision=fp31", "composer.Trainer: "),
    ({"model": BROKEN}, "invalid literal for int()"),
])  # fmt: skip
def test_a_mistake_is_one_line_with_the_section_in_hydra_s_words(loaded, wrong, message):
    with pytest.raises(ConfigError) as caught:
        built(loaded(wrong) if isinstance(wrong, str) else loaded(**wrong))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_an_error_of_a_callable_is_one_of_the_config_and_not_of_a_group(loaded):
    with pytest.raises(ConfigError, match="own_parts.fails"):
        simulate_replicas(loaded(model=BROKEN), 2)


def test_a_module_that_cannot_be_imported_is_named_with_the_reason(loaded, tmp_path, monkeypatch):
    (tmp_path / "half.py").write_text("import a_module_that_is_missing\ndef mlp(width): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"'half.mlp'.*a_module_that_is_missing"):
        built(loaded("model.mlp._target_=half.mlp"))


def test_a_fault_that_may_pass_is_none_of_the_config(loaded, tmp_path, monkeypatch):
    text = "def mlp(width): raise ConnectionError('the hub does not answer')\n"
    (tmp_path / "remote.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConnectionError, match="the hub does not answer"):
        built(loaded("model.mlp._target_=remote.mlp"))


def test_an_error_of_the_program_names_the_section_and_keeps_its_traceback(
    loaded, tmp_path, monkeypatch
):
    (tmp_path / "paid.py").write_text("def mlp(width): raise RuntimeError('no license')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RuntimeError, match="no license.* full_key: model.mlp") as caught:
        built(loaded("model.mlp._target_=paid.mlp"))
    assert str(caught.value.__cause__) == "no license"


@pytest.mark.slow
def test_the_command_says_in_one_line_what_cannot_be_built(tmp_path):
    """In the folder that it is started in, whose modules it finds."""
    (tmp_path / "here.py").write_text("import torch\ndef model(width): return torch.nn.ReLU()\n")
    alone = OWN["callbacks"]["diloco"] | {"num_replicas": 1}
    own = {"model": {"_target_": "here.model"}, "callbacks": {"diloco": alone}}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(OWN | own))
    # -P: the script composer-replication does not have that folder in its path either.
    command = [sys.executable, "-P", "-m", "composer_replication", "train", "own.yaml"]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # own_parts
    result = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert "Error: the config: Error in call to target 'here.model'" in result.stderr
    assert "missing 1 required positional argument: 'width'" in result.stderr
