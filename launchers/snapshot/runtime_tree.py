"""The runtime tree: what travels to every node beside a job's code, as one immutable snapshot.

| in the tree | from | who reads it |
|---|---|---|
| ``__main__.py`` | ``launchers/attempts/runtime_main.py`` | ``python -I -S <runtime tree> ...`` |
| ``sitecustomize.py`` | ``launchers/rank_hooks/startup.py`` | the ranks' interpreters |
| ``lib/orc/launchers/agent/**`` | the same place | the agent |
| ``lib/orc/launchers/environments/*`` | the same place | the environment step |
| ``orc/runtime/**`` | the same place | the ranks |

``orc`` and ``orc.launchers`` are namespace packages there, and what only the agent needs lies in ``lib``: the root
is on the ranks' PYTHONPATH, and must not hide an orc that is installed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from orc.launchers.errors import BundleError
from orc.launchers.snapshot.hashing import StatCache
from orc.launchers.snapshot.manifest import FILE, Bundle, Entry
from orc.launchers.snapshot.scan import SourceTree, cache_file

_ENVIRONMENTS = ("__init__", "build", "container", "copied", "requirements")


def runtime_files() -> dict[str, bytes]:
    """Return the files of the runtime tree: path in the tree -> absolute path on this machine.

    Works from a checkout, an editable install and a wheel: the files are found next to this one.
    """
    launchers = os.path.dirname(os.path.dirname(os.path.realpath(os.fsencode(__file__))))
    runtime = os.path.join(os.path.dirname(launchers), b"runtime")
    own = {
        "__main__.py": b"attempts/runtime_main.py",
        "sitecustomize.py": b"rank_hooks/startup.py",
        **{f"lib/orc/launchers/environments/{name}.py": f"environments/{name}.py".encode() for name in _ENVIRONMENTS},
    }
    found = {path: os.path.join(launchers, source) for path, source in own.items()}
    found.update(_package(os.path.join(launchers, b"agent"), "lib/orc/launchers/agent"))
    found.update(_package(runtime, "orc/runtime"))
    if "orc/runtime/__init__.py" not in found:
        raise _incomplete("orc.runtime is missing", runtime)
    return found


def _package(directory: bytes, place: str) -> Iterator[tuple[str, bytes]]:
    for folder, subfolders, names in os.walk(directory):
        subfolders[:] = [name for name in subfolders if name != b"__pycache__"]
        for name in names:
            if name.endswith(b".py"):
                full = os.path.join(folder, name)
                yield f"{place}/{os.fsdecode(os.path.relpath(full, directory))}", full


def runtime_bundle(*, cache: Path | None = None) -> SourceTree:
    """Return the runtime tree of this installation of orc. *cache* is a directory for hashes of unchanged files.

    Raises `BundleError` for an installation that is incomplete.
    """
    found = runtime_files()
    entries = []
    with StatCache(cache_file(cache, os.path.dirname(found["orc/runtime/__init__.py"]))) as hashes:
        for path, full in found.items():
            try:
                digest, status = hashes.digest(path, full, os.stat(full))
            except OSError as error:
                raise _incomplete(error.strerror or str(error), full) from None
            entries.append(Entry(path, FILE, digest, status.st_size))
    return SourceTree(Bundle.of(entries), found)


def _incomplete(problem: str, where: bytes) -> BundleError:
    return BundleError(
        f"this installation of orc is incomplete: {problem}",
        where=os.fsdecode(where),
        hint="Install orc-launch again.",
    )
