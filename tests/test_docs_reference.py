"""The API reference, as far as it can be checked without Sphinx. `make docs` builds it."""

import inspect
import re
from dataclasses import fields
from pathlib import Path
from pkgutil import resolve_name

import pytest
from scripts import load_script

import composer_replication
from composer_replication import DiLoCo, DiLoCoCallback, DiLoCoSettings
from composer_replication.callback.callback import CallbackArguments
from composer_replication.diloco.options import DiLoCoArguments
from composer_replication.replica import make_manager
from composer_replication.replica.factory import ManagerArguments

DOCS = Path(__file__).parent.parent / "docs"
NAMED = re.findall(r"^\.\. auto\w+:: ([\w.]+)$", (DOCS / "api.md").read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def conf():
    return load_script(DOCS / "conf.py")


@pytest.mark.parametrize("name", NAMED)
def test_it_names_what_there_is(name):
    module, _, own = name.rpartition(".")
    assert inspect.getdoc(resolve_name(f"{module}:{own}"))


def test_every_public_name_is_in_it():
    public = {f"composer_replication.{name}" for name in composer_replication.__all__}
    assert public | {"composer_replication.replica.make_manager"} <= set(NAMED)


@pytest.mark.parametrize(
    ("of", "documented", "arguments"),
    [
        (DiLoCoCallback, DiLoCoCallback.__init__, CallbackArguments),
        (DiLoCo, DiLoCo.__init__, DiLoCoArguments),
        (DiLoCoSettings, DiLoCoSettings, DiLoCoSettings),
        (make_manager, make_manager, ManagerArguments),
    ],
)
def test_each_argument_has_its_type_and_its_default(conf, of, documented, arguments):
    lines = inspect.getdoc(documented).splitlines()
    conf.add_types(None, "", "", of, None, lines)
    shown = dict(re.findall(r"^    (\w+) \((``.*``)\): ", "\n".join(lines), re.MULTILINE))
    for field in fields(arguments):
        default = inspect.signature(of).parameters[field.name].default
        assert shown[field.name].startswith(f"``{field.type}``")
        assert default is inspect.Parameter.empty or f"default ``{default!r}``" in shown[field.name]
