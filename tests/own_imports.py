"""What the modules of the package import, read from their text. For the tests."""

import ast
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "composer_replication"


@cache
def imports_of(path: Path) -> frozenset[str]:
    """The names of the modules that a file imports, and numpy where it calls ``Tensor.numpy``."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
        elif isinstance(node, ast.Attribute) and node.attr == "numpy":
            found.add("numpy")
    return frozenset(found)


def modules_of(package: str) -> list[Path]:
    """The files of a package of ours, or of a module beside the packages."""
    return sorted((PACKAGE / package).rglob("*.py")) or [PACKAGE / package]


def own_imports(path: Path) -> set[str]:
    return {name for name in imports_of(path) if name.startswith("composer_replication")}


def file_of(module: str) -> Path | None:
    path = ROOT / module.replace(".", "/")
    return next((f for f in (path.with_suffix(".py"), path / "__init__.py") if f.exists()), None)


def of_others(*paths: Path) -> set[str]:
    """The names of other packages that these files of ours import, and those that they import."""
    seen, todo, found = set(), list(paths), set()
    while todo:
        path = todo.pop()
        if path in seen:
            continue
        seen.add(path)
        for name in imports_of(path):
            if name == "composer_replication":
                continue  # its public names are imported when they are asked for
            if not name.startswith("composer_replication."):
                found.add(name.partition(".")[0])
            elif (own := file_of(name) or file_of(name.rpartition(".")[0])) is not None:
                todo.append(own)
    return found - sys.stdlib_module_names
