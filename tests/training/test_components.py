"""What a config can name exists, and takes the keys that the config check lets through."""

import inspect

import pytest

from composer_replication.training.components import COMPONENTS

NAMED = [(section, name) for section, names in COMPONENTS.items() for name in names]


@pytest.mark.parametrize(("section", "name"), NAMED, ids=lambda value: value)
def test_a_component_takes_the_keys_that_are_listed_for_it(section, name):
    component = COMPONENTS[section][name]
    taken = inspect.signature(component.load()).parameters
    assert set(component.keys) <= taken.keys()
    assert len(set(component.keys)) == len(component.keys)
