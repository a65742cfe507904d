"""One rank of the all-reduce probe. Sent as text to ``python -c``; needs torch and nothing else.

<rank> <world size> <backend>     the first rank prints {"port", "addresses"} and then its result; the others read
                                  that line from standard input first. Result: {"rank", "latency_us", "mb_s",
                                  "pairs": {peer: mb_s}, "gflops"}
"""

from __future__ import annotations

import datetime
import importlib
import json
import os
import re
import socket
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

BIG = 16 << 20  # bytes of the bandwidth probe
PAIR = 1 << 20
ROUNDS = 15  # of pairs, at most
TIMEOUT = datetime.timedelta(seconds=30)
ARRIVAL = datetime.timedelta(seconds=80)  # importing torch takes long from a cold disk, or beside other programs


def interface_of(address: str) -> str | None:
    """Return the network interface that has an address."""
    import fcntl
    import struct

    if ":" in address:
        with open("/proc/net/if_inet6") as file:
            for line in file:
                digits, _, _, _, _, name = line.split()
                if socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)) == address:
                    return name
        return None
    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                packed = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", name[:15].encode()))  # SIOCGIFADDR
            except OSError:
                continue
        if socket.inet_ntoa(packed[20:24]) == address:
            return name
    return None


def addresses() -> list[str]:
    """Return the addresses at which others may reach this machine."""
    connection = os.environ.get("SSH_CONNECTION", "").split()
    found = [connection[2]] if len(connection) == 4 else []
    try:
        with open("/proc/net/fib_trie") as file:
            found += re.findall(r"\|-- (\S+)\n\s+/32 host LOCAL", file.read())
    except OSError:
        pass
    return [a for a in dict.fromkeys(found) if not a.startswith(("127.", "::1"))] + ["127.0.0.1"]


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


def main(arguments: Sequence[str]) -> None:
    """Join the process group, measure, print."""
    rank, world, backend = int(arguments[0]), int(arguments[1]), arguments[2]
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
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    device = torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")
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

    small, big = torch.ones(1, device=device), torch.ones(BIG // 4, device=device)
    dist.all_reduce(small)  # connects
    latency = timed(lambda: dist.all_reduce(small), 20)
    took = torch.tensor([timed(lambda: dist.all_reduce(big), 1)], device=device)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    # The first one also connects; a link so slow that it took seconds need not be tried again.
    slowest = float(took)
    speed_s = slowest if slowest > 1.0 else timed(lambda: dist.all_reduce(big), 3)
    # What goes over each network interface per second: the usual "bus bandwidth".
    speed = BIG * 2 * (world - 1) / max(1, world) / speed_s / 1e6
    pairs = {}
    piece = torch.ones(PAIR // 4, device=device)
    for turn in range(min(ROUNDS, world + world % 2 - 1)):
        other = partner(rank, world, turn)
        dist.all_reduce(small)  # everybody begins together
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
        pairs[str(other)] = 2 * PAIR / min(timed(exchange, 1) for _ in range(5)) / 1e6  # undisturbed
    square = torch.ones(512, 512, device=device)
    gflops = 2 * 512**3 / min(timed(lambda: square @ square, 1) for _ in range(15)) / 1e9  # undisturbed
    dist.barrier()
    dist.destroy_process_group()
    result = {"rank": rank, "latency_us": latency * 1e6, "mb_s": speed, "pairs": pairs, "gflops": gflops}
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
