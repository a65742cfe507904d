"""Logins: services that this user has a token for, in ``logins.json`` of the configuration directory, mode 0600."""

from __future__ import annotations

import ipaddress
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from orc.launchers.errors import LaunchError
from orc.launchers.paths import config_dir, refuse_untrusted
from orc.launchers.strict_modes import make_private

URL_VARIABLE = "ORC_SERVICE_URL"
TOKEN_VARIABLE = "ORC_TOKEN"  # noqa: S105 - the name of the variable
TOKEN_FILE_VARIABLE = "ORC_TOKEN_FILE"  # noqa: S105
CA_VARIABLE = "ORC_SERVICE_CA"
_MAX_TOKEN = 512
_LEDGER = ("", "local")  # values of the variable that mean: no service


@dataclass(frozen=True)
class Login:
    """Service and the token for it."""

    url: str
    token: str = ""
    ca: str = ""  # file of certificates to trust instead of the system's
    insecure_http: bool = False  # the token may travel in the clear

    def __repr__(self) -> str:
        return f"Login({self.url!r})"  # never the token: reprs end in logs


def configured() -> Login | None:
    """Return the service that commands talk to; `None` where they use the ledger.

    ``$ORC_SERVICE_URL`` goes before what `orc login` stored, and ``$ORC_SERVICE_URL=local`` means the ledger; its token
    is in ``$ORC_TOKEN`` or the file ``$ORC_TOKEN_FILE``, else the stored one for that URL. Raises `LaunchError`.
    """
    given = os.environ.get(URL_VARIABLE)
    if given is not None:
        return of(given, where=URL_VARIABLE)
    if not file().exists():  # most have none: no JSON, no checks
        return None
    current, stored = read()
    return _with_variables(stored[current]) if current in stored else None


def of(url: str, *, where: str = "") -> Login | None:
    """Return the login of the service at *url*; `None` for ``local``. Raises `LaunchError`."""
    if url.strip() in _LEDGER:
        return None
    checked = checked_url(url.strip(), where=where)
    return _with_variables(read()[1].get(checked) or Login(checked))


def _with_variables(login: Login) -> Login:
    token = os.environ.get(TOKEN_VARIABLE) or ""
    if not token and (path := os.environ.get(TOKEN_FILE_VARIABLE)):
        token = token_file(Path(path))
    ca = os.environ.get(CA_VARIABLE) or login.ca
    token = checked_token(token, TOKEN_VARIABLE) if token else login.token
    return Login(login.url, token, ca, login.insecure_http)


def token_file(path: Path) -> str:
    """Return the token in a file that is readable by its owner alone. Raises `LaunchError`."""
    from orc.launchers.secrets import read_private

    found = read_private(path, "token")
    if found is None:
        raise LaunchError("there is no such token file", where=str(path))
    return checked_token(found.strip(), str(path))


def checked_token(token: str, where: str = "") -> str:
    """Return *token* if it can be one. Raises `LaunchError`, which does not repeat it."""
    if not token or len(token) > _MAX_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        hint = "a token is one word of letters, digits, `_` and `-`: orc_..."
        raise LaunchError("that is no token", where=where, hint=hint)
    return token


def checked_url(text: str, *, where: str = "") -> str:
    """Return the URL of a service in its one spelling. Raises `LaunchError` for what is none."""
    refusal = LaunchError(
        f"not the URL of a service: {text!r}", where=where, hint="it looks like https://orc.example.org"
    )
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise refusal from None
    more = parts.username is not None or parts.query or parts.fragment
    if not host or more or parts.scheme not in ("http", "https") or not text.isprintable():
        raise refusal
    address = f"[{host}]" if ":" in host else host
    default = {"http": 80, "https": 443}[parts.scheme]
    return f"{parts.scheme}://{address}{'' if port in (None, default) else f':{port}'}{parts.path.rstrip('/')}"


def refuse_clear_text(login: Login) -> None:
    """Raise `LaunchError` where the token would travel over a network in the clear."""
    if login.url.startswith("https://") or login.insecure_http or is_loopback(login.url):
        return
    raise LaunchError(
        "the token would travel unencrypted, and whoever reads it can act as you",
        where=login.url,
        hint="use https://, or a tunnel to the loopback address (ssh -L); "
        "`orc login --insecure-http URL` agrees to the risk",
    )


def is_loopback(url: str) -> bool:
    """Return True for a URL that leads to this machine and nowhere else."""
    host = urlsplit(url).hostname or ""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def file() -> Path:
    """Return the place of the stored logins."""
    return config_dir() / "logins.json"


def read() -> tuple[str, dict[str, Login]]:
    """Return the URL in use (empty for none), and all stored logins by URL. Raises `LaunchError`."""
    from orc.launchers.secrets import read_private

    path = file()
    text = read_private(path, "file of logins")
    if text is None:
        return "", {}
    refuse_untrusted(path, "file of logins")
    try:
        data = json.loads(text)
        return str(data["current"]), {url: _login(url, one) for url, one in data["services"].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise LaunchError("not a file of logins", where=str(path), hint="remove it and log in again") from None


def _login(url: str, data: Mapping[str, Any]) -> Login:
    return Login(url, str(data["token"]), str(data.get("ca", "")), bool(data.get("insecure_http", False)))


def store(login: Login) -> Path:
    """Keep *login* and make its service the one in use; return the file. Raises `LaunchError`."""
    _, logins = read()
    return _write(login.url, {**logins, login.url: login})


def forget(url: str) -> bool:
    """Remove the login of *url*; false when there was none. The service in use is none afterwards, if it was that."""
    current, logins = read()
    if url not in logins:
        return False
    del logins[url]
    _write("" if current == url else current, logins)
    return True


def _write(current: str, logins: Mapping[str, Login]) -> Path:
    from orc.launchers.remote.files import write_file

    path = file()
    services = {url: {k: v for k, v in asdict(one).items() if k != "url"} for url, one in logins.items()}
    try:
        if not path.parent.is_dir():
            make_private(path.parent)
        refuse_untrusted(path.parent, "configuration directory")
        write_file(str(path), json.dumps({"current": current, "services": services}, indent=2).encode(), 0o600)
    except OSError as error:
        raise LaunchError(f"cannot keep the login: {error.strerror or error}", where=str(path)) from None
    return path
