"""The keywords of our functions: what callers, ``help`` and editors see of them."""

import inspect
import re
from pathlib import Path

import pytest
from common import plain_sgd
from golden.runs import rows
from harness.groups import run

from composer_replication import DiLoCo, DiLoCoCallback, options, settings
from composer_replication.arguments import defaults_of, descriptions_of, shows
from composer_replication.group.host import GroupKeywords
from composer_replication.group.plain_loop import DiLoCoKeywords
from composer_replication.options import (
    ManagerKeywords,
    OptionKeywords,
    ReplicaOptions,
    SyncKeywords,
)
from composer_replication.replica import make_manager
from composer_replication.settings import DiLoCoSettings, SettingKeywords
from composer_replication.simulation.simulation import SimulationError

DOORS = {
    DiLoCo: DiLoCoKeywords,
    DiLoCoCallback: GroupKeywords,
    DiLoCoSettings: SettingKeywords,
    ReplicaOptions: OptionKeywords,
    make_manager: ManagerKeywords,
}


@pytest.mark.parametrize("door", DOORS)
def test_a_function_shows_every_keyword_with_its_default_and_its_description(door):
    shown = inspect.signature(door).parameters
    defaults = defaults_of(DOORS[door])
    assert not [each for each in shown.values() if each.kind is each.VAR_KEYWORD]
    assert {name: shown[name].default for name in defaults} == defaults
    assert {shown[name].kind for name in defaults} == {inspect.Parameter.KEYWORD_ONLY}
    described = inspect.getdoc(door.__init__ if isinstance(door, type) else door)
    if door is DiLoCo:
        described += inspect.getdoc(DiLoCo)  # the class describes what is no keyword
    for name in shown:
        assert f"\n    {name}: " in described, name


@pytest.mark.parametrize(
    ("held", "keywords"), [(DiLoCoSettings, SettingKeywords), (ReplicaOptions, OptionKeywords)]
)
def test_each_keyword_is_an_attribute_of_the_frozen_object_that_is_made_of_them(held, keywords):
    assert held.__annotations__.keys() == keywords.__annotations__.keys()
    assert vars(held()).keys() == keywords.__annotations__.keys()


def test_a_keyword_is_defined_in_one_place_above_its_description():
    source = Path(settings.__file__).read_text() + Path(options.__file__).read_text()
    for name in GroupKeywords.__annotations__:
        defined = re.findall(rf'^    {name}: Annotated\[.*\]\n    """', source, re.M)
        assert len(defined) == 1, name
    for door in DOORS:  # none repeats a name or a default
        function = door.__init__ if isinstance(door, type) else door
        written = inspect.getsource(function).partition(") -> ")[0]
        assert not [name for name in DOORS[door].__annotations__ if f"{name}:" in written]


def test_without_the_source_the_descriptions_alone_are_missing(monkeypatch):
    def missing(module):
        raise OSError("could not get source code")

    descriptions_of.cache_clear()
    monkeypatch.setattr(inspect, "getsource", missing)
    try:

        @shows(SettingKeywords)
        def door(**named):
            """Open."""

        assert inspect.signature(door).parameters["sync_every"].default == 100
        assert door.__doc__ == "Open."
    finally:
        descriptions_of.cache_clear()


@pytest.mark.parametrize(
    ("door", "name", "closest"),
    [
        (DiLoCoCallback, "sync_evry", "sync_every"),
        (DiLoCoCallback, "bucket_cap_mb", None),  # of a version before
        (DiLoCoCallback, "runs_dir", "run_dir"),
        (DiLoCoSettings, "outer_lrs", "outer_lr"),
        (ReplicaOptions, "time_out", "timeout"),
        (make_manager, "replicaid", "replica_id"),
    ],
)
def test_an_unknown_keyword_is_refused_with_the_closest_one(door, name, closest):
    expected = f"did you mean {closest}[?]" if closest else "use one of "
    with pytest.raises(TypeError, match=f"^{name} is no argument of {door.__name__}: {expected}"):
        door(**{name: 1})


def test_an_option_of_the_callback_alone_is_unknown_to_diloco_and_to_make_manager():
    with pytest.raises(SimulationError, match="eval_weights is no argument of DiLoCo: "):
        run(1, lambda group: None, eval_weights="local")
    with pytest.raises(TypeError, match="eval_weights is no argument of make_manager: "):
        make_manager(eval_weights="local")


def test_a_bad_setting_is_refused_by_every_function_that_takes_it():
    for bad in ({"sync_every": -5}, {"weight_by": "nonsense"}, {"digest_every": -1}):
        ((name, value),) = bad.items()
        with pytest.raises(ValueError, match=f"^{name}={value!r}: use "):
            DiLoCoCallback(**bad)
        with pytest.raises(SimulationError, match=f"{name}={value!r}: use "):
            run(1, lambda group: None, **bad)


def test_every_setting_is_an_argument_of_diloco_the_outer_optimizer_s_too():
    def numbers(group):
        saved = group.diloco.state_dict()["fragments"][0]["optimizer"]["param_groups"][0]
        return [saved[name] for name in ("lr", "momentum", "nesterov")]

    own = DiLoCoSettings(outer_lr=0.5, outer_momentum=0.25, outer_nesterov=False)
    assert run(1, numbers, **vars(own), **defaults_of(SyncKeywords)) == [[0.5, 0.25, False]]
    assert run(1, numbers) == [[0.7, 0.5, True]]


@pytest.mark.parametrize(("own", "message"), [
    ({"outer_lr": 0.7}, "outer_lr and an outer_optimizer of your own: give"),
    ({"schedule": rows((4, 1, 0))}, "in the schedule and an outer_optimizer of your own"),
])  # fmt: skip
def test_a_setting_that_an_outer_optimizer_of_one_s_own_would_not_hear_of_is_refused(own, message):
    with pytest.raises(SimulationError, match=message):
        run(1, lambda group: None, outer=plain_sgd(), **own)
