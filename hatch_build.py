"""README as a package index shows it, which has none of the files that its links lead to."""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_COMMENT = re.compile(r"<!--.*?-->\n?", re.DOTALL)
_RELATIVE = re.compile(r"(!?)\[([^\]]*)\]\((?!https://)[^)]*\)")


def for_index(readme: str) -> str:
    """Replace each relative link by its text, and leave relative pictures and comments out."""
    text = _COMMENT.sub("", readme)
    return _RELATIVE.sub(lambda link: "" if link[1] else link[2], text)


class CustomMetadataHook(MetadataHookInterface):
    """hatchling calls this for the metadata of sdist and wheel."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text()
        metadata["readme"] = {"content-type": "text/markdown", "text": for_index(text)}
