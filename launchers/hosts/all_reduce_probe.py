"""Program of a rank of the all-reduce probe, on a host whose Python has torch.

<rank> <world size> <backend>     the first rank prints {"port", "addresses"} and then its result; the others read
                                  that line from standard input first. Result: {"rank", "latency_us", "mb_s",
                                  "pairs": {peer: mb_s}, "gflops", "node_mb_s": of all GPUs of this host together,
                                  "node_promised", "promised": [what, mb_s] of the hardware, or null}
"""

from __future__ import annotations

import datetime
import importlib
import json
import os
import re
import site
import socket
import subprocess
import sys
import time

from orc.launchers.agent.network import interface_of, reachable_addresses, towards

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# On a CPU and on a GPU, where less would measure how fast work is launched: bytes of the bandwidth probe and of that of
# pairs, and the side of the matrices.
SIZES = {"cpu": (16 << 20, 1 << 20, 512), "cuda": (256 << 20, 64 << 20, 8192)}
ROUNDS = 15  # of pairs, at most
TIMEOUT = datetime.timedelta(seconds=30)
ARRIVAL = datetime.timedelta(seconds=80)  # importing torch takes long from a cold disk, or beside other programs


def partner(rank: int, world: int, turn: int) -> int:
    """Return the partner of *rank* in one round of a tournament of all pairs; itself when it rests."""
    size = world + world % 2
    if rank == size - 1:
        other = turn
    elif rank == turn:
        other = size - 1
    else:
        other = (2 * turn - rank) % (size - 1)
    return other if other < world else rank


def addresses() -> list[str]:
    """Return the addresses of this host: that of the SSH connection first, and the loopback's last."""
    connection = os.environ.get("SSH_CONNECTION", "").split()
    return list(dict.fromkeys([*connection[2:3], *reachable_addresses(), "127.0.0.1"]))


def places(torch: Any, device: Any) -> list[Any]:
    """Return every device of this host of the kind of *device*."""
    if device.type != "cuda":
        return [device]
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]


def multiply(torch: Any, device: Any, side: int) -> float:
    """Return the speed of a matrix product on *device* in GFLOP/s, undisturbed. Exits for one that cannot do it."""
    times = []
    try:
        square = torch.ones(side, side, device=device)
        for _ in range(15):
            began = time.perf_counter()
            square = square @ square / side
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - began)
    except RuntimeError as error:
        sys.exit(f"{device}: {str(error).splitlines()[0]}")
    return float(2 * side**3 / min(times) / 1e9)


def reduce_together(torch: Any, devices: list[Any], size: int) -> float:
    """Return the bus bandwidth of an all-reduce of *size* bytes over the GPUs of this host in MB/s, undisturbed.

    Exits where it cannot be done, or gives a wrong sum.
    """
    count, times = len(devices), []
    try:
        pieces = [torch.ones(size // 4, device=device) for device in devices]
        for _ in range(6):  # the first one connects
            for device in devices:
                torch.cuda.synchronize(device)
            began = time.perf_counter()
            torch.cuda.nccl.all_reduce(pieces)
            for device in devices:
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - began)
            wrong = [device for device, piece in zip(devices, pieces) if float(piece[-1]) != count]  # noqa: B905
            if wrong:
                sys.exit(f"{wrong[0]}: an all-reduce over the {count} GPUs of this host gives a wrong sum")
            for piece in pieces:
                piece.fill_(1.0)
    except RuntimeError as error:
        sys.exit(f"an all-reduce over the {count} GPUs of this host: {str(error).splitlines()[0]}")
    return size * 2 * (count - 1) / count / min(times) / 1e6


def main() -> None:
    """Join the process group, measure, print."""
    rank, world, backend = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    os.environ["OMP_NUM_THREADS"] = "1"
    if sys.flags.no_site:
        site.main()  # programs of ours start without the packages of their Python
    # The host's torch: nothing of the launch layer imports one.
    torch: Any = importlib.import_module("torch")
    dist: Any = importlib.import_module("torch.distributed")
    torch.set_num_threads(1)
    if rank == 0:
        store = dist.TCPStore("localhost", 0, world, True, ARRIVAL, wait_for_workers=False)
        print(json.dumps({"port": store.port, "addresses": addresses()}), flush=True)
        reached = store.get("reached").decode() if world > 1 else "127.0.0.1"
        own = reached
    else:
        where = json.loads(sys.stdin.readline())
        problems = []
        for reached in where["addresses"]:
            try:
                with socket.create_connection((reached, where["port"]), timeout=5) as link:
                    own = link.getsockname()[0]
                break
            except OSError as error:
                problems.append(f"{reached}: {error}")
        else:
            sys.exit("cannot reach the first host: " + "; ".join(problems))
        store = dist.TCPStore(reached, where["port"], world, False, ARRIVAL, wait_for_workers=False)
        store.set("reached", reached)
    interface = interface_of(own)
    for name, value in towards(interface).items():
        os.environ.setdefault(name, value)
    device = torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")
    big_bytes, pair_bytes, side = SIZES[device.type]
    store.set(f"here {rank}", "")
    store.wait([f"here {other}" for other in range(world)], ARRIVAL)
    store.set_timeout(TIMEOUT)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=TIMEOUT)

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    def timed(work: Any, count: int) -> float:
        times = []
        for _ in range(count):
            wait()
            began = time.perf_counter()
            work()
            wait()
            times.append(time.perf_counter() - began)
        return float(sorted(times)[count // 2])

    small, big = torch.ones(1, device=device), torch.ones(big_bytes // 4, device=device)
    dist.all_reduce(small)  # connects
    latency = timed(lambda: dist.all_reduce(small), 20)
    took = torch.tensor([timed(lambda: dist.all_reduce(big), 1)], device=device)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    # The first one also connects; a link so slow that it took seconds need not be tried again.
    slowest = float(took)
    speed_s = slowest if slowest > 1.0 else timed(lambda: dist.all_reduce(big), 3)
    # What goes over each network interface per second: the usual "bus bandwidth".
    speed = big_bytes * 2 * (world - 1) / max(1, world) / speed_s / 1e6
    pairs = {}
    piece = torch.ones(pair_bytes // 4, device=device)
    for turn in range(min(ROUNDS, world + world % 2 - 1)):
        other = partner(rank, world, turn)
        dist.all_reduce(small)  # all begin together
        if other == rank:
            continue

        def exchange(other: int = other) -> None:
            if rank < other:
                dist.send(piece, other)
                dist.recv(piece, other)
            else:
                dist.recv(piece, other)
                dist.send(piece, other)

        exchange()
        pairs[str(other)] = 2 * pair_bytes / min(timed(exchange, 1) for _ in range(5)) / 1e6  # undisturbed
    gflops = min(multiply(torch, place, side) for place in places(torch, device))
    dist.barrier()
    dist.destroy_process_group()
    result = {"rank": rank, "latency_us": latency * 1e6, "mb_s": speed, "pairs": pairs, "gflops": gflops}
    if device.type == "cuda":
        if len(devices := places(torch, device)) > 1:
            result.update(node_mb_s=reduce_together(torch, devices, big_bytes), node_promised=between_gpus())
        if world > 1:
            result["promised"] = to_other_hosts(os.environ.get("NCCL_SOCKET_IFNAME", interface or "").lstrip("="))
    print(json.dumps(result), flush=True)


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
