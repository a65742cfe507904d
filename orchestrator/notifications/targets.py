"""Targets: what an address of a subscription comes to, with its secrets. Lives for one delivery only."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from orc.launchers.errors import LaunchError, SpecError
from orc.launchers.secrets import redact
from orc.launchers.spec.notify import checked_url, parse_address, secret_name
from orc.orchestrator.notifications.settings import MailSettings, Settings

if TYPE_CHECKING:
    from orc.launchers.spec.job import JobSpec

Secrets = Callable[[Iterable[str]], Mapping[str, str]]


class Undeliverable(LaunchError):
    """A target that cannot be delivered to, now or later, unless its configuration changes."""


@dataclass(frozen=True)
class Policy:
    """Policy for addresses that jobs bring along. On a user's own machine they are the user's own."""

    service: bool = False  # jobs of many people: their addresses are limited, and no secret is looked up for them


@dataclass(frozen=True)
class Target:
    """Target, ready for a delivery. *shown* is its form without secrets."""

    kind: str  # webhook, slack, email
    shown: str
    url: str = field(default="", repr=False)
    key: str = field(default="", repr=False)
    to: tuple[str, ...] = ()
    mail: MailSettings | None = None
    password: str = field(default="", repr=False)
    limited: bool = False  # it came with a job of a service: only to public addresses
    plain: bool = False  # ... unless its host is on the list of the service

    def masked(self, text: str) -> str:
        """Return *text* without anything that is secret about this target."""
        hidden = [self.key, self.password, self.url, urlsplit(self.url).path.strip("/"), urlsplit(self.url).query]
        return redact(text, [value for value in hidden if len(value) > 3])


def shown(to: str) -> str:
    """Return an address as people may see it: of a URL, nothing behind its host."""
    address = parse_address(to)
    if address.kind == "target" or address.secret or address.kind == "email":
        return to
    parts = urlsplit(address.value)
    short = f"{parts.scheme}://{parts.hostname}{f':{parts.port}' if parts.port else ''}"
    digest = hashlib.sha256(address.value.encode()).hexdigest()[:6]
    return f"{address.kind}:{short}/…{digest}"  # two of one host are told apart


def target_of(to: str, settings: Settings, policy: Policy, secrets: Secrets) -> Target:
    """Return the target that *to* means; *secrets* looks values up. Raises `Undeliverable`."""
    try:
        address = parse_address(to)
        if address.kind == "target":
            return _named(address.value, settings, secrets)
        if address.kind == "email":
            return _mail(to, (address.value,), settings, policy, secrets)
        if address.secret and policy.service:
            raise Undeliverable(
                "a service looks up no secrets for the addresses of jobs",
                where=to,
                hint="name a target of the service's notifications.yaml",
            )
        url = checked_url(_value(f"${{secret:{address.value}}}", secrets), public=False) if address.secret else ""
        url = url or address.value
    except ValueError as error:
        raise Undeliverable(str(error), where="notify") from None
    plain = not policy.service or listed(urlsplit(url).hostname or "", settings.allow.hosts)
    if policy.service and not plain and urlsplit(url).scheme != "https":
        raise Undeliverable("a job's webhook is reached by https", where=shown(to), hint="`allow.hosts` of the service")
    return Target(address.kind, shown(to), url, limited=policy.service, plain=plain)


def _named(name: str, settings: Settings, secrets: Secrets) -> Target:
    from orc.launchers.spec.problems import nearest

    found = settings.targets.get(name)
    if found is None:
        raise Undeliverable(
            f"there is no target {name!r}{nearest(name, settings.targets)}",
            hint=f"targets of notifications.yaml: {', '.join(settings.targets) or 'none'}",
        )
    if found.kind == "email":
        return _mail(name, found.to, settings, Policy(), secrets)
    url = checked_url(_value(found.url or "", secrets), public=False)
    return Target(found.kind, name, url, _value(found.key or "", secrets))


def _mail(to: str, addresses: tuple[str, ...], settings: Settings, policy: Policy, secrets: Secrets) -> Target:
    if settings.mail is None:
        raise Undeliverable("no server takes e-mail", where=to, hint="give `mail:` in notifications.yaml")
    if policy.service:
        for address in addresses:
            if not listed(address.rpartition("@")[2].lower(), settings.allow.mail):
                raise Undeliverable(
                    "a job may not name this address of e-mail",
                    where=to,
                    hint="`allow.mail` of the service lists domains",
                )
    password = _value(settings.mail.password or "", secrets)
    return Target("email", to, to=addresses, mail=settings.mail, password=password)


def _value(text: str, secrets: Secrets) -> str:
    name = secret_name(text)
    if name is None:
        return text
    try:
        return secrets([name])[name]
    except SpecError as error:
        raise Undeliverable(error.what, where=error.where, hint=error.hint) from None


def subscribed(spec: JobSpec, settings: Settings, policy: Policy) -> JobSpec:
    """Return *spec* with what the settings subscribe every job to.

    Raises:
        Undeliverable: An address of the settings or of the job that cannot be.
    """
    for entry in spec.notify:
        target_of(entry.to, settings, policy, _assumed)
    if not settings.always:
        return spec
    return spec.model_copy(update={"notify": settings.subscribed(spec.notify)})


def _assumed(names: Iterable[str]) -> Mapping[str, str]:
    """Return values for secrets that are looked up when something is delivered."""
    return dict.fromkeys(names, "https://example.org/")


def listed(host: str, patterns: Iterable[str]) -> bool:
    """Return True where one of *patterns* (``host`` or ``*.domain``) is for *host*."""
    return any(host == p or (p.startswith("*.") and host.endswith(p[1:])) for p in patterns)
