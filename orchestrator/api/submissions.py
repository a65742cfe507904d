"""Submissions as they are sent to a service: the members that a job, a group or a schedule is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from orc.orchestrator.api.call import Bounds, Text

Digest = Annotated[str, Bounds(pattern="^[0-9a-f]{64}$")]
Stage = Annotated[str, Bounds(max_length=64, pattern=r"^([A-Za-z0-9][A-Za-z0-9_-]*)?$")]


@dataclass(frozen=True)
class Digests:
    """Trees that a job is made of."""

    code: Digest
    environment: Digest | None = None

    def given(self) -> dict[str, str]:
        """Return those that there are."""
        return {name: digest for name, digest in vars(self).items() if digest is not None}


@dataclass(frozen=True)
class NewMember:
    """Job as it is sent, by itself or as a member of a group: there without the keys that are `shared`."""

    index: Annotated[int, Bounds(ge=0, lt=1 << 31)]
    digests: Digests
    spec: Mapping[str, Any] = field(default_factory=dict)
    stage: Stage = ""
    parameters: Annotated[Mapping[Text, Text], Bounds(max_length=100)] = field(default_factory=dict)
