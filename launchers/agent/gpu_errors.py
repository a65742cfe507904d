"""Errors of this node's GPUs while a job runs: Xids, as the kernel logs them, or else the counters of nvidia-smi."""

from __future__ import annotations

import os
import re

from orc.launchers.agent.gpus import nvidia_smi
from orc.launchers.agent.records import read_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

KERNEL_LOG = "/dev/kmsg"
MOST = 4  # errors of a GPU that are kept: the first ones; what follows mostly follows from them
RECORD_BYTES = 8192  # the kernel gives one record for each read, and refuses to give less of it
ANSWER_S = 5.0  # of nvidia-smi, which may hang where a GPU has
_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:]+)(?:\.\d)?\): (\d+), ?(.*)")
_COUNTERS = "--query-gpu=pci.bus_id,index,uuid,ecc.errors.uncorrected.volatile.total"


class GpuErrors:
    """Errors of GPUs that the kernel has logged, or nvidia-smi has counted, since this was made.

    Those of other jobs' GPUs are left out, where the ranks have put theirs on record, or else where
    CUDA_VISIBLE_DEVICES of *env* says which are the job's.
    """

    def __init__(self, node_dir: str, env: Mapping[str, str], log: str = KERNEL_LOG) -> None:
        self.node_dir = node_dir
        self.path = env.get("PATH") or os.defpath  # of nvidia-smi
        self.errors: list[tuple[str, str]] = []  # PCI address, what it is
        self.fd = -1
        try:
            self.fd = os.open(log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self.fd, 0, os.SEEK_END)
        except OSError:  # there is none, or it is root's alone: counters are asked, now and at the end
            self.close()
        shown = env.get("CUDA_VISIBLE_DEVICES")
        listed: list[tuple[str, str, str, int | None]] = []
        if self.fd < 0 or shown is not None:
            try:
                listed = list_gpus(self.path)
            except OSError:
                pass  # then nothing is known to have been counted since; the question at the end says what is wrong
        self.counted = {_address(pci): count for pci, _, _, count in listed}
        self.given = None if shown is None else _given(shown, listed)

    def close(self) -> None:
        """Read no more."""
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1

    def poll(self) -> list[str]:
        """Read on, and return what is new, as lines for people."""
        known = len(self.errors)
        for error in (error for text in self._lines() for error in xids(text)):
            if error not in self.errors and sum(error[0] == pci for pci, _ in self.errors) < MOST:
                self.errors.append(error)
        return self._told(self.errors[known:])

    def _lines(self) -> Iterator[str]:
        while self.fd >= 0:
            try:
                piece = os.read(self.fd, RECORD_BYTES)
            except BlockingIOError:
                return
            except BrokenPipeError:  # what was next has been overwritten; the one after it comes with the next read
                continue
            except OSError:
                self.close()
                return
            if not piece:
                return
            yield from piece.decode("utf-8", "replace").splitlines()

    def summary(self) -> str:
        """Return what to say of a run that has failed, in one line; empty where no GPU of the job has had an error."""
        self.poll()
        return "; ".join(self._told(self.errors if self.fd >= 0 else [*self.errors, *self._counted_since()])[:MOST])

    def _counted_since(self) -> list[tuple[str, str]]:
        """Return the GPUs that have lost memory since this was made."""
        try:
            listed = list_gpus(self.path)
        except OSError as error:
            return [("", f"nvidia-smi: {error}")]  # which says something, too
        found = []
        for pci, _, _, count in listed:
            before = self.counted.get(_address(pci))
            if count is not None and before is not None and count > before:
                found.append((pci, f"{count - before} uncorrected memory errors since the ranks were started"))
        return found

    def _told(self, errors: Sequence[tuple[str, str]]) -> list[str]:
        """Return lines about those of *errors* that are this job's."""
        ranks = self._ranks() if errors else {}
        own = ranks.keys() if ranks else self.given
        return [
            f"GPU {pci}{f' of rank {ranks[_address(pci)]}' if ranks else ''}: {what}" if pci else what
            for pci, what in errors
            if own is None or not pci or _address(pci) in own
        ]

    def _ranks(self) -> dict[tuple[int, ...], int]:
        """Return which rank has the GPU at which address, as far as ranks have said so."""
        found: dict[tuple[int, ...], int] = {}
        try:
            names = os.listdir(self.node_dir)
        except FileNotFoundError:  # the attempt's directory was removed
            return found
        for name in names:
            if name.startswith("device-") and name.endswith(".json"):
                record = read_json(os.path.join(self.node_dir, name)) or {}
                if isinstance(record.get("pci"), str) and isinstance(record.get("rank"), int):
                    found[_address(record["pci"])] = record["rank"]
        return found


def xids(line: str) -> list[tuple[str, str]]:
    """Return the PCI address and the text of the Xid in a line of the kernel's log, if it has one."""
    match = _XID.search(line)
    if match is None:
        return []
    pci, number, said = match.groups()
    text = "".join(character for character in said if character.isprintable())[:200].strip().rstrip(".")
    return [(pci, f"Xid {number}{f', {text}' if text else ''}")]


def list_gpus(path: str) -> list[tuple[str, str, str, int | None]]:
    """Return PCI address, index and UUID of the GPUs, and how many errors of memory their driver has counted, as the
    nvidia-smi on *path* has it; none without that program. Raises `OSError` where it fails.
    """
    found = []
    text, _ = nvidia_smi(path, ANSWER_S, _COUNTERS, "--format=csv,noheader,nounits") or ("", "")
    for line in text.splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) == 4:
            pci, index, uuid, count = words
            found.append((pci, index, uuid, int(count) if count.isdigit() else None))
    return found


def _given(shown: str, listed: Sequence[tuple[str, str, str, int | None]]) -> set[tuple[int, ...]] | None:
    """Return the addresses of the GPUs that CUDA_VISIBLE_DEVICES shows; `None` where one cannot be told (MIG)."""
    found = set()
    for name in filter(None, (name.strip() for name in shown.split(","))):
        places = [
            pci for pci, index, uuid, _ in listed if name == index or (name[:4] == "GPU-" and uuid.startswith(name))
        ]
        if not places:
            return None
        found.add(_address(places[0]))
    return found


def _address(pci: str) -> tuple[int, ...]:
    """Return an address as numbers: it is written with leading zeros, letters and a function, or without."""
    words = pci.partition(".")[0].split(":")
    return tuple(int(word, 16) for word in words if re.fullmatch(r"[0-9a-fA-F]{1,8}", word))
