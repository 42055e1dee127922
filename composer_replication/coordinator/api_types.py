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
MetricName = Annotated[str, Field(pattern=r"^[a-z0-9_/]{1,64}$")]
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
    steps_per_second: Number = None
    metrics: Annotated[dict[MetricName, Number], Field(max_length=64)] = {}
    digest_step: Count | None = None
    global_digest: Annotated[str | None, Field(pattern=r"^[0-9a-f]{64}$")] = None


def _possible(rows: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    if len({stream for stream, _, _ in rows}) < len(rows):
        raise ValueError("a stream occurs twice: send one row for each stream")
    for stream, position, in_part in rows:
        if position > in_part:
            raise ValueError(
                f"stream {stream} has {position} samples in the model and {in_part} in some part "
                "of it: the second has to be at least the first"
            )
    return rows


class WithLedger(StrictBody):
    """A body with the ledger of a model.

    Its rows have a stream, the samples of it that are in the model, and those that are in some part
    of the model.
    """

    ledger: Annotated[list[tuple[Count, Count, Count]], AfterValidator(_possible)]

    def entries(self) -> dict[int, tuple[int, int]]:
        """The rows by stream."""
        return {stream: (position, in_part) for stream, position, in_part in self.ledger}


class DatasetRequest(StrictBody):
    """A dataset of the samples ``0 .. length - 1``, which are leased by units of ``unit_size``."""

    dataset_id: Name
    length: Annotated[int, Field(ge=1, lt=2**53)]
    seed: Count
    unit_size: Annotated[int, Field(ge=1, lt=2**53)]


class StreamRequest(StrictBody):
    """A stream of samples for one incarnation of a replica group, identified by ``name``."""

    name: Name
    dataset_id: Name
    replica_id: GroupName
    session: Name


class LeaseRequest(StrictBody):
    """A request for the lease with a number, of this epoch or an earlier one."""

    number: Count
    epoch: Count


class ReopenRequest(StrictBody):
    """Where a group continues its stream, in samples, and the group's session."""

    position: Count
    session: Name


class CommitReport(WithLedger):
    """A sync: the outer step and the ledger after it, and the streams of its participants.

    ``age_s`` is the number of seconds since the sync ended.
    """

    outer_step: Count
    present: list[Count]
    age_s: Annotated[float, Field(ge=0, allow_inf_nan=False)]


class RewindRequest(WithLedger):
    """The outer step and the ledger of the checkpoint from which the run continues."""

    outer_step: Count
