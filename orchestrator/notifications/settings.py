"""Settings of notifications: ``notifications.yaml`` in the configuration directory, of a user or of a service."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from orc.launchers.spec import grammar, source
from orc.launchers.spec.notify import TARGET_NAME, Notify, Subscriptions, checked_url, mailbox, secret_name
from orc.launchers.spec.options import FrozenModel, Name, Port, keys_of, section_at, several

FILE = "notifications.yaml"


def _url(value: Any) -> str:
    text = grammar.line(grammar.scalar_text(value).strip())
    return text if secret_name(text) else checked_url(text, public=False)


def _secret(value: Any) -> str:
    text = grammar.line(grammar.scalar_text(value).strip())
    if not secret_name(text):
        raise ValueError("a password stands in no file; write ${secret:NAME}, and give NAME as any other secret")
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
