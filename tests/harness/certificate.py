"""A certificate for the tests of HTTPS."""

import shutil
import subprocess

import pytest


def make_certificate(folder):
    """One for this machine, signed by itself, and its key: as the arguments of a service."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    made = "openssl req -x509 -newkey rsa:2048 -nodes -keyout key.pem -out cert.pem -days 2"
    made += " -subj /CN=localhost -addext subjectAltName=DNS:localhost,IP:127.0.0.1"
    subprocess.run(made.split(), cwd=folder, check=True, capture_output=True)
    return {"ssl_certfile": folder / "cert.pem", "ssl_keyfile": folder / "key.pem"}
