"""Sending of one message to a target, limited in time: over HTTP, or as an e-mail.

A request follows no redirects, and those for jobs of a service go to public addresses only. An e-mail travels
encrypted unless the settings turn that off.
"""

from __future__ import annotations

import ipaddress
import smtplib
import socket
import ssl
import threading
from collections.abc import Mapping
from email.message import EmailMessage
from email.policy import SMTP
from typing import Any
from urllib.parse import urlsplit

from orc.orchestrator.notifications.targets import Target, Undeliverable

STEP_S = 10.0  # for each of: connect, write, the next bytes of the answer
TOTAL_S = 30.0  # for all of it: an answer may come byte by byte
_AGAIN = frozenset({408, 409, 425, 429})


class Undelivered(Exception):
    """A delivery that may work later. *after_s* is the Retry-After of the other side."""

    def __init__(self, why: str, after_s: float = 0.0) -> None:
        super().__init__(why)
        self.after_s = after_s


def post(target: Target, body: bytes, headers: Mapping[str, str]) -> None:
    """Post *body* to the target. Raises `Undelivered`, or `Undeliverable` where it makes no sense to try again."""
    try:
        import httpx
    except ModuleNotFoundError:
        what = "notifications are posted with httpx, which is not installed here: pip install 'orc-launch[client]'"
        raise Undelivered(what) from None  # another process that passes may have it
    url, pinned, host = target.url, dict[str, str](), ""
    if target.limited and not target.plain:
        url, pinned, host = _pinned(target)
    # Variables such as HTTPS_PROXY are the administrator's: what a job names is never sent through them.
    context = ssl.create_default_context()  # the machine's own authorities, which those of a company are added to
    with httpx.Client(timeout=STEP_S, follow_redirects=False, trust_env=not target.limited, verify=context) as client:
        over = threading.Event()

        def give_up() -> None:
            over.set()
            client.close()

        watch = threading.Timer(TOTAL_S, give_up)
        watch.daemon = True
        watch.start()
        try:
            extensions: dict[str, Any] = {"sni_hostname": host} if host else {}
            with client.stream(
                "POST", url, content=body, headers={**headers, **pinned}, extensions=extensions
            ) as answer:
                _judge(answer.status_code, answer.headers.get("retry-after", ""))
        except (httpx.HTTPError, httpx.InvalidURL, OSError, RuntimeError) as error:
            # What a library says may name machines of the network of the service, which owners of jobs need not know.
            told = type(error).__name__ if target.limited else f"{type(error).__name__}: {error}"
            why = f"no answer within {TOTAL_S:.0f} s" if over.is_set() else told
            raise Undelivered(target.masked(why)) from None
        finally:
            watch.cancel()


def _judge(status: int, retry_after: str) -> None:
    if 200 <= status < 300:
        return
    if 300 <= status < 400:
        raise Undeliverable(
            f"the answer was {status}; redirects are not followed", hint="give the address that it leads to"
        )
    if status >= 500 or status in _AGAIN:
        after = float(retry_after) if retry_after.isdigit() else 0.0
        raise Undelivered(f"the answer was {status}", min(after, 3600.0))
    raise Undeliverable(f"the answer was {status}")


def _pinned(target: Target) -> tuple[str, dict[str, str], str]:
    """Return the URL with an address that was looked at in place of the name, the header with the name, and the name.

    The name is looked up once: what a second look-up would answer plays no part.
    """
    parts = urlsplit(target.url)
    host = parts.hostname or ""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise Undelivered(f"{host} cannot be looked up ({type(error).__name__})") from None
    addresses = [str(entry[4][0]) for entry in found]
    for address in addresses:
        if not is_public(address):
            raise Undeliverable(
                f"{host} is at no public address",
                where=target.shown,
                hint="`allow.hosts` in the service's notifications.yaml lists hosts that may be private",
            )
    literal = f"[{addresses[0]}]" if ":" in addresses[0] else addresses[0]
    return parts._replace(netloc=f"{literal}:{port}").geturl(), {"host": parts.netloc.rpartition("@")[2]}, host


# Networks that `ipaddress` takes for global, of every Python that orc runs under: addresses of one site, of translators
# that lead into one (RFC 8215), and the services that clouds answer their own machines with.
_NOT_PUBLIC = tuple(map(ipaddress.ip_network, ("fec0::/10", "64:ff9b:1::/48", "168.63.129.16/32", "192.88.99.0/24")))
# Where the last four bytes are an IPv4 address: NAT64 (RFC 6052), and IPv4-compatible addresses (RFC 4291, 2.5.5.1).
_TRANSLATED = tuple(map(ipaddress.ip_network, ("64:ff9b::/96", "::/96")))


def is_public(address: str) -> bool:
    """Return True for an address of the public internet, also where it is written inside another one."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if any(ip in network for network in _NOT_PUBLIC):
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if inner is None and any(ip in network for network in _TRANSLATED):
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
    return ip.is_global and not ip.is_multicast


def send_mail(target: Target, message: EmailMessage) -> None:
    """Send *message*. Raises `Undelivered`, or `Undeliverable` where it makes no sense to try again."""
    mail = target.mail
    if mail is None:
        raise ValueError("a target of e-mail has a server")
    context = ssl.create_default_context()
    try:
        if mail.tls == "tls":
            server: smtplib.SMTP = smtplib.SMTP_SSL(mail.host, mail.port, timeout=STEP_S, context=context)
        else:
            server = smtplib.SMTP(mail.host, mail.port, timeout=STEP_S)
        with server:
            if mail.tls == "starttls":
                server.starttls(context=context)  # raises where the server does not offer it
            if mail.user:
                server.login(mail.user, target.password)
            # One transaction for all of them: it is taken for all or for none, so a second try sends nobody two.
            _send(server, message, mail.sender, target.to)
    except smtplib.SMTPResponseException as error:
        text = error.smtp_error.decode("utf-8", "replace") if isinstance(error.smtp_error, bytes) else error.smtp_error
        why = target.masked(f"{mail.host} answered {error.smtp_code} {text}")
        if 500 <= error.smtp_code < 600:
            raise Undeliverable(why) from None
        raise Undelivered(why) from None
    except (smtplib.SMTPException, OSError) as error:
        raise Undelivered(target.masked(f"{mail.host}: {type(error).__name__}: {error}")) from None


def _send(server: smtplib.SMTP, message: EmailMessage, sender: str, to: tuple[str, ...]) -> None:
    server.ehlo_or_helo_if_needed()
    code, text = server.mail(sender)
    for address in to if code == 250 else ():
        code, text = server.rcpt(address)
        if code not in (250, 251):
            break
    if code not in (250, 251):
        server.rset()
        raise smtplib.SMTPResponseException(code, text)
    code, text = server.data(message.as_bytes(policy=SMTP))
    if code != 250:
        raise smtplib.SMTPResponseException(code, text)
