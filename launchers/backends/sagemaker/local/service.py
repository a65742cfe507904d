"""`Service` on this machine: objects are files, a training job is a process that runs its containers here."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from orc.launchers.backends.sagemaker.images import Image
from orc.launchers.backends.sagemaker.local.storage import LocalStorage
from orc.launchers.backends.sagemaker.service import NameTaken
from orc.launchers.errors import BackendError
from orc.launchers.strict_modes import make_private

Mode = Literal["contract", "docker"]
ACCOUNT = "000000000000"
READ_BYTES = 1 << 20
START_TIMEOUT_S = 60.0  # far more than a Python start takes, on a machine that swaps
_TIMES = ("CreationTime", "LastModifiedTime", "TrainingStartTime", "TrainingEndTime", "StartTime", "EndTime")
_ENDED = ("Completed", "Failed", "Stopped")


class LocalService:
    """Everything below *directory*: ``s3/<bucket>/<key>`` and ``jobs/<training job>``. Contacts nothing."""

    def __init__(self, directory: Path, mode: Mode = "contract") -> None:
        self.directory = directory
        self.mode = mode
        self.storage = LocalStorage(directory / "s3")
        self.jobs = directory / "jobs"

    # -- who we are

    def account(self) -> str:
        """None of AWS's."""
        return ACCOUNT

    def identity(self) -> str:
        """There are no credentials."""
        return ACCOUNT

    def role_problem(self, arn: str) -> str:
        """Nothing is requested."""
        return ""

    def image(self, image: Image) -> str:
        """Return the image of the SDK's own table; the contract without docker needs none."""
        if self.mode == "contract":
            return "none"
        from orc.launchers.backends.sagemaker.sdk import stock_image

        return stock_image(image, str(self.directory))

    # -- objects

    def has_bucket(self, bucket: str) -> bool:
        """A bucket is a directory, and it is there when it is needed."""
        return True

    def create_bucket(self, bucket: str) -> None:
        """See `has_bucket`."""

    def put(self, uri: str, data: bytes | Path, *, kms_key: str | None = None) -> None:
        """Write a file, in one step."""
        self.storage.write(uri, data)

    def get(self, uri: str, offset: int = 0, limit: int | None = None) -> bytes | None:
        """Return at most *limit* bytes of an object from *offset* on; `None` when there is no object."""
        return self.storage.read(uri, offset, limit)

    def get_many(self, uris: Sequence[str], limit: int) -> dict[str, bytes]:
        """Return the contents of the objects that exist and have at most *limit* bytes."""
        found = {uri: self.storage.read(uri, 0, limit + 1) for uri in uris}
        return {uri: data for uri, data in found.items() if data is not None and len(data) <= limit}

    def exists(self, uri: str) -> bool:
        """Return True when the object exists."""
        return self.storage.path(uri).is_file()

    def delete(self, uri: str) -> None:
        """Remove it, if it is there."""
        self.storage.path(uri).unlink(missing_ok=True)

    # -- training jobs

    def create(self, request: Mapping[str, Any]) -> None:
        """Start a process that runs the job. Raises `NameTaken`, and `BackendError` for what cannot run here."""
        self._check(request)
        name = str(request["TrainingJobName"])
        make_private(self.jobs)
        making = self.jobs / f".{name}.{os.getpid()}"
        shutil.rmtree(making, ignore_errors=True)
        making.mkdir(mode=0o700)
        lock = _hold(making / "lock")
        try:
            _write(making / "request.json", {**request, "CreationTime": time.time(), "Mode": self.mode})
            try:
                making.rename(self.jobs / name)  # all at once, with the lock held: whoever sees it sees it alive
            except OSError:
                if not (self.jobs / name).is_dir():
                    raise
                raise NameTaken(f"there is a training job called {name} already", where=str(self.jobs)) from None
            self._start(self.jobs / name, lock)
        finally:
            shutil.rmtree(making, ignore_errors=True)
            os.close(lock)

    def _start(self, directory: Path, lock: int) -> None:
        from orc.launchers.agent.variables import without_own

        env = without_own(os.environ)
        env["ORC_GANG"] = directory.name  # whoever submits this from within a job must not end it with itself
        with (directory / "driver.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "orc.launchers.backends.sagemaker.local.driver", str(directory), str(lock)],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[lock],
                start_new_session=True,
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while not (directory / "status.json").exists():
            if process.poll() is not None or time.monotonic() > deadline:
                said = (directory / "driver.log").read_text(errors="replace").strip().splitlines()
                raise BackendError(
                    f"the job cannot be run on this machine: {said[-1] if said else 'its process has ended'}",
                    where=str(directory),
                )
            time.sleep(0.01)

    def _check(self, request: Mapping[str, Any]) -> None:
        for channel in request.get("InputDataConfig") or ():
            uri = str(channel["DataSource"].get("S3DataSource", {}).get("S3Uri", ""))
            if uri.startswith("file://") and not Path(uri.removeprefix("file://")).is_dir():
                raise BackendError(f"the input {channel['ChannelName']} is no directory: {uri}")
            if not uri.startswith("file://") and not self.storage.has(uri):
                raise BackendError(
                    f"the input {channel['ChannelName']} is not on this machine: {uri or 'not in S3'}",
                    hint="Nothing is fetched from AWS here: give a directory instead, as file:///path/to/it.",
                )
        if self.mode == "docker":
            if shutil.which("docker") is None:
                raise BackendError(
                    "instance_type: local needs docker, and there is no program of that name",
                    hint="Install docker, or use --local-contract, which needs none.",
                )
            return
        from orc.launchers.backends.sagemaker.local.containers import unsupported_reason

        if why := unsupported_reason():
            raise BackendError(
                f"containers cannot be simulated here: {why}",
                hint="Allow user namespaces (sysctl kernel.unprivileged_userns_clone=1; on Ubuntu "
                "kernel.apparmor_restrict_unprivileged_userns=0), or use docker: instance_type: local.",
            )

    def describe(self, name: str) -> dict[str, Any] | None:
        """Return the description of a training job; `None` when there is none."""
        directory = self.jobs / name
        request = _read(directory / "request.json")
        if request is None:
            return None
        alive = _is_held(directory / "lock")  # looked at first: its last word comes before its end
        status = _read(directory / "status.json") or {"TrainingJobStatus": "InProgress", "SecondaryStatus": "Starting"}
        if status["TrainingJobStatus"] not in _ENDED and not alive:
            reason = "InternalServerError: the process that ran the containers was killed"
            status.update(TrainingJobStatus="Failed", SecondaryStatus="Failed", FailureReason=reason)
            status.setdefault("TrainingEndTime", status.get("LastModifiedTime", request["CreationTime"]))
        request.pop("Mode")
        status.pop("BillableTimeInSeconds", None)  # nobody sends a bill
        if model := status.get("ModelArtifacts", {}).get("S3ModelArtifacts"):
            status["ModelArtifacts"] = {"S3ModelArtifacts": str(self.storage.path(model))}  # nothing of it is in S3
        return dict(_dated({"TrainingJobArn": _arn(name), **request, **status}))

    def summaries(self, *, since: float | None = None, name_contains: str = "") -> Iterator[dict[str, Any]]:
        """Jobs, newest first."""
        names = [path.name for path in self.jobs.glob("[!.]*") if name_contains in path.name]
        found = [job for name in names if (job := self.describe(name)) is not None]
        for job in sorted(found, key=lambda one: one["CreationTime"], reverse=True):
            if since is None or job["CreationTime"].timestamp() > since:
                yield job

    def tags(self, arn: str) -> dict[str, str]:
        """The tags of a job."""
        request = _read(self.jobs / arn.rpartition("/")[2] / "request.json") or {}
        return {tag["Key"]: tag["Value"] for tag in request.get("Tags") or ()}

    def stop(self, name: str) -> None:
        """Leave word; one that is not there is left as it is."""
        if (self.jobs / name).is_dir():
            (self.jobs / name / "stop").touch()

    # -- logs

    def streams(self, name: str) -> list[str]:
        """The logs of its containers, oldest first."""
        stems = [path.stem for path in (self.jobs / name / "logs").glob("algo-*.log")]
        return [f"{name}/{stem}" for stem in sorted(stems, key=_stream_order)]

    def events(self, stream: str, token: str | None) -> tuple[list[str], str | None]:
        """Return whole lines after the byte *token*; a line without an end counts when its writer has ended."""
        name, _, stem = stream.partition("/")
        directory = self.jobs / name
        alive = _is_held(directory / "lock")
        offset = int(token or 0)
        try:
            with (directory / "logs" / f"{stem}.log").open("rb") as file:
                file.seek(offset)
                data = file.read(READ_BYTES)
        except FileNotFoundError:
            return [], token
        end = data.rfind(b"\n") + 1
        if not end and data and (not alive or len(data) == READ_BYTES):
            end = len(data)
        lines = data[:end].removesuffix(b"\n").split(b"\n") if end else []
        return [line.decode("utf-8", "replace") for line in lines], str(offset + end)

    # -- secrets

    def put_secret(self, name: str, text: str, *, kms_key: str | None = None, tags: Mapping[str, str]) -> None:
        """There is no AWS Secrets Manager here. Raises `BackendError`."""
        raise BackendError(
            "AWS Secrets Manager is not asked on this machine", where=name, hint="Let the secrets travel by S3."
        )

    def delete_secret(self, name: str) -> None:
        """There is none."""

    def close(self) -> None:
        """There are no connections."""


def _arn(name: str) -> str:
    return f"arn:aws:sagemaker:local:{ACCOUNT}:training-job/{name}"


def _stream_order(stem: str) -> tuple[int, int]:
    _, host, number = stem.split("-")
    return int(number), int(host)


def _dated(value: Any) -> Any:
    """Times as the SDK gives them."""
    if isinstance(value, list):
        return [_dated(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {key: datetime.fromtimestamp(item, UTC) if key in _TIMES else _dated(item) for key, item in value.items()}


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return dict(json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None


def _write(path: Path, data: Mapping[str, Any]) -> None:
    from orc.launchers.remote.files import write_file

    write_file(str(path), json.dumps(data).encode(), 0o600)


def _hold(path: Path) -> int:
    """Take a lock that lasts as long as the returned file is open."""
    import fcntl

    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return fd


def _is_held(path: Path) -> bool:
    import fcntl

    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
