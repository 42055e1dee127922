"""The HTTP interface for samples: datasets, streams, leases, and reports of the ledger."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import AfterValidator, Field

from composer_replication.coordinator.admission import address_of
from composer_replication.coordinator.api_types import Count, ErrorBody, GroupName, Name, StrictBody
from composer_replication.coordinator.events import Events
from composer_replication.coordinator.streams import Streams
from composer_replication.coordinator.work_units.leases import Lease
from composer_replication.coordinator.work_units.work_units import DatasetProgress


def _each_once(rows: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    if len({stream for stream, _, _ in rows}) < len(rows):
        raise ValueError("a stream occurs twice: send one row for each stream")
    return rows


LedgerRows = Annotated[list[tuple[Count, Count, Count]], AfterValidator(_each_once)]
"""Rows of a stream, its samples that are in the model, and those that are in some part of it."""


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


class ReleaseRequest(StrictBody):
    """The model's ledger at the end of a stream."""

    ledger: LedgerRows


class CommitReport(StrictBody):
    """A sync: the outer step and the ledger after it, and the streams of its participants.

    ``age_s`` is the number of seconds since the sync ended.
    """

    outer_step: Count
    ledger: LedgerRows
    present: list[Count]
    age_s: Annotated[float, Field(ge=0, allow_inf_nan=False)]


class RewindRequest(StrictBody):
    """The outer step and the ledger of the checkpoint from which the run continues."""

    outer_step: Count
    ledger: LedgerRows


def data_router(streams: Streams, events: Events) -> APIRouter:
    """Build the routes for samples.

    Args:
        streams: Sample streams of the run.
        events: Receives rewinds.
    """
    router = APIRouter(responses={404: {"model": ErrorBody}})
    units = streams.units

    @router.post("/datasets", status_code=201)
    def create(dataset: DatasetRequest) -> dict[str, str]:
        """Add a dataset. A repeated request with the same numbers is answered again."""
        units.create_dataset(**dataset.model_dump())
        return {"dataset_id": dataset.dataset_id}

    @router.get("/datasets/{dataset_id:path}")
    def progress(dataset_id: Name) -> DatasetProgress:
        """Return how many samples of a dataset are done."""
        return units.dataset(dataset_id)

    @router.post("/streams", status_code=201)
    def open_stream(stream: StreamRequest) -> dict[str, int]:
        """Open a stream. A repeated request with the same name is answered again."""
        return {"stream": units.open_stream(**stream.model_dump())}

    @router.post("/streams/{stream}/leases", status_code=201)
    def lease(stream: Count, request: LeaseRequest) -> Lease:
        """Return the lease with a number, the same at every request; empty if none is available."""
        return units.lease(stream, request.number, request.epoch)

    @router.post("/streams/{stream}/reopen")
    def reopen(stream: Count, request: ReopenRequest) -> dict[str, int]:
        """Continue a stream from a checkpoint of the group that owns it."""
        units.reopen(stream, request.position, request.session)
        return {"stream": stream}

    @router.post("/streams/{stream}/release")
    def release(stream: Count, request: ReleaseRequest) -> dict[str, list[int]]:
        """Close a stream. Its samples that are not in the model become available."""
        return {"unknown": streams.release(stream, _ledger(request.ledger))}

    @router.post("/commits")
    def commit(report: CommitReport) -> dict[str, list[int]]:
        """Record a sync. A report may be repeated and may be late."""
        ledger = _ledger(report.ledger)
        present = set(report.present)
        return {"unknown": streams.commit(report.outer_step, ledger, present, report.age_s)}

    @router.post("/rewind")
    def rewind(request: Request, body: RewindRequest) -> dict[str, int]:
        """Continue the run from a checkpoint, and undo what came after it."""
        outer_step = body.outer_step
        with events.action(f"rewind to outer step {outer_step}", address_of(request.scope)):
            streams.rewind(outer_step, _ledger(body.ledger))
        return {"outer_step": outer_step}

    return router


def _ledger(rows: list[tuple[int, int, int]]) -> dict[int, tuple[int, int]]:
    return {stream: (position, in_part) for stream, position, in_part in rows}
