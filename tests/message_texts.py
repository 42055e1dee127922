"""The texts that the package raises or warns with, read from its code.

A text is as people see it, with ``...`` for each name and number in it.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "composer_replication"
LEVELS = ("warning", "error", "exception", "critical", "warn")
FIELD = re.compile(r"%(?:[-#0-9.]*[sdrgfi])|\{\w*\}")


class Texts:
    """The messages of the package.

    Attributes:
        by_place: The possible texts of each ``raise`` and each warning, by file and code. Empty
            where the code passes on an error or a text of somebody else.
    """

    def __init__(self) -> None:
        trees = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
        self._functions: dict[str, list[ast.FunctionDef]] = {}
        self._attributes: dict[str, list[ast.expr]] = {}
        for node in (each for tree in trees.values() for each in ast.walk(tree)):
            if isinstance(node, ast.FunctionDef):
                self._functions.setdefault(node.name, []).append(node)
            elif isinstance(node, ast.Assign):
                for target in node.targets:
                    if isinstance(target, ast.Attribute):
                        self._attributes.setdefault(target.attr, []).append(node.value)
        self.by_place: dict[tuple[str, str], set[str]] = {}
        for path, tree in trees.items():
            self._module = tree
            for scope, node in _said(tree, tree):
                place = (str(path.relative_to(PACKAGE)), ast.unparse(node))
                self.by_place.setdefault(place, set()).update(
                    text for text in self._of(node, scope, depth=0) if re.search(r"\w", text)
                )

    def all(self) -> set[str]:
        """Every text."""
        return set().union(*self.by_place.values())

    def _of(self, node: ast.AST | None, scope: ast.AST, depth: int) -> set[str]:
        """The texts that an expression may be; none if that is not in the code."""
        if depth > 6:
            return set()

        def of(*nodes: ast.AST | None) -> set[str]:
            return set().union(*(self._of(each, scope, depth + 1) for each in nodes))

        match node:
            case ast.Constant(value=str(text)):
                return {plain(FIELD.sub("...", text))}
            case ast.JoinedStr(values=parts):
                # A text may begin with another one, by which people will look it up.
                head = parts[0].value if isinstance(parts[0], ast.FormattedValue) else None
                heads = of(head) if isinstance(head, ast.Name) else set()
                shown = [str(p.value) if isinstance(p, ast.Constant) else "..." for p in parts]
                return {plain(each + "".join(shown[1:])) for each in heads or {shown[0]}}
            case ast.BinOp(op=ast.Add(), left=left, right=right):
                heads, tails = of(left) or {"..."}, of(right) or {"..."}
                return {plain(head + tail) for head in heads for tail in tails}
            case ast.IfExp(body=body, orelse=other):
                return of(body, other)
            case ast.Raise(exc=ast.Call() | ast.Name() as raised):
                return of(raised)
            case ast.Name(id=name):
                constants = [each for each in self._module.body if isinstance(each, ast.Assign)]
                values = [each for node in (scope, *constants) for each in _values(node, name)]
                return of(*values, *self._arguments(scope, name))
            case ast.Attribute(attr=name):  # of an object of ours; a property has a function's name
                return of(*self._attributes.get(name, ())) | self._returned(name, depth)
            case ast.Call(func=ast.Attribute(value=logger, attr=level)) if _logs(logger, level):
                return of(*node.args[:1])
            case ast.Call(func=ast.Attribute(value=text, attr="format")):
                return of(text)
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
                if name in self._functions:
                    return self._returned(name, depth)
                # An error: OSError has a number before its text, HTTPException a status.
                texts = [arg for arg in node.args if of(arg) or isinstance(arg, ast.JoinedStr)]
                return of(*texts[:1])
        return set()

    def _returned(self, name: str, depth: int) -> set[str]:
        """The texts that functions of a name return."""
        return set().union(
            *(
                self._of(found.value, function, depth + 1)
                for function in self._functions.get(name, [])
                for found in ast.walk(function)
                if isinstance(found, ast.Return)
            )
        )

    def _arguments(self, scope: ast.AST, name: str) -> list[ast.expr]:
        """What a function of this module is called with for one of its parameters."""
        names = [a.arg for a in scope.args.args] if isinstance(scope, ast.FunctionDef) else []
        if name not in names:
            return []
        place = names.index(name)
        calls = [node for node in ast.walk(self._module) if isinstance(node, ast.Call)]
        named = [call for call in calls if getattr(call.func, "id", None) == scope.name]
        return [call.args[place] for call in named if place < len(call.args)]


def plain(text: str) -> str:
    """A text in one line, without a second ``...`` beside the first."""
    return re.sub(r"\.\.\.(?:\.\.\.)+", "...", " ".join(text.split()))


def _said(node: ast.AST, scope: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Each ``raise`` and each warning, with the function around it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Raise) and child.exc is not None:
            yield scope, child
        elif isinstance(child, ast.Call) and isinstance(child.func, ast.Attribute):
            is_own_text = bool(child.args) and isinstance(child.args[0], ast.JoinedStr)
            if _logs(child.func.value, child.func.attr):
                yield scope, child
            elif is_own_text and ast.unparse(child.func) == "super().__init__":
                yield scope, child.args[0]  # an error that words itself
        yield from _said(child, child if isinstance(child, ast.FunctionDef) else scope)


def _logs(value: ast.AST, level: str) -> bool:
    return level in LEVELS and ast.unparse(value).rpartition(".")[2].strip("_") in (
        "log",
        "warnings",
        "package_log",
    )


def _values(scope: ast.AST, name: str) -> list[ast.expr]:
    """What is assigned to a variable in a function, or in the code of a module."""
    return [
        node.value
        for node in ast.walk(scope)
        if isinstance(node, ast.Assign)
        if any(isinstance(each, ast.Name) and each.id == name for each in node.targets)
    ]
