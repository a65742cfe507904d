"""Speeds that the hardware of a host promises for an all-reduce: between its GPUs, and to other hosts. Sent as text."""

from __future__ import annotations

import os
import re
import subprocess

ANSWER_S = 20.0
PCI_EXPRESS = "PCI Express"
_LANE_MB_S = {1: 250, 2: 500, 3: 985, 4: 1969, 5: 3938, 6: 7563}  # of PCI Express, by generation
_LINK = re.compile(r"Link \d+: ([\d.]+) GB/s")


def between_gpus() -> tuple[str, float] | None:
    """Return what joins the GPUs of this host, and the MB/s of one of them; `None` where nvidia-smi cannot tell.

    NVLink where it joins every two of them, and else PCI Express: an all-reduce is as fast as its slowest link.
    """
    nvlink: list[float] = [
        sum(float(word) for word in _LINK.findall(gpu)) for gpu in _asked("nvlink", "-s").split("GPU ")[1:]
    ]
    if nvlink and min(nvlink) > 0 and joined_by_nvlink(_asked("topo", "-m")):
        return "NVLink", min(nvlink) * 1000
    query = "--query-gpu=pcie.link.gen.max,pcie.link.width.max"
    speeds: list[float] = []
    for line in _asked(query, "--format=csv,noheader,nounits").splitlines():
        generation, _, lanes = (word.strip() for word in line.partition(","))
        if generation.isdigit() and lanes.isdigit():
            speeds.append(float(_LANE_MB_S.get(int(generation), 0) * int(lanes)))
    slowest = min(speeds, default=0.0)
    return (PCI_EXPRESS, slowest) if slowest else None


def joined_by_nvlink(matrix: str) -> bool:
    """Return whether in the *matrix* that ``nvidia-smi topo -m`` prints each two GPUs have NVLink between them."""
    rows = [row for row in map(str.split, matrix.splitlines()) if row and re.fullmatch(r"GPU\d+", row[0])]
    rows = [row for row in rows if "X" in row]  # no header
    return len(rows) > 1 and all(
        word == "X" or word.startswith("NV") for row in rows for word in row[1 : len(rows) + 1]
    )


def to_other_hosts(interface: str, system: str = "/sys") -> tuple[str, float] | None:
    """Return what NCCL uses between hosts, and its MB/s: the fastest InfiniBand (or RoCE) port that is up, else
    *interface*; `None` where the system does not say. With NCCL_IB_DISABLE=1 it uses no such port.
    """
    ports: dict[str, float] = {}
    disabled = os.environ.get("NCCL_IB_DISABLE", "0") not in ("", "0")
    for card in [] if disabled else _names(f"{system}/class/infiniband"):
        for port in _names(f"{system}/class/infiniband/{card}/ports"):
            place = f"{system}/class/infiniband/{card}/ports/{port}"
            rate = re.match(r"([\d.]+) Gb/sec", _read(f"{place}/rate"))
            if rate and "ACTIVE" in _read(f"{place}/state"):
                ports[card] = max(ports.get(card, 0.0), 125 * float(rate.group(1)))
    if ports:
        card = max(ports, key=lambda name: ports[name])
        return card, ports[card]
    speed = _read(f"{system}/class/net/{interface}/speed")  # of a virtual one -1, or an error
    return (interface, int(speed) / 8) if speed.isdigit() and int(speed) else None


def _asked(*words: str) -> str:
    """Return what ``nvidia-smi`` prints; nothing where it is not there or fails."""
    try:
        done = subprocess.run(["nvidia-smi", *words], stdin=subprocess.DEVNULL, capture_output=True, timeout=ANSWER_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode("utf-8", "replace")


def _names(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""
