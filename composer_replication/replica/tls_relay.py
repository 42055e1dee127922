"""A program that carries the gloo connections of one process to and from its peers, over TLS.

gloo listens on a loopback address. For each peer it connects to another loopback address, where
this program listens. The program forwards the bytes to the peer's relay over TLS 1.3, with
certificates on both ends, and that relay forwards them to the peer's gloo.

The relay is a process of its own for two reasons. It sends what gloo has handed to it even after
the training process has ended. And a training step may hold the interpreter lock for longer than a
message takes.

It reads commands from stdin, one JSON object a line, and answers each with a JSON object:
``{"serve": PORT}`` lets peers reach gloo at that port, and no longer at an earlier one;
``{"reach": [HOST, PORT, GLOO_PORT], "listen": ADDRESS}`` answers with the port at that loopback
address that leads to a peer. The program ends when stdin and all connections are closed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import sys
from asyncio import StreamReader, StreamWriter
from collections.abc import Mapping
from functools import partial
from typing import Any

from composer_replication.replica.tls import HANDSHAKE_TIMEOUT_S, client_context, server_context

log = logging.getLogger("composer_replication.replica.tls_relay")

OWN = "127.0.0.2"
"""The address on which gloo listens."""

PING = 0
"""A client sends this instead of a port to check whether the relay accepts its certificate."""

CHUNK = 1 << 20
"""Most bytes that are read at a time, and most that wait to be sent on a connection."""

END_S = 60.0
"""How long the relay may go on sending after the training process has ended, in seconds."""


class Relay:
    """The relay of one training process. All of it runs in one asyncio loop, so it has no locks.

    Args:
        tls_dir: The folder of certificates.
    """

    def __init__(self, tls_dir: str) -> None:
        self._server_context = server_context(tls_dir)
        self._client_context = client_context(tls_dir)
        self._gloo_port = 0
        self._entries: list[asyncio.Server] = []
        self._connections: set[asyncio.Task[None]] = set()

    async def listen(self, listener: socket.socket) -> asyncio.Server:
        """Accept peers on a socket that listens already."""
        return await asyncio.start_server(
            self._from_peer,
            sock=listener,
            limit=CHUNK,
            ssl=self._server_context,
            ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S,
        )

    async def obey(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Carry out a command of the training process, and return the answer to it."""
        if "serve" in command:
            self._gloo_port = command["serve"]
            for entry in self._entries:
                entry.close()  # an earlier quorum's; open connections stay until gloo closes them
            self._entries = []
            return {}
        to_peer = partial(self._to_peer, *command["reach"])
        entry = await asyncio.start_server(to_peer, command["listen"], 0, limit=CHUNK)
        self._entries.append(entry)
        return {"port": entry.sockets[0].getsockname()[1]}

    async def drain(self) -> None:
        """Wait until everything has been forwarded, for ``END_S`` at most."""
        if self._connections:
            await asyncio.wait(self._connections, timeout=END_S)

    async def _from_peer(self, reader: StreamReader, writer: StreamWriter) -> None:
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                wanted = int.from_bytes(await reader.readexactly(2))
                if wanted == PING:
                    writer.write(b"!")
                    writer.close()
                    return
                if wanted != self._gloo_port:
                    raise ConnectionError(f"port {wanted} is not this quorum's")
                gloo = await asyncio.open_connection(OWN, wanted, limit=CHUNK)
        except (OSError, EOFError) as error:
            log.warning("Rejected a connection from %s: %s", _peer(writer), error or "it ended")
            writer.transport.abort()
            return
        await self._join(reader, writer, *gloo)

    async def _to_peer(
        self, host: str, port: int, gloo_port: int, reader: StreamReader, writer: StreamWriter
    ) -> None:
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                tls_reader, tls_writer = await asyncio.open_connection(
                    host, port, ssl=self._client_context, limit=CHUNK
                )
                tls_writer.write(gloo_port.to_bytes(2))
        except OSError as error:  # a timeout and an SSLError are OSErrors
            log.warning(
                "No TLS connection to the replica group at %s:%d: %s",
                host,
                port,
                error or "timeout",
            )
            writer.transport.abort()
            return
        await self._join(reader, writer, tls_reader, tls_writer)

    async def _join(
        self, reader: StreamReader, writer: StreamWriter, peer: StreamReader, to_peer: StreamWriter
    ) -> None:
        directions = ((reader, to_peer), (peer, writer))
        both = [asyncio.create_task(_forward(*direction)) for direction in directions]
        self._connections |= set(both)
        try:
            await asyncio.gather(*both)
        finally:
            self._connections -= set(both)


async def _forward(reader: StreamReader, writer: StreamWriter) -> None:
    """Forward all bytes until the reader ends, then close the writer, so that its peer ends too."""
    try:
        while data := await reader.read(CHUNK):
            writer.write(data)
            await writer.drain()
    except OSError as error:
        log.debug("A connection broke off: %s", error)
    finally:
        writer.close()
        try:
            await writer.wait_closed()
        except OSError as error:
            log.debug("A connection broke off: %s", error)


def _peer(writer: StreamWriter) -> str:
    return str((writer.get_extra_info("peername") or ["?"])[0])


async def run(tls_dir: str, listener: socket.socket) -> None:
    """Relay until stdin ends."""
    relay = Relay(tls_dir)
    server = await relay.listen(listener)
    commands = StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    while line := await commands.readline():
        print(json.dumps(await relay.obey(json.loads(line))), flush=True)
    server.close()
    await relay.drain()


if __name__ == "__main__":
    # Ctrl-C and SIGTERM go to all processes of a job; the training process decides about the end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(
        level=logging.WARNING,
        format="%(asctime)s %(levelname).1s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
    )
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # tracebacks of strangers' handshakes
    asyncio.run(run(sys.argv[1], socket.socket(fileno=int(sys.argv[2]))))
