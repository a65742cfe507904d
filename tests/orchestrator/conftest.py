"""A client over a fake backend, a clock that a test moves, job files, and a certificate of this machine."""

from __future__ import annotations

import datetime
import ipaddress
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # for the fakes, which subprocesses import as well

from fake_backend import FakeBackend  # noqa: E402
from fake_clock import Clock  # noqa: E402

from orc.launchers.backends.base import Phase  # noqa: E402
from orc.launchers.spec import LoadedJob, load_job  # noqa: E402
from orc.orchestrator.client import Client  # noqa: E402
from orc.orchestrator.views import JobView  # noqa: E402


@pytest.fixture
def clock(bare_runtime: None) -> Clock:
    return Clock()


@pytest.fixture
def backend(tmp_path: Path) -> FakeBackend:
    return FakeBackend(tmp_path / "fake")


@pytest.fixture
def client(orc_home: Path, backend: FakeBackend, clock: Clock) -> Iterator[Client]:
    with Client(backend_of=lambda _: backend, clock=clock, sleep=clock.sleep) as made:
        yield made


@pytest.fixture
def job_file(tmp_path: Path) -> Callable[..., LoadedJob]:
    """Writes a job file with these keys over a tiny default and loads it."""

    def write(**keys: Any) -> LoadedJob:
        directory = tmp_path / "project"
        directory.mkdir(exist_ok=True)
        (directory / "train.py").write_text("print('training')\n")
        path = directory / "job.yaml"
        path.write_text(yaml.safe_dump({"name": "digits", "script": "train.py", "launcher": "python", **keys}))
        return load_job(path)

    return write


@pytest.fixture
def see(client: Client, backend: FakeBackend) -> Callable[..., JobView]:
    """Passes see this of the attempt that *view* shows, and go on. Returns the job as it is then."""

    def see(view: JobView, phase: Phase, *, passes: int = 1, **observation: Any) -> JobView:
        backend.set(view.attempt.marker, phase, **observation)
        for _ in range(passes):
            client.refresh()
        return client.job(view.id)

    return see


@pytest.fixture
def subprocess_env(orc_home: Path) -> dict[str, str]:
    """The environment of a process that may import `fake_backend`."""
    return {**os.environ, "PYTHONPATH": str(HERE)}


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificate and key of localhost in one file; it is its own authority."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    path = tmp_path_factory.mktemp("certificate") / "localhost.pem"
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.write_bytes(made.public_bytes(serialization.Encoding.PEM) + private)
    return path
