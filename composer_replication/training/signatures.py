"""Finds what a callable accepts, by its import path, without importing it if its source tells.

Importing Composer takes seconds, and a wrong name or argument should be answered at once. Where the
source leaves something open (a decorated function, a module that makes its names when it is
imported, C), the module is imported before anything is refused, so that no refusal is a guess.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import re
from collections.abc import Iterator
from importlib.machinery import ModuleSpec

from composer_replication.training.import_paths import (
    find_module,
    import_target,
    modules_in,
    no_such_name,
)
from composer_replication.training.key_checks import ConfigError

_MAX_HOPS = 20
_MAKES_NAMES = re.compile(r"\bsys\.modules\b|\b(globals|vars|locals)\(\)|\bexec\(|__getattr__")
"""A module with one of these may have names that its source does not show."""


_Found = tuple[inspect.Signature, bool]
"""A signature, and whether it is sure. A decorator seldom changes it, and may."""


class _Unclear(Exception):
    """The source does not show the signature, so the module has to be imported."""


def signatures_of(path: str, *, may_import: bool = True) -> Iterator[inspect.Signature]:
    """Yield what is known of a callable's signature, the surest last.

    What its source says comes first. If that may be wrong, what it says when it is imported is
    next. A caller that stops at the first one saves the import. Some callables in C have none.

    Args:
        path: Its import path, ``package.module.name``.
        may_import: Whether to import the module if its source does not tell.

    Raises:
        ConfigError: There is no such name, it cannot be imported, or it cannot be called.
    """
    try:
        signature, is_sure = _from_source(path)
        yield signature
        if is_sure:
            return
    except _Unclear:
        pass
    except SyntaxError as error:
        raise ConfigError(f"{path} cannot be imported: {error}") from error
    if not may_import:
        return
    found = import_target(path)
    if not callable(found):
        raise ConfigError(f"{path} cannot be called: its type is {type(found).__name__}")
    with contextlib.suppress(ValueError):
        yield inspect.signature(found)


def _from_source(path: str, hops: int = 0) -> _Found:
    spec, rest = find_module(path)
    if hops > _MAX_HOPS or not rest:
        raise _Unclear
    tree, (name, *members) = ast.parse(_source_of(spec)), rest
    found = list(_bindings(tree, name))
    if not found:
        return _through_stars(tree, spec, name, hops)
    (node,) = found if len(found) == 1 else (None,)
    if isinstance(node, ast.Import | ast.ImportFrom):
        return _from_source(".".join([_origin(node, name, spec), *members]), hops + 1)
    if members or node is None:
        raise _Unclear
    if isinstance(node, ast.ClassDef):
        return _of_class(node, spec, hops)
    if isinstance(node, ast.FunctionDef):
        return _of_function(node), not node.decorator_list
    raise _Unclear


def _source_of(spec: ModuleSpec) -> str:
    get_source = getattr(spec.loader, "get_source", None)
    source = get_source(spec.name) if get_source is not None else None
    if source is None:
        raise _Unclear
    return source


def _bindings(tree: ast.Module, name: str) -> Iterator[ast.AST]:
    """Every place outside of functions and classes that binds a name."""
    for node in _statements(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if node.name == name:
                yield node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            bound = [alias.asname or alias.name.partition(".")[0] for alias in node.names]
            if name in bound:
                yield node
        elif any(_assigns(expression, name) for expression in ast.iter_child_nodes(node)):
            yield node


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.expr):
            yield from _statements(child)


def _assigns(expression: ast.AST, name: str) -> bool:
    return not isinstance(expression, ast.stmt) and any(
        isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store)
        for node in ast.walk(expression)
    )


def _origin(node: ast.Import | ast.ImportFrom, name: str, spec: ModuleSpec) -> str:
    """The path that an import binds to a name."""
    for alias in node.names:
        if isinstance(node, ast.ImportFrom) and (alias.asname or alias.name) == name:
            return f"{_module_of(node, spec)}.{alias.name}"
        if isinstance(node, ast.Import) and alias.asname == name:
            return alias.name
    return name  # `import a.b` binds a


def _module_of(node: ast.ImportFrom, spec: ModuleSpec) -> str:
    if not node.level:
        return node.module or ""
    package = spec.name if spec.submodule_search_locations is not None else spec.parent or ""
    names = package.split(".")
    names = names[: len(names) - node.level + 1]
    return ".".join([*names, node.module] if node.module else names)


def _through_stars(tree: ast.Module, spec: ModuleSpec, name: str, hops: int) -> _Found:
    """Look for a name that a module does not bind itself, where it imports everything from."""
    for node in _statements(tree):
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            try:
                return _from_source(f"{_module_of(node, spec)}.{name}", hops + 1)
            except ConfigError:
                continue
    if _MAKES_NAMES.search(_source_of(spec)):
        raise _Unclear
    raise no_such_name(f"{spec.name}.{name}", _names_of(tree, spec))


def _names_of(tree: ast.Module, spec: ModuleSpec, hops: int = 0) -> Iterator[str]:
    for node in _statements(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.ImportFrom):
            if node.names[0].name == "*" and hops < _MAX_HOPS:
                star, rest = find_module(_module_of(node, spec))
                yield from () if rest else _names_of(ast.parse(_source_of(star)), star, hops + 1)
            yield from (alias.asname or alias.name for alias in node.names)
    yield from modules_in(spec.submodule_search_locations or ())


def _of_class(node: ast.ClassDef, spec: ModuleSpec, hops: int) -> _Found:
    own = {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}
    metaclasses = {ast.unparse(keyword.value) for keyword in node.keywords}
    if "__new__" in own or not metaclasses <= {"ABCMeta", "abc.ABCMeta"}:
        raise _Unclear
    if "__init__" in own:  # which neither dataclass nor attrs would replace
        return _of_function(own["__init__"], skip=1), not own["__init__"].decorator_list
    if node.decorator_list or len(node.bases) != 1:
        raise _Unclear
    return _from_source(f"{spec.name}.{ast.unparse(node.bases[0])}", hops + 1)


def _of_function(node: ast.FunctionDef, skip: int = 0) -> inspect.Signature:
    """The signature of a function, with None for all defaults."""
    kind, arguments, empty = inspect.Parameter, node.args, inspect.Parameter.empty
    parameters = [kind(each.arg, kind.POSITIONAL_ONLY) for each in arguments.posonlyargs]
    parameters += [kind(each.arg, kind.POSITIONAL_OR_KEYWORD) for each in arguments.args]
    first = len(parameters) - len(arguments.defaults)
    parameters[first:] = [each.replace(default=None) for each in parameters[first:]]
    parameters = parameters[skip:]
    if arguments.vararg is not None:
        parameters.append(kind(arguments.vararg.arg, kind.VAR_POSITIONAL))
    for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        has_none = empty if default is None else None
        parameters.append(kind(each.arg, kind.KEYWORD_ONLY, default=has_none))
    if arguments.kwarg is not None:
        parameters.append(kind(arguments.kwarg.arg, kind.VAR_KEYWORD))
    return inspect.Signature(parameters)
