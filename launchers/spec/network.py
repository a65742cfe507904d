"""The ``network`` section of a job and of a cluster: the network between the nodes of a run."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from orc.launchers.spec import grammar
from orc.launchers.spec.options import FrozenModel


def _interface(value: Any) -> str:
    text = grammar.scalar_text(value)
    if not re.fullmatch(r"[^\s/,=^:!]{1,15}", text):  # as the kernel takes it, without what NCCL's lists are made of
        raise ValueError(f"{text!r} is not the name of a network interface, such as eth0 or ib0")
    return text


def _cidr(value: Any) -> str:
    import ipaddress

    text = grammar.scalar_text(value).strip()
    try:
        return str(ipaddress.ip_network(text))
    except ValueError as error:
        raise ValueError(f"is not a network such as 10.1.0.0/16: {error}") from None


class Network(FrozenModel):
    """The network that ranks of several nodes listen on. Ranks of one node stay on its loopback interface."""

    interface: Annotated[str, BeforeValidator(_interface)] | None = Field(
        None, description="The interface that the nodes use among each other, as eth0."
    )
    cidr: Annotated[str, BeforeValidator(_cidr)] | None = Field(
        None, description="The network that every node's address must lie in, as 10.1.0.0/16."
    )


def chosen_network(job: Network, cluster: Network) -> dict[str, str]:
    """Return the ``network`` of ``agent.json``: each value of the job goes over the cluster's."""
    chosen = {name: getattr(job, name) or getattr(cluster, name) for name in ("interface", "cidr")}
    return {name: value for name, value in chosen.items() if value}
