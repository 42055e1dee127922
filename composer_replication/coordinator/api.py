"""The coordinator's HTTP interface. ``/openapi.json`` describes it, ``/`` is a page for people."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from importlib import resources
from typing import Annotated, Any

from fastapi import APIRouter, BackgroundTasks, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from fastapi.security import HTTPBearer
from pydantic import Field

from composer_replication import __version__
from composer_replication.coordinator.admission import Admission, address_of
from composer_replication.coordinator.api_types import (
    Changes,
    GroupName,
    Info,
    Name,
    Progress,
    Pulse,
    Refusal,
    Registration,
)
from composer_replication.coordinator.audit import Audit
from composer_replication.coordinator.data_api import data_router
from composer_replication.coordinator.database import StorageError
from composer_replication.coordinator.journal import Journal
from composer_replication.coordinator.registry import (
    DuplicateError,
    OutdatedError,
    Registry,
    Versions,
)
from composer_replication.coordinator.run_settings import RefusedError, RunSettings
from composer_replication.coordinator.strangers import Strangers
from composer_replication.coordinator.streams import Streams
from composer_replication.coordinator.work_units.tables import (
    DatasetMismatch,
    StreamClosed,
    UnknownStream,
)

log = logging.getLogger(__name__)

STATUS_OF = {
    RefusedError: 422,
    DuplicateError: 409,
    OutdatedError: 410,
    DatasetMismatch: 409,
    UnknownStream: 404,
    StreamClosed: 410,
    StorageError: 507,
}
"""What each of our errors is in HTTP; the text is theirs."""


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What groups hear of a run beside its settings.

    Args:
        num_replicas: How many groups a cold start waits for.
        min_replicas: Fewest groups in a quorum that may commit.
        model_section: The config's ``model``, which groups compare with their own before they build
            it; None if it has none.
    """

    num_replicas: int
    min_replicas: int = 1
    model_section: Mapping[str, Any] | None = None


def create_app(
    settings: RunSettings,
    registry: Registry,
    streams: Streams,
    journal: Journal,
    *,
    audit: Audit,
    strangers: Strangers,
    tokens: Collection[str],
    hosts: Collection[str] | None = None,
    lighthouse_addr: str,
    facts: RunFacts,
) -> FastAPI:
    """Build the application.

    Args:
        settings: Of the run.
        registry: Of its replica groups.
        streams: Of their samples.
        journal: Of what has happened.
        audit: Of who changed it.
        strangers: Of the lighthouse's members that are no groups of the run.
        tokens: One of them every request but those for the page has to bear; none for no check.
        hosts: Names in the ``Host`` header that are accepted; None for any.
        lighthouse_addr: ``http://host:port``, as groups reach it.
        facts: Of the run.
    """
    refusals: dict[int | str, dict[str, Any]] = {
        code: {"model": Refusal} for code in (401, 409, 410, 413, 422, 507)
    }
    # No /docs: its script comes from a CDN, into a page where people type the token.
    app = FastAPI(
        title="composer-replication coordinator", version=__version__, docs_url=None, redoc_url=None
    )
    app.add_middleware(Admission, tokens=tokens, hosts=hosts, audit=audit)
    app.add_exception_handler(RequestValidationError, _explain_invalid)
    for kind, code in STATUS_OF.items():
        app.add_exception_handler(kind, _answer_with(code))
    # For the description alone: the token is checked by Admission, before the body is read.
    described = [Depends(HTTPBearer(auto_error=False))]
    v1 = APIRouter(prefix="/v1", dependencies=described, responses=refusals)

    @v1.get("/info")
    def info() -> Info:
        """The settings of the run, which all replica groups adopt, and where the lighthouse is."""
        version, newest, source = settings.newest()
        return Info(
            version=registry.versions.composer_replication,
            torchft=registry.versions.torchft,
            settings=asdict(newest),
            settings_version=version,
            settings_source=source,
            num_replicas=facts.num_replicas,
            min_replicas=facts.min_replicas,
            lighthouse_addr=lighthouse_addr,
            heartbeat_timeout_s=registry.heartbeat_timeout_s,
            outer_step=streams.outer_step,
            model_fingerprint=registry.model_fingerprint(),
            model_section=None if facts.model_section is None else dict(facts.model_section),
        )

    @v1.get("/settings/{version}")
    def version(version: Annotated[int, Field(ge=1, lt=2**53)]) -> dict[str, Any]:
        """One version of the settings."""
        return asdict(settings.of(version))

    @v1.patch("/settings")
    def change(request: Request, changes: Changes) -> Pulse:
        """Change settings for all groups, at one and the same outer step."""
        given = changes.model_dump(exclude_unset=True)
        with audit.action("settings", None, address_of(request.scope), changes=given):
            if not given or None in given.values():
                raise RefusedError("name the settings to change, each with a value")
            return Pulse(settings_version=settings.change(given))

    @v1.post("/replicas", status_code=201)
    def register(request: Request, registration: Registration) -> Pulse:
        """Take part. Asked again with the same session, it is answered again."""
        about = {"host": registration.host, "world_size": registration.world_size}
        versions = Versions(registration.composer_replication, registration.torchft)
        model = [(t.name, tuple(t.shape), t.dtype) for t in registration.model]
        who = registration.replica_id
        with audit.action("registration", who, address_of(request.scope), **about):
            registry.register(who, registration.session, about, versions, model)
        return Pulse(settings_version=settings.newest_version)

    @v1.post("/replicas/{replica_id}/heartbeat")
    async def heartbeat(
        replica_id: GroupName, progress: Progress, afterwards: BackgroundTasks
    ) -> Pulse:
        """Say that a group is alive, and where it stands."""
        # On the event loop, and without the database: the threads for other requests may all be
        # waiting for the disk.
        told = progress.model_dump(exclude={"session"}, exclude_none=True)
        registry.heartbeat(replica_id, progress.session, told)
        if streams.hear_outer_step(progress.outer_step or 0):
            afterwards.add_task(note_outer_step, progress.outer_step or 0)
        return Pulse(settings_version=settings.newest_version)

    def note_outer_step(outer_step: int) -> None:
        try:
            streams.note_outer_step(outer_step)
        except StorageError as error:
            log.warning("Outer step %d is not stored: %s", outer_step, error)

    @v1.delete("/replicas/{replica_id}")
    def leave(replica_id: GroupName, session: Name) -> Pulse:
        """End taking part."""
        registry.leave(replica_id, session)
        return Pulse(settings_version=settings.newest_version)

    @v1.get("/status")
    def status() -> dict[str, Any]:
        """All there is to see, for the page."""
        replicas = registry.replicas()
        told = info().model_dump()
        return told | {
            "time": time.time(),
            "outer_step": max(told["outer_step"], *(r.get("outer_step") or 0 for r in replicas), 0),
            "replicas": replicas,
            "losses": registry.losses(),
            "datasets": [asdict(dataset) for dataset in streams.units.datasets()],
            "strangers": strangers.names,
            "events": journal.events(),
        }

    @app.get("/", include_in_schema=False)
    def page() -> HTMLResponse:
        return HTMLResponse(page_text)  # it tells nothing itself, and asks for the token

    page_text = (
        resources.files("composer_replication.coordinator").joinpath("page.html").read_text("utf-8")
    )
    v1.include_router(data_router(streams, audit))
    app.include_router(v1)
    return app


def _answer_with(status: int) -> Any:
    def answer(request: Request, error: Exception) -> JSONResponse:
        del request
        return JSONResponse({"detail": str(error)}, status)

    return answer


async def _explain_invalid(request: Request, error: Exception) -> JSONResponse:
    """Say what is wrong without the input: FastAPI's own answer repeats it, and fails on NaN."""
    del request
    assert isinstance(error, RequestValidationError), "it is registered for that"
    told = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:5])
    # The name of an unknown field comes from the request.
    return JSONResponse({"detail": told.encode("ascii", "backslashreplace").decode()[:500]}, 422)
