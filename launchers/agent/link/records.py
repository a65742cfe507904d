"""The records that travel between hosts without a shared file system: which they are, and who needs which."""

from __future__ import annotations

import os
import re

from orc.launchers.agent.errors import log_stderr
from orc.launchers.agent.records import create_json, read_json, refresh_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any


OWN = re.compile(r"node-(\d{1,6})/(lease|heartbeat|exit)\.json")
HEARTBEAT = re.compile(r"node-\d{1,6}/heartbeat\.json")
COMMON = re.compile(r"(stop-r\d{1,6}|cancel)\.json")
RENDEZVOUS = re.compile(r"rendezvous-r\d{1,6}\.json")
CALL = re.compile(r"calls/[A-Za-z0-9_-]{1,100}(\.done|\.end)?\.json")
STACKS = re.compile(r"stacks/[A-Za-z0-9_-]{1,100}(?:\.node-(\d{1,6}))?\.json")


class Files:
    """The records of the attempt directory on this host: what is new here, and what comes from elsewhere."""

    def __init__(self, directory: str, node: int, restart: int) -> None:
        self.directory = directory
        self.fixed = [f"stop-r{restart}.json", "cancel.json", f"rendezvous-r{restart}.json"]
        self.fixed += [f"node-{node}/{name}.json" for name in ("lease", "heartbeat", "exit")]
        self.known: dict[str, tuple[int, int, int]] = {}  # what the content that everybody has looked like

    def changed(self) -> dict[str, dict[str, Any]]:
        """Records that are new or different since the last call, but for those that came from elsewhere."""
        names = list(self.fixed)
        for folder in ("calls", "stacks"):
            try:
                entries = os.listdir(os.path.join(self.directory, folder))
            except FileNotFoundError:
                continue
            # These are written once. Names with two more dots are temporary.
            names += [f"{folder}/{entry}" for entry in entries if f"{folder}/{entry}" not in self.known]
        found = {}
        for name in names:
            path = os.path.join(self.directory, name)
            signature = _signature(path)
            if signature is None or signature == self.known.get(name) or not is_record(name):
                continue
            record = read_json(path)
            if record is not None:
                self.known[name] = signature
                found[name] = record
        return found

    def store(self, name: str, record: Mapping[str, Any]) -> bool:
        """Write what came from elsewhere; False when something else counts here, or the directory was removed."""
        path = os.path.join(self.directory, name)
        if not os.path.isdir(self.directory):
            return False
        try:
            if not HEARTBEAT.fullmatch(name) and read_json(path) == record:  # no two heartbeats are the same
                return True
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            if name.startswith("stop-"):  # the first one counts, on every host
                if not create_json(path, record):
                    return False
            else:
                refresh_json(path, record, durable=name.endswith("/exit.json"))
        except OSError as error:
            log_stderr(f"link: cannot write {path}: {error}")
            return True  # the others may have room for it
        signature = _signature(path)
        if signature is not None:
            self.known[name] = signature
        return True


def _signature(path: str) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def is_record(name: str) -> bool:
    """Return whether *name* is one of the files that travel: never a path that leads anywhere else."""
    return any(pattern.fullmatch(name) for pattern in (OWN, COMMON, RENDEZVOUS, CALL, STACKS))


def may_send(node: int, name: str) -> bool:
    """Return whether the client *node* may send this to the server: its own records and what concerns all."""
    own = OWN.fullmatch(name)
    answer = STACKS.fullmatch(name)
    if own:
        return int(own[1]) == node
    if answer:
        return answer[1] is None or int(answer[1]) == node
    return bool(COMMON.fullmatch(name) or CALL.fullmatch(name))


def concerns(node: int, name: str, record: Mapping[str, Any]) -> bool:
    """Return whether the server passes this on to the client *node*."""
    own = OWN.fullmatch(name)
    if own:
        return own[1] == "0"
    if CALL.fullmatch(name):
        return bool(record.get("from" if name.endswith(".done.json") else "node") == node)
    answer = STACKS.fullmatch(name)
    return answer is None or answer[1] is None
