"""What requests are made of."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Name = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f]+$")]
Count = Annotated[int, Field(ge=0, lt=2**53)]


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


Number = Annotated[float | None, AfterValidator(_finite)]
"""A number; what is not finite, such as a loss that has diverged, is none: JSON has no such."""


class Strict(BaseModel):
    """The body of a request, with no fields but those named."""

    model_config = ConfigDict(extra="forbid")


class Refusal(BaseModel):
    """Why a request was refused."""

    detail: str
