"""Packing of what an environment brings along from the submitting machine: its virtual environment, or an archive
of conda-pack.

Both become a `SourceTree` like the job's code, so they travel through the same store and what has not changed is not
sent again. A virtual environment is packed without what each node makes anew (``bin/python``, byte code), and with one
more file that says where it comes from.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orc.launchers.environments.build import facts_of
from orc.launchers.environments.copied import FACTS
from orc.launchers.errors import BundleError
from orc.launchers.snapshot.hashing import StatCache
from orc.launchers.snapshot.listing import IgnoreRules, decode, encode, pattern_of, patterns_of
from orc.launchers.snapshot.manifest import EXECUTABLE, FILE, Bundle, Entry, follow
from orc.launchers.snapshot.scan import SourceTree, cache_file
from orc.launchers.strict_modes import make_private

if TYPE_CHECKING:
    from orc.launchers.spec.environment import Environment

_OWN = "orc-launch"  # this program: what the ranks need of it travels as the runtime tree
_NEVER = frozenset({"__pycache__", ".git"})


def pack(environment: Environment, workdir: Path, base_dir: Path, cache: Path | None) -> SourceTree | None:
    """Return what *environment* brings along; `None` when everything is made on the nodes. Raises `BundleError`.

    *cache* is a directory for hashes of unchanged files, and for the file that describes the packed environment.
    """
    if environment.copied is not None:
        return pack_venv(find_venv(environment.copied.venv, base_dir), environment.copied.exclude, cache=cache)
    if environment.conda is not None and environment.conda.archive and not environment.conda.archive.startswith("/"):
        return pack_file(workdir, environment.conda.archive, cache=cache)
    return None


def travels_apart(environment: Environment, workdir: Path, base_dir: Path) -> tuple[str, ...]:
    """Patterns (gitignore syntax) of what lies in the working directory and is brought along by itself."""
    if environment.copied is not None:
        return patterns_of(find_venv(environment.copied.venv, base_dir), workdir)
    if environment.conda is not None and environment.conda.archive and not environment.conda.archive.startswith("/"):
        return (pattern_of(environment.conda.archive),)
    return ()


def find_venv(given: str | None, base_dir: Path) -> Path:
    """The virtual environment that is meant: *given*, or the active one, or the one this program runs in."""
    if given is not None:
        path = base_dir / Path(given).expanduser()
    elif active := os.environ.get("VIRTUAL_ENV"):
        path = Path(active)
    elif sys.prefix != sys.base_prefix:
        path = Path(sys.prefix)
    else:
        raise BundleError(
            "environment: copy: no virtual environment is active", hint="Activate one, or name it: copy: {venv: .venv}."
        )
    if not (path / "pyvenv.cfg").is_file():
        raise BundleError(
            "environment: copy: not a virtual environment (no pyvenv.cfg)",
            where=str(path),
            hint="For conda use `conda: {archive: ...}`, which conda-pack makes.",
        )
    return path.absolute()


def pack_file(workdir: Path, path: str, *, cache: Path | None = None) -> SourceTree:
    """Return one file of the working directory, ignored or not."""
    full = os.fsencode(workdir / path)
    with StatCache(cache_file(cache, b"environment " + full)) as hashes:
        try:
            digest, status = hashes.digest(path, full, os.stat(full))
        except OSError as error:
            raise BundleError(f"cannot read the archive: {error.strerror}", where=os.fsdecode(full)) from None
    return SourceTree(Bundle.of([Entry(path, FILE, digest, status.st_size)]), {path: full})


def pack_venv(venv: Path, exclude: Sequence[str] = (), *, cache: Path | None = None) -> SourceTree:
    """The virtual environment at *venv*. Raises `BundleError` for one that depends on files outside itself."""
    root = os.fsencode(venv)
    # No file in the environment has a say, only the patterns.
    rules = IgnoreRules(root, ".no-such-file", exclude, where="environment.copy.exclude") if exclude else None
    facts = _facts(venv)
    entries: list[Entry] = []
    sources: dict[str, bytes] = {}
    with StatCache(cache_file(cache, b"environment " + root)) as hashes:
        for path, full in _files(root, rules):
            try:
                status = os.lstat(full)
                if stat.S_ISLNK(status.st_mode):
                    entries.append(Entry.link(path, os.fsdecode(os.readlink(full))))
                    continue
                digest, status = hashes.digest(path, full, status)
            except OSError as error:
                raise BundleError(f"cannot read: {error.strerror}", where=os.fsdecode(full)) from None
            entries.append(Entry(path, EXECUTABLE if status.st_mode & stat.S_IXUSR else FILE, digest, status.st_size))
            sources[path] = full
    own = {entry.path for entry in entries if _is_own(entry.path)}
    entries = [entry for entry in entries if entry.path not in own]
    sources = {path: full for path, full in sources.items() if path not in own}
    _refuse_outsiders(venv, entries, sources)
    entries.append(_describe(facts, sources, cache))
    return SourceTree(Bundle.of(entries), sources)


def _files(root: bytes, rules: IgnoreRules | None) -> list[tuple[str, bytes]]:
    found: list[tuple[str, bytes]] = []
    pending = [""]
    while pending:
        directory = pending.pop()
        try:
            with os.scandir(os.path.join(root, encode(directory)) if directory else root) as listing:
                children = list(listing)
        except OSError as error:
            raise BundleError(f"cannot read: {error.strerror}", where=os.fsdecode(root)) from None
        for child in children:
            name = decode(child.name)
            path = f"{directory}/{name}" if directory else name
            is_directory = child.is_dir(follow_symlinks=False)
            if name in _NEVER or name.endswith(".pyc") or (rules and rules.ignores(path, directory=is_directory)):
                continue
            if is_directory:
                pending.append(path)
            elif child.is_file() and not _made_anew(path, child.is_symlink()):
                found.append((path, child.path))
    return found


def _made_anew(path: str, link: bool) -> bool:
    """Return names that every node writes itself: the interpreter, the activation scripts' environment, ``lib64``."""
    directory, _, name = path.rpartition("/")
    return path in ("pyvenv.cfg", "lib64", ".gitignore") or (directory == "bin" and link and name.startswith("python"))


def _facts(venv: Path) -> dict[str, Any]:
    """Return the Python, platform and C library that the environment is made for. Raises `BundleError`."""
    facts = facts_of(str(venv / "bin" / "python"))
    if facts is None:
        raise BundleError(
            "environment: copy: the environment's Python does not run",
            where=str(venv / "bin" / "python"),
            hint="Make the virtual environment again.",
        )
    settings = (venv / "pyvenv.cfg").read_text(encoding="utf-8", errors="replace").lower()
    shares = any(
        key.strip() == "include-system-site-packages" and value.strip() == "true"
        for key, _, value in (line.partition("=") for line in settings.splitlines())
    )
    known = {key: facts[key] for key in ("version", "implementation", "platform", "libc")}
    return {**known, "venv": str(venv), "host": os.uname().nodename, "system_site_packages": shares}


def _describe(facts: dict[str, Any], sources: dict[str, bytes], cache: Path | None) -> Entry:
    """The entry of the file with the environment's origin; written to *cache*, named by its content."""
    data = (json.dumps(facts, indent=1, sort_keys=True) + "\n").encode()
    digest = hashlib.sha256(data).hexdigest()
    if cache is not None:
        file = cache / "environments" / f"{digest}.json"
        if not file.is_file() or file.read_bytes() != data:
            make_private(file.parent)
            temporary = file.with_suffix(f".{os.getpid()}")
            temporary.write_bytes(data)
            temporary.rename(file)
        sources[FACTS] = os.fsencode(file)
    return Entry(FACTS, FILE, digest, len(data))


def _refuse_outsiders(venv: Path, entries: Sequence[Entry], sources: Mapping[str, bytes]) -> None:
    """Raise `BundleError` when something would be missing on the nodes: editable installs, links that lead out."""
    links = {entry.path: entry.target for entry in entries if entry.target is not None}
    for path, target in links.items():
        if follow(path, links) is None:
            raise BundleError(
                f"the virtual environment has a link out of itself, to {target!r}",
                where=str(venv / path),
                hint="Leave it out with environment.copy.exclude, or install what it leads to.",
            )
    for path, full in sources.items():
        name = path.rpartition("/")[2]
        if name == "direct_url.json":
            _refuse_editable(path, full)
        elif name.endswith(".pth") and path.rpartition("/")[0].endswith("site-packages"):
            _refuse_foreign_path(venv, path, full)


def _is_own(path: str) -> bool:
    """Files of this program's own installation, which is editable in a checkout."""
    name = path.rpartition("site-packages/")[2]
    plain = _OWN.replace("-", "_")
    return name.startswith((f"__editable__.{plain}-", f"__editable___{plain}_", f"{plain}-")) or path == "bin/orc"


def _refuse_editable(path: str, full: bytes) -> None:
    try:
        with open(full, "rb") as file:
            data = json.load(file)
    except (OSError, ValueError):
        return  # not ours to judge
    if not (data.get("dir_info") or {}).get("editable"):
        return
    name = path.rpartition("/")[0].rpartition("/")[2].removesuffix(".dist-info")
    raise BundleError(
        f"{name} is an editable install of {data.get('url')}: its code is not in the virtual environment",
        where=os.fsdecode(full),
        hint="Install it without -e; or, if the job does not need it, leave it out with environment.copy.exclude.",
    )


def _refuse_foreign_path(venv: Path, path: str, full: bytes) -> None:
    """Return findings for ``.pth`` lines that name a directory outside of the environment."""
    home = (venv / path).parent
    with open(full, encoding="utf-8", errors="replace") as file:
        lines = file.read().splitlines()
    for line in lines:
        text = line.strip()
        if not text or text.startswith(("#", "import ", "import\t")):
            continue
        target = Path(os.path.normpath(home / text))
        if target.is_dir() and not target.is_relative_to(venv):
            raise BundleError(
                f"{path} adds {target}, which is not in the virtual environment",
                where=str(venv / path),
                hint=f"Install that package without -e; or leave it out: environment.copy.exclude: [{path}].",
            )
