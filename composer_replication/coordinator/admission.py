"""Checks that every request passes before its body is read."""

from __future__ import annotations

import hmac
import re
from collections.abc import Collection

from fastapi import HTTPException
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from composer_replication.coordinator.events import Events
from composer_replication.util.connections import RateLimitedCount

MAX_BODY = 32 * 2**20
"""Largest body in bytes. The registration of a model with 2,000 tensors has 0.2 MB."""

_OPEN = ("/", "/openapi.json")
"""Paths that need no token: the page, which asks for it, and the description of the interface."""


class Admission:
    """ASGI middleware that checks the host name, the token and the size of every request.

    A dependency of a FastAPI route would come too late: FastAPI reads and parses the body before it
    calls one, so that a client without the token could fill the memory and keep the event loop from
    answering heartbeats.

    Args:
        app: The application, which answers the requests that pass.
        tokens: Accepted tokens. Empty: none is needed.
        hosts: Accepted names in the ``Host`` header; None for any. A web page can make a host name
            of its own resolve to this machine and then read answers as its own (DNS rebinding).
            Without a token only the name reveals that.
        events: Receives requests with a wrong token.
    """

    def __init__(
        self,
        app: ASGIApp,
        tokens: Collection[str],
        hosts: Collection[str] | None,
        events: Events,
    ) -> None:
        self._app = app
        self._events = events
        # Without a limit, clients without a token could replace all other events.
        self._wrong_tokens = RateLimitedCount()
        self._tokens = [token.encode() for token in tokens]
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        rejection = self._rejection(scope["path"], headers)
        if rejection is not None:
            await rejection(scope, receive, send)
            # A browser that opens the page has no token yet.
            is_guess = rejection.status_code == 401 and "authorization" in headers
            if is_guess and (count := self._wrong_tokens.count()):
                text = f"requests with a wrong token: {count}, the last one from"
                await run_in_threadpool(self._events.try_to_add, f"{text} {address_of(scope)}")
            return
        size = 0

        async def bounded() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > MAX_BODY:
                raise HTTPException(413, f"the body is larger than {MAX_BODY // 2**20} MiB")
            return message

        await self._app(scope, bounded, send)

    def _rejection(self, path: str, headers: Headers) -> JSONResponse | None:
        host = re.sub(r":\d+$", "", headers.get("host", "")).lower()
        if self._hosts is not None and host not in self._hosts:
            detail = f"Host {host!r} is not a name of this service: use {' or '.join(self._hosts)}"
            return JSONResponse({"detail": ascii_of(detail)}, 421)
        if path not in _OPEN and not self._is_authorized(headers):
            which = "wrong" if headers.get("authorization") else "no"
            detail = f"{which} token: set COMPOSER_REPLICATION_TOKEN to this run's secret"
            return JSONResponse({"detail": detail}, 401, {"WWW-Authenticate": "Bearer"})
        return None

    def _is_authorized(self, headers: Headers) -> bool:
        scheme, _, credential = headers.get("authorization", "").partition(" ")
        # Every token is compared in constant time: otherwise the time would reveal matching bytes.
        matches = [hmac.compare_digest(credential.encode(), token) for token in self._tokens]
        return not matches or (scheme.lower() == "bearer" and any(matches))


def address_of(scope: Scope) -> str | None:
    """The address from which a request comes: that of the client, or of a proxy before it."""
    client = scope.get("client")
    return client[0] if client else None


def ascii_of(text: str) -> str:
    """A text that quotes a request, which may have any characters: in ASCII, and not too long."""
    return text.encode("ascii", "backslashreplace").decode()[:500]
