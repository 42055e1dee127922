"""Which samples a replica group trains on, over HTTP."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import AfterValidator, BaseModel, Field

from composer_replication.coordinator.admission import address_of
from composer_replication.coordinator.api_types import Count, GroupName, Name, Refusal, Strict
from composer_replication.coordinator.audit import Audit
from composer_replication.coordinator.streams import Streams
from composer_replication.coordinator.work_units.leases import Lease
from composer_replication.coordinator.work_units.progress import DatasetProgress


def _each_once(rows: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    if len({stream for stream, _, _ in rows}) < len(rows):
        raise ValueError("a ledger has each stream once")
    return rows


LedgerRows = Annotated[list[tuple[Count, Count, Count]], AfterValidator(_each_once)]
"""Each a stream, the samples of it that are in the model, and those that are in part of it."""


class Dataset(Strict):
    """Samples ``0 .. length - 1``, handed out by units of ``unit_size``."""

    dataset_id: Name
    length: Annotated[int, Field(ge=1, lt=2**53)]
    seed: Count
    unit_size: Annotated[int, Field(ge=1, lt=2**53)]


class KnownDataset(BaseModel):
    """A dataset that is known."""

    dataset_id: str


class NewStream(Strict):
    """A stream of samples for one life of a replica group; the name makes it the same again."""

    name: Name
    dataset_id: Name
    replica_id: GroupName
    session: Name


class KnownStream(BaseModel):
    """The key of a stream."""

    stream: int


class Wanted(Strict):
    """The lease of a number, of this epoch or an earlier one."""

    number: Count
    epoch: Count


class Reopening(Strict):
    """Where a group goes on in its stream, in samples, and its session."""

    position: Count
    session: Name


class Ending(Strict):
    """What the model has when a stream ends."""

    ledger: LedgerRows


class Commit(Strict):
    """A sync: the model after it, the streams of those who took part, seconds since it ended."""

    outer_step: Count
    ledger: LedgerRows
    present: list[Count]
    age_s: Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Rewind(Strict):
    """The model of the checkpoint from which the run goes on."""

    outer_step: Count
    ledger: LedgerRows


class Unknown(BaseModel):
    """The streams of a ledger that are unknown here."""

    unknown: list[int]


class OuterStep(BaseModel):
    """The outer step from which the run goes on."""

    outer_step: int


def data_router(streams: Streams, audit: Audit) -> APIRouter:
    """The requests about samples.

    Args:
        streams: Of the run.
        audit: Of who changed it.
    """
    router = APIRouter(responses={404: {"model": Refusal}})
    units = streams.units

    @router.post("/datasets", status_code=201)
    def create(dataset: Dataset) -> KnownDataset:
        """Make a dataset known. Asked again with the same numbers, it is answered again."""
        units.create_dataset(**dataset.model_dump())
        return KnownDataset(dataset_id=dataset.dataset_id)

    @router.get("/datasets/{dataset_id:path}")
    def progress(dataset_id: Name) -> DatasetProgress:
        """How far a dataset is."""
        return units.dataset(dataset_id)

    @router.post("/streams", status_code=201)
    def open_stream(stream: NewStream) -> KnownStream:
        """Begin a stream. Asked again with the same name, it is answered again."""
        return KnownStream(stream=units.open_stream(**stream.model_dump()))

    @router.post("/streams/{stream}/leases", status_code=201)
    def lease(stream: Count, wanted: Wanted) -> Lease:
        """A lease of a stream, the same whenever it is asked for; empty if there is nothing."""
        return units.lease(stream, wanted.number, wanted.epoch)

    @router.post("/streams/{stream}/reopen")
    def reopen(stream: Count, reopening: Reopening) -> KnownStream:
        """Go on in a stream from a checkpoint of the group's own."""
        units.reopen(stream, reopening.position, reopening.session)
        return KnownStream(stream=stream)

    @router.post("/streams/{stream}/release")
    def release(stream: Count, ending: Ending) -> Unknown:
        """End a stream; what of it is not in the model comes back."""
        return Unknown(unknown=streams.release(stream, _ledger(ending.ledger)))

    @router.post("/commits")
    def commit(report: Commit) -> Unknown:
        """Report a sync. It may be repeated, and come late."""
        ledger = _ledger(report.ledger)
        present = set(report.present)
        return Unknown(unknown=streams.commit(report.outer_step, ledger, present, report.age_s))

    @router.post("/rewind")
    def rewind(request: Request, checkpoint: Rewind) -> OuterStep:
        """Go on from a checkpoint: what came after it is undone."""
        outer_step = checkpoint.outer_step
        with audit.action("rewind", None, address_of(request.scope), outer_step=outer_step):
            streams.rewind(outer_step, _ledger(checkpoint.ledger))
        return OuterStep(outer_step=outer_step)

    return router


def _ledger(rows: list[tuple[int, int, int]]) -> dict[int, tuple[int, int]]:
    return {stream: (position, in_part) for stream, position, in_part in rows}
