"""The coordinator's HTTP server: its socket, its thread and its certificate."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from composer_replication.coordinator.connections import (
    BACKLOG,
    FILES_RUN_OUT,
    BoundedProtocol,
    raise_file_limit,
)
from composer_replication.replica.tls import CA, CERT, HANDSHAKE_TIMEOUT_S, KEY, check_tls_dir


class _Loop(asyncio.SelectorEventLoop):
    """An event loop that limits how long a client may take for the TLS handshake.

    uvicorn has no setting for that. asyncio's own limit is 60 s, and ``BoundedProtocol`` sees a
    connection only after the handshake.
    """

    async def create_server(self, *args: Any, **kwargs: Any) -> asyncio.Server:
        if kwargs.get("ssl") is not None:
            kwargs["ssl_handshake_timeout"] = HANDSHAKE_TIMEOUT_S
        return await super().create_server(*args, **kwargs)


@dataclass(frozen=True)
class TlsFiles:
    """The certificate of the service, as PEM files.

    Args:
        certfile: The certificate, with the intermediate ones up to its CA.
        keyfile: Its private key.
        ca_certs: The CA of the clients' certificates. None: clients need no certificate, and the
            token alone identifies them.
        needs_client_certificate: Whether a client without a certificate is rejected.
    """

    certfile: Path
    keyfile: Path
    ca_certs: Path | None = None
    needs_client_certificate: bool = True

    @classmethod
    def of_folder(cls, tls_dir: str | None) -> TlsFiles | None:
        """Use the files in the folder of a member of the run; None without a folder.

        A client without a certificate is accepted, because a browser that shows the page has none.
        It needs the token like everybody else. A client that does present a certificate needs one
        of the run's authority.

        Raises:
            ValueError: The files cannot be used.
        """
        if tls_dir is None:
            return None
        check_tls_dir(tls_dir)
        folder = Path(tls_dir)
        return cls(folder / CERT, folder / KEY, folder / CA, needs_client_certificate=False)

    @classmethod
    def of(
        cls, certfile: Path | None, keyfile: Path | None, ca_certs: Path | None
    ) -> TlsFiles | None:
        """Use the files that the command's options name; None if there are none.

        Args:
            certfile: ``--ssl-certfile``.
            keyfile: ``--ssl-keyfile``.
            ca_certs: ``--ssl-ca-certs``.

        Raises:
            ValueError: The certificate or its key is missing.
        """
        if certfile is None and keyfile is None and ca_certs is None:
            return None
        if certfile is None or keyfile is None:
            missing = "--ssl-keyfile" if certfile is not None else "--ssl-certfile"
            raise ValueError(f"{missing} is missing: HTTPS needs a certificate and its key")
        return cls(certfile, keyfile, ca_certs)


class HttpService:
    """Serves an application from a thread of its own.

    Args:
        bind: Address to listen at, ``address:port``. Port 0 is a free one.
        tls: The certificate. None: plain HTTP.

    Attributes:
        port: The port.

    Raises:
        ValueError: ``bind`` is not an address.
        OSError: The address cannot be listened at.
    """

    def __init__(self, bind: str, tls: TlsFiles | None = None) -> None:
        self._tls = tls
        raise_file_limit()
        self._socket = _listen(bind)
        self.port: int = self._socket.getsockname()[1]
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    def start(self, app: Any) -> None:
        """Serve an ASGI application, and return when the server answers.

        Raises:
            ValueError: The certificate cannot be used.
            OSError: The server has not started.
        """
        logging.getLogger("asyncio").addFilter(FILES_RUN_OUT)
        config = uvicorn.Config(
            app,
            http=BoundedProtocol,
            ws="none",
            backlog=BACKLOG,
            # A line for every request, or for every malformed one, would hide our own log lines.
            log_level="error",
            access_log=False,
            **_tls_settings(self._tls),
        )
        try:
            config.load()
        except OSError as error:  # ssl.SSLError is an OSError
            raise ValueError(f"the certificate cannot be used ({error}): {self._tls}") from error
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="coordinator", daemon=True)
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            time.sleep(0.01)
        if not self._server.started:
            raise OSError("the coordinator's HTTP service has not started: see the log")

    def _run(self) -> None:
        assert self._server is not None
        with asyncio.Runner(loop_factory=_Loop) as runner:
            runner.run(self._server.serve([self._socket]))

    @property
    def is_serving(self) -> bool:
        """Whether the server is running."""
        return self._thread is not None and self._thread.is_alive()

    def close(self) -> None:
        """Stop the server and close its socket."""
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._thread.join(5.0)
        self._socket.close()


def _tls_settings(tls: TlsFiles | None) -> dict[str, Any]:
    """The arguments of ``uvicorn.Config`` for a certificate."""
    if tls is None:
        return {}
    requirement = ssl.CERT_NONE
    if tls.ca_certs is not None:
        requirement = ssl.CERT_REQUIRED if tls.needs_client_certificate else ssl.CERT_OPTIONAL
    return {
        "ssl_certfile": tls.certfile,
        "ssl_keyfile": tls.keyfile,
        "ssl_ca_certs": None if tls.ca_certs is None else str(tls.ca_certs),
        "ssl_cert_reqs": requirement,
    }


def _listen(bind: str) -> socket.socket:
    address, _, port = bind.rpartition(":")
    if not port.isdecimal() or not address:
        raise ValueError(f"--bind {bind!r}: use address:port, such as 0.0.0.0:29512 or [::]:0")
    host = address.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server(
            (host, int(port)),
            family=family,
            dualstack_ipv6=host == "::",
            reuse_port=False,
            backlog=BACKLOG,
        )
        # Accepted sockets inherit it. asyncio does not set it on sockets that it did not create,
        # and without it the second packet of an answer waits 40 ms for the client's ACK.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listening
    except OSError as error:
        raise OSError(f"cannot listen at --bind {bind}: {error}. Choose another port") from error
