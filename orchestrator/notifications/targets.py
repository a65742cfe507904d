"""Targets of notifications: ``notifications.yaml``, and what an address comes to, with secrets, for one delivery."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from orc.launchers.errors import LaunchError, SpecError
from orc.launchers.secrets import redact
from orc.launchers.spec import grammar, source
from orc.launchers.spec.notify import (
    TARGET_NAME,
    Notify,
    Subscriptions,
    checked_url,
    mailbox,
    parse_address,
    secret_name,
)
from orc.launchers.spec.options import FrozenModel, Name, Port, keys_of, section_at, several

if TYPE_CHECKING:
    from orc.launchers.spec.job import JobSpec


FILE = "notifications.yaml"


def _url(value: Any) -> str:
    text = grammar.line(grammar.scalar_text(value).strip())
    return text if secret_name(text) else checked_url(text, public=False)


def _secret(value: Any) -> str:
    text = grammar.line(grammar.scalar_text(value).strip())
    if not secret_name(text):
        raise ValueError(
            "a password must not stand in this file; write ${secret:NAME}, and set NAME like any other secret"
        )
    return text


def _host(value: Any) -> str:
    text = grammar.line(grammar.scalar_text(value).strip()).lower()
    if not re.fullmatch(r"(\*\.)?[a-z0-9_]([a-z0-9_.:-]*[a-z0-9_])?", text):
        raise ValueError(f"{text!r} is no host; write for example hooks.example.org or *.example.org")
    return text


Url = Annotated[str, BeforeValidator(_url)]
SecretReference = Annotated[str, BeforeValidator(_secret)]
Mailbox = Annotated[str, BeforeValidator(mailbox)]


class TargetSettings(FrozenModel):
    """Target of notifications."""

    kind: Literal["webhook", "slack", "email"] = Field("webhook", description="How it is told.")
    url: Url | None = Field(None, description="Where a webhook or Slack is told; may be ${secret:NAME}.")
    key: SecretReference | None = Field(None, description="${secret:NAME}: what a webhook's messages are signed with.")
    to: Annotated[tuple[Mailbox, ...], several, Field(max_length=50)] = Field((), description="Addresses of e-mail.")

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.kind == "email":
            if not self.to or self.url or self.key:
                raise ValueError("a target of kind email has `to`, and neither `url` nor `key`")
        elif not self.url or self.to:
            raise ValueError(f"a target of kind {self.kind} has `url`, and no `to`")
        elif self.key and self.kind == "slack":
            raise ValueError("messages to Slack are not signed; remove `key`")
        return self


class MailSettings(FrozenModel):
    """Server that takes the e-mail."""

    host: Annotated[str, BeforeValidator(_host)] = Field(description="Its name.")
    port: Port = Field(587, description="587 for starttls, 465 for tls.")
    tls: Literal["starttls", "tls", "none"] = Field("starttls", description="How the connection is encrypted.")
    sender: Mailbox = Field(alias="from", description="The address that messages come from.")
    user: Name | None = Field(None, description="Who logs in.")
    password: SecretReference | None = Field(None, description="${secret:NAME}.")

    @model_validator(mode="after")
    def _safe(self) -> Self:
        if (self.user is None) != (self.password is None):
            raise ValueError("`user` and `password` belong together")
        if self.password and self.tls == "none":
            raise ValueError("a password is not sent without encryption; use tls: starttls")
        return self


class AllowSettings(FrozenModel):
    """Addresses that jobs of a service may bring along, beside public ones that are reached by https."""

    hosts: Annotated[tuple[Annotated[str, BeforeValidator(_host)], ...], several] = Field(
        (), description="Hosts that may be private and may be reached by http: hooks.lan, *.example.org."
    )
    mail: Annotated[tuple[Annotated[str, BeforeValidator(_host)], ...], several] = Field(
        (), description="Domains of e-mail that a job may name: example.org, *.example.org."
    )


class Settings(FrozenModel):
    """Settings of notifications."""

    targets: dict[Annotated[str, Field(pattern=f"^{TARGET_NAME}$")], TargetSettings] = Field(
        {}, description="Targets by name."
    )
    mail: MailSettings | None = Field(None, description="The server that takes e-mail.")
    always: Subscriptions = Field((), description="What is told of every job, beside what its own file asks for.")
    allow: AllowSettings = Field(AllowSettings(), description="What jobs of a service may name themselves.")

    def subscribed(self, own: tuple[Notify, ...]) -> tuple[Notify, ...]:
        """Return the subscriptions of a job with these of its *own*: one for each address."""
        found: dict[str, Notify] = {}
        for entry in (*own, *self.always):
            events = (*found[entry.to].on, *entry.on) if entry.to in found else entry.on
            found[entry.to] = Notify(to=entry.to, on=tuple(dict.fromkeys(events)))
        return tuple(found.values())


def settings_file() -> Path:
    """Return the path of the settings: ``$ORC_NOTIFICATIONS``, or a file in the configuration directory."""
    from orc.launchers import paths

    given = os.environ.get("ORC_NOTIFICATIONS")
    return Path(given).expanduser().absolute() if given else paths.config_dir() / FILE


def load_settings(path: Path | None = None) -> Settings:
    """Return the settings; empty ones where there is no file. Raises `SpecError`.

    Without *path* it is `settings_file`, which need not exist unless ``ORC_NOTIFICATIONS`` names it.
    """
    from orc.launchers.spec.problems import SpecProblems, choose, translate

    file = settings_file() if path is None else path
    if path is None and not os.environ.get("ORC_NOTIFICATIONS") and not os.path.lexists(file):
        return Settings()
    document = source.read_settings(file, "settings of notifications")

    def suggest(place: source.KeyPath, name: str) -> str:
        section = TargetSettings if place[:1] == ("targets",) else section_at(Settings, place)
        return choose(name, keys_of(section)) if section else ""

    try:
        return Settings.model_validate(document.data)
    except ValidationError as error:
        raise SpecProblems(translate(error, document, suggest)) from None


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
