"""Program that runs on a host, once for each request of `HostConnections.call`. Standard library only, Python >= 3.9.

This file is sent, with `strict_modes`, to each host that is asked something (`calls`), so nothing has to be on the host
and it always fits the one who asks. A request and its answer are one JSON object each.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time

from orc.launchers.agent.processes import kill_attempt, signal_process
from orc.launchers.agent.procfs import holder_runs
from orc.launchers.agent.records import CONFIDENTIAL, NODE_RECORD_BYTES, checked, create_json, read_json, remove
from orc.launchers.attempts.home import at_home
from orc.launchers.strict_modes import VARIABLE, check, make_private

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_BEEN = ".prepared-"  # and the name of a host: it has seen this directory
_RECORDS = ("lease.json", "heartbeat.json", "exit.json")
_STOP = re.compile(r"stop-r[0-9]{1,6}\.json")
_MOST_STOPS = 16
_MOST_BYTES = 16 << 20  # of one attempt's records in an answer


def write(path: str, text: str, mode: int) -> None:
    """Write a whole file, durably and in one step."""
    temporary = f"{path}.{os.urandom(4).hex()}.tmp"  # hosts may share the directory
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, path)
    except BaseException:
        remove(temporary)
        raise


def status(request: dict[str, Any]) -> dict[str, Any]:
    """Return the status of some attempts on this host, by their directories."""
    attempts: dict[str, Any] = {}
    for given in request["directories"]:
        try:
            attempts[given] = status_of(os.path.expanduser(given), request["host"])
        except OSError as error:  # of this directory alone: the others' owners have done nothing to theirs
            attempts[given] = {"why": f"{error.filename or given}: {error.strerror or error}"}
    return {"attempts": attempts, "now": time.time()}


def status_of(directory: str, host: str) -> dict[str, Any]:
    """Return the status of one attempt: its records, the age of each in seconds, and whether its agent runs here."""
    config = read_json(os.path.join(directory, "agent.json"))
    if config is None:
        return {"there": False, "alive": False}
    config = checked(config)
    names = hosts_in(config)
    node = names.index(host) if host in names else None
    lease = record_of(os.path.join(directory, f"node-{node}", "lease.json"))
    alive = lease is not None and holder_runs(lease)  # before the records are read: who is gone now has left them
    records: dict[str, Any] = {}
    ages: dict[str, float] = {}
    here = set(os.listdir(directory))
    found = sorted(name for name in here if _STOP.fullmatch(name))[:_MOST_STOPS]
    nodes = [k for k in range(config.get("nnodes", 1)) if f"node-{k}" in here]  # few, on hosts that share no files
    nodes.sort(key=lambda k: k != node)
    left = _MOST_BYTES
    for name in ("cancel.json", *found, *(f"node-{k}/{r}" for k in nodes for r in _RECORDS)):
        path = os.path.join(directory, name)
        record = record_of(path) if left > 0 else None
        if record is not None:
            records[name] = record
            ages[name] = age(path)
            left -= os.stat(path).st_size
    return {
        "there": True,
        "node": node,
        "config": {key: config.get(key) for key in ("marker", "nnodes", "hosts", "runtime_tree", "grace_s")},
        "confidential": any(os.path.exists(os.path.join(directory, name)) for name in CONFIDENTIAL),
        "linked": os.path.exists(os.path.join(directory, "link.json")),
        "age": age(os.path.join(directory, "agent.json")),
        "records": records,
        "ages": ages,
        "alive": alive,
        "silence": silence(records, node),
    }


def record_of(path: str) -> dict[str, Any] | None:
    """Return a record that whoever runs in the job's account can have written, `checked`."""
    record = read_json(path, NODE_RECORD_BYTES)
    return None if record is None else checked(record)


def silence(records: dict[str, Any], node: int | None) -> float:
    """Return how long ago the agent on this host gave its last sign, in seconds; both read the same clock."""
    signs = [records.get(f"node-{node}/{name}", {}).get("at") for name in ("lease.json", "heartbeat.json")]
    return time.time() - max((at for at in signs if at), default=time.time())


def age(path: str) -> float:
    """Return how long ago *path* was written, in seconds."""
    try:
        return max(0.0, time.time() - os.stat(path).st_mtime)
    except FileNotFoundError:
        return 0.0


def prepare(request: dict[str, Any]) -> dict[str, Any]:
    """Write the files of this host's agent, unless it was started before; return the token of the link that counts."""
    directory = os.path.expanduser(request["directory"])
    check(directory)  # whoever can write there would have the agent run what they like
    make_private(directory)
    path = os.path.join(directory, "agent.json")
    agent = at_home(json.loads(request["agent"]))
    before = read_json(path)
    known = checked(before or {})
    if any(os.path.exists(os.path.join(directory, f"node-{k}", "lease.json")) for k in own_nodes(known, request)):
        state = "held" if before is None or hosts_in(known) == hosts_in(agent) else "other"
        return {"state": state, "token": (read_json(os.path.join(directory, "link.json")) or {}).get("token")}
    # An older file is the only one that differs: a plan for other hosts, which did not get as far as a lease.
    # (But for the link, which the first one to start may have found needless.)
    if {**(before or {}), "link": agent.get("link")} != agent:
        remove(os.path.join(directory, "link.json"))
        write(path, json.dumps(agent, indent=2, ensure_ascii=False), request["mode"])
    if request["secrets"]:
        write(os.path.join(directory, "secrets.json"), json.dumps(request["secrets"]), 0o600)
    create_json(os.path.join(directory, "link.json"), {"token": request["token"]})
    write(os.path.join(directory, f"{_BEEN}{request['host']}"), "", 0o600)
    return {"state": "ready", "token": (read_json(os.path.join(directory, "link.json")) or {}).get("token")}


def hosts_in(agent: dict[str, Any]) -> list[str]:
    """Return the names of an attempt's hosts, in the order of its nodes."""
    return [str(host.get("name")) for host in agent.get("hosts", ())]


def own_nodes(before: dict[str, Any], request: dict[str, Any]) -> set[int]:
    """Return the numbers of this host's node in this plan, and in one that came before."""
    names = hosts_in(before)
    return {request["node"], *([names.index(request["host"])] if request["host"] in names else [])}


def start(request: dict[str, Any]) -> None:
    """Write the link's address, and become the program that starts the agent; that one gives the answer."""
    directory = os.path.expanduser(request["directory"])
    argv = [os.path.expanduser(word) for word in request["argv"]]
    for path in (directory, *(word for word in argv[1:4] if word.startswith("/"))):  # its orders, and its code
        check(path)
    if request["node"] == 0:
        drop_link_if_shared(directory)
    if request["link"] is not None:
        write(os.path.join(directory, "link.json"), json.dumps(request["link"]), 0o600)
    sys.stdout.flush()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.execvp(argv[0], argv)


def drop_link_if_shared(directory: str) -> None:
    """Remove the link of agents that see the same files. All hosts have been here by now."""
    path = os.path.join(directory, "agent.json")
    agent = read_json(path)
    if agent is None or not agent.get("link"):
        return
    seen = [os.path.join(directory, _BEEN + name) for name in hosts_in(checked(agent))]
    if len(seen) > 1 and all(os.path.exists(been) for been in seen):
        write(path, json.dumps({**agent, "link": False}, indent=2, ensure_ascii=False), 0o600)


def cancel(request: dict[str, Any]) -> dict[str, Any]:
    """Write a request to cancel for the agents of some attempts; where they are gone, end what they left behind."""
    for given in request["directories"]:
        directory = os.path.expanduser(given)
        seen = status_of(directory, request["host"])
        if not seen["there"] or f"node-{seen['node']}/exit.json" in seen["records"]:
            continue
        write(os.path.join(directory, "cancel.json"), json.dumps(request["request"]), 0o600)
        if not seen["alive"] and f"node-{seen['node']}/lease.json" in seen["records"]:
            end(directory)
    return {}


def reap(request: dict[str, Any]) -> dict[str, Any]:
    """End everything that some attempts, which are over, may have left on this host.

    An agent that still runs was given up while nobody could see it: it is told to end, at once. One that is stopped,
    and its guard with it, would not hear that before its ranks go on: it is ended.
    """
    for given in request["directories"]:
        directory = os.path.expanduser(given)
        seen = status_of(directory, request["host"])
        if seen["alive"] and f"node-{seen['node']}/exit.json" not in seen["records"]:
            lease = seen["records"].get(f"node-{seen['node']}/lease.json", {})
            if seen["silence"] > request["peer_timeout_s"] and holder_runs(lease):
                signal_process(int(lease["pid"]), signal.SIGKILL)
                end(directory)
            write(os.path.join(directory, "cancel.json"), '{"grace_s": 0, "reason": "given up as lost"}', 0o600)
        elif seen["there"] and not seen["alive"]:
            end(directory)
            for name in CONFIDENTIAL:
                remove(os.path.join(directory, name))
    return {}


def undo(request: dict[str, Any]) -> dict[str, Any]:
    """End an attempt that must not go on, at once, and remove its directory; another may be started in its place."""
    directory = os.path.expanduser(request["directory"])
    seen = status_of(directory, request["host"])
    if not seen["there"]:
        return {"state": "gone"}
    if request["only_unstarted"] and f"node-{seen['node']}/lease.json" in seen["records"]:
        return {"state": "held"}
    write(os.path.join(directory, "cancel.json"), '{"grace_s": 0, "reason": "not all hosts were free"}', 0o600)
    deadline = time.monotonic() + 20.0
    while status_of(directory, request["host"]).get("alive") and time.monotonic() < deadline:
        time.sleep(0.05)
    end(directory)
    trash = f"{directory}.{os.getpid()}.tmp"
    try:
        os.rename(directory, trash)
    except FileNotFoundError:
        return {"state": "gone"}
    import shutil

    shutil.rmtree(trash)
    return {"state": "gone"}


def end(directory: str) -> None:
    """SIGKILL what is left of an attempt on this host."""
    check(directory)
    kill_attempt(directory)


def main() -> None:
    """Answer one request from standard input."""
    request = json.loads(sys.stdin.buffer.read())
    if request.get("trusted"):
        os.environ[VARIABLE] = request["trusted"]
    operations = {f.__name__: f for f in (status, prepare, start, cancel, reap, undo)}
    try:
        answer: dict[str, Any] = operations[request["do"]](request) or {}
    except OSError as error:
        answer = {"error": error.strerror or str(error), "errno": error.errno, "path": error.filename}
    json.dump(answer, sys.stdout)
