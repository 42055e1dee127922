"""The coordinator's HTTP interface. ``/openapi.json`` describes it; ``/`` is the status page."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from fastapi import APIRouter, BackgroundTasks, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from fastapi.security import HTTPBearer
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from composer_replication import __version__
from composer_replication.coordinator.admission import Admission, address_of, ascii_of
from composer_replication.coordinator.database import RejectedError, StorageError
from composer_replication.coordinator.events import Events
from composer_replication.coordinator.page import page_html, shown_settings, with_record
from composer_replication.coordinator.registry import Registry
from composer_replication.coordinator.streams import Streams
from composer_replication.coordinator.wire_types import Lease, RunInfo
from composer_replication.coordinator.work_units import DatasetProgress
from composer_replication.replica.addresses import bracketed
from composer_replication.util.fence import fence
from composer_replication.util.json_files import finite

# ---- the bodies of requests ------------------------------------------------------------------

GroupName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
"""The name of a replica group. It occurs in URLs, paths, log lines and torchft's own names."""


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("use printable characters only")
    return text


Name = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_printable)]
TensorName = Annotated[str, Field(max_length=1000), AfterValidator(_printable)]
MetricName = Annotated[str, Field(pattern=r"^[a-z0-9_/]{1,64}$")]
Count = Annotated[int, Field(ge=0, lt=2**53)]


Number = Annotated[float | None, AfterValidator(finite)]
"""A number. NaN and infinity become null, since JSON has no such numbers."""


class StrictBody(BaseModel):
    """The body of a request. Fields that it does not name are rejected."""

    model_config = ConfigDict(extra="forbid")


class ErrorBody(BaseModel):
    """The answer to a request that failed. ``detail`` says why, in a line for people."""

    detail: str


class Registration(StrictBody):
    """What a replica group says of itself when it registers, before it trains."""

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


class DatasetRequest(StrictBody):
    """A dataset of the samples ``0 .. length - 1``, which are leased by units of ``unit_size``.

    ``shuffle`` says whether groups shuffle the samples of a unit.
    """

    dataset_id: Name
    length: Annotated[int, Field(ge=1, lt=2**53)]
    seed: Count
    unit_size: Annotated[int, Field(ge=1, lt=2**53)]
    shuffle: bool = True


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


class RewindRequest(WithLedger):
    """The outer step and the ledger of the checkpoint from which the run continues."""

    outer_step: Count


class CommitReport(WithLedger):
    """A sync: the outer step and the ledger after it, and the streams of its participants.

    ``age_s`` is the number of seconds since the sync ended.
    """

    outer_step: Count
    present: list[Count]
    age_s: Annotated[float, Field(ge=0, allow_inf_nan=False)]


# ---- the run ---------------------------------------------------------------------------------

Record = Callable[[], Mapping[str, Any]]
"""A function that returns what a run's folder adds to the page's data; see ``RunData.page``."""


@dataclass(frozen=True, kw_only=True)
class RunData:
    """A run, and what the coordinator knows about it.

    Args:
        info: What groups have to know before they start.
        registry: Replica groups of the run.
        streams: Their sample streams.
        events: The table of its events.
        is_host_guessed: Whether the machine's name is a guess. A group then reaches the lighthouse
            under the host name with which it has reached this service.
        record: Reads what the run's folder adds to the page's data. None: the service has no such
            folder.
    """

    info: RunInfo
    registry: Registry
    streams: Streams
    events: Events
    is_host_guessed: bool = False
    record: Record | None = None

    def info_for(self, host: str | None = None) -> dict[str, Any]:
        """The settings that all replica groups adopt, and what else they need to start.

        Args:
            host: The host name with which the group has reached this service.
        """
        info = asdict(self.info) | {"outer_step": self.streams.outer_step}
        if host and self.is_host_guessed:
            port = self.info.lighthouse_addr.rpartition(":")[2]
            info["lighthouse_addr"] = f"http://{bracketed(host)}:{port}"
        return info

    def status(self) -> dict[str, Any]:
        """The replica groups, the settings, and what has happened."""
        run = self.info_for()
        del run["model_section"]  # the page may be sent to others
        return run | {
            "time": time.time(),
            "replicas": self.registry.replicas(),
            "losses": self.registry.heartbeats.losses(),
            "agreement": self.registry.heartbeats.agreement(),
            "datasets": [asdict(dataset) for dataset in self.streams.units.datasets()],
            "samples_gap": self.streams.units.gap,
            "events": self.events.newest(),
        }

    def shown(self) -> dict[str, Any]:
        """The status with the settings as people write them, for the page and the saved one."""
        return self.status() | shown_settings(self.info.settings)

    def page(self) -> dict[str, Any]:
        """Everything that the page shows: the status, and what the run's folder has.

        It may take a second. Programs that decide about a run read the status instead.
        """
        shown = self.shown()
        if self.record is not None:
            with fence("what the run's folder has"):  # a file in it may have anything
                shown = with_record(shown, self.record())
        return shown


def create_app(
    run: RunData,
    *,
    tokens: Collection[str],
    hosts: Collection[str] | None = None,
) -> FastAPI:
    """Build the application.

    Args:
        run: The run that requests read and change.
        tokens: Accepted tokens. Every request needs one, except those for the page. Empty: none.
        hosts: Accepted names in the ``Host`` header; None for any.
    """
    errors: dict[int | str, dict[str, Any]] = dict.fromkeys(("4XX", 507), {"model": ErrorBody})
    # No /docs: its script comes from a CDN and would run on a page where people type the token.
    app = FastAPI(
        title="composer-replication coordinator", version=__version__, docs_url=None, redoc_url=None
    )
    app.add_middleware(Admission, tokens=tokens, hosts=hosts, events=run.events)
    app.add_exception_handler(RequestValidationError, _explain_invalid)
    app.add_exception_handler(RejectedError, _explain)
    app.add_exception_handler(StorageError, _explain)
    # For /openapi.json alone: Admission checks the token, before the body is read.
    described = [Depends(HTTPBearer(auto_error=False))]
    v1 = APIRouter(prefix="/v1", dependencies=described, responses=errors)
    _add_run(v1, run)
    _add_groups(v1, run)
    _add_samples(v1, run)
    app.include_router(v1)

    @app.get("/", include_in_schema=False)
    def page() -> HTMLResponse:
        return HTMLResponse(page_html())  # without data: it asks for the token and then for those

    return app


def _add_run(v1: APIRouter, run: RunData) -> None:
    @v1.get("/info")
    def info(request: Request) -> dict[str, Any]:
        """Return the settings that all replica groups adopt, and the address of the lighthouse."""
        return run.info_for(request.url.hostname)

    v1.get("/status")(run.status)
    v1.get("/page")(run.page)


def _add_groups(v1: APIRouter, run: RunData) -> None:
    registry, streams = run.registry, run.streams
    fenced = fence("the newest outer step to a coordinator that starts again")

    @v1.post("/replicas", status_code=201)
    def register(request: Request, registration: Registration) -> dict[str, str]:
        """Register a replica group. A repeated request with the same session is answered again."""
        replica_id = registration.replica_id
        group = f"replica group {replica_id}"
        source = f"from {registration.host} ({address_of(request.scope)})"
        with run.events.refusals(f"{group}, {source},"):
            registry.register(**registration.model_dump())
        run.events.try_to_add(f"{group} has connected {source}")
        return {"replica_id": replica_id}

    @v1.post("/replicas/{replica_id}/heartbeat")
    async def heartbeat(
        replica_id: GroupName,
        beat: Heartbeat,
        afterwards: BackgroundTasks,
    ) -> dict[str, str]:
        """Record that a group is alive, and its progress."""
        # This runs on the event loop and does not use the database. In a thread it could wait for
        # other requests that wait for a slow disk, until all groups looked dead.
        progress = beat.model_dump(exclude={"session"}, exclude_none=True)
        registry.heartbeat(replica_id, beat.session, progress)
        if streams.observe_outer_step(beat.outer_step or 0):
            afterwards.add_task(fenced(streams.store_outer_step))
        return {"replica_id": replica_id}

    @v1.delete("/replicas/{replica_id}")
    def leave(replica_id: GroupName, session: Name) -> dict[str, str]:
        """Record that a group has finished."""
        registry.leave(replica_id, session)
        return {"replica_id": replica_id}


def _add_samples(v1: APIRouter, run: RunData) -> None:
    streams, units = run.streams, run.streams.units

    @v1.post("/datasets", status_code=201)
    def create(dataset: DatasetRequest) -> dict[str, str]:
        """Add a dataset. A repeated request with the same numbers is answered again."""
        units.create_dataset(**dataset.model_dump())
        return {"dataset_id": dataset.dataset_id}

    @v1.get("/datasets/{dataset_id:path}")
    def progress(dataset_id: Name) -> DatasetProgress:
        """Return how many samples of a dataset are done."""
        return units.dataset(dataset_id)

    @v1.post("/streams", status_code=201)
    def open_stream(stream: StreamRequest) -> dict[str, int]:
        """Open a stream. A repeated request with the same name is answered again."""
        return {"stream": units.open_stream(**stream.model_dump())}

    @v1.post("/streams/{stream}/leases", status_code=201)
    def lease(stream: Count, request: LeaseRequest) -> Lease:
        """Return the lease with a number, the same at every request; empty if none is available."""
        return units.lease(stream, request.number, request.epoch)

    @v1.post("/streams/{stream}/reopen")
    def reopen(stream: Count, request: ReopenRequest) -> dict[str, int]:
        """Continue a stream from a checkpoint of the group that owns it."""
        units.reopen(stream, request.position, request.session)
        return {"stream": stream}

    @v1.post("/streams/{stream}/release")
    def release(stream: Count, request: WithLedger) -> dict[str, list[int]]:
        """Close a stream. Its samples that are not in the model become available."""
        return {"unknown": streams.release(stream, request.ledger)}

    @v1.post("/commits")
    def commit(report: CommitReport) -> dict[str, list[int]]:
        """Record a sync. A report may be repeated and may be late."""
        return {"unknown": streams.commit(**report.model_dump())}

    @v1.post("/rewind")
    def rewind(request: Request, body: RewindRequest) -> dict[str, int]:
        """Continue the run from a checkpoint, and undo what came after it."""
        source = f"from {address_of(request.scope)},"
        with run.events.refusals(f"a resume at outer step {body.outer_step}, {source}"):
            streams.rewind(**body.model_dump())
        return {"outer_step": body.outer_step}


async def _explain(request: Request, error: Any) -> JSONResponse:
    """Answer with the text of a RejectedError or StorageError."""
    del request
    return JSONResponse({"detail": str(error)}, error.status)


async def _explain_invalid(request: Request, error: Any) -> JSONResponse:
    """Describe an invalid request without its input, which FastAPI's own answer repeats.

    FastAPI's answer also fails on NaN.
    """
    del request
    text = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:5])
    return JSONResponse({"detail": ascii_of(text)}, 422)
