"""A config names what is not ours, by import path. Run: pytest tests/training/test_building.py"""

import subprocess
import sys

import pytest
import yaml
from own_parts import Model, seen

from composer_replication.data.loader import ReplicaDataLoader
from composer_replication.training.building import build_one
from composer_replication.training.config import ConfigError, load_config, save_config
from composer_replication.training.trainer import build_trainer, simulate_replicas

OWN = {
    "max_duration": "4ba",
    "global_train_batch_size": 8,
    "device_eval_batch_size": 4,
    "device": "cpu",
    "precision": "fp32",
    "progress_bar": False,
    "model": {
        "_target_": "own_parts.Model",
        "mlp": {"_target_": "own_parts.mlp", "width": 4},
        "names": ["a", "b"],
    },
    "train_loader": {"_target_": "own_parts.loader", "size": 32},
    "eval_loader": {"_target_": "own_parts.eval_loader"},
    "optimizer": {"_target_": "torch.optim.AdamW", "lr": 0.01, "betas": [0.9, 0.95]},
    "scheduler": {"_target_": "torch.optim.lr_scheduler.StepLR", "step_size": 1, "gamma": 0.5},
    "algorithms": {"clip": {
        "_target_": "composer.algorithms.GradientClipping",
        "clipping_type": "norm",
        "clipping_threshold": 1.0,
    }},
    "callbacks": {
        "diloco": {"sync_every": 2, "digest_every": 1},
        "mine": {"_target_": "own_parts.Counts", "every": 1, "label": "counted"},
        "lr_monitor": {},
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


def test_every_section_takes_callables_of_others(loaded, tmp_path):
    config = loaded()
    save_config(config, tmp_path / "saved.yaml")  # as launch does for its groups
    results = simulate_replicas(load_config(tmp_path / "saved.yaml"), 2)
    assert len({result["global_digest"] for result in results}) == 1
    assert {result["inner_steps"] for result in results} == {4}
    assert [each for each in seen if isinstance(each, tuple)] == [
        (8, 0, 2, "train"),
        (8, 1, 2, "train"),
    ]
    assert seen.count(4) == 2 and seen.count("counted") == 8


def test_values_are_plain_python_and_nested_callables_are_called(loaded):
    model = build_one("model", loaded()["model"])
    assert isinstance(model, Model) and type(model.names) is list
    assert [p.shape[0] for p in model.mlp.parameters()][:2] == [4, 4]


NAMES = [f"mlp.layers.{i}.{of}" for i in (0, 2, 4) for of in ("bias", "weight")]


@pytest.mark.parametrize(("target", "given"), [
    ("own_parts.by_names", NAMES),
    ("own_parts.by_model", Model),
])  # fmt: skip
def test_an_optimizer_is_given_what_it_names(loaded, target, given):
    simulate_replicas(loaded(optimizer={"_target_": target, "lr": 0.01}), 1)
    assert given in seen


def test_muon_is_given_names_by_its_path_too(loaded):
    muon = {"_target_": "composer_replication.training.Muon", "adamw_names": r"layers\.4"}
    simulate_replicas(loaded(optimizer=muon), 1)  # without names it raises an error


def test_an_optimizer_s_checkpoint_has_no_names_that_nobody_asked_for(loaded):
    model = build_one("model", loaded()["model"])
    optimizer = {"_target_": "torch.optim.SGD", "lr": 1.0}
    built = build_one("optimizer", optimizer, params=model.parameters(), model=model)
    assert "param_names" not in built.state_dict()["param_groups"][0]
    (group,) = built.param_groups
    assert all(a is b for a, b in zip(group["params"], model.parameters(), strict=True))


DATASET = {"_target_": "torch.utils.data.TensorDataset", "_args_": [
    {"_target_": "torch.arange", "_args_": [40]},
]}  # fmt: skip


def test_our_loader_divides_a_dataset_of_others_between_the_groups(loaded):
    section = loaded(train_loader={"name": "dataset", "dataset": DATASET})["train_loader"]
    read = []
    for rank in range(2):
        loader = build_one(
            "train_loader", section, batch_size=4, replica_rank=rank, num_replica_groups=2
        )
        read.append({int(i) for (batch,) in loader for i in batch})
    assert [len(each) for each in read] == [20, 20] and not read[0] & read[1]
    whole = build_one("eval_loader", section, batch_size=8, split="eval")
    assert sorted(int(i) for (batch,) in whole for i in batch) == list(range(40))


@pytest.mark.parametrize(("own", "name"), [
    ({"dataset_id": "mine"}, "mine"),
    ({}, "TensorDataset 40 7924"),
])  # fmt: skip
def test_leases_are_of_a_dataset_with_a_name(loaded, own, name):
    section = {"name": "dataset", "dataset": DATASET, "shards": "leased", "unit_size": 4}
    config = loaded(train_loader=section | own)
    loader = build_one("train_loader", config["train_loader"], batch_size=4)
    assert isinstance(loader, ReplicaDataLoader)
    assert (loader.spec.length, loader.spec.unit_size) == (40, 4)
    assert loader.spec.dataset_id.startswith(name)


def built(config):
    """Build what a group builds of a config."""
    callback = build_one("callbacks", {"diloco": config["callbacks"]["diloco"]})
    build_trainer(config, callback).close()


def test_our_leasing_loader_can_be_named_by_its_path(loaded):
    section = {"_target_": "composer_replication.ReplicaDataLoader", "dataset": DATASET}
    built(loaded(train_loader=section))


@pytest.mark.parametrize(("override", "message"), [
    ("callbacks.other=null", "callbacks has no 'other': use one of diloco, lr_monitor"),
    ("callbacks.mine=3", "callbacks.mine=3 is not a section: write key: value pairs"),
    ("callbacks.diloco._target_=own_parts.Counts", "callbacks.diloco has no '_target_'"),
])  # fmt: skip
def test_a_mistake_in_a_name_is_named_before_anything_is_built(loaded, override, message):
    with pytest.raises(ConfigError) as caught:
        loaded(override)
    assert message in str(caught.value)


CALL = "Error in call to target"
LOCATE = "Error locating target"
WITHOUT_WIDTH = {"_target_": "own_parts.Model", "mlp": {"_target_": "own_parts.mlp"}}
BROKEN = {"_target_": "own_parts.Model", "mlp": {"_target_": "own_parts.fails"}}
NO_OPTIMIZER = {"_target_": "own_parts.of_nothing", "lr": 1}
OF_TORCH = {"_target_": "torch.utils.data.DataLoader", "dataset": DATASET}
MLP = {"_target_": "own_parts.mlp", "width": 4}


@pytest.mark.parametrize(("wrong", "message"), [
    ("model._target_=Model", f"model: {LOCATE} 'Model': No module named 'Model'"),
    ("model._target_=null", "model: Expected a callable target, got 'None'"),
    ("model._target_=own_parts.Modle", f"model: {LOCATE} 'own_parts.Modle': No module named"),
    ("model.mlp._target_=own_prts.mlp", f"model.mlp: {LOCATE} 'own_prts.mlp': No module named"),
    ("model.mlp.widht=3", f"model.mlp: {CALL} 'own_parts.mlp': mlp() got an unexpected keyword"),
    ("model.mlp._target_=own_parts.fails", "unexpected keyword argument 'width'"),
    ("optimizer.learning_rate=3", "optimizer has no 'learning_rate': use one of amsgrad"),
    ("optimizer.params=3", "optimizer.params: leave it out, it follows from the rest"),
    ("scheduler.gama=3", "scheduler has no 'gama': did you mean 'gamma'?"),
    ("train_loader.batch_size=3", "train_loader.batch_size: leave it out, it follows from the"),
    ("train_loader.replica_rank=3", "train_loader.replica_rank: leave it out"),
    ("callbacks.mine.evry=3", "callbacks.mine has no 'evry': did you mean 'every'?"),
    ("callbacks.lr_monitor.every=3", "callbacks.lr_monitor has no 'every': leave it out"),
    ("algorithms.clip._target_=composer.algorithms.EMMA", f"algorithms.clip: {LOCATE} 'composer"),
    ({"model": {"_target_": "own_parts.Model"}}, "model: Model.__init__() missing 1 required"),
    ({"model": WITHOUT_WIDTH}, f"model.mlp: {CALL} 'own_parts.mlp': mlp() missing 1 required"),
    ({"model": BROKEN}, f"model.mlp: {CALL} 'own_parts.fails': invalid literal for int()"),
    ({"model": MLP}, "model makes a TinyMLP and no ComposerModel: wrap it"),
    ({"algorithms": {"x": MLP}}, "algorithms.x makes a TinyMLP and no Algorithm: derive it from C"),
    ({"optimizer": NO_OPTIMIZER}, "optimizer makes a int and no Optimizer: use one of torch's"),
    ({"train_loader": {"_target_": "own_parts.whole_loader"}}, "would give every group the same"),
    ({"train_loader": OF_TORCH}, "(name: dataset, dataset: {_target_: ...})"),
    ({"model": {"name": "byte_gpt", "d_modle": 8}}, "model has no 'd_modle': did you mean 'd_mod"),
    ({"model": {"d_model": 3}}, "model lacks name: use one of byte_gpt; or write _target_"),
    ({"optimizer": {"name": "adamw", "lrr": 3}}, "optimizer has no 'lrr': did you mean 'lr'?"),
    ({"train_loader": {"name": "text", "sede": 3}}, "train_loader has no 'sede': did you mean 'se"),
])  # fmt: skip
def test_a_mistake_is_one_line_with_the_section_and_the_key(loaded, wrong, message):
    with pytest.raises(ConfigError) as caught:
        built(loaded(wrong) if isinstance(wrong, str) else loaded(**wrong))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_an_error_of_a_callable_is_one_of_the_config_and_not_of_a_group(loaded):
    with pytest.raises(ConfigError, match="own_parts.fails"):
        simulate_replicas(loaded(model=BROKEN), 2)


def test_a_module_that_cannot_be_imported_is_named_with_the_reason(loaded, tmp_path, monkeypatch):
    (tmp_path / "half.py").write_text("import a_module_that_is_missing\ndef mlp(width): ...\n")
    (tmp_path / "sick.py").write_text("raise RuntimeError('no license')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"model.mlp: .*'half.mlp': .*a_module_that_is_missing"):
        built(loaded("model.mlp._target_=half.mlp"))
    with pytest.raises(ConfigError, match=r"model.mlp: .*'sick.mlp': no license"):
        built(loaded("model.mlp._target_=sick.mlp"))


def test_a_callable_whose_signature_c_does_not_tell_is_called():
    options = {"x": {"_target_": "builtins.dict", "a": 1}}
    assert build_one("scheduler", {"_target_": "builtins.dict", **options}) == {"x": {"a": 1}}


def test_a_fault_that_may_pass_is_none_of_the_config(loaded, tmp_path, monkeypatch):
    text = "def mlp(width): raise ConnectionError('the hub does not answer')\n"
    (tmp_path / "remote.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConnectionError, match="the hub does not answer"):
        built(loaded("model.mlp._target_=remote.mlp"))


def test_a_callable_of_others_may_stand_under_a_short_name(loaded):
    target = {"_target_": "own_parts.Counts", "every": 1, "label": "mine"}
    config = loaded(callbacks=OWN["callbacks"] | {"speed_monitor": target})
    simulate_replicas(config, 1)
    assert "mine" in seen


@pytest.mark.parametrize(("override", "message"), [
    ("model._target_=here.Modle", "model: Error locating target 'here.Modle': No module named"),
    ("optimizer.lrr=1", "model makes a Model and no ComposerModel: wrap it"),
])  # fmt: skip
@pytest.mark.slow
def test_the_command_says_in_one_line_what_cannot_be_built(tmp_path, override, message):
    """In the folder that it is started in, whose modules it finds."""
    (tmp_path / "here.py").write_text("import torch\nclass Model(torch.nn.Module): ...\n")
    alone = {"model": {"_target_": "here.Model"}, "callbacks": {"diloco": {"num_replicas": 1}}}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(OWN | alone))
    # -P: the script composer-replication does not have that folder in its path either.
    command = [sys.executable, "-P", "-m", "composer_replication", "train", "own.yaml", override]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 2
    assert f"Error: {message}" in result.stderr and "Traceback" not in result.stderr
