"""Hosts of a cluster, and the files that list them.

These are hostfiles of MPI (``node1 slots=4``, ``node1:4``) and INI inventories (``[group]``, ``node1
ansible_host=...``).
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from orc.launchers.errors import SpecError
from orc.launchers.paths import refuse_untrusted
from orc.launchers.remote.ssh.options import Machine, host_name
from orc.launchers.spec import grammar
from orc.launchers.spec.options import Argument, PathText, Reader, Whole, several

Slots = Annotated[Whole, Field(ge=0, le=4096)]
Labels = Annotated[tuple[Argument, ...], several]


def _names(value: Any) -> str:
    """Return a name, or a range of names."""
    text = grammar.scalar_text(value).strip()
    for name in expand(text):
        host_name(name)
    return text


class Host(Machine):
    """Host in clusters.yaml. What is `None` is the cluster's, and then that of ``~/.ssh/config``."""

    name: Annotated[str, Reader(_names, str)] = Field(description="What it is called here, and in ~/.ssh/config.")
    slots: Slots | None = Field(None, description="Processes (or GPUs) for jobs; 0: one job at a time.")
    labels: Labels = Field((), description="What jobs can ask for.")
    root: PathText | None = Field(None, description="orc's files there.")


def expand(name: str) -> list[str]:
    """Return ``node[01-03]`` (or ``node[01:03]``) as three names; any other name as itself. Raises `ValueError`."""
    match = re.fullmatch(r"([^\[\]]*)\[([0-9]+)[-:]([0-9]+)\]([^\[\]]*)", name)
    if not match:
        return [name]
    first, last = int(match[2]), int(match[3])
    if not first <= last <= first + 10_000:
        raise ValueError(f"{name!r}: {match[2]} to {match[3]} is no range of hosts")
    return [f"{match[1]}{number:0{len(match[2])}d}{match[4]}" for number in range(first, last + 1)]


# The variables of an inventory, and what the common hostfiles call the same.
_KEYS = {
    "ansible_host": "address",
    "ansible_ssh_host": "address",
    "hostname": "address",
    "ansible_user": "user",
    "ansible_ssh_user": "user",
    "ansible_port": "port",
    "ansible_ssh_port": "port",
    "ansible_python_interpreter": "python",
    "label": "labels",
    "max_slots": "slots",
    "max-slots": "slots",
}
_KNOWN = ("address", "user", "port", "slots", "labels", "python", "root", "via")


def read_hostfile(path: str, where: str) -> list[Host]:
    """Return the hosts in the file, in its order; groups of an inventory become labels. *where* names the file first.

    Raises `SpecError` with file and line.
    """
    file = Path(path).expanduser()
    refuse_untrusted(file, "hostfile", SpecError)
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise SpecError(f"hostfile: {file} cannot be read: {error.strerror}", where=where) from None
    except UnicodeDecodeError:
        raise SpecError(f"hostfile: {file} is not UTF-8 text", where=where) from None
    return parse_hostfile(text, str(file))


def parse_hostfile(text: str, name: str) -> list[Host]:
    """Return the hosts in *text*, which is called *name* in messages. Raises `SpecError`."""
    hosts: dict[str, Host] = {}
    group = ""
    for number, line in enumerate(text.splitlines(), 1):
        where = f"{name}:{number}"
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise SpecError(f"not a line of a hostfile: {error}", where=where) from None
        if not words:
            continue
        if heading := re.fullmatch(r"\[([^\[\]]+)\]", line.split("#")[0].split(";")[0].strip()):
            group = heading[1]
        elif group.endswith((":vars", ":children")) or words[0].startswith(";"):
            # Variables of groups and groups of groups are Ansible's own; the hosts stand elsewhere.
            continue
        else:
            for host in _hosts(words, group, where):
                before = hosts.get(host.name)
                hosts[host.name] = _joined(before, host, where) if before else host
    return list(hosts.values())


def _hosts(words: list[str], group: str, where: str) -> list[Host]:
    first, *settings = words
    data: dict[str, object] = {"labels": [group] if group and group not in ("all", "ungrouped") else []}
    if count := re.fullmatch(r"([^:\[\]]+):([0-9]+)", first):  # MPICH; an IPv6 address has more colons
        first, data["slots"] = count[1], int(count[2])
    for pair in settings:
        key, equals, value = pair.partition("=")
        known = _KEYS.get(key, key)
        if known not in _KNOWN:
            if key.startswith("ansible_"):
                continue  # how Ansible does its work says nothing about the host
            from orc.launchers.spec.problems import choose

            raise SpecError(f"unknown key {key!r}{choose(key, _KNOWN)}", where=where)
        if not equals:
            raise SpecError(f"{key}: expected {key}=value", where=where)
        if known == "labels":
            data["labels"] = [*_list(data["labels"]), *value.split(",")]
        elif known in ("slots", "port"):
            if not value.isdigit():
                raise SpecError(f"{key}: {value!r} is not a whole number", where=where)
            data[known] = int(value)
        else:
            data[known] = value
    user, _, bare = first.rpartition("@")
    if user:
        data["user"] = user
    try:
        return [Host.model_validate({**data, "name": name}) for name in expand(bare)]
    except ValidationError as error:
        first_error = error.errors(include_url=False)[0]
        what = str(first_error.get("ctx", {}).get("error") or first_error["msg"])
        raise SpecError(f"{'.'.join(str(part) for part in first_error['loc'])}: {what}", where=where) from None
    except ValueError as error:
        raise SpecError(str(error), where=where) from None


def _list(value: object) -> list[str]:
    return [str(item) for item in value] if isinstance(value, (list, tuple)) else []


def _joined(before: Host, again: Host, where: str) -> Host:
    """Return each host once: one that stands in several groups of an inventory has all their labels."""
    data = before.model_dump()
    for key, value in again.model_dump(exclude_defaults=True).items():
        if key == "labels":
            data[key] = (*before.labels, *(label for label in again.labels if label not in before.labels))
        elif data[key] in (None, value):
            data[key] = value
        else:
            raise SpecError(f"{again.name}: {key} is {value} here and {data[key]} above", where=where)
    return Host.model_validate(data)
