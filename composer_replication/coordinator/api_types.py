"""Fields and bodies of the coordinator's requests and answers."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

GroupName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
"""The name of a replica group. It occurs in URLs, paths, log lines and torchft's own names."""


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("use printable characters only")
    return text


Name = Annotated[
    str, Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f]+$"), AfterValidator(_printable)
]
TensorName = Annotated[str, Field(max_length=1000), AfterValidator(_printable)]
Count = Annotated[int, Field(ge=0, lt=2**53)]


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


Number = Annotated[float | None, AfterValidator(_finite)]
"""A number. NaN and infinity become null, since JSON has no such numbers."""


class StrictBody(BaseModel):
    """The body of a request. Fields that it does not name are rejected."""

    model_config = ConfigDict(extra="forbid")


class ErrorBody(BaseModel):
    """The reason why a request failed."""

    detail: str


class Registration(StrictBody):
    """A replica group that registers."""

    replica_id: GroupName
    session: Name
    host: Name
    world_size: Annotated[int, Field(ge=1, lt=2**31)]
    composer_replication: Name
    torchft: Name
    model: Name
    tensors: dict[TensorName, Name] = {}


class Heartbeat(StrictBody):
    """A sign of life of a replica group, with its progress."""

    session: Name
    phase: Name | None = None
    batch: Count | None = None
    max_batches: Count | None = None
    inner_steps: Count | None = None
    outer_step: Count | None = None
    round: Number = None
    loss: Number = None
    num_participants: Count | None = None
    sync_seconds: Number = None
    inner_share: Number = None
    steps_per_second: Number = None
    digest_step: Count | None = None
    global_digest: Annotated[str | None, Field(pattern=r"^[0-9a-f]{64}$")] = None
