"""Program on a host for `checks` and `ports`: standard library only, Python >= 3.9.

facts <root>             print one JSON object about this machine and this Python
ports <token> <seconds>   print {"port", "addresses"}, and answer every connection with the token; when a line
                        [{"name", "addresses", "port", "token"}] has come, connect to these and print a line
                        {name: "" or what is wrong}; end when the input does

It runs on each host of a job, without its ``site-packages``, which take as long to be set up as all the rest; what
takes long to import is imported where it is needed.
"""

from __future__ import annotations

import json
import os
import re
import select
import socket
import sys
import time

from orc.launchers.agent.gpus import gpu_count, nvidia_smi
from orc.launchers.agent.network import reachable_addresses

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# index, name, driver, memory used and total (MiB), utilisation (%), temperature (C), uncorrected ECC errors, throttling
GPU_FIELDS = (
    "index,name,driver_version,memory.used,memory.total,utilization.gpu,temperature.gpu,"
    "ecc.errors.uncorrected.volatile.total,clocks_throttle_reasons.active"
)
CONNECT_S = 3.0
ANSWER_S = 20.0  # where a connection is taken, the way is open; under load the answer comes late


def gather_facts(root: str) -> dict[str, Any]:
    """Return facts of this machine: clock, disk, memory, processors, GPUs; and this Python with its torch."""
    answer = {
        "host": socket.gethostname(),
        "user": user(),
        "python": list(sys.version_info[:3]),
        "executable": sys.executable,
        "cpus": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "memory": memory(),
        "root": root,
        **disk(os.path.expanduser(root)),
        **torch_version(),
        **gpus(),
    }
    answer["now"] = time.time()  # last, so that it is close to the answer's way back
    return answer


def user() -> str:
    """Return the user's name; the number where there is no name."""
    import pwd

    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def memory() -> dict[str, int]:
    """Return bytes: total and available."""
    with open("/proc/meminfo") as file:
        lines = {name: rest for name, _, rest in (line.partition(":") for line in file)}
    return {key: int(lines[name].split()[0]) * 1024 for key, name in (("total", "MemTotal"), ("free", "MemAvailable"))}


def disk(root: str) -> dict[str, Any]:
    """Return the free bytes where *root* is or will be, and whether it can be written."""
    while not os.path.exists(root):
        root = os.path.dirname(root)
    status = os.statvfs(root)
    return {
        "free": status.f_bavail * status.f_frsize,
        "writable": os.path.isdir(root) and os.access(root, os.W_OK | os.X_OK),
    }


def torch_version() -> dict[str, Any]:
    """Return version and CUDA version of torch without importing it, which takes a second."""
    place = torch_directory()
    if place is None:
        return {"torch": None, "cuda": None}
    try:
        with open(os.path.join(place, "version.py")) as file:
            text = file.read()
    except OSError:
        return {"torch": "broken: no version.py", "cuda": None}
    version = re.search(r"^__version__\s*(?::[^=]*)?=\s*['\"]([^'\"]+)", text, re.M)
    cuda = re.search(r"^(?:cuda|hip)\s*(?::[^=]*)?=\s*['\"]([^'\"]+)", text, re.M)
    return {"torch": version.group(1) if version else "unknown", "cuda": cuda.group(1) if cuda else None}


def torch_directory() -> str | None:
    """Return the directory that torch would be imported from: mostly where pip puts it, in front of the rest."""
    import site

    home = os.path.dirname(os.path.dirname(os.path.abspath(sys.executable)))
    virtual = os.path.isfile(os.path.join(home, "pyvenv.cfg"))
    for directory in site.getsitepackages([home] if virtual else None):
        if os.path.isfile(os.path.join(directory, "torch", "__init__.py")):
            return os.path.join(directory, "torch")
    import importlib.util

    if sys.flags.no_site:
        site.main()  # with all .pth files and what they run
    spec = importlib.util.find_spec("torch")
    return next(iter(spec.submodule_search_locations or ()), None) if spec is not None else None


def gpus() -> dict[str, Any]:
    """Return the rows of nvidia-smi and the number of GPUs that the driver lists: one off the bus has no row."""
    found: dict[str, Any] = {"gpus": [], "gpus_known": gpu_count(), "gpu_error": None}
    path = os.environ.get("PATH", os.defpath)
    try:
        text, fault = nvidia_smi(path, 20.0, f"--query-gpu={GPU_FIELDS}", "--format=csv,noheader,nounits") or ("", "")
    except OSError as error:
        fault = str(error)
    if fault:
        return {**found, "gpu_error": fault}
    names = ("index", "name", "driver", "used", "total", "utilisation", "temperature", "ecc", "throttle")
    rows = [[word.strip() for word in line.split(",")] for line in text.splitlines() if line.strip()]
    return {**found, "gpus": [dict(zip(names, row)) for row in rows]}  # noqa: B905 - Python 3.9


def addresses() -> list[str]:
    """Return addresses at which others may reach this machine, the most likely first."""
    found = []
    connection = os.environ.get("SSH_CONNECTION", "").split()
    if len(connection) == 4:
        found.append(connection[2])
    for family, target in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((target, 9))  # sends nothing: asks the routing table
                found.append(probe.getsockname()[0])
        except OSError:
            pass
    found += reachable_addresses()
    useful = [a for a in dict.fromkeys(found) if not a.startswith(("127.", "::1", "fe80:", "0.0.0.0"))]
    return useful or ["127.0.0.1"]


def serve_ports(token: str, seconds: float) -> None:
    """Answer with the token until standard input is closed or the time is over; meanwhile connect to those named."""
    import threading

    try:
        server = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
        server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        server.bind(("::", 0))
    except OSError:  # no IPv6 here
        server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        server.bind(("", 0))
    server.listen(256)
    print(json.dumps({"port": server.getsockname()[1], "addresses": addresses()}), flush=True)
    poll = select.poll()
    poll.register(0, select.POLLIN)
    poll.register(server, select.POLLIN)
    deadline = time.monotonic() + seconds
    received = b""
    while time.monotonic() < deadline:
        for ready, _ in poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            if ready == 0:
                piece = os.read(0, 1 << 16)
                if not piece:
                    return
                received += piece
                if received.endswith(b"\n"):
                    targets, received = json.loads(received), b""
                    threading.Thread(target=report, args=(targets,), daemon=True).start()
            else:
                peer, _ = server.accept()
                with peer:
                    peer.settimeout(1.0)
                    try:
                        peer.sendall(token.encode())
                    except OSError:
                        pass


def report(targets: list[dict[str, Any]]) -> None:
    """Print the result of `connect`."""
    print(json.dumps(connect(targets)), flush=True)


def connect(targets: list[dict[str, Any]]) -> dict[str, str]:
    """Try all targets at the same time; return the error of each, or an empty text."""
    import threading

    result: dict[str, str] = {}

    def attempt(target: dict[str, Any]) -> None:
        problems = []
        for address in target["addresses"]:
            try:
                with socket.create_connection((address, target["port"]), timeout=CONNECT_S) as link:
                    link.settimeout(ANSWER_S)
                    answer = link.recv(256).decode("utf-8", "replace")
                if answer == target["token"]:
                    result[target["name"]] = ""
                    return
                problems.append(address + ": another machine answers there")
            except OSError as error:
                what = "no answer" if isinstance(error, socket.timeout) else error.strerror or str(error)
                problems.append(address + ": " + what.lower())
        result[target["name"]] = "; ".join(problems)

    threads = [threading.Thread(target=attempt, args=(target,), daemon=True) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return result


def main() -> None:
    """Run one mode."""
    mode, *arguments = sys.argv[1:]
    if mode == "facts":
        print(json.dumps(gather_facts(arguments[0])))
    elif mode == "ports":
        serve_ports(arguments[0], float(arguments[1]))
