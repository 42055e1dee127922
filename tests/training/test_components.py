"""What a config can name exists, and takes the arguments that the check before it lets through."""

import inspect

import pytest

from composer_replication.training.components import SHORT_NAMES, component_of
from composer_replication.training.import_paths import import_target

NAMED = [(section, name) for section, names in SHORT_NAMES.items() for name in names]


@pytest.mark.parametrize(("section", "name"), NAMED, ids=lambda value: value)
def test_the_arguments_of_a_short_name_are_found_without_importing_it(section, name):
    component = component_of(section, name, {})
    (read,) = component.signatures()
    real = inspect.signature(import_target(component.path))
    objects = {"manager"} if name == "diloco" else set()  # what a config cannot give
    assert set(read.parameters) == set(real.parameters) - objects
    for parameter in read.parameters.values():
        is_required = real.parameters[parameter.name].default is inspect.Parameter.empty
        assert (parameter.default is inspect.Parameter.empty) == is_required, parameter
