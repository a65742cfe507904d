"""Training job as SageMaker runs it, on this machine: from the request to containers, their end, and what is kept.

Control files in the job's directory ask for things: ``stop`` and ``interrupt`` (a spot interruption).
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import sys
import tarfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from sagemaker_containers import Containers

TICK_S = 0.05
ML = PurePosixPath("/opt/ml")
CHECKPOINTS = "/opt/ml/checkpoints"
TERMINAL = ("Completed", "Failed", "Stopped")
_FAILURE_CHARACTERS = 1024


class Storage(Protocol):
    """Storage that the ``s3://`` addresses of the request lead to."""

    def fetch(self, uri: str, directory: Path) -> None:
        """Copy the objects below *uri*, or that one object, into *directory*."""
        ...

    def put(self, uri: str, path: Path) -> None:
        """Store the file at *path* as the object *uri*; raises `FileNotFoundError` when it has just gone."""
        ...


@dataclass(frozen=True)
class PlatformSettings:
    """Settings of the platform that runs a training job, which a request does not hold."""

    grace_s: float = 120.0  # between SIGTERM and SIGKILL
    sync_s: float = 1.0  # between two looks for changed checkpoints
    path: str = ""  # PATH of the containers; its python3 runs the entry point
    env: Mapping[str, str] = field(default_factory=dict)  # of every container, below the request's
    keep: bool = False  # what the containers had below /opt/ml


class TrainingJobError(Exception):
    """The job cannot be run here; the message is its failure reason."""


class Training:
    """Training job on its way through SageMaker's states, in the directory *directory*, which is its alone.

    *on_change* gets the fields of ``DescribeTrainingJob`` after every change (times in seconds since the epoch),
    *on_output* the name of a log stream and new lines of it.
    """

    def __init__(
        self,
        request: Mapping[str, Any],
        directory: Path,
        storage: Storage,
        platform: PlatformSettings,
        *,
        on_change: Callable[[dict[str, Any]], None] = lambda _: None,
        on_output: Callable[[str, list[str]], None] = lambda _, __: None,
    ) -> None:
        self.request = request
        self.directory = directory
        self.storage = storage
        self.platform = platform
        self.on_change = on_change
        self.on_output = on_output
        self.name = str(request["TrainingJobName"])
        count = int(request["ResourceConfig"]["InstanceCount"])
        self.hosts = [f"algo-{number + 1}" for number in range(count)]
        self.spot = bool(request.get("EnableManagedSpotTraining"))
        self.state: dict[str, Any] = {"TrainingJobStatus": "InProgress", "SecondaryStatusTransitions": []}
        self.incarnation = 0
        self.numbered = 0
        self.pushed: dict[tuple[str, str], tuple[int, int]] = {}
        self.tails: dict[str, tuple[Path, int, bytes]] = {}

    # -- states

    def set_status(self, status: str, message: str, **changes: Any) -> None:
        """The next secondary status."""
        now = time.time()
        transitions = self.state["SecondaryStatusTransitions"]
        if transitions:
            transitions[-1]["EndTime"] = now
        transitions.append({"Status": status, "StartTime": now, "StatusMessage": message})
        self.state.update({"SecondaryStatus": status, "LastModifiedTime": now, **changes})
        self.on_change(self.state)

    def finish(self, status: str, secondary: str, message: str = "", **changes: Any) -> None:
        """The last one."""
        now = time.time()
        started = self.state.get("TrainingStartTime", now)
        seconds = max(1, round(now - started))
        self.set_status(
            secondary,
            message,
            TrainingJobStatus=status,
            TrainingEndTime=now,
            TrainingTimeInSeconds=seconds,
            BillableTimeInSeconds=seconds * len(self.hosts),
            **changes,
        )
        self.state["SecondaryStatusTransitions"][-1]["EndTime"] = now
        self.on_change(self.state)

    def has_control_file(self, name: str) -> bool:
        """Return True when the control file *name* is there."""
        return (self.directory / name).exists()

    # -- the whole

    def run(self) -> None:
        """Run the job to its end, whatever happens."""
        try:
            self.set_status("Starting", "Launching requested ML instances")
            while self.once():
                pass
        except TrainingJobError as error:
            self.finish("Failed", "Failed", str(error), FailureReason=str(error))
        except Exception as error:
            reason = f"InternalServerError: {type(error).__name__}: {error}"
            self.finish("Failed", "Failed", reason, FailureReason=reason)
        finally:
            for path in () if self.platform.keep else self.directory.glob("run-*"):
                shutil.rmtree(path, ignore_errors=True)

    def once(self) -> bool:
        """Run one incarnation of the containers; returns True when there has to be another one."""
        if self.has_control_file("stop"):
            self.finish("Stopped", "Stopped")
            return False
        self.incarnation += 1
        base = self.directory / f"run-{self.incarnation}"
        self.set_status("Downloading", "Downloading input data")
        for host in self.hosts:
            self.prepare_host(base / host, host)
        started = self.state.get("TrainingStartTime") or time.time()
        message = "Training image download completed. Training in progress."
        self.set_status("Training", message, TrainingStartTime=started)
        containers = self.start(base)
        why, statuses = self.watch(containers, base, started)
        if why == "Interrupted":
            (self.directory / "interrupt").unlink(missing_ok=True)
            self.set_status("Interrupted", "Training job was interrupted: insufficient spot capacity")
            self.set_status("Starting", "Launching requested ML instances")
            return True
        self.conclude(base, why, statuses)
        return False

    def conclude(self, base: Path, why: str, statuses: Mapping[str, int]) -> None:
        """Record how the job ended, and upload what it leaves behind."""
        failed = [(host, status) for host, status in statuses.items() if status]  # in the order of their ends
        if not why and failed:
            reason = f"AlgorithmError: {self.failure_text_of(base, failed[0][0])}, exit code: {failed[0][1]}"
            self.finish("Failed", "Failed", reason, FailureReason=reason)
            return
        self.set_status("Uploading", "Uploading generated training model")
        artifact = self.upload(base)
        status, secondary = ("Completed", "Completed") if not why else ("Stopped", why)
        self.finish(status, secondary, f"Training job {status.lower()}", ModelArtifacts={"S3ModelArtifacts": artifact})

    # -- before the containers

    def prepare_host(self, home: Path, host: str) -> None:
        """The directory that the host will see as ``/opt/ml``. Raises `TrainingJobError`."""
        request, ml = self.request, home / "ml"
        for name in ("input/config", "input/data", "model", "output/data", "checkpoints"):
            (ml / name).mkdir(parents=True)
        channels = {}
        for channel in request.get("InputDataConfig") or ():
            name, source = str(channel["ChannelName"]), channel["DataSource"]["S3DataSource"]
            target = ml / "input/data" / name
            target.mkdir()
            self.storage.fetch(str(source["S3Uri"]), target)
            channels[name] = {
                "TrainingInputMode": channel.get("InputMode", "File"),
                "S3DistributionType": source.get("S3DataDistributionType", "FullyReplicated"),
                "RecordWrapperType": channel.get("RecordWrapperType", "None"),
            }
        kind = str(request["ResourceConfig"]["InstanceType"])
        group = "homogeneousCluster"
        resources = {
            "current_host": host,
            "current_instance_type": kind,
            "current_group_name": group,
            "hosts": self.hosts,
            "instance_groups": [{"instance_group_name": group, "instance_type": kind, "hosts": self.hosts}],
            "network_interface_name": "lo",
        }
        files = {
            "resourceconfig": resources,
            "inputdataconfig": channels,
            "hyperparameters": request.get("HyperParameters") or {},
        }
        for name, content in files.items():
            (ml / f"input/config/{name}.json").write_text(json.dumps(content))
        # Distinct addresses: rendezvous tell hosts apart by what their names resolve to.
        lines = ["127.0.0.1 localhost", *(f"127.0.1.{n + 1} {name}" for n, name in enumerate(self.hosts))]
        (home / "hosts").write_text("\n".join(lines) + "\n")
        (home / "scratch").mkdir()
        if checkpoints := request.get("CheckpointConfig"):
            target = self.checkpoints(home)
            target.mkdir(parents=True, exist_ok=True)
            self.storage.fetch(str(checkpoints["S3Uri"]), target)
            for path in _files(target):
                self.pushed[host, str(path.relative_to(target))] = _signature(path)

    def checkpoints(self, home: Path) -> Path:
        """The host's checkpoint directory, as seen from outside. Raises `TrainingJobError`."""
        local = PurePosixPath((self.request.get("CheckpointConfig") or {}).get("LocalPath") or CHECKPOINTS)
        if not local.is_relative_to(ML):
            raise TrainingJobError(f"ClientError: CheckpointConfig.LocalPath {local}: here it has to lie below {ML}")
        return home / "ml" / local.relative_to(ML)

    def environment(self, host: str) -> dict[str, str]:
        """Return the environment of a container, with nothing of the user's own."""
        platform = self.platform
        return {
            "PATH": platform.path or f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}",
            "HOME": "/tmp",
            "LANG": "C.UTF-8",
            "HOSTNAME": host,
            "TRAINING_JOB_NAME": self.name,
            "TRAINING_JOB_ARN": str(self.request.get("TrainingJobArn") or f"arn:aws:sagemaker:local:0:{self.name}"),
            **platform.env,
            **(self.request.get("Environment") or {}),
        }

    def start(self, base: Path) -> Containers:
        """Start all hosts of one incarnation. Raises `TrainingJobError` where namespaces are not allowed."""
        algorithm = self.request["AlgorithmSpecification"]
        argv = [*(algorithm.get("ContainerEntrypoint") or ["train"]), *(algorithm.get("ContainerArguments") or [])]
        logs = self.directory / "logs"
        logs.mkdir(exist_ok=True)
        self.numbered = max(int(time.time()), self.numbered + 1)  # SageMaker's streams end in their second of birth
        specs: list[dict[str, Any]] = []
        for host in self.hosts:
            log = logs / f"{host}-{self.numbered}.log"
            log.touch()
            self.tails[f"{self.name}/{log.stem}"] = (log, 0, b"")
            specs.append(
                {
                    "name": host,
                    "ml": str(base / host / "ml"),
                    "scratch": str(base / host / "scratch"),
                    "hosts_file": str(base / host / "hosts"),
                    "argv": argv,
                    "env": self.environment(host),
                    "log": str(log),
                    # The image is this machine's Python: no `pip install` of a job may change it.
                    "read_only": [sys.prefix],
                }
            )
        return Containers(base / "machine.json", specs)

    # -- while they run

    def watch(self, containers: Containers, base: Path, started: float) -> tuple[str, dict[str, int]]:
        """Watch the containers to their end; returns the reason of a stop (or nothing) and their statuses."""
        limits = self.request.get("StoppingCondition") or {}
        limit = float(limits.get("MaxRuntimeInSeconds") or 86400)
        why, kill_at, synced = "", float("inf"), 0.0
        with containers:
            while containers.running:
                containers.wait(TICK_S)
                now = time.monotonic()
                if kill_at == float("inf"):
                    failed = any(containers.ended.values())
                    if self.has_control_file("stop"):
                        why = "Stopped"
                        self.set_status("Stopping", "Stopping the training job", TrainingJobStatus="Stopping")
                    elif self.spot and self.has_control_file("interrupt"):
                        why = "Interrupted"
                    elif time.time() - started > limit:
                        why = "MaxRuntimeExceeded"
                    if why or failed:
                        containers.send("term")
                        kill_at = now + self.platform.grace_s
                elif now > kill_at:
                    containers.send("kill")
                self.forward_logs()
                if now - synced > self.platform.sync_s:
                    self.synchronise(base)
                    synced = time.monotonic()
        if containers.error:
            raise TrainingJobError(f"InternalServerError: {containers.error}")
        self.forward_logs(final=True)
        self.synchronise(base)
        return why, containers.ended

    def forward_logs(self, final: bool = False) -> None:
        """Forward the output of the containers, line by line."""
        for stream, (path, offset, held) in list(self.tails.items()):
            with path.open("rb") as file:
                file.seek(offset)
                data = file.read()
            *lines, rest = (held + data).split(b"\n")
            if final and rest:
                lines, rest = [*lines, rest], b""
            self.tails[stream] = (path, offset + len(data), rest)
            if lines:
                self.on_output(stream, [line.decode("utf-8", "replace") for line in lines])
        if final:
            self.tails.clear()

    def synchronise(self, base: Path) -> None:
        """Changed checkpoints to storage; of all hosts into one place, as SageMaker does it."""
        checkpoints = self.request.get("CheckpointConfig")
        if not checkpoints:
            return
        for host in self.hosts:
            root = self.checkpoints(base / host)
            for path in _files(root):
                name = str(path.relative_to(root))
                try:
                    signature = _signature(path)
                    if self.pushed.get((host, name)) != signature:
                        self.storage.put(f"{str(checkpoints['S3Uri']).rstrip('/')}/{name}", path)
                except FileNotFoundError:
                    continue  # it was renamed or removed while we looked
                self.pushed[host, name] = signature

    # -- afterwards

    def failure_text_of(self, base: Path, host: str) -> str:
        """Return the text of ``/opt/ml/output/failure`` of the host that failed first."""
        try:
            text = (base / host / "ml/output/failure").read_text(errors="replace")
        except FileNotFoundError:
            return ""
        return text[:_FAILURE_CHARACTERS]

    def upload(self, base: Path) -> str:
        """``model.tar.gz`` and ``output.tar.gz`` of all hosts; returns where the model is."""
        output = str(self.request["OutputDataConfig"]["S3OutputPath"]).rstrip("/")
        target = f"{output}/{self.name}/output"
        for name, folder in (("model", "model"), ("output", "output/data")):
            buffer = io.BytesIO()
            with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
                for host in self.hosts:
                    root = base / host / "ml" / folder
                    for path in _files(root):
                        tar.add(path, arcname=str(path.relative_to(root)))
            archive = base / f"{name}.tar.gz"
            archive.write_bytes(buffer.getvalue())
            self.storage.put(f"{target}/{name}.tar.gz", archive)
        return f"{target}/model.tar.gz"


def _files(root: Path) -> list[Path]:
    """Regular files below *root* that are not just being written. What goes away meanwhile is left out."""
    found = [Path(folder, name) for folder, _, names in os.walk(root) for name in names]
    return sorted(path for path in found if not re.search(r"\.(tmp|new)$", path.name) and path.is_file())


def _signature(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_mtime_ns, status.st_size
