"""The certificates of a run, and who is let in with them. Run: pytest tests/replica/test_tls.py

Real: certificates from the command's code, OpenSSL's handshake over loopback.
"""

import socket
import ssl
import stat
import subprocess
import threading
from datetime import timedelta

import pytest

from composer_replication.replica import certificates
from composer_replication.replica.certificates import CA_KEY, make_certificates
from composer_replication.replica.tls import (
    CA,
    CERT,
    KEY,
    check_tls_dir,
    client_context,
    server_context,
)


@pytest.fixture
def made(tmp_path):
    """Makes the certificate of a member, by default of the same run."""

    def make(name, run="run", days=30, hosts=()):
        make_certificates(tmp_path / name, hosts, tmp_path / f"{run}-authority", days)
        return tmp_path / name

    return make


def shake_hands(server, client):
    """Whether a connection comes about, and what each end says if not."""
    ours, theirs = socket.socketpair()
    said = []

    def serve():
        try:
            with server.wrap_socket(ours, server_side=True) as connection:
                connection.sendall(connection.recv(5))
        except OSError as error:
            said.append(error)
            ours.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with client.wrap_socket(theirs) as connection:
            connection.sendall(b"state")
            answer = connection.recv(5)  # under TLS 1.3 a refusal comes with the first answer
    except OSError as error:
        said.append(error)
        answer = b""
    thread.join(5)
    return answer == b"state", said


def test_members_of_a_run_accept_each_other_whatever_they_are_called(made):
    a, b = made("a", hosts=["a.example", "10.0.0.1"]), made("b")
    for one, other in ((a, b), (b, a), (a, a)):
        assert shake_hands(server_context(one), client_context(other)) == (True, [])
    check_tls_dir(a)


def test_a_member_of_another_run_is_refused_on_both_sides(made):
    own, other = made("own"), made("other", run="another-run")
    assert not shake_hands(server_context(own), client_context(other))[0]
    assert not shake_hands(server_context(other), client_context(own))[0]


def test_a_client_without_a_certificate_is_refused_even_if_it_knows_the_authority(made):
    own = made("own")
    stranger = ssl.create_default_context(cafile=own / CA)
    stranger.check_hostname = False
    connected, said = shake_hands(server_context(own), stranger)
    assert not connected
    assert any("PEER_DID_NOT_RETURN_A_CERTIFICATE" in str(error) for error in said)


def test_keys_are_readable_by_their_owner_alone_and_the_authority_s_is_kept_apart(made, tmp_path):
    folder = made("own")
    assert sorted(path.name for path in folder.iterdir()) == sorted([CA, CERT, KEY])
    authority = tmp_path / "run-authority"
    for secret in (folder / KEY, authority / CA_KEY):
        assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert stat.S_IMODE(authority.stat().st_mode) == 0o700


def test_openssl_finds_nothing_to_object_to_and_browsers_get_the_names(made):
    folder = made("own", hosts=["coordinator.example", "10.0.0.1", "[::1]"])
    command = ["openssl", "verify", "-x509_strict", "-CAfile", folder / CA, folder / CERT]
    assert subprocess.run(command, capture_output=True).returncode == 0
    text = subprocess.run(
        ["openssl", "x509", "-in", folder / CERT, "-noout", "-ext", "subjectAltName"],
        capture_output=True,
        text=True,
    ).stdout
    assert "DNS:coordinator.example, IP Address:10.0.0.1, IP Address:0:0:0:0:0:0:0:1" in text


def test_a_new_certificate_replaces_the_old_one_and_the_members_still_accept_it(made):
    before, other = made("own"), made("other")
    old = (before / CERT).read_bytes()
    renewed = made("own")
    assert (renewed / CERT).read_bytes() != old
    assert shake_hands(server_context(other), client_context(renewed)) == (True, [])


def test_while_an_authority_is_replaced_both_are_accepted(made):
    old, new = made("old"), made("new", run="new-run")
    both = (new / CA).read_bytes() + (old / CA).read_bytes()
    for folder in (old, new):
        (folder / CA).write_bytes(both)
    assert shake_hands(server_context(old), client_context(new)) == (True, [])
    check_tls_dir(old)


def test_a_folder_of_another_authority_is_left_as_it_is(made, tmp_path):
    folder = made("own")
    files = {path: path.read_bytes() for path in folder.iterdir()}
    for authority in ("nowhere", "another-authority"):
        made("another", run="another")
        with pytest.raises(ValueError, match="--authority FOLDER"):
            make_certificates(folder, [], tmp_path / authority, 30)
    assert {path: path.read_bytes() for path in folder.iterdir()} == files


# ---- what is said of a folder that cannot be used ------------------------------------------------


@pytest.mark.parametrize("name", [CA, CERT, KEY])
def test_a_missing_file_is_named_with_the_command_that_makes_it(made, name):
    folder = made("own")
    (folder / name).unlink()
    with pytest.raises(ValueError, match=f"{name} is missing .*composer-replication certificates"):
        check_tls_dir(folder)


@pytest.mark.parametrize("name", [CA, CERT, KEY])
def test_a_file_that_is_no_pem_is_one_error(made, name):
    folder = made("own")
    (folder / name).write_text("something else")
    with pytest.raises(ValueError, match="cannot be used: .*composer-replication certificates"):
        check_tls_dir(folder)


def test_a_key_of_another_certificate_is_refused(made):
    folder = made("own")
    (folder / KEY).write_bytes((made("other") / KEY).read_bytes())
    with pytest.raises(ValueError, match="cannot be used: KEY_VALUES_MISMATCH"):
        check_tls_dir(folder)


def test_a_key_with_a_password_asks_nobody_on_the_terminal(made):
    folder = made("own")
    subprocess.run(
        f"openssl ec -in {folder / KEY} -aes128 -passout pass:1234 -out {folder / 'encrypted'}",
        shell=True,
        check=True,
        capture_output=True,
    )
    (folder / "encrypted").replace(folder / KEY)
    with pytest.raises(ValueError, match="key.pem has a password"):
        check_tls_dir(folder)


def test_an_expired_certificate_is_refused_by_its_own_process(made, monkeypatch):
    # Issued two days ago for one day: the clock is the one thing that is not real here.
    real = certificates.datetime

    class TwoDaysAgo(real):
        @classmethod
        def now(cls, tz=None):
            return real.now(tz) - timedelta(days=2)

    monkeypatch.setattr(certificates, "datetime", TwoDaysAgo)
    folder = made("own", days=1)
    with pytest.raises(ValueError, match="certificate has expired.*composer-replication certif"):
        check_tls_dir(folder)


def test_a_certificate_of_another_authority_is_refused_by_its_own_process(made):
    folder = made("own")
    (folder / CA).write_bytes((made("other", run="another-run") / CA).read_bytes())
    with pytest.raises(ValueError, match="cert.pem is rejected by its own ca.pem"):
        check_tls_dir(folder)


def test_a_key_that_others_may_read_is_warned_of(made, caplog):
    folder = made("own")
    (folder / KEY).chmod(0o644)
    check_tls_dir(folder)
    assert "key.pem can be read by other users: chmod 600" in caplog.text
