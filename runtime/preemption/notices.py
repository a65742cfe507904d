"""Preemption notices that do not come as signals: metadata of the platform, polled.

Off unless the platform is detected. One thread per machine asks every few seconds; a notice is handed to `Preemption`,
as if the process had been signalled, and all ranks save at an agreed step. Signals (SIGTERM, SIGUSR1) need none of
this: so Slurm preempts, SageMaker takes managed spot instances back, and the agent of an orc job passes it on.

==================  =============================================================  ====================================
source              detected by                                                    asks
==================  =============================================================  ====================================
EC2 spot            the machine's vendor, AWS_EC2_METADATA_SERVICE_ENDPOINT        ``spot/instance-action`` (IMDSv2)
Google Cloud, TPU   the machine's product name, TPU_NAME, GCE_METADATA_HOST        ``preempted``, ``maintenance-event``
Slurm               SLURM_JOB_END_TIME, unless an orc agent keeps the time         the clock
a file              ORC_NOTICE_FILE                                                whether it exists
==================  =============================================================  ====================================
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from weakref import WeakKeyDictionary

from orc.runtime.logging import get_logger
from orc.runtime.preemption.preemption import Preemption

if TYPE_CHECKING:
    from orc.runtime.core.context import RunContext

POLL_S = 5.0
REQUEST_S = 2.0
GIVE_UP_AFTER = 3  # failed requests in a row: there is no such service here
SLURM_LEAD_S = 120.0
DMI = Path("/sys/devices/virtual/dmi/id")


class Source(Protocol):
    """A source of preemption notices."""

    name: str

    def poll(self) -> str | None:
        """Return the text of the notice; `None` while there is none. Raises `OSError` when the query fails."""
        ...


class NoticeFile:
    """A file whose appearance is the notice; its first line is the text."""

    name = "notice file"

    def __init__(self, path: Path) -> None:
        self.path = path

    def poll(self) -> str | None:
        """See `Source.poll`."""
        try:
            text = self.path.read_text(errors="replace")
        except FileNotFoundError:
            return None
        return text.partition("\n")[0].strip() or f"{self.path} is there"


class SlurmTimeLimit:
    """The end of the job's time, *lead_s* seconds before."""

    name = "Slurm time limit"

    def __init__(self, end: float, lead_s: float = SLURM_LEAD_S) -> None:
        self.end = end
        self.lead_s = lead_s

    def poll(self) -> str | None:
        """See `Source.poll`."""
        left = self.end - time.time()
        return f"the job ends in {max(left, 0):.0f} s" if left <= self.lead_s else None


class Ec2Spot:
    """The interruption notice of a spot instance, about two minutes ahead, from the instance metadata service v2."""

    name = "EC2 spot"

    def __init__(self, endpoint: str = "http://169.254.169.254") -> None:
        self.endpoint = endpoint.rstrip("/")
        self._token = ""
        self._renew_at = 0.0

    def poll(self) -> str | None:
        """See `Source.poll`."""
        if time.monotonic() >= self._renew_at:
            headers = {"X-aws-ec2-metadata-token-ttl-seconds": "3600"}
            self._token = _request(f"{self.endpoint}/latest/api/token", headers, "PUT") or ""
            self._renew_at = time.monotonic() + 3000
        url = f"{self.endpoint}/latest/meta-data/spot/instance-action"
        answer = _request(url, {"X-aws-ec2-metadata-token": self._token})
        if answer is None:  # 404: no notice
            return None
        try:
            action = json.loads(answer)
        except ValueError:
            return answer.strip()
        return f"{action.get('action', 'interruption')} at {action.get('time', 'an unknown time')}"


class GoogleCloud:
    """Preemption and maintenance of a Compute Engine or TPU machine, from its metadata server."""

    name = "Google Cloud"

    def __init__(self, host: str = "metadata.google.internal") -> None:
        self.root = f"http://{host}/computeMetadata/v1/instance"

    def poll(self) -> str | None:
        """See `Source.poll`."""
        headers = {"Metadata-Flavor": "Google"}
        if (_request(f"{self.root}/preempted", headers) or "").strip().upper() == "TRUE":
            return "the machine is preempted"
        event = (_request(f"{self.root}/maintenance-event", headers) or "NONE").strip()
        # A live migration (MIGRATE_...) goes unnoticed by the processes.
        return f"maintenance: {event}" if event.upper().startswith("TERMINATE") else None


def _request(url: str, headers: Mapping[str, str], method: str = "GET") -> str | None:
    """The body; `None` for 404. Never through a proxy: the address means this very machine."""
    import urllib.error
    import urllib.request

    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(url, headers=dict(headers), method=method)  # noqa: S310 - http, fixed hosts
    try:
        with opener.open(request, timeout=REQUEST_S) as answer:
            return str(answer.read(65536).decode("utf-8", "replace"))
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        raise


def sources(env: Mapping[str, str], notice_file: str | None = None, dmi: Path = DMI) -> list[Source]:
    """Return the sources to query for notices in the environment *env* on this machine."""
    found: list[Source] = []
    if notice_file is not None:
        found.append(NoticeFile(Path(notice_file)))
    end = env.get("SLURM_JOB_END_TIME", "")
    if "SLURM_JOB_ID" in env and end.isdigit() and "ORC_MARKER" not in env:
        found.append(SlurmTimeLimit(float(end)))
    aws = env.get("AWS_EC2_METADATA_SERVICE_ENDPOINT")
    if (aws or _dmi(dmi, "sys_vendor") == "Amazon EC2") and env.get("AWS_EC2_METADATA_DISABLED", "").lower() != "true":
        found.append(Ec2Spot(aws) if aws else Ec2Spot())
    google = env.get("GCE_METADATA_HOST")
    if google or "TPU_NAME" in env or _dmi(dmi, "product_name") == "Google Compute Engine":
        found.append(GoogleCloud(google) if google else GoogleCloud())
    return found


def _dmi(root: Path, name: str) -> str:
    try:
        return (root / name).read_text().strip()
    except OSError:  # no such thing in containers and virtual machines of other kinds
        return ""


class Notices:
    """Thread that polls *asked* until one has a notice. Made by `of`."""

    def __init__(self, context: RunContext, asked: Sequence[Source], *, poll_s: float | None = None) -> None:
        self._context = context
        self._asked = list(asked)
        self._failures = dict.fromkeys((source.name for source in asked), 0)
        self._poll_s = POLL_S if poll_s is None else poll_s
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="orc-notices", daemon=True)

    @classmethod
    def of(cls, context: RunContext) -> Notices | None:
        """Return the notices of this machine's first rank; `None` on others and where nothing gives notice."""
        if context not in _known:
            made = None
            if context.is_local_main and not context.mirrored:
                auto = context.config.notices == "auto"
                asked = sources(
                    os.environ if auto else {}, context.config.notice_file, DMI if auto else Path(os.devnull)
                )
                made = cls(context, asked) if asked else None
            _known[context] = made
            if made is not None:
                made.start()
        return _known[context]

    @classmethod
    def forget(cls, context: RunContext) -> None:
        """The run of *context* is over."""
        known = _known.pop(context, None)
        if known is not None:
            known.close()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closing.set()

    def _run(self) -> None:
        while self._asked and not self._closing.wait(self._poll_s):
            for source in list(self._asked):
                try:
                    notice = source.poll()
                except OSError as error:
                    self._failures[source.name] += 1
                    if self._failures[source.name] == GIVE_UP_AFTER:
                        self._asked.remove(source)
                        get_logger(__name__).info(f"{source.name} is not asked for notices any more: {error}")
                    continue
                self._failures[source.name] = 0
                if notice is not None:
                    print(f"orc: preemption notice from {source.name}: {notice}", file=sys.stderr, flush=True)  # noqa: T201
                    Preemption.of(self._context).signal = signal.SIGTERM
                    return


def close_all() -> None:
    """End the threads of this process."""
    for context in list(_known):
        Notices.forget(context)


_known: WeakKeyDictionary[RunContext, Notices | None] = WeakKeyDictionary()
atexit.register(close_all)
