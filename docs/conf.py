"""How Sphinx builds the site from these pages. Run: make docs"""

from __future__ import annotations

import inspect
import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

META = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]

project = META["name"]
version = release = META["version"]
html_title = f"{project} {version}"
html_theme = "furo"
html_show_copyright = False
html_show_sphinx = False
# No line is cut at 1280 pixels: 98 columns fit, and longer lines are wrapped.
html_theme_options = {"light_css_variables": {"code-font-size": "var(--font-size--small--3)"}}
html_static_path = ["_static"]
html_css_files = ["site.css"]

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
highlight_language = "text"  # a block without a language is output
myst_heading_anchors = 4  # as git hosts make them

nb_execution_mode = "off"  # tests/test_tutorial.py executes it, and its outputs are stored
nb_merge_streams = True

autodoc_member_order = "bysource"
autodoc_mock_imports = ["lightning", "transformers"]  # they are not in the environment of the site
autodoc_inherit_docstrings = False  # torch's and torchft's are theirs
autoclass_content = "both"
autodoc_typehints = "none"  # they are beside each argument's description
maximum_signature_line_length = 80
napoleon_google_docstring = True
napoleon_numpy_docstring = False

# The one type that the pages name and do not describe.
nitpick_ignore = [("py:class", "composer_replication.simulation.manager.SimulatedManager")]


def add_types(app: Sphinx, what: str, name: str, of: Any, options: Any, lines: list[str]) -> None:
    """Write each argument's type and default beside its name, where napoleon expects them."""
    if not callable(of) or "Args:" not in lines:
        return
    parameters = inspect.signature(of).parameters
    for number in range(lines.index("Args:") + 1, len(lines)):
        found = re.fullmatch(r"    (\w+): (.*)", lines[number])
        known = parameters.get(found[1]) if found else None
        if found and known:
            said = f"``{annotation(known)}``"
            if known.default is not known.empty:
                said += f", default ``{known.default!r}``"
            lines[number] = f"    {found[1]} ({said}): {found[2]}"


def annotation(parameter: inspect.Parameter) -> str:
    kind = parameter.annotation
    return kind if isinstance(kind, str) else inspect.formatannotation(kind)


def leave_out_of_the_search(app: Sphinx, doctree: Any) -> None:
    """Decisions are for who changes the code: the search would find them before the pages."""
    if app.env.docname.startswith("adrs/"):
        app.env.metadata[app.env.docname]["nosearch"] = "true"


def setup(app: Sphinx) -> None:
    app.connect("doctree-read", leave_out_of_the_search)
    app.connect("autodoc-process-docstring", add_types, priority=400)  # napoleon has 500
