"""What groups say to each other: the proof of the run's token, and values from JSON.

One proof serves the reports in a quorum (``quorum_reports``) and the requests to a rank's server
(``peer_server``).
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Sequence
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints


def proof(token: str, *content: Any) -> str:
    """The proof that its author knows a token and has said this, for content that JSON can hold.

    Args:
        token: The run's secret.
        content: What is said, and everything that makes it different from other occasions. Its
            first part is the kind of message, so that a proof of one kind is none of another.
    """
    # JSON keeps the parts apart: none can run into the next.
    text = json.dumps(content, sort_keys=True)
    return hmac.new(token.encode(), text.encode(), hashlib.sha256).hexdigest()


def is_proven(tokens: Sequence[str], received: str, *content: Any) -> bool:
    """Whether a received proof shows that its author knows one of the tokens and has said this."""
    # As bytes: compare_digest raises a TypeError for a str that is not ASCII.
    return any(
        hmac.compare_digest(received.encode(), proof(token, *content).encode()) for token in tokens
    )


def converted(value: Any, kind: Any) -> Any:
    """Convert a value from JSON, which has lists and no tuples, to the type of a field.

    Args:
        value: From JSON.
        kind: A plain type, a NamedTuple, a tuple of any length, or one of these or None.

    Raises:
        TypeError: It is not of that type.
        ValueError: It is a list of another length.
    """
    kinds = get_args(kind)
    if NoneType in kinds:  # or None
        return None if value is None else converted(value, kinds[0])
    if get_origin(kind) is tuple:
        return tuple(converted(each, kinds[0]) for each in converted(value, list))
    if issubclass(kind, tuple):
        pairs = zip(converted(value, list), get_type_hints(kind).values(), strict=True)
        return kind(*(converted(*pair) for pair in pairs))
    if type(value) is not kind:
        raise TypeError(f"{value!r} is not of type {kind.__name__}")
    return value
