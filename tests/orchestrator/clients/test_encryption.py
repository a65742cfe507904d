"""Encryption of the way to a service: what cannot go encrypted to the right one does not go."""

from __future__ import annotations

import datetime
import ipaddress
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from served_ledger import Served

from orc.launchers.errors import LaunchError
from orc.orchestrator.api.call import Digests
from orc.orchestrator.api.jobs import submit_job
from orc.orchestrator.cli.main import main
from orc.orchestrator.clients.errors import ServiceUnreachable
from orc.orchestrator.clients.service import ServiceClient
from orc.orchestrator.service.app import create_app
from orc.orchestrator.service.server import make_server
from orc.orchestrator.service.settings import Settings


@pytest.fixture(scope="module")
def encrypted(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A service with a certificate of its own over the same ledger: its URL, and the certificate."""
    home = tmp_path_factory.mktemp("tls")
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "orc")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    (home / "cert.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    private = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (home / "key.pem").write_bytes(key.private_bytes(*private))
    settings = Settings(port=0, reconciler=False, tls_cert=home / "cert.pem", tls_key=home / "key.pem")
    server = make_server(settings, create_app(settings, open_client=served.ledger))
    listening = socket.create_server(("127.0.0.1", 0))
    serving = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    serving.start()
    while not server.started:
        assert serving.is_alive()
        time.sleep(0.01)
    yield f"https://127.0.0.1:{listening.getsockname()[1]}", home / "cert.pem"
    server.should_exit = True
    serving.join()


def test_a_certificate_is_verified(encrypted: tuple[str, Path], served: Served, tmp_path: Path, capfd) -> None:
    url, certificate = encrypted
    with (
        ServiceClient(url, served.tokens["grace"], sleep=lambda _: None) as client,
        pytest.raises(ServiceUnreachable, match="certificate is not trusted") as refused,
    ):
        client.me()
    assert "--ca" in refused.value.hint
    token = tmp_path / "token"
    token.write_text(served.tokens["grace"])
    token.chmod(0o600)
    assert main(["login", url, "--token-file", str(token), "--ca", str(certificate)]) == 0
    capfd.readouterr()
    assert main(["whoami"]) == 0
    assert capfd.readouterr().out == f"grace (user) at {url}\n"


def test_secrets_never_travel_in_the_clear_whatever_was_agreed_for_the_token() -> None:
    with ServiceClient("http://192.0.2.1", "orc_x", insecure_http=True) as client:
        client.session.http = httpx.Client(transport=httpx.MockTransport(lambda _: pytest.fail("it was sent")))
        with pytest.raises(LaunchError, match="secrets would travel unencrypted") as refused:
            submit_job(client.session, {}, Digests(""), "", {"API_KEY": "hunter2"}, "a-key-of-its-own")
    assert "hunter2" not in str(refused.value)


def test_a_redirection_is_not_followed() -> None:
    def lead_away(request: httpx.Request) -> httpx.Response:
        assert request.url.host == "127.0.0.1"
        return httpx.Response(307, headers={"Location": "https://elsewhere.example.org/"})

    with ServiceClient("http://127.0.0.1:1", "orc_x") as client:
        client.session.http = httpx.Client(base_url=client.address, transport=httpx.MockTransport(lead_away))
        with pytest.raises(ServiceUnreachable, match="not that of a service"):
            client.me()
