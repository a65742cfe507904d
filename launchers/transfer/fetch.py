"""Fetching of files from another machine, in one stream of tar."""

from __future__ import annotations

import io
import shutil
import tarfile
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from orc.launchers.errors import BundleError
from orc.launchers.transfer.wire import CHUNK, ByteSource

if TYPE_CHECKING:
    from orc.launchers.remote.transport import Transport


def fetch(names: Collection[str], transport: Transport, source: str, target: Path, what: str, timeout_s: float) -> None:
    """Write the files *names* below *source* on another machine below *target*.

    Args:
        names: Safe relative names of files; nothing else that the machine sends is written.
        transport: The machine.
        source: The directory there.
        target: The directory here.
        what: What the files are, for messages.
        timeout_s: Of silence.

    Raises:
        BundleError: Files are missing, or something else was sent.
        BackendUnreachable: The machine does not answer.
    """
    wanted = set(names)
    argv = ("tar", "-C", source, "-cf", "-", "--no-recursion", "--null", "--files-from", "-")
    with transport.stream(argv, timeout_s=timeout_s) as process:
        process.write("".join(f"./{name}\0" for name in sorted(wanted)).encode())
        process.close_stdin()
        got = set()
        try:
            with tarfile.open(fileobj=io.BufferedReader(ByteSource(process.read), CHUNK), mode="r|") as archive:
                for member in archive:
                    name = member.name.removeprefix("./")
                    content = archive.extractfile(member) if member.isreg() else None
                    if name not in wanted or content is None:
                        raise BundleError(f"the host sent {name!r}, which was not asked for", where=transport.name)
                    (target / name).parent.mkdir(parents=True, exist_ok=True)
                    with (target / name).open("xb") as file:
                        shutil.copyfileobj(content, file, CHUNK)
                    got.add(name)
        except tarfile.TarError as error:
            raise BundleError(f"{what} came damaged: {error}", where=transport.name) from None
        ended = process.wait()
    if got != wanted:
        reason = (ended.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise BundleError(f"{len(wanted - got)} files of {what} are missing: {reason}", where=transport.name)
