"""Options of SSH in any part of clusters.yaml: names, jump hosts, host keys."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from orc.launchers.errors import SpecError
from orc.launchers.remote.ssh.routes import ConnectOptions, HostSpec, is_user
from orc.launchers.spec import grammar
from orc.launchers.spec.options import Argument, FrozenModel, Number, PathText, Port, Reader, seconds

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
    """Return jump hosts as they are written, several separated by commas. Raises `ValueError`."""
    text = grammar.scalar_text(value).strip()
    for user, at, host in (hop.rpartition("@") for hop in text.split(",")):
        if not re.fullmatch(_NAME, host) or (at and not is_user(user)):
            raise ValueError(f"{text!r} is not a jump host; write [user@]host[:port], several separated by commas")
    return text


HostName = Annotated[str, Reader(host_name, str)]
UserName = Annotated[str, Reader(user_name, str)]
JumpHosts = Annotated[str, Reader(jump_hosts, str)]


class Machine(FrozenModel):
    """Options of reaching a machine. What is `None` is the cluster's, and then that of ``~/.ssh/config``."""

    other_forms = ({"type": "string"},)

    name: HostName = Field(description="What it is called here, and in ~/.ssh/config.")
    address: HostName | None = Field(None, description="Where it is, if the name does not tell.")
    user: UserName | None = Field(None, description="Who logs in.")
    port: Port | None = Field(None, description="sshd's port.")
    via: JumpHosts | None = Field(None, description="Jump host, [user@]host[:port].")
    python: Argument | None = Field(None, description="The Python that orc uses there.")

    @model_validator(mode="before")
    @classmethod
    def _long_form(cls, data: Any) -> Any:
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
        """Return the `HostSpec` of a machine; *python* is for a machine that names none."""
        return HostSpec(self.name, self.address, self.user, self.port, self.via, self.python or python)


def refuse_home(python: str | None, sudo: bool, where: str) -> None:
    """Raise `SpecError` for a *python* below a home directory that *sudo* makes that of root."""
    if sudo and (python or "").startswith("~"):
        what = f"python: {python} would be below the home directory of root, because of `sudo`"
        raise SpecError(what, where=where, hint="Give the whole path.")


class SshOptions(FrozenModel):
    """Options of reaching the machines of a cluster."""

    host_keys: Literal["strict", "accept-new"] = Field(
        "strict", description="Whether unknown host keys are refused: strict or accept-new."
    )
    ssh_config: PathText | None = Field(None, description="SSH configuration instead of ~/.ssh/config.")
    connect_timeout: Annotated[Number, seconds(0.1, 600)] = Field(
        10.0, description="Seconds until a host that does not answer counts as silent."
    )

    @property
    def access(self) -> ConnectOptions:
        """The same for transports."""
        return ConnectOptions(self.host_keys, self.ssh_config, self.connect_timeout)
