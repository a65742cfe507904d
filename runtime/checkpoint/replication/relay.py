"""Files from one rank to others over the run's store, in pieces.

It is there whatever the process group is made of, needs no further port, and threads may use it beside the training.
Everything passes through rank 0's process, so it is for what is rare or small: the random states of
other machines' ranks, and a checkpoint for a machine that has none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orc.runtime.checkpoint.errors import CheckpointError
from orc.runtime.checkpoint.storage.durable import FileRecord, Hashing
from orc.runtime.core.store import StoreError

if TYPE_CHECKING:
    from orc.runtime.core.store import Store

PIECE = 4 * 1024 * 1024  # bytes; all that is on its way lies in rank 0's memory
_AHEAD = 4  # pieces on the store that have not been read
_DATA, _END, _FAILED = b"d", b".", b"!"
_INDEX = 4  # bytes


class Relay:
    """A transfer of files. Sender and readers use the same *prefix*, which no transfer has used before."""

    def __init__(self, store: Store, prefix: str, patience_s: float) -> None:
        self._store = store
        self._prefix = prefix
        self._patience_s = patience_s

    def send(self, directory: Path, names: Sequence[str], readers: int) -> None:
        """Send the files *names* of *directory* to as many *readers*.

        Raises:
            OSError: a file cannot be read; the readers are told.
            CheckpointError: a reader does not come.
        """
        number = 0
        try:
            for piece in _pieces(directory, names):
                self._put(number, _DATA + piece, readers)
                number += 1
        except OSError as error:
            self._put(number, _FAILED + str(error).encode(), readers)
            raise
        self._put(number, _END, readers)
        for one in range(max(number - _AHEAD + 1, 0), number):
            self._await_readers(one)

    def receive(self, names: Sequence[str], create: Callable[[str], Hashing | None]) -> dict[str, FileRecord]:
        """Receive the files *names*, each into the file that *create* opens for it, or nowhere with `None`.

        Returns the records of the written files.

        Raises:
            OSError: a file cannot be written.
            CheckpointError: the sender failed or does not come.
        """
        records: dict[str, FileRecord] = {}
        failure: BaseException | None = None
        current, file = -1, None

        def close() -> None:
            nonlocal file
            if file is not None:
                done, file = file, None
                records[names[current]] = done.close()

        def drop() -> None:
            nonlocal file
            if file is not None:
                with suppress(OSError):
                    file.abandon()
                file = None

        try:
            for piece in self._get():
                if failure is not None:
                    continue  # the others wait for us to have read
                try:
                    index = int.from_bytes(piece[:_INDEX], "big")
                    if index != current:
                        close()
                        current, file = index, create(names[index])
                    if file is not None and len(piece) > _INDEX:
                        file.write(memoryview(piece)[_INDEX:])
                except Exception as error:  # noqa: BLE001 - raised below
                    failure = error
                    drop()
            if failure is not None:
                raise failure
            close()
            return records
        finally:
            drop()

    def _put(self, number: int, value: bytes, readers: int) -> None:
        store: Any = self._store  # the stub takes text alone
        store.set(f"{self._prefix}{number}", readers.to_bytes(_INDEX, "big") + value)
        if number >= _AHEAD:
            self._await_readers(number - _AHEAD)

    def _await_readers(self, number: int) -> None:
        key = f"{self._prefix}read/{number}"
        self._wait(key, "a rank that receives files")
        self._store.delete_key(key)

    def _get(self) -> Iterator[bytes]:
        number = 0
        while True:
            key = f"{self._prefix}{number}"
            self._wait(key, "the rank that sends files")
            value = self._store.get(key)
            readers, kind, data = int.from_bytes(value[:_INDEX], "big"), value[_INDEX : _INDEX + 1], value[_INDEX + 1 :]
            if self._store.add(f"{self._prefix}count/{number}", 1) == readers:
                self._store.delete_key(key)
                self._store.delete_key(f"{self._prefix}count/{number}")
                if kind == _DATA:
                    self._store.set(f"{self._prefix}read/{number}", "")
            if kind == _END:
                return
            if kind == _FAILED:
                raise CheckpointError(f"another rank cannot read what it has to send: {data.decode()}")
            yield data
            number += 1

    def _wait(self, key: str, who: str) -> None:
        try:
            self._store.wait([key], timedelta(seconds=self._patience_s))
        except StoreError as error:
            raise CheckpointError(f"{who} did not come within {self._patience_s:g} s ({error})") from None


def _pieces(directory: Path, names: Iterable[str]) -> Iterator[bytes]:
    """Each begins with the number of its file; the first of a file is empty."""
    for index, name in enumerate(names):
        header = index.to_bytes(_INDEX, "big")
        yield header
        with (directory / name).open("rb", buffering=0) as file:
            while data := file.read(PIECE):
                yield header + data
