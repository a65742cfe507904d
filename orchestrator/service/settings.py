"""Settings of the service: flags, ``ORC_SERVE_*`` variables and ``service.yaml``, read in one place."""

from __future__ import annotations

import difflib
import ipaddress
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from orc.launchers import paths
from orc.launchers.errors import SpecError
from orc.launchers.spec import grammar, source

FILE_NAME = "service.yaml"
PREFIX = "ORC_SERVE_"
# Those of this machine alone. An address that is none of them can be reached by others.
_LOOPBACK_NAMES = ("localhost", "ip6-localhost")


def _age(given: Any) -> Any:
    return None if given is None else grammar.seconds(given)


class Settings(BaseModel):
    """Settings of one service. Sizes in bytes, times in seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8770, ge=0, le=65535, description="port to listen on; 0 chooses a free one")
    tls_cert: Path | None = Field(None, description="file of the certificate chain (PEM)")
    tls_key: Path | None = Field(None, description="file of the certificate's key (PEM)")
    behind_proxy: bool = Field(False, description="a proxy on this machine or network ends TLS and names the client")
    trusted_proxies: tuple[str, ...] = Field(
        ("127.0.0.1", "::1"), description="addresses of proxies that are believed, with behind_proxy"
    )
    allowed_hosts: tuple[str, ...] = Field((), description="names that requests may call this service by")
    reconciler: bool = Field(True, description="run the passes in this process")
    max_body: int = Field(2 << 20, ge=1024, description="largest body of a request")
    max_upload: int = Field(512 << 20, ge=1024, description="largest body that brings content of snapshots")
    requests_per_minute: int = Field(
        12_000, ge=1, description="requests of one token, and those without one of an address"
    )
    failed_logins_per_minute: int = Field(10, ge=1, description="refused tokens from one address")
    max_streams: int = Field(1000, ge=1, description="event streams that are open at the same time")
    max_streams_per_token: int = Field(100, ge=1, description="event streams of one token that are open at once")
    threads: int = Field(16, ge=2, le=256, description="requests that are worked on at the same time")
    body_timeout: float = Field(30.0, gt=0, description="longest silence within a request")
    shutdown_timeout: float = Field(20.0, gt=0, description="for requests to finish after SIGTERM")
    keep_jobs: Annotated[float | None, BeforeValidator(_age)] = Field(
        None, ge=3600, description="time after which jobs that have ended are removed from the ledger, 30d for example"
    )
    keep_failed: bool = Field(False, description="switch that keeps those that have failed, with keep_jobs")
    keep_audit: Annotated[float | None, BeforeValidator(_age)] = Field(
        None, ge=3600, description="time after which lines of the audit log are removed, 365d for example"
    )
    access_log: Literal["text", "json"] = Field("text", description="form of the access log")
    poll_interval: float = Field(0.5, gt=0, description="between two looks for new events, while somebody listens")

    @property
    def is_loopback(self) -> bool:
        """True when other machines cannot connect."""
        if self.host in _LOOPBACK_NAMES:
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def tls(self) -> bool:
        """True when this process encrypts by itself."""
        return self.tls_cert is not None

    @property
    def https(self) -> bool:
        """True when browsers reach the service by HTTPS."""
        return self.tls or self.behind_proxy


def load_settings(
    given: Mapping[str, Any], file: Path | None = None, environ: Mapping[str, str] = os.environ
) -> Settings:
    """Return the settings: flags before variables before the file before defaults.

    Args:
        given: Values of flags by name of the setting; `None` where a flag was not given.
        file: The file; ``service.yaml`` in the configuration directory, where there is one, by default.
        environ: Variables; ``ORC_SERVE_PORT`` is the setting ``port``. Lists are separated by commas.

    Raises:
        SpecError: A name or a value is wrong, or the file cannot be read.
    """
    values: dict[str, tuple[Any, str]] = {}  # with the place that each comes from
    path = file or paths.config_dir() / FILE_NAME
    if file or path.exists():
        document = source.read_settings(path, "settings of the service")
        values = {name: (value, document.keys[(name,)].where) for name, value in document.data.items()}
    for variable, text in environ.items():
        if variable.startswith(PREFIX):
            name = variable.removeprefix(PREFIX).lower()
            if name in ("url",):  # where the command line finds a service (`orc login`)
                continue
            values[name] = (_list(text) if _is_list(name) else text, variable)
    for name, value in given.items():
        if value is not None:
            values[name] = (value, f"--{name.replace('_', '-')}")
    for name, (_, where) in values.items():
        if name not in Settings.model_fields:
            near = difflib.get_close_matches(name, Settings.model_fields, n=1)
            hint = f"did you mean {near[0]}?" if near else f"settings are {', '.join(Settings.model_fields)}"
            raise SpecError(f"the service has no setting {name!r}", where=where, hint=hint)
    try:
        settings = Settings.model_validate({name: value for name, (value, _) in values.items()})
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else ""
        where = values[name][1] if name in values else name
        raise SpecError(f"{name}: {first['msg']}", where=where, hint=_about(name)) from None
    if (settings.tls_cert is None) != (settings.tls_key is None):
        raise SpecError("--tls-cert and --tls-key belong together", hint="give both files, or neither")
    return settings


def _about(name: str) -> str:
    field = Settings.model_fields.get(name)
    return f"it is the {field.description}" if field else ""


def _is_list(name: str) -> bool:
    field = Settings.model_fields.get(name)
    return field is not None and isinstance(field.default, tuple)


def _list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
