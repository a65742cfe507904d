"""Destinations of a save: the place of its files, and the step that makes them a checkpoint there."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from orc.runtime.checkpoint.errors import CheckpointError
from orc.runtime.checkpoint.format import layout
from orc.runtime.checkpoint.format.layout import NAME, Manifest, foreign_entries, locate
from orc.runtime.checkpoint.state.ownership import Ownership, disown, own, record
from orc.runtime.checkpoint.storage import remote
from orc.runtime.checkpoint.storage.durable import (
    FileRecord,
    Hashing,
    HashingFile,
    checksum,
    keep_entries,
    publish,
    remove_tree,
    temporary_name,
    write_file,
)
from orc.runtime.checkpoint.storage.remote import Remote, RemoteFile


class LocalDestination:
    """A temporary directory beside the target, which one rename puts in its place.

    leads:
        This rank prepares and commits, and writes what all ranks share.
    site:
        This site's number where every one writes a checkpoint of its own.
    numbered:
        It is one of a series, whose folder belongs to this run until it ends; a directory by itself only during a save.
    """

    def __init__(self, target: Path, token: str, leads: bool, site: int | None, *, numbered: bool = False) -> None:
        self.target: Path = target
        self.leads = leads
        self._site = site
        self._numbered = numbered
        self._owned: Ownership | None = None
        self._before: dict[str, object] | None = None  # what was in the target; nothing: it was not there
        self._hooked = False  # hooks of this rank have written into the target itself
        self._temporary = temporary_name(target, "" if site is None else f"site-{site}")
        self._mark = f".saving-{token}"  # shows that this directory was made for this save

    def prepare(self) -> None:
        """Make the temporary directory; on the leading rank, before any other writes."""
        target = self.target
        if target == Path.cwd() or target in Path.cwd().parents:
            raise CheckpointError(f"{target} is the current directory or above it; save to a directory of its own")
        if target.exists() and not target.is_dir():
            raise CheckpointError(f"{target} is a file; a checkpoint is a directory")
        target.parent.mkdir(parents=True, exist_ok=True)
        part = "" if self._site is None else f"-site-{self._site}"
        if self._numbered:
            directory, name = record(target.parent)
            self._owned = own(target.parent, f"{name}{part}", within=directory)
        else:
            self._owned = own(target.parent, f"-{target.name}{part}")
        self._before = {entry.name: _stamp(entry) for entry in target.iterdir()} if target.exists() else None
        remove_tree(self._temporary)
        self._temporary.mkdir()
        (self._temporary / self._mark).touch()

    def check_visible(self) -> None:
        """Raise `CheckpointError` when what the leading rank has prepared cannot be seen from here."""
        if not self._temporary.is_dir():
            raise CheckpointError(
                f"{self._temporary} was made by another rank and cannot be seen from here: checkpoints of several "
                "machines need a directory that all of them share; where they have none, leave "
                "ORC_CHECKPOINT_SHARED at auto"
            )

    def hook_directory(self) -> Path:
        """The directory that the script has named; the one that takes its place, where that is a checkpoint already."""
        # Scripts compare the directory with the one they have named. A checkpoint that is there stays whole until the
        # new one is, and of numbered ones an interrupted save leaves nothing under a number.
        if self._site is not None or self._numbered or (locate(self.target) / NAME).exists():
            return self._temporary
        self.target.mkdir(exist_ok=True)
        self._hooked = True
        return self.target

    def hook_files(self) -> dict[str, FileRecord]:
        """They are there already; the commit finds them."""
        return {}

    def _fetch_hooked(self) -> None:
        """Move what hooks have written into the target to the files of this save."""
        for entry in list(self.target.iterdir()):
            # A file that an interrupted save has left, and that is written again, is one of this save.
            if self._before is not None and self._before.get(entry.name) == _stamp(entry):
                continue
            if (self._temporary / entry.name).exists():
                remove_tree(entry)
            else:
                entry.rename(self._temporary / entry.name)
        if self._before is None:
            self.target.rmdir()
        self._hooked = False

    def create(self, name: str) -> Hashing:
        """A new file of the checkpoint, on disk when closed. A name with a folder makes the folder."""
        path = self._temporary / name
        if "/" in name:
            path.parent.mkdir(exist_ok=True)
        return HashingFile(path)

    def present(self) -> list[str]:
        """Return the names of the files that this site's ranks and their hooks have written."""
        names = {entry.name for entry in self._temporary.iterdir() if entry.is_file()} - {self._mark}
        for folder in self._temporary.iterdir():
            if layout.SHARDS.fullmatch(folder.name):
                names |= {f"{folder.name}/{entry.name}" for entry in folder.iterdir()}
        return sorted(names)

    def path(self) -> Path:
        """The temporary directory."""
        return self._temporary

    def hand_over(self) -> None:
        """Nothing: the leading rank alone removes what was written."""

    def take_over(self, names: Iterable[str]) -> None:
        """Nothing, as above."""

    def seal(self, manifest: Manifest) -> None:
        """Do all of the commit but its last step; on the leading rank, when all have written."""
        target, temporary = self.target, self._temporary
        if self._site is not None and len(list(target.parent.glob(f"{target.name}.*.tmp/{self._mark}"))) > 1:
            raise CheckpointError(
                f"a checkpoint was to be written on every machine, but several machines share {target.parent}: "
                "turn save_on_each_node off, leave ORC_CHECKPOINT_SHARED at auto, or save to a local disk"
            )
        if self._hooked:
            self._fetch_hooked()
        present = {entry.name for entry in temporary.iterdir()}
        unseen = sorted(
            name
            for name in manifest.files
            if name not in present and not ("/" in name and (temporary / name).is_file())
        )
        if unseen:
            raise CheckpointError(
                f"{', '.join(unseen)} of other ranks cannot be seen in {temporary} from the rank that commits: "
                "checkpoints of several machines need a directory that all of them share; where they have none, leave "
                "ORC_CHECKPOINT_SHARED at auto"
            )
        (temporary / self._mark).unlink()
        # What hooks wrote is part of the checkpoint too.
        hooked = {
            name: checksum(temporary / name) for name in present - set(manifest.files) if (temporary / name).is_file()
        }
        manifest = replace(manifest, files={**manifest.files, **hooked})
        current = locate(target)
        if current.exists():
            keep_entries(current, temporary, foreign_entries(current))
        write_file(temporary / NAME, manifest.to_json())

    def commit(self, manifest: Manifest) -> None:
        """Rename it, in one step; on the leading rank, after `seal`."""
        assert self._owned is not None
        self._owned.check()
        publish(self._temporary, self.target)
        self._disown()

    def clear(self) -> None:
        """Nothing: the commit has removed what it took the place of."""

    def abandon(self) -> None:
        """Remove the temporary directory, and that of the hooks if it was made for them."""
        if self.leads and self._owned is not None:  # else it may be another run's
            if self._hooked and self._before is None:
                remove_tree(self.target)
            # Another rank may still write into it. The save tells why it failed, and the next one removes the rest.
            with suppress(OSError):
                remove_tree(self._temporary)
            self._disown()

    def _disown(self) -> None:
        if self._owned is not None and not self._numbered:
            disown(self._owned)


_PREFIXED = re.compile(r"\.[0-9a-f]{16}-")  # of the files of a save that took the place of a checkpoint


class RemoteDestination:
    """Objects written under their final names, or a new *prefix* where a checkpoint is; the manifest comes last.

    The methods are those of `LocalDestination`.
    """

    def __init__(self, target: Remote, prefix: str, leads: bool) -> None:
        self.target: Remote = target
        self.leads = leads
        self._prefix = prefix
        self._spool: Path | None = None
        self._created: list[str] = []  # what `abandon` removes here
        self._seen: str | None = None  # a file of the rank that reported last
        self._id: str | None = None  # of the manifest that this rank has begun to put in place
        self._replaced: Manifest | None = None

    def prepare(self) -> None:
        """Make the directory, on stores that have directories; what is wrong with the store shows here."""
        self.target.make_directory()

    def check_visible(self) -> None:
        """Every rank reaches the store by itself."""
        _ = self.target.system

    def hook_directory(self) -> Path:
        """A local directory whose files are uploaded."""
        if self._spool is None:
            self._spool = Path(tempfile.mkdtemp(prefix="orc-checkpoint-"))
        return self._spool

    def hook_files(self) -> dict[str, FileRecord]:
        """Upload them."""
        if self._spool is None:
            return {}
        records = {}
        for path in sorted(self._spool.iterdir()):
            if path.is_file():
                records[path.name] = remote.upload(path, self._object(path.name))
        shutil.rmtree(self._spool)
        self._spool = None
        return records

    def create(self, name: str) -> Hashing:
        """There when closed."""
        return RemoteFile(self._object(name))

    def hand_over(self) -> None:
        """Forget what this rank has written, and is about to report: from here on only the leading rank may remove it.

        The report may make it a part of a checkpoint, and whether it has may never be heard of here.
        """
        self._created.clear()

    def take_over(self, names: Iterable[str]) -> None:
        """Remove the files *names*, which the ranks have reported, if the save fails; on the leading rank."""
        for self._seen in names:
            self._created.append(self._prefix + self._seen)

    def seal(self, manifest: Manifest) -> None:
        """Nothing: the last step does all."""

    def commit(self, manifest: Manifest) -> None:
        """Put the manifest in place. The store has confirmed every file; one shows whether all ranks write to it."""
        manifest = replace(manifest, prefix=self._prefix)
        if self._seen is not None and self.target.size(self._prefix + self._seen) is None:
            raise CheckpointError(f"{self.target} does not hold {self._seen}, which was just written to it")
        self._replaced = remote.read_manifest(self.target) if self._prefix else None
        self._id = manifest.id
        (self.target / NAME).replace(manifest.to_json())
        self._created.clear()

    def clear(self) -> None:
        """Remove the files of the checkpoint that was there, and what interrupted saves left, after the commit."""
        if self._replaced is None:
            return
        old = {self._replaced.prefix + name for name in self._replaced.files}
        old |= set(self._replaced.files)  # of the first save, where the one that replaced it was interrupted here
        there = self.target.sizes()
        left = {name for name in there if (found := _PREFIXED.match(name)) and found[0] != self._prefix}
        self.target.remove_all(sorted(old & there.keys() | left))

    def abandon(self) -> None:
        """Remove what no checkpoint consists of, as far as this rank can tell."""
        if self._spool is not None:
            shutil.rmtree(self._spool, ignore_errors=True)
        if self._created and not self._may_be_committed():
            self.target.remove_all(self._created)

    def _may_be_committed(self) -> bool:
        """Return whether the manifest may be in place although `commit` failed: an answer can be lost."""
        if self._id is None:
            return False
        try:
            return remote.read_manifest(self.target).id == self._id
        except CheckpointError:
            return self.target.size(NAME) is not None

    def _object(self, name: str) -> Remote:
        self._created.append(self._prefix + name)
        return self.target / self._created[-1]


def _stamp(path: Path) -> object:
    """Return what tells two states of a file, or of all that a directory holds, apart."""
    files = sorted(path.rglob("*")) if path.is_dir() and not path.is_symlink() else [path]
    return [(file, status.st_mtime_ns, status.st_size) for file in files for status in [file.lstat()]]


Destination = LocalDestination | RemoteDestination
