"""A virtual environment that was packed on another machine: whether it works here, and how it is laid out.

Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

FACTS = "orc-environment.json"  # in the packed environment: where it comes from


def mismatch(packed: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """Return the reason why an environment that was packed there does not work here; empty when it does. Pure."""
    if packed["implementation"] != here["implementation"]:
        return f"it is made for {packed['implementation']}, this node has {here['implementation']}"
    if packed["version"].split(".")[:2] != here["version"].split(".")[:2]:
        return f"it is made for Python {packed['version']}, this node has {here['version']} ({here['executable']})"
    if packed["platform"] != here["platform"]:
        return f"it is made for {packed['platform']}, this node is {here['platform']}"
    (name, version), (own_name, own_version) = packed["libc"], here["libc"]
    if name != own_name or _numbers(version) > _numbers(own_version):
        return f"it is made on {name} {version}, this node has {own_name} {own_version}: compiled packages may not load"
    return ""


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdigit()]


def lay_out(tree: str, directory: str, packed: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Make a virtual environment from a packed one: own ``bin`` and ``pyvenv.cfg``, links to the rest."""
    bin_directory = os.path.join(directory, "bin")
    os.makedirs(bin_directory, mode=0o700)
    base = str(here["base"])
    version = ".".join(str(here["version"]).split(".")[:2])
    for name in ("python", "python3", f"python{version}"):
        os.symlink(base if name == "python" else "python", os.path.join(bin_directory, name))
    for entry in sorted(os.listdir(tree)):
        if entry not in ("bin", "pyvenv.cfg", FACTS):
            os.symlink(os.path.join(tree, entry), os.path.join(directory, entry))
    if not os.path.lexists(os.path.join(directory, "lib64")):
        os.symlink("lib", os.path.join(directory, "lib64"))
    scripts = os.path.join(tree, "bin")
    for name in sorted(os.listdir(scripts)) if os.path.isdir(scripts) else ():
        source, target = os.path.join(scripts, name), os.path.join(bin_directory, name)
        if os.path.islink(source) or not os.path.isfile(source):
            if not os.path.lexists(target):
                os.symlink(os.path.join(scripts, name), target)
            continue
        with open(source, "rb") as file:
            content = file.read()
        if os.path.lexists(target):
            continue
        with open(target, "wb") as file:
            file.write(moved(content, str(packed["venv"]), directory))
        os.chmod(target, 0o700)
    lines = [
        f"home = {os.path.dirname(base)}",
        f"include-system-site-packages = {'true' if packed.get('system_site_packages') else 'false'}",
        f"version = {here['version']}",
    ]
    with open(os.path.join(directory, "pyvenv.cfg"), "w", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")


def moved(content: bytes, old: str, new: str) -> bytes:
    """Return a script of the environment *old* as it has to be in *new*: interpreter's path, what activation sets."""
    if b"\0" in content[:1024]:
        return content
    before, after = os.fsencode(old), os.fsencode(new)
    first, newline, rest = content.partition(b"\n")
    python = os.path.join(after, b"bin", b"python")
    if first.startswith(b"#!" + before + b"/bin/python"):
        line = b"#!" + python
        if len(line) > 127 or b" " in python:  # longer ones are cut by the kernel
            line = b"#!/bin/sh\n'''exec' \"" + python + b'" "$0" "$@"\n\' \'\'\''
        return line + newline + rest
    if first == b"#!/bin/sh" and rest.startswith(b"'''exec' "):
        return content.replace(before + b"/bin/python", python, 1)
    return content.replace(before, after) if content[:2] != b"#!" or b"python" not in first else content
