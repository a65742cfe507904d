"""What can be said about reaching machines over SSH, in any part of clusters.yaml: names, jump hosts, host keys."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from pydantic_core import CoreSchema
from pydantic_core import core_schema as cs

from orc.launchers.remote.ssh.hosts import Access, HostSpec, is_user
from orc.launchers.spec import grammar
from orc.launchers.spec.model import Model, model, setting

DEFAULT_ROOT = "~/.local/state/orc"  # of orc's files, on a machine that is reached over SSH
DEFAULT_PYTHON = "python3"
# What may stand for a host: a name or an address. It becomes an argument of programs, so it never begins with a dash.
_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.:-]*"


def host_name(value: Any) -> str:
    """The name or address of a host. Raises `ValueError`."""
    text = grammar.scalar_text(value).strip()
    if not re.fullmatch(_NAME, text):
        raise ValueError(f"{text!r} is not the name of a host")
    return text


def user_name(value: Any) -> str:
    """The name of who logs in. Raises `ValueError`."""
    text = grammar.scalar_text(value).strip()
    if not is_user(text):
        raise ValueError(f"{text!r} is not the name of a user")
    return text


def jump_hosts(value: Any) -> str:
    """One jump host or several. Raises `ValueError`."""
    text = grammar.scalar_text(value).strip()
    for user, at, host in (hop.rpartition("@") for hop in text.split(",")):
        if not re.fullmatch(_NAME, host) or (at and not is_user(user)):
            raise ValueError(f"{text!r} is not a jump host; write [user@]host[:port], several separated by commas")
    return text


def path(value: Any) -> str:
    """An absolute path over there or here; may begin with ``~``. Raises `ValueError`."""
    text = grammar.line(value)
    if not text.startswith(("/", "~/")) and text != "~":
        raise ValueError(f"{text!r} is not an absolute path")
    return text.rstrip("/") or "/"


def word(value: Any) -> str:
    """One line that no program takes for an option. Raises `ValueError`."""
    text = grammar.scalar_text(value).strip()
    if not text or not text.isprintable() or text.startswith("-"):
        raise ValueError(f"{text!r} cannot be used here")
    return text


def seconds(minimum: float, maximum: float) -> CoreSchema:
    """A duration between two bounds, in seconds."""

    def bounded(value: Any) -> float:
        number = grammar.seconds(value)
        if not minimum <= number <= maximum:
            raise ValueError(f"expected {minimum:g} to {maximum:g} seconds, not {value!r}")
        return number

    return cs.no_info_plain_validator_function(bounded)


def read(function: Callable[[Any], Any]) -> CoreSchema:
    """The schema of what *function* makes of a value; its `ValueError` is the complaint."""
    return cs.no_info_plain_validator_function(function)


def maybe(schema: CoreSchema) -> CoreSchema:
    """The same, or nothing."""
    return cs.nullable_schema(schema)


def several(schema: CoreSchema) -> CoreSchema:
    """A list; one value alone is short for a list of one."""
    return cs.no_info_before_validator_function(
        lambda value: [value] if isinstance(value, (str, int)) else value,
        cs.tuple_schema([schema], variadic_item_index=0),
    )


_PORT = cs.int_schema(ge=1, le=65535, strict=True)


@model
class Machine(Model):
    """How one machine is reached. What is `None` is the cluster's, and then what ``~/.ssh/config`` says."""

    name: str = setting(read(host_name), doc="What it is called here, and in ~/.ssh/config.")
    address: str | None = setting(maybe(read(host_name)), default=None, doc="Where it is, if the name does not tell.")
    user: str | None = setting(maybe(read(user_name)), default=None, doc="Who logs in.")
    port: int | None = setting(maybe(_PORT), default=None, doc="sshd's port.")
    via: str | None = setting(maybe(read(jump_hosts)), default=None, doc="Jump host, [user@]host[:port].")
    python: str | None = setting(maybe(read(word)), default=None, doc="The Python that orc uses there.")

    @classmethod
    def before(cls, data: Any) -> Any:
        """``node1`` is short for ``{name: node1}``, ``me@node1`` for ``{name: node1, user: me}``."""
        if not isinstance(data, str):
            return data
        user, at, name = data.rpartition("@")
        return {"name": name, "user": user} if at else {"name": data}

    @property
    def where(self) -> str:
        """Its address, or the name that stands for it."""
        return self.address or self.name

    def spec(self, python: str | None = None) -> HostSpec:
        """What the transport needs to know; *python* is for a machine that names none."""
        return HostSpec(self.name, self.address, self.user, self.port, self.via, self.python or python)


@model
class Reaching(Model):
    """How the machines of a cluster are reached."""

    host_keys: str = setting(
        cs.literal_schema(["strict", "accept-new"]), default="strict", doc="Whether unknown hosts are refused."
    )
    ssh_config: str | None = setting(maybe(read(path)), default=None, doc="Instead of the user's ~/.ssh/config.")
    connect_timeout: float = setting(seconds(0.1, 600), default=10.0, doc="Seconds until a host counts as silent.")

    @property
    def access(self) -> Access:
        """The same for transports."""
        return Access(self.host_keys, self.ssh_config, self.connect_timeout)
