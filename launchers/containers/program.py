"""The program of every container of an attempt: it prepares the attempt's files, runs the agent and passes on its end.

A platform describes the container (`Container`) in a program of its own, which calls `main`; `archive.entry_program`
packs both. Standard library only, Python >= 3.9. What must outlive a container lies in the attempt directory, which the
platform brings to an object store and back: one that is started again (after a spot interruption, say) goes on there.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass, field

from orc.launchers.containers.output import Logs, log_line

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import Any

EXIT_LAUNCH = 77
EXIT_STOPPED = 143
FAILURE_BYTES = 1024  # more is not shown
REPORT_BYTES = 4096  # Kubernetes keeps no more of a container that has ended
DELIVERY_S = 30.0  # for the last records, to the object store
LOOK_S = 0.05  # how often logs are read
HUB_TIMEOUT_S = 900.0  # the containers of a job start minutes apart: the image is loaded on each machine
GREETING_BYTES = 4096

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)


class Failure(Exception):
    """The attempt cannot be started here; the message is what the platform shows."""


class Stopped(Exception):
    """SIGTERM came before the agent was there."""


@dataclass(frozen=True)
class Container:
    """Container of an attempt, as its platform knows it."""

    platform: str  # the kind of the backend
    hosts: Sequence[str]  # names by which the containers reach each other, in the order of their nodes
    node: int
    inputs: str  # the directory of agent.json, with several hosts link.json, with secrets secrets.json
    archive: str  # of the snapshot's trees; a URL of an object store, or a path
    variables: Mapping[str, str] = field(default_factory=dict)  # that the platform's containers have
    directories: Sequence[str] = ()  # that the job may expect
    secrets: Callable[[Mapping[str, Any]], bytes | None] = lambda config: None  # that a service of the platform keeps
    report: str = ""  # where the platform takes the last words of a container from: this node's records, and then 0


def read_json(path: str) -> dict[str, Any]:
    """The object in *path*; raises `Failure` when there is none."""
    try:
        with open(path, encoding="utf-8") as file:
            data = json.load(file)
    except (OSError, ValueError) as error:
        raise Failure(f"{path} cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise Failure(f"{path} does not hold a JSON object")
    return data


# --- getting ready -------------------------------------------------------------------------------------------------


def unpack(archive: str, target: str) -> None:
    """The snapshot's trees, with none of a container that was here before. Raises `Failure`."""
    shutil.rmtree(target, ignore_errors=True)
    os.makedirs(target, mode=0o755)
    try:
        with tarfile.open(archive, "r:gz") as tar:
            if hasattr(tarfile, "data_filter"):
                tar.extractall(target, filter="data")
            else:  # Python before 3.9.17
                tar.extractall(target, members=staying_inside(tar, target))  # noqa: S202
    except (OSError, tarfile.TarError) as error:
        raise Failure(f"{archive} cannot be unpacked: {error}") from None


def staying_inside(tar: tarfile.TarFile, target: str) -> Iterator[tarfile.TarInfo]:
    """The members of *tar*, each looked at when those before it are in *target*: what the filter does that old Pythons
    lack. Raises `TarError` for one that is, or points to something, outside.
    """
    top = os.path.realpath(target)
    for member in tar:
        paths = [os.path.join(top, member.name)]
        if member.issym():
            paths.append(os.path.join(os.path.dirname(paths[0]), member.linkname))
        elif not member.isreg() and not member.isdir():
            raise tarfile.TarError(f"{member.name} is neither a file, a directory nor a symbolic link")
        if any(os.path.commonpath((top, os.path.realpath(path))) != top for path in paths):
            raise tarfile.TarError(f"{member.name} leads out of it")
        yield member


def make_room(work: str) -> None:
    """Let the agent make the working copy: images bring an empty one, or one with files of
    their own."""
    if not os.path.isdir(work):
        return
    try:
        os.rmdir(work)
    except OSError:
        aside = f"{work}.image"
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(work, aside)


def place_private(container: Container, target: str, config: Mapping[str, Any]) -> None:
    """Token and secrets, where nothing is brought to the object store. Raises `Failure`."""
    shutil.rmtree(target, ignore_errors=True)
    os.makedirs(target, mode=0o700)
    for name in ("link.json", "secrets.json"):
        path = os.path.join(container.inputs, name)
        if os.path.exists(path):
            with open(path, "rb") as file:
                _write_private(os.path.join(target, name), file.read())
    kept = container.secrets(config)
    if kept is not None:
        _write_private(os.path.join(target, "secrets.json"), kept)


def _write_private(path: str, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(data)


def place_config(config: Mapping[str, Any], node: int) -> str:
    """``agent.json`` in the attempt directory, without what an earlier incarnation has left for others.

    All hosts are synchronised to one place. What another node has left there would say that the processes here are its
    own (``pids.json``), and an old copy of its records would take the place of the new ones.
    """
    directory = str(config["attempt_dir"])
    os.makedirs(directory, mode=0o700, exist_ok=True)
    for name in os.listdir(directory):
        if name in ("calls", "stacks") or (name.startswith("node-") and name != f"node-{node}"):
            shutil.rmtree(os.path.join(directory, name), ignore_errors=True)
    path = os.path.join(directory, "agent.json")
    _write_private(f"{path}.tmp", json.dumps(config, ensure_ascii=False, indent=2).encode() + b"\n")
    os.rename(f"{path}.tmp", path)
    return path


# --- which incarnation this is -------------------------------------------------------------------------------------


def restored_restart(directory: str) -> int:
    """Return the restart after the highest one in the records that were restored; 0 without any."""
    highest = -1
    for folder, _, names in os.walk(directory):
        for name in names:
            if not name.endswith(".json") or name == "agent.json":
                continue
            try:
                with open(os.path.join(folder, name), encoding="utf-8") as file:
                    record = json.load(file)
            except (OSError, ValueError):
                continue  # half of an upload
            if isinstance(record, dict) and isinstance(record.get("restart"), int):
                highest = max(highest, record["restart"])
    return highest + 1


def finished_before(config: Mapping[str, Any], owner: str) -> bool:
    """Return True when every node has recorded a success already: then there is nothing left to do."""
    for node in range(int(config["nnodes"])):
        try:
            record = read_json(os.path.join(str(config["attempt_dir"]), f"node-{node}", "exit.json"))
        except Failure:
            return False
        if record.get("outcome") != "succeeded" or record.get("owner") != owner:
            return False
    return True


def restart_of_server(hosts: Sequence[str], port: int, tls: ssl.SSLContext) -> int:
    """The restart that node 0's agent runs. Its host may have seen more of the records than this one.

    Raises `Failure` when it does not answer in time, and `Stopped`.
    """
    deadline = time.monotonic() + HUB_TIMEOUT_S
    while True:
        why = ""
        for host in hosts:
            try:
                with socket.create_connection((host, port), timeout=2.0) as sock, tls.wrap_socket(sock) as line:
                    return int(json.loads(line.makefile("rb").readline(GREETING_BYTES))["restart"])
            except (OSError, ValueError, KeyError, TypeError) as error:
                why = f"{host} port {port}: {error}"
        if time.monotonic() > deadline:
            raise Failure(f"node 0 does not answer within {HUB_TIMEOUT_S:g} s: {why}")
        wait(0.1)


def link_context(runtime: str, private: str) -> ssl.SSLContext:
    """Return the settings of connections of the agents, from the tree that was unpacked and the token."""
    sys.path.insert(0, f"{runtime}/lib")
    from orc.launchers.agent.link.channel import tls_context

    return tls_context(str(read_json(f"{private}/link.json").get("token")), server=False)


def wait(seconds: float) -> None:
    """Sleep; raises `Stopped` when the platform requests the end."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        received = signal.sigtimedwait(_SIGNALS, left)
        if received is not None and received.si_signo != signal.SIGCHLD:
            raise Stopped


# --- the object store, where the platform does not bring files there itself ----------------------------------------


def carry(config: Mapping[str, Any], *words: str) -> subprocess.Popen[bytes]:
    """Start `mirror` with *words*, as a process that has the libraries of the image."""
    start = "import sys; sys.path.insert(0, sys.argv[1]); import mirror, s3; sys.exit(mirror.main(s3, sys.argv[2:]))"
    argv = [sys.executable, "-c", start, os.path.abspath(sys.argv[0]), *words]
    env = {**os.environ, **config.get("env", {})}
    return subprocess.Popen(
        argv, stdin=subprocess.PIPE, stderr=subprocess.PIPE if words[0] == "fetch" else None, env=env
    )


def fetched(config: Mapping[str, Any], url: str, target: str) -> str:
    """Return the path of an object that was fetched to *target*. Raises `Failure`."""
    process = carry(config, "fetch", url, target)
    said = process.communicate()[1].decode("utf-8", "replace").strip()
    if process.returncode:
        raise Failure(f"{url} cannot be fetched: {said[-FAILURE_BYTES:]}")
    return target


def report_of(directory: str, node: int) -> str:
    """Return the records of a node that has ended, in `REPORT_BYTES` at most; what people read is left out first."""
    found: dict[str, Any] = {}
    for name in ("exit", "lease"):
        try:
            found[name] = read_json(os.path.join(directory, f"node-{node}", f"{name}.json"))
        except Failure:
            continue
    failure = (found.get("exit") or {}).get("first_failure") or {}
    while len(text := json.dumps(found)) > REPORT_BYTES:
        if tail := str(failure.get("log_tail") or ""):
            failure["log_tail"] = tail[len(tail) // 2 + 1 :]
        elif not found.get("exit", {}).pop("ranks", None) and not found.pop("lease", None):
            return ""
    return text if found else ""


def leave_report(path: str, directory: str, node: int) -> bool:
    """Write the records of a node that has ended to *path*, if it has any; return whether they say how it ended."""
    text = report_of(directory, node)
    if text:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    return "exit" in json.loads(text or "{}")


# --- the end -------------------------------------------------------------------------------------------------------


def failure_text(directory: str, node: int, restart: int, status: int) -> str:
    """Return the text that a platform shows of a failed job: the first failing rank, its end, and its last lines."""
    found = []
    for name in (f"node-{node}/exit.json", f"stop-r{restart}.json"):
        try:
            record = read_json(os.path.join(directory, name))
        except Failure:
            continue
        if int(record.get("restart", restart)) == restart:
            found.append(record)
    if not found:
        return f"the agent ended with status {status} and left no record; the log says more"
    first = next((record["first_failure"] for record in found if record.get("first_failure")), None)
    reason = str(found[0].get("reason") or f"exit status {status}")
    if not first:
        return reason
    rank = f"rank {first['rank']}" if first.get("rank") is not None else "the launcher"
    how = f"was killed by {first['signal']}" if first.get("signal") else f"exited with {first.get('exit_code')}"
    return shortened(f"{rank} on {first.get('host')} {how}", str(first.get("log_tail") or ""))


def shortened(reason: str, tail: str, limit: int = FAILURE_BYTES) -> str:
    """*reason* and as much of the end of *tail* as fits into *limit* bytes."""
    text = reason.encode()[:limit].decode("utf-8", "ignore")
    room = limit - len(text.encode()) - 1
    if not tail or room <= 0:
        return text
    data = tail.encode()
    if len(data) > room:
        cut = data[-room:].decode("utf-8", "ignore")
        tail = cut.partition("\n")[2] or cut
    return f"{text}\n{tail}"


# --- the whole -----------------------------------------------------------------------------------------------------


def run(container: Container, failed: Callable[[str], None]) -> int:
    """Get ready, run the agent, and pass on how it ended; *failed* gets the text of a failure."""
    hosts, node = container.hosts, container.node
    config = read_json(f"{container.inputs}/agent.json")
    if int(config["nnodes"]) != len(hosts):
        raise Failure(f"the job was made for {config['nnodes']} hosts, and there are {len(hosts)}: {', '.join(hosts)}")
    os.environ.update(container.variables)
    archive = container.archive
    if "://" in archive:
        archive = fetched(config, archive, f"{config['root']}.tar.gz")
    unpack(archive, str(config["root"]))
    for directory in container.directories:
        os.makedirs(directory, exist_ok=True)
    if config.get("work_dir"):
        make_room(str(config["work_dir"]))
    place_private(container, str(config["private_dir"]), config)
    owner = f"{container.platform}:{config['marker']}"
    if finished_before(config, owner):
        log_line("this attempt has succeeded before: nothing to do\n")
        return 0
    if node:
        where = config["hub"]
        tls = link_context(str(config["runtime_tree"]), str(config["private_dir"]))
        restart = restart_of_server([str(address) for address in where["addresses"]], int(where["port"]), tls)
    else:
        restart = restored_restart(str(config["attempt_dir"]))
    path = place_config(config, node)
    argv = [sys.executable, "-I", "-S", str(config["runtime_tree"]), "node", path]
    argv += ["--node-rank", str(node), "--owner", owner, "--restart", str(restart)]
    argv += ["--master-host", hosts[0]] if len(hosts) > 1 else []
    mirror = carry(config, "push", path, str(node)) if (config.get("backend") or {}).get("store") else None
    status, announced = supervise(argv, Logs(str(config.get("logs_dir") or f"{config['attempt_dir']}/logs")))
    if status and not announced:
        failed(failure_text(str(config["attempt_dir"]), node, restart, status))
    said = bool(container.report) and leave_report(container.report, str(config["attempt_dir"]), node)
    if said and mirror is None and not announced:
        status = 0  # a platform that sees a failure would end the others, before they have said theirs
    if mirror is not None:
        mirror.stdin.close()  # type: ignore[union-attr]
        try:
            mirror.wait(DELIVERY_S)
        except subprocess.TimeoutExpired:
            log_line(f"orc: the last records did not reach the object store within {DELIVERY_S:g} s\n")
    return status


def supervise(argv: Sequence[str], logs: Logs) -> tuple[int, bool]:
    """Run the agent and show its logs until it has ended; its exit status, and whether the platform wanted the end."""
    pid = os.fork()
    if pid == 0:
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            os.execv(argv[0], list(argv))
        except OSError as error:
            os.write(2, f"cannot start {argv[0]}: {error.strerror}\n".encode())
        finally:
            os._exit(EXIT_LAUNCH)
    announced = False
    while True:
        received = signal.sigtimedwait(_SIGNALS, LOOK_S)
        if received is not None and received.si_signo != signal.SIGCHLD:
            announced = True
            os.kill(pid, signal.SIGTERM)  # it is not reaped yet, so the number is its own
        logs.show()
        while True:  # as the container's first process this one inherits what others leave behind
            try:
                ended, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if not ended:
                break
            if ended == pid:
                logs.show(final=True)
                code = os.waitstatus_to_exitcode(status)
                return (128 - code if code < 0 else code), announced


def main(describe: Callable[[], Container], *, failure: str = "") -> int:
    """Run the container that *describe* tells of. What cannot be done is printed, and written to the file *failure*."""

    def failed(text: str) -> None:
        if failure:
            os.makedirs(os.path.dirname(failure), exist_ok=True)
            with open(failure, "w", encoding="utf-8") as file:
                file.write(shortened(text, ""))

    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        return run(describe(), failed)
    except Stopped:
        return EXIT_STOPPED
    except Failure as error:
        log_line(f"orc: {error}\n")
        failed(str(error))
        return EXIT_LAUNCH
    except Exception as error:  # noqa: BLE001 - a platform would show nothing but the exit status
        import traceback

        log_line(traceback.format_exc())
        failed(f"orc: {type(error).__name__}: {error}")
        return EXIT_LAUNCH
