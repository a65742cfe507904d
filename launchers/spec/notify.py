"""Notifications of a job file: addresses, and the events that are sent to them."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, NamedTuple
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field

from orc.launchers.spec import grammar
from orc.launchers.spec.options import FrozenModel, several

EventWord = Literal["start", "end", "success", "failure", "cancelled", "requeue", "stall"]
TARGET_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}"
MAX_ADDRESS = 255
_SECRET = re.compile(r"\$\{secret:([A-Za-z_][A-Za-z0-9_]*)\}", re.ASCII)
# What RFC 5321 lets an address have without quotes: nothing of it can end a header or begin another address.
_MAILBOX = re.compile(
    r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~.-]{1,64}@[A-Za-z0-9](?:[A-Za-z0-9.-]{0,252}[A-Za-z0-9])?", re.ASCII
)
# Services whose addresses are passwords: whoever knows one may post.
_SECRET_HOSTS = ("hooks.slack.com", "discord.com", "discordapp.com", "webhook.office.com", "logic.azure.com")


class Address(NamedTuple):
    """Address of notifications: a target's name, a URL, a mailbox, or the name of the secret that holds a URL."""

    kind: str  # target, webhook, slack, email
    value: str
    secret: bool = False  # *value* is the name of a secret


def secret_name(text: str) -> str | None:
    """Return the name in ``${secret:NAME}``; `None` for any other text."""
    found = _SECRET.fullmatch(text)
    return found[1] if found else None


def parse_address(text: str) -> Address:
    """Return the address that *text* is. Raises `ValueError`.

    It is ``NAME`` of a target, ``https://...`` (a webhook), ``webhook:``, ``slack:`` and a URL or ``${secret:NAME}``,
    or ``email:`` and a mailbox.
    """
    if re.fullmatch(TARGET_NAME, text):
        return Address("target", text)
    kind, _, rest = text.partition(":")
    if kind in ("http", "https"):
        return Address("webhook", checked_url(text))
    if kind == "email":
        return Address("email", mailbox(rest))
    if kind == "slack" or kind == "webhook":
        if name := secret_name(rest):
            return Address(kind, name, secret=True)
        return Address(kind, checked_url(rest))
    raise ValueError(
        f"{text!r} is no address; write a target's name, https://..., slack:${{secret:NAME}} or email:me@example.org"
    )


def checked_url(text: str, *, public: bool = True) -> str:
    """Return *text* if it is a URL of http. Raises `ValueError`; with *public*, also for one that is a password."""
    if len(text) > 2000 or not text.isascii() or not text.isprintable() or " " in text:
        raise ValueError("a URL is printable ASCII without blanks, at most 2000 characters")
    try:
        parts = urlsplit(text)
        host, _ = parts.hostname, parts.port
    except ValueError:  # its message may show what is secret
        raise ValueError("that is no URL: its host or port is not right") from None
    if parts.scheme not in ("http", "https") or not host:
        raise ValueError("expected a URL such as https://example.org/hook")
    if parts.fragment:
        raise ValueError("a URL to post to has no #fragment")
    listed = any(host == name or host.endswith(f".{name}") for name in _SECRET_HOSTS)
    if public and (listed or parts.username is not None or parts.password is not None):
        raise ValueError(
            f"a URL of {host} that posts is a password and does not belong into a job file; "
            "write ${secret:NAME} in its place, or the name of a target in notifications.yaml"
        )
    return text


def mailbox(value: Any) -> str:
    """Return *value* if it is one plain address of e-mail. Raises `ValueError`."""
    if not isinstance(value, str) or not _MAILBOX.fullmatch(value):
        raise ValueError(f"{value!r} is no address of e-mail; write for example me@example.org")
    return value


def _address(value: Any) -> str:
    text = grammar.line(grammar.scalar_text(value).strip())
    if len(text) > MAX_ADDRESS:
        raise ValueError(f"an address has at most {MAX_ADDRESS} characters; give a longer one as a target's `url`")
    parse_address(text)
    return text


class Notify(FrozenModel):
    """Subscription to a job's events."""

    short_form = "to"

    to: Annotated[str, BeforeValidator(_address)] = Field(
        description="A target of notifications.yaml, https://..., slack:${secret:NAME} or email:me@example.org."
    )
    on: Annotated[tuple[EventWord, ...], several, Field(min_length=1)] = Field(("end",), description="What is told.")


Subscriptions = Annotated[tuple[Notify, ...], several, Field(max_length=20)]
