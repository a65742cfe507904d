"""The way between a container and an object store: what it starts from, and what must outlive it.

Run by `program.carry` with the libraries of the image, from the archive of the entry program; *s3* is
`orc.runtime.checkpoint.storage.s3`, other stores are reached through fsspec. Standard library, Python >= 3.9.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

ROUND_S = 2.0
BYTES_PER_S = 1 << 20  # a log that grows is sent anew each time: large ones less often
LAST_TRIES = 5
PRIVATE = ("secrets.json", "link.json")


def open_url(s3: Any, url: str) -> tuple[Any, str]:
    """Return the store and the path of *url*. Raises `ImportError`, `OSError`, `ValueError`."""
    if url.partition("://")[0] in s3.SCHEMES:
        found: tuple[Any, str] = s3.open_url(url)
        return found
    import fsspec  # type: ignore[import-untyped]

    system, path = fsspec.core.url_to_fs(url)
    return system, str(path)


def fetch(s3: Any, url: str, target: str) -> None:
    """Copy an object to a file."""
    system, path = open_url(s3, url)
    os.makedirs(os.path.dirname(target), exist_ok=True)
    with system.open(path, "rb") as source, open(target, "wb") as sink:
        while data := source.read(1 << 22):
            sink.write(data)


class Push:
    """The files of one node, on their way to the directory of its job in the store."""

    def __init__(self, s3: Any, config: dict[str, Any], node: int) -> None:
        self.system, self.top = open_url(s3, config["backend"]["store"])
        self.job, self.attempt, self.logs = config["job_dir"], config["attempt_dir"], config["logs_dir"]
        self.node = node
        self.sent: dict[str, tuple[tuple[int, int], float]] = {}  # what was sent last, and when

    def files(self) -> Iterator[tuple[str, str]]:
        """Yield the paths of this node's files here, and below the job's directory."""
        name = os.path.basename(self.attempt)
        places = [(self.logs, f"{name}/logs"), *([(self.attempt, name), (self.job, "")] if self.node == 0 else ())]
        # Last: with its exit record a node is over.
        places.append((f"{self.attempt}/node-{self.node}", f"{name}/node-{self.node}"))
        for here, there in places:
            for entry in sorted(os.listdir(here)) if os.path.isdir(here) else ():
                wanted = entry.endswith(".log" if here == self.logs else ".jsonl" if not there else ".json")
                if wanted and entry not in (*PRIVATE, "cancel.json"):
                    yield f"{here}/{entry}", f"{there}/{entry}".lstrip("/")

    def round(self, final: bool = False) -> None:
        """Send what has changed, and look whether the attempt is to end. Raises what the store raises."""
        for here, there in self.files():
            try:
                status = os.stat(here)
            except FileNotFoundError:
                continue
            seen, at = (status.st_mtime_ns, status.st_size), time.monotonic()
            before, when = self.sent.get(there, (None, 0.0))
            if seen == before or (not final and before and at - when < status.st_size / BYTES_PER_S):
                continue
            with open(here, "rb") as file:
                self.system.pipe_file(f"{self.top}/{there}", file.read())
            self.sent[there] = (seen, at)
        if self.node == 0 and not os.path.exists(f"{self.attempt}/cancel.json"):
            try:
                data = self.system.cat_file(f"{self.top}/{os.path.basename(self.attempt)}/cancel.json")
            except FileNotFoundError:
                return
            with open(f"{self.attempt}/.cancel", "wb") as file:
                file.write(data)
            os.replace(f"{self.attempt}/.cancel", f"{self.attempt}/cancel.json")

    def run(self) -> int:
        """Send until standard input ends, and then the rest."""
        said = ""
        while True:
            over = bool(select.select([0], [], [], ROUND_S)[0])
            for _ in range(LAST_TRIES if over else 1):
                try:
                    self.round(over)
                    said = ""
                    break
                except Exception as error:  # noqa: BLE001 - drivers of fsspec have errors of their own
                    if (why := str(error) or type(error).__name__) != said:
                        said = why
                        sys.stderr.write(f"orc: records wait for the object store: {said}\n")
                    time.sleep(ROUND_S if over else 0)
            if over:
                return 1 if said else 0


def main(s3: Any, words: Sequence[str]) -> int:
    """``fetch URL FILE`` or ``push AGENT_JSON NODE``; what cannot be done is one line on standard error."""
    try:
        if words[0] == "fetch":
            fetch(s3, *words[1:])
            return 0
        with open(words[1], encoding="utf-8") as file:
            return Push(s3, json.load(file), int(words[2])).run()
    except (ImportError, OSError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
