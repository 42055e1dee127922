"""Makes the certificates of one run: those of its authority and of its members.

It uses the package ``cryptography``. The ``openssl`` command would need a configuration file for
the extensions, differs between OpenSSL and LibreSSL, and is missing from many container images.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from composer_replication.replica.tls import CA, CERT, KEY

CA_KEY = "ca-key.pem"
AUTHORITY_DAYS = 3650


def make_certificates(
    folder: Path, hosts: Sequence[str], authority: Path, days: int
) -> tuple[datetime, bool]:
    """Write a new key and certificate into a folder, signed by a run's authority.

    It makes the authority if there is none yet, and replaces a certificate that is in the folder.

    Args:
        folder: The folder for a replica group or the coordinator.
        hosts: Names and addresses that the certificate is for; browsers compare them.
        authority: The folder of the run's authority. Anybody with the key in it can make members of
            the run, so it should stay on one machine.
        days: How long the certificate is valid.

    Returns:
        When the certificate expires, and whether the authority is new.

    Raises:
        ValueError: The folder has certificates of another authority.
    """
    is_new = not (authority / CA_KEY).exists()
    if is_new and (folder / CA).exists():
        raise ValueError(
            f"{folder / CA} is of an authority that is not in {authority}: say where its "
            f"{CA_KEY} is with --authority FOLDER, or make certificates in another folder"
        )
    if is_new:
        _make_authority(authority)
    ca = x509.load_pem_x509_certificate((authority / CA).read_bytes())
    ca_key = serialization.load_pem_private_key((authority / CA_KEY).read_bytes(), password=None)
    assert isinstance(ca_key, ec.EllipticCurvePrivateKey), "the only kind that is made here"
    if (folder / CA).exists() and (authority / CA).read_bytes() not in (folder / CA).read_bytes():
        raise ValueError(
            f"{folder / CA} is of another authority than {authority}: give the one that made it "
            "with --authority FOLDER, or make certificates in another folder"
        )
    key = ec.generate_private_key(ec.SECP256R1())
    # For both uses: a group is a server of its peers, and their client.
    uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    builder = (
        _builder(key, "composer-replication member", days)
        .issuer_name(ca.subject)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False
        )
    )
    if hosts:
        names = x509.SubjectAlternativeName([_host(host) for host in hosts])
        builder = builder.add_extension(names, critical=False)
    certificate = builder.sign(ca_key, hashes.SHA256())
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / CA).exists():
        (folder / CA).write_bytes((authority / CA).read_bytes())
    _write_secret(folder / KEY, _pem(key))
    (folder / CERT).write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return certificate.not_valid_after_utc, is_new


def _make_authority(authority: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _builder(key, "composer-replication run", AUTHORITY_DAYS)
    certificate = (
        builder.issuer_name(x509.Name([_common_name("composer-replication run")]))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    authority.mkdir(parents=True, exist_ok=True, mode=0o700)
    (authority / CA).write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    _write_secret(authority / CA_KEY, _pem(key))


def _builder(key: ec.EllipticCurvePrivateKey, name: str, days: int) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([_common_name(name)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))  # clocks differ between machines
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _common_name(name: str) -> x509.NameAttribute:
    return x509.NameAttribute(NameOID.COMMON_NAME, name)


def _key_usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host.strip("[]")))
    except ValueError:
        return x509.DNSName(host)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _write_secret(path: Path, content: bytes) -> None:
    """Replace a file so that other users can never read it, and nobody sees a half-written one."""
    part = path.with_name(path.name + ".part")
    part.unlink(missing_ok=True)
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    part.replace(path)
