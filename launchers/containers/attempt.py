"""An attempt in an object store: what its containers read, and the records that they leave."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from orc.launchers.attempts.confidential import new_link_token
from orc.launchers.attempts.reader import AttemptRecords, read_attempts
from orc.launchers.containers.archive import entry_program
from orc.launchers.containers.layout import AGENT, ENTRY, LINK, SECRETS

if TYPE_CHECKING:
    from orc.launchers.containers.objects import ObjectStore
    from orc.launchers.remote.transport import Transport


def upload_inputs(objects: ObjectStore, place: str, agents: str, secrets: Mapping[str, str], platform: Path) -> None:
    """Upload what the containers of an attempt read to *place* (a URI that ends with a slash), their program last.

    *agents* is the content of ``agent.json``, *secrets* are values by name, *platform* is as of `entry_program`.
    """
    objects.put(place + AGENT, agents.encode())
    for name, text in private_inputs(agents, secrets).items():
        # What an earlier try has left may be read by its containers at this moment.
        if name != LINK or not objects.exists(place + LINK):
            objects.put(place + name, text.encode())
    objects.put(place + ENTRY, entry_program(platform))


def private_inputs(agents: str, secrets: Mapping[str, str]) -> dict[str, str]:
    """Return the files that only the containers of an attempt may read: a new token of its agents, and the secrets."""
    found = {LINK: json.dumps({"token": new_link_token()}) + "\n"} if json.loads(agents).get("link") else {}
    return {**found, SECRETS: json.dumps(dict(secrets)) + "\n"} if secrets else found


def remove_private(objects: ObjectStore, place: str, config: Mapping[str, Any]) -> None:
    """Delete the secrets of an attempt, and the token of its agents; *config* is its ``agent.json``."""
    if config.get("secrets"):
        objects.delete(place + SECRETS)
    if config.get("link"):
        objects.delete(place + LINK)


class _Objects:
    """As much of a `Transport` as reading records takes; ``agent.json`` is where the submission has put it."""

    def __init__(self, objects: ObjectStore, configs: Mapping[str, Mapping[str, Any]]) -> None:
        self._objects = objects
        self._agents = {f"{uri}/{AGENT}": config for uri, config in configs.items()}

    def read_many(self, paths: Iterable[str], *, limit: int) -> dict[str, bytes]:
        wanted = list(paths)
        own = {path: json.dumps(self._agents[path]).encode() for path in wanted if path in self._agents}
        return {**self._objects.get_many([path for path in wanted if path not in own], limit), **own}


def read_records(objects: ObjectStore, configs: Mapping[str, Mapping[str, Any]]) -> dict[str, AttemptRecords]:
    """Return the agents' records of many attempts by the URI of their directories; *configs* has the ``agent.json``."""
    return read_attempts(cast("Transport", _Objects(objects, configs)), list(configs))
