"""TLS between the processes of one run, from a folder of certificates.

The folder has three PEM files. ``ca.pem`` is the run's certificate authority. With ``cert.pem`` and
``key.pem`` a process proves that it belongs to the run. Both ends of a connection between replica
groups show a certificate, and check that the run's authority has signed the other's.

Names are not compared on connections between members. Groups are dialled under names and addresses
that differ between networks and change when a machine is replaced, and only members of the run hold
a certificate of its authority. Browsers do compare names, see ``certificates.py``.
"""

from __future__ import annotations

import logging
import os
import ssl
from pathlib import Path

log = logging.getLogger(__name__)

TLS_DIR = "COMPOSER_REPLICATION_TLS_DIR"
CA, CERT, KEY = "ca.pem", "cert.pem", "key.pem"

HANDSHAKE_TIMEOUT_S = 5.0
"""How long a TLS handshake may take, in seconds."""


def server_context(tls_dir: str | os.PathLike[str]) -> ssl.SSLContext:
    """Make the context for connections to this process; clients have to show a certificate.

    Args:
        tls_dir: The folder of certificates.

    Raises:
        ValueError: The folder's certificates cannot be used; the message has the fix.
    """
    context = _context(Path(tls_dir), ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(tls_dir: str | os.PathLike[str]) -> ssl.SSLContext:
    """Make the context for connections that this process makes to members of the run.

    Args:
        tls_dir: The folder of certificates.

    Raises:
        ValueError: The folder's certificates cannot be used; the message has the fix.
    """
    context = _context(Path(tls_dir), ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    return context


def check_tls_dir(tls_dir: str | os.PathLike[str]) -> None:
    """Check a folder of certificates before any peer waits for this process.

    Args:
        tls_dir: The folder.

    Raises:
        ValueError: A file is missing or is not PEM, the key belongs to another certificate, or the
            certificate has expired or another authority has signed it. The message has the fix.
    """
    folder = Path(tls_dir)
    server, client = server_context(folder), client_context(folder)
    try:
        _shake_hands(server, client)
    except ssl.SSLCertVerificationError as error:
        raise ValueError(
            f"tls_dir={str(folder)!r}: {CERT} is rejected by its own {CA}: {error.verify_message}. "
            f"{_fix(folder)}"
        ) from error
    if os.stat(folder / KEY).st_mode & 0o077:
        log.warning("%s can be read by other users: chmod 600 it", folder / KEY)


def _context(folder: Path, protocol: int) -> ssl.SSLContext:
    for name in (CA, CERT, KEY):
        if not os.access(folder / name, os.R_OK):
            raise ValueError(
                f"tls_dir={str(folder)!r}: {folder / name} is missing or cannot be read. "
                f"{_fix(folder)}"
            )
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_verify_locations(folder / CA)
        context.load_cert_chain(folder / CERT, folder / KEY, password=_no_password)
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        reason = getattr(error, "reason", None) or str(error)
        raise ValueError(
            f"tls_dir={str(folder)!r}: {CA}, {CERT} and {KEY} cannot be used: {reason}. "
            f"{_fix(folder)}"
        ) from error
    return context


def _no_password() -> str:
    """Stands in for OpenSSL's prompt on the terminal, for which a run would wait for ever."""
    raise ValueError(f"{KEY} has a password: a key for this has none")


def _fix(folder: Path) -> str:
    return (
        f"Make them with `composer-replication certificates {folder}`, and give it "
        "--authority FOLDER if the run has an authority already"
    )


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> None:
    """Connect the two in memory, so that each checks the other's certificate."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_side=False),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    while ends:
        for end in list(ends):
            try:
                end.do_handshake()
                ends.remove(end)
            except ssl.SSLWantReadError:
                pass
