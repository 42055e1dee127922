"""Functions that take a dataclass's fields: what callers and ``help`` see of them."""

import inspect
from dataclasses import fields

import pytest
from common import plain_sgd
from golden.runs import rows
from promises.groups import run

from composer_replication.diloco.algorithm import DiLoCo
from composer_replication.diloco.arguments import DiLoCoArguments
from composer_replication.options import DiLoCoOptions
from composer_replication.replica.factory import ManagerArguments, make_manager
from composer_replication.settings import DiLoCoSettings
from composer_replication.simulation.simulation import SimulationError


@pytest.mark.parametrize(
    ("function", "arguments"), [(DiLoCo, DiLoCoArguments), (make_manager, ManagerArguments)]
)
def test_they_show_every_field_with_its_default_and_a_description(function, arguments):
    shown = inspect.signature(function).parameters
    assert shown == inspect.signature(arguments).parameters
    assert shown.keys() == {field.name for field in fields(arguments)}
    described = inspect.getdoc(function.__init__ if function is DiLoCo else function)
    for name in shown:
        assert f"\n    {name}: " in described, name


def test_an_unknown_argument_is_refused_with_the_closest_one():
    with pytest.raises(TypeError, match="^replicaid is no argument of make_manager: did you mean"):
        make_manager(replicaid=0)
    with pytest.raises(TypeError, match="^a is no argument of make_manager: use one of "):
        make_manager(a=1)


def test_every_setting_is_an_argument_of_diloco_the_outer_optimizer_s_too():
    def numbers(group):
        saved = group.diloco.state_dict()["fragments"][0]["optimizer"]["param_groups"][0]
        return [saved[name] for name in ("lr", "momentum", "nesterov")]

    settings = DiLoCoSettings(outer_lr=0.5, outer_momentum=0.25, outer_nesterov=False)
    assert run(1, numbers, **vars(settings), **vars(DiLoCoOptions())) == [[0.5, 0.25, False]]
    assert run(1, numbers) == [[0.7, 0.5, True]]


@pytest.mark.parametrize(("settings", "message"), [
    ({"outer_lr": 0.5}, "outer_lr and an outer_optimizer of your own: give"),
    ({"schedule": rows((4, 1, 0))}, "in the schedule and an outer_optimizer of your own"),
])  # fmt: skip
def test_a_setting_that_an_outer_optimizer_of_one_s_own_would_not_hear_of_is_refused(
    settings, message
):
    with pytest.raises(SimulationError, match=message):
        run(1, lambda group: None, outer=plain_sgd(), **settings)
