"""Entry point of every container of a SageMaker training job: prepares the job's files and runs the agent.

Standard library only, Python >= 3.9; run as ``python -I -S`` with nothing else
of orc beside it. SageMaker tells a container who it is through files below ``/opt/ml`` and reads what it prints, its
exit status and ``/opt/ml/output/failure``; docs/explanation/sagemaker-container.md describes both sides.
"""

from __future__ import annotations

import codecs
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any

ML = "/opt/ml"
EXIT_LAUNCH = 77
EXIT_STOPPED = 143
FAILURE_BYTES = 1024  # more is not shown
PIECE_BYTES = 16384  # of a line that does not end
PATIENCE_S = 1.0  # for the rest of a line
LOOK_S = 0.05  # how often logs are read
HUB_TIMEOUT_S = 900.0  # the containers of a job start minutes apart: the image is loaded on each instance
READ_BYTES = 1 << 20
GREETING_BYTES = 4096

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
_RANK_LOG = re.compile(r"rank-([0-9]+)\.log")
_LOOKS_LIKE_RANK = re.compile(r"\[rank [0-9]+~?\] ")

_FETCH_SECRETS = """
import sys
try:
    import boto3
except ImportError:
    sys.exit("the image has no boto3, which reads the job's secrets from AWS Secrets Manager")
client = boto3.client("secretsmanager", region_name=sys.argv[2] or None)
try:
    text = client.get_secret_value(SecretId=sys.argv[1])["SecretString"]
except Exception as error:
    sys.exit(f"the secret {sys.argv[1]} cannot be read: {error}")
sys.stdout.write(text)
"""


class Failure(Exception):
    """The job cannot be started here; the message is what SageMaker shows."""


class Stopped(Exception):
    """SIGTERM came before the agent was there."""


# --- what SageMaker says -------------------------------------------------------------------------------------------


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


def host_order(hosts: Sequence[str]) -> list[str]:
    """Hosts in the order of their numbers: ``algo-2`` before ``algo-10``."""
    return sorted(hosts, key=lambda host: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", host)])


def sagemaker_variables(
    resources: Mapping[str, Any], channels: Mapping[str, Any], hyperparameters: Mapping[str, str], ml: str = ML
) -> dict[str, str]:
    """The documented ``SM_*`` variables, which SageMaker's own toolkit would set; everything but text is JSON."""
    hosts = host_order([str(host) for host in resources["hosts"]])
    current = str(resources["current_host"])
    interface = str(resources.get("network_interface_name") or "")
    given = {name: _value(text) for name, text in hyperparameters.items()}
    inputs = {name: f"{ml}/input/data/{name}" for name in channels}
    words = [word for name, text in hyperparameters.items() for word in (f"--{name}", str(text))]
    cpus = len(os.sched_getaffinity(0))
    gpus = sum(bool(re.fullmatch(r"nvidia[0-9]+", name)) for name in os.listdir("/dev"))
    values: dict[str, Any] = {
        "SM_MODEL_DIR": f"{ml}/model",
        "SM_INPUT_DIR": f"{ml}/input",
        "SM_INPUT_DATA_DIR": f"{ml}/input/data",
        "SM_INPUT_CONFIG_DIR": f"{ml}/input/config",
        "SM_OUTPUT_DIR": f"{ml}/output",
        "SM_OUTPUT_DATA_DIR": f"{ml}/output/data",
        "SM_OUTPUT_FAILURE": f"{ml}/output/failure",
        "SM_CHANNELS": sorted(channels),
        **{f"SM_CHANNEL_{_variable(name)}": path for name, path in inputs.items()},
        "SM_HPS": given,
        **{f"SM_HP_{_variable(name)}": value for name, value in given.items()},
        "SM_USER_ARGS": words,
        "SM_HOSTS": hosts,
        "SM_HOST_COUNT": len(hosts),
        "SM_CURRENT_HOST": current,
        "SM_CURRENT_HOST_RANK": hosts.index(current),
        "SM_CURRENT_INSTANCE_TYPE": resources.get("current_instance_type") or "",
        "SM_CURRENT_INSTANCE_GROUP": resources.get("current_group_name") or "",
        "SM_MASTER_ADDR": hosts[0],
        "SM_NETWORK_INTERFACE_NAME": interface,
        "SM_NUM_CPUS": cpus,
        "SM_NUM_GPUS": gpus,
        "SM_NUM_NEURONS": 0,
        "SM_RESOURCE_CONFIG": dict(resources),
        "SM_INPUT_DATA_CONFIG": dict(channels),
        "SM_TRAINING_ENV": {
            "channel_input_dirs": inputs,
            "current_host": current,
            "current_instance_type": resources.get("current_instance_type") or "",
            "hosts": hosts,
            "master_hostname": hosts[0],
            "hyperparameters": given,
            "input_config_dir": f"{ml}/input/config",
            "input_data_config": dict(channels),
            "input_dir": f"{ml}/input",
            "job_name": os.environ.get("TRAINING_JOB_NAME", ""),
            "model_dir": f"{ml}/model",
            "network_interface_name": interface,
            "num_cpus": cpus,
            "num_gpus": gpus,
            "output_data_dir": f"{ml}/output/data",
            "resource_config": dict(resources),
        },
    }
    variables = {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}
    if interface:
        variables.update(GLOO_SOCKET_IFNAME=interface, NCCL_SOCKET_IFNAME=interface)
    return variables


def _variable(name: str) -> str:
    return re.sub(r"[^A-Z0-9_]", "_", name.upper())


def _value(text: Any) -> Any:
    """A hyperparameter as it was before it became text; SageMaker keeps text alone."""
    try:
        return json.loads(text)
    except (TypeError, ValueError):
        return text


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
    """Let the agent make the working copy: images bring an empty ``/opt/ml/code``, or one with files of their own."""
    if not os.path.isdir(work):
        return
    try:
        os.rmdir(work)
    except OSError:
        aside = f"{work}.image"
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(work, aside)


def place_private(source: str, target: str, config: Mapping[str, Any]) -> None:
    """Token and secrets, where nothing is synchronised to S3. Raises `Failure`."""
    shutil.rmtree(target, ignore_errors=True)
    os.makedirs(target, mode=0o700)
    for name in ("link.json", "secrets.json"):
        path = os.path.join(source, name)
        if os.path.exists(path):
            with open(path, "rb") as file:
                _write_private(os.path.join(target, name), file.read())
    place = (config.get("backend") or {}).get("secrets") or {}
    if place.get("from") == "secretsmanager":
        # Not in this process: it has no site-packages.
        argv = [sys.executable, "-c", _FETCH_SECRETS, str(place["id"]), str(place.get("region") or "")]
        done = subprocess.run(argv, capture_output=True, check=False)
        if done.returncode:
            raise Failure(done.stderr.decode("utf-8", "replace").strip().splitlines()[-1])
        _write_private(os.path.join(target, "secrets.json"), done.stdout)


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
    """Return the restart after the highest one in the records restored from S3; 0 without any."""
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


def restart_of_hub(hosts: Sequence[str], port: int, tls: ssl.SSLContext) -> int:
    """The restart that node 0's agent runs. Its host may have seen more of the records in S3 than this one.

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

    return tls_context(str(read_json(f"{private}/link.json").get("token")), hub=False)


def wait(seconds: float) -> None:
    """Sleep; raises `Stopped` when the platform requests the end."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        received = signal.sigtimedwait(_SIGNALS, left)
        if received is not None and received.si_signo != signal.SIGCHLD:
            raise Stopped


# --- logs ----------------------------------------------------------------------------------------------------------


class Tail:
    """Log file on its way to standard output: lines of a rank get ``[rank 3] `` in front, a node's own do not.

    A piece of a line that is not finished yet is marked ``[rank 3~] ``: the rest follows on the next line.
    """

    def __init__(self, path: str, rank: int | None) -> None:
        self.path = path
        self.rank = rank
        self.offset = 0
        self.held = ""
        self.held_since = 0.0
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def read(self, final: bool = False) -> list[str]:
        """The lines that can be shown now, each with its newline."""
        lines: list[str] = []
        while data := self.piece():
            lines += self.take(self.decoder.decode(data))
        return lines + self.take(self.decoder.decode(b"", final), final)

    def piece(self) -> bytes:
        """Return the next piece of the file; empty at its end."""
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            data = file.read(READ_BYTES)
        self.offset += len(data)
        return data

    def take(self, text: str, final: bool = False) -> list[str]:
        """Turn new *text* into lines; *final*: nothing follows."""
        now = time.monotonic()
        if not self.held and text:
            self.held_since = now
        *whole, rest = (self.held + text).split("\n")
        lines: list[str] = []
        for line in whole:
            while len(line) > PIECE_BYTES:
                lines.append(self.line(line[:PIECE_BYTES], more=True))
                line = line[PIECE_BYTES:]
            lines.append(self.line(line))
        while len(rest) > PIECE_BYTES:
            lines.append(self.line(rest[:PIECE_BYTES], more=True))
            rest = rest[PIECE_BYTES:]
        if whole:
            self.held_since = now
        if rest and (final or now - self.held_since > PATIENCE_S):
            lines.append(self.line(rest, more=True))
            rest = ""
        self.held = rest
        return lines

    def line(self, text: str, more: bool = False) -> str:
        """Return one line of output."""
        if self.rank is not None:
            return f"[rank {self.rank}{'~' if more else ''}] {text}\n"
        return f" {text}\n" if _LOOKS_LIKE_RANK.match(text) else f"{text}\n"


class Logs:
    """The logs of this host's agent and ranks."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.tails: dict[str, Tail] = {}

    def show(self, final: bool = False) -> None:
        """Print what is new."""
        try:
            names = sorted(os.listdir(self.directory))
        except FileNotFoundError:
            return
        for name in names:
            if name not in self.tails and name.endswith(".log"):
                found = _RANK_LOG.fullmatch(name)
                self.tails[name] = Tail(os.path.join(self.directory, name), int(found[1]) if found else None)
        for tail in self.tails.values():
            log_line("".join(tail.read(final)))


def log_line(text: str) -> None:
    """Onto standard output, whole."""
    data = text.encode("utf-8", "replace")
    while data:
        data = data[os.write(1, data) :]


# --- the end -------------------------------------------------------------------------------------------------------


def failure_text(directory: str, node: int, restart: int, status: int) -> str:
    """Return the text of SageMaker's ``FailureReason``: the first failing rank, its end, and its last lines."""
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


def write_failure(text: str) -> None:
    """Write the reason of a failure to the file that SageMaker reads."""
    os.makedirs(f"{ML}/output", exist_ok=True)
    with open(f"{ML}/output/failure", "w", encoding="utf-8") as file:
        file.write(shortened(text, ""))


# --- the whole -----------------------------------------------------------------------------------------------------


def run() -> int:
    """Get ready, run the agent, and pass on how it ended."""
    resources = read_json(f"{ML}/input/config/resourceconfig.json")
    channels = _optional(f"{ML}/input/config/inputdataconfig.json")
    hyperparameters = _optional(f"{ML}/input/config/hyperparameters.json")
    hosts = host_order([str(host) for host in resources["hosts"]])
    node = hosts.index(str(resources["current_host"]))
    source = f"{ML}/input/data/orc-attempt"
    config = read_json(f"{source}/agent.json")
    if int(config["nnodes"]) != len(hosts):
        raise Failure(f"the job was made for {config['nnodes']} hosts, and there are {len(hosts)}: {', '.join(hosts)}")
    os.environ.update(sagemaker_variables(resources, channels, hyperparameters))
    unpack(f"{ML}/input/data/orc/source.tar.gz", str(config["root"]))
    for directory in (f"{ML}/model", f"{ML}/output/data"):
        os.makedirs(directory, exist_ok=True)
    if config.get("work_dir"):
        make_room(str(config["work_dir"]))
    place_private(source, str(config["private_dir"]), config)
    owner = f"sagemaker:{config['marker']}"
    if finished_before(config, owner):
        log_line("this attempt has succeeded before: nothing to do\n")
        return 0
    if node:
        where = config["hub"]
        tls = link_context(str(config["runtime_tree"]), str(config["private_dir"]))
        restart = restart_of_hub([str(address) for address in where["addresses"]], int(where["port"]), tls)
    else:
        restart = restored_restart(str(config["attempt_dir"]))
    path = place_config(config, node)
    argv = [sys.executable, "-I", "-S", str(config["runtime_tree"]), "node", path]
    argv += ["--node-rank", str(node), "--owner", owner, "--restart", str(restart)]
    argv += ["--master-host", hosts[0]] if len(hosts) > 1 else []
    status, told = supervise(argv, Logs(str(config.get("logs_dir") or f"{config['attempt_dir']}/logs")))
    if status and not told:
        write_failure(failure_text(str(config["attempt_dir"]), node, restart, status))
    return status


def _optional(path: str) -> dict[str, Any]:
    return read_json(path) if os.path.exists(path) else {}


def supervise(argv: Sequence[str], logs: Logs) -> tuple[int, bool]:
    """Run the agent and show its logs until it has ended; its exit status, and whether SageMaker wanted the end."""
    pid = os.fork()
    if pid == 0:
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            os.execv(argv[0], list(argv))
        except OSError as error:
            os.write(2, f"cannot start {argv[0]}: {error.strerror}\n".encode())
        finally:
            os._exit(EXIT_LAUNCH)
    told = False
    while True:
        received = signal.sigtimedwait(_SIGNALS, LOOK_S)
        if received is not None and received.si_signo != signal.SIGCHLD:
            told = True
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
                return (128 - code if code < 0 else code), told


def main() -> int:
    """Run `run`, and report what cannot be done where SageMaker shows it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        return run()
    except Stopped:
        return EXIT_STOPPED
    except Failure as failure:
        log_line(f"orc: {failure}\n")
        write_failure(str(failure))
        return EXIT_LAUNCH
    except Exception as error:  # noqa: BLE001 - SageMaker would show nothing but the exit status
        import traceback

        log_line(traceback.format_exc())
        write_failure(f"orc: {type(error).__name__}: {error}")
        return EXIT_LAUNCH


if __name__ == "__main__":
    sys.exit(main())
