"""What a callable accepts is read from its source, and imported where the source does not tell."""

import sys

import pytest

from composer_replication.training.key_checks import ConfigError
from composer_replication.training.signatures import signatures_of

MODULES = {
    "__init__": """
from typing import TYPE_CHECKING
from .plain import function as renamed, Own
from .stars import *
from . import plain
import zoo.plain as module
if TYPE_CHECKING:
    from .plain import Inherits
""",
    "plain": """
import functools
def function(a, /, b, *args, c, d=1, **kwargs): ...
def keeps(f):
    @functools.wraps(f)
    def wrapped(*args, **kwargs): return f(*args, **kwargs)
    return wrapped
def changes(f):
    def wrapped(z): return f(z)
    return wrapped
@keeps
def decorated(x, y=2): ...
@changes
def changed(x): ...
class Own:
    def __init__(self, x, *, y=2): ...
    def method(self): ...
class Inherits(Own):
    pass
class FromElsewhere(functools.partial):
    pass
number = 3
""",
    "stars": "from .plain import *\ndef own(q): ...\n",
    "dynamic": "globals()['made'] = lambda x: x\n",
    "broken": "import a_module_that_is_missing\ndef function(x): ...\nf = function\n",
    "wrong": "def f(:\n",
}


@pytest.fixture
def zoo(tmp_path, monkeypatch):
    folder = tmp_path / "zoo"
    folder.mkdir()
    for name, text in MODULES.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "zoo"]:
        del sys.modules[name]


def is_imported():
    return "zoo" in sys.modules


@pytest.mark.parametrize(("path", "parameters"), [
    ("zoo.plain.function", "(a, /, b, *args, c, d=None, **kwargs)"),
    ("zoo.renamed", "(a, /, b, *args, c, d=None, **kwargs)"),
    ("zoo.module.function", "(a, /, b, *args, c, d=None, **kwargs)"),
    ("zoo.Own", "(x, *, y=None)"),
    ("zoo.plain.Inherits", "(x, *, y=None)"),
    ("zoo.Inherits", "(x, *, y=None)"),  # for type checkers, and so it is there
    ("zoo.own", "(q)"),
    ("zoo.stars.Own", "(x, *, y=None)"),
])  # fmt: skip
def test_the_source_is_enough_for_what_is_written_out(zoo, path, parameters):
    (found,) = signatures_of(path)
    assert str(found) == parameters and not is_imported()


@pytest.mark.parametrize(("path", "parameters"), [
    ("zoo.plain.decorated", ["(x, y=None)", "(x, y=2)"]),
    ("zoo.plain.changed", ["(x)", "(z)"]),
    ("zoo.plain.Own.method", ["(self)"]),
    ("zoo.dynamic.made", ["(x)"]),
    ("builtins.isinstance", ["(obj, class_or_tuple, /)"]),
])  # fmt: skip
def test_what_the_source_leaves_open_is_imported_by_whoever_goes_on(zoo, path, parameters):
    assert [str(found) for found in signatures_of(path)] == parameters
    assert len(list(signatures_of(path, may_import=False))) == len(parameters) - 1


def test_what_the_source_says_of_a_decorated_function_comes_before_the_import(zoo):
    found = signatures_of("zoo.plain.decorated")
    next(found)
    assert not is_imported()
    next(found)
    assert is_imported()


@pytest.mark.parametrize(("path", "message", "imports"), [
    ("zoo.plain.functoin", "zoo.plain has no 'functoin': did you mean zoo.plain.function?", False),
    ("zoo.pain.function", "zoo has no 'pain': did you mean zoo.plain?", False),
    ("zoo.Onw", "zoo has no 'Onw': did you mean zoo.Own?", False),
    ("zoo.chnged", "zoo has no 'chnged': did you mean zoo.changed?", False),  # by stars
    ("zooo.plain.f", "there is no module 'zooo' for zooo.plain.f: did you mean 'zoo'?", False),
    ("zoo.xyzzy", "zoo has no 'xyzzy': look it up", False),
    ("zoo.wrong.f", "zoo.wrong.f cannot be imported: invalid syntax", False),
    ("zoo.dynamic.mad", "zoo.dynamic has no 'mad': did you mean zoo.dynamic.made?", True),
    ("zoo.Own.methd", "zoo.Own has no 'methd': did you mean zoo.Own.method?", True),
    ("zoo.broken.f", "ModuleNotFoundError: No module named 'a_module_that_is_missing'", True),
    ("zoo.plain.number", "zoo.plain.number cannot be called: its type is int", True),
    ("zoo.plain", "zoo.plain cannot be called: its type is module", True),
])  # fmt: skip
def test_a_wrong_path_is_named_with_the_closest_one(zoo, path, message, imports):
    with pytest.raises(ConfigError) as caught:
        list(signatures_of(path))
    assert message in str(caught.value)
    assert is_imported() == imports
