"""The way into pods: a command over the API; the gate, a pod that does nothing but reach the shared volume."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

from orc.launchers.backends.kubernetes.api import Api
from orc.launchers.backends.kubernetes.manifests import ATTEMPT, MAIN
from orc.launchers.backends.kubernetes.verdict import waiting_of
from orc.launchers.containers.held import HeldFiles
from orc.launchers.containers.http import GONE, TIMEOUT_S, unless_refused
from orc.launchers.containers.transport import Channel, HelperTransport
from orc.launchers.errors import BackendError, BackendUnreachable

_PROTOCOLS = "v5.channel.k8s.io,v4.channel.k8s.io"
_INDEX = "batch.kubernetes.io/job-completion-index"
_PIECE = 1 << 15  # of a message: servers refuse large ones


class PodChannel(Channel):
    """A command in a pod: its streams are numbered channels of one websocket."""

    def __init__(self, api: Api, pod: str, command: Sequence[str], *, tty: bool = False) -> None:
        _ = api.client  # says what to install
        import websocket
        from kubernetes.stream.ws_client import create_websocket

        streams = {"container": MAIN, "stdin": True, "stdout": True, "stderr": not tty, "tty": tty}
        words = [*streams.items(), *(("command", word) for word in command)]
        query = urlencode([(key, str(value).lower() if isinstance(value, bool) else value) for key, value in words])
        url = f"ws{api.host.removeprefix('http')}{api.path('pods', pod, 'exec')}?{query}"
        try:
            headers = {**api.headers(), "sec-websocket-protocol": _PROTOCOLS}
            websocket.setdefaulttimeout(TIMEOUT_S)  # to connect
            self.sock = create_websocket(api.client.configuration, url, headers)
            self.sock.settimeout(None)
        except websocket.WebSocketBadStatusException as error:
            raise api.refusal(error.status_code, error.resp_body or str(error).encode()) from None
        except (OSError, websocket.WebSocketException) as error:
            raise BackendUnreachable(f"no way into the pod {pod}: {error}", where=api.where) from None
        self._errors, self._binary = websocket.WebSocketException, websocket.ABNF.OPCODE_BINARY

    def resize(self, columns: int, lines: int) -> None:
        """Tell the terminal over there its size."""
        self.send(json.dumps({"Width": columns, "Height": lines}).encode(), 4)

    def send(self, data: bytes, channel: int = 0) -> None:
        """See `Channel.send`."""
        try:
            for start in range(0, len(data), _PIECE):
                self.sock.send(bytes([channel]) + data[start : start + _PIECE], self._binary)
        except self._errors as error:
            raise OSError(str(error)) from None

    def receive(self) -> tuple[str, bytes]:
        """See `Channel.receive`."""
        try:
            while True:
                data = self.sock.recv()
                data = data.encode() if isinstance(data, str) else data
                if not data:
                    raise OSError("closed")
                if data[0] in (1, 2):
                    return ("out", "err")[data[0] - 1], data[1:]
                if data[0] == 3 and data[1:]:
                    return "end", str(_exit_status(json.loads(data[1:]))).encode()
        except (ValueError, self._errors) as error:
            raise OSError(str(error)) from None

    def close(self) -> None:
        """See `Channel.close`."""
        self.sock.abort()  # who waits for its output
        self.sock.shutdown()


def _exit_status(said: Mapping[str, Any]) -> int:
    if said.get("status") == "Success":
        return 0
    causes = (said.get("details") or {}).get("causes") or ()
    codes = [int(each["message"]) for each in causes if each.get("reason") == "ExitCode"]
    if not codes:
        raise BackendError(str(said.get("message") or "it could not be started"))
    return codes[0]


def pods_of(api: Api, job: str, node: str = "") -> list[tuple[str, dict[str, Any]]]:
    """Return name and status of an attempt's pods, or of one; those with their number under ``node``."""
    found = api.items("pods", f"{ATTEMPT}={job}" + (f",{_INDEX}={node}" if node else ""))
    return [(p["metadata"]["name"], {**p["status"], "node": int(p["metadata"]["labels"][_INDEX])}) for p in found]


class PodFiles(HeldFiles):
    """Files of an attempt whose pods share nothing: a ConfigMap keeps what must outlive the Job."""

    def __init__(self, api: Api, job: str, home: str, python: str) -> None:
        super().__init__(home, python)
        self._api, self._job = api, job

    def kept(self) -> dict[str, bytes]:
        """See `HeldFiles.kept`."""
        data = (self._api.get("configmaps", self._job) or {}).get("data") or {}
        return {name: text.encode() for name, text in data.items()}

    def keep(self, name: str, data: bytes) -> None:
        """See `HeldFiles.keep`. It does not go with the Job any more."""
        body = {"metadata": {"ownerReferences": None}, "data": {name: data.decode()}}
        self._api.request("PATCH", self._api.path("configmaps", self._job), body=body)

    def last_words(self) -> dict[int, str]:
        """See `HeldFiles.last_words`."""
        pods = [(each["node"], each.get("containerStatuses") or ()) for _, each in pods_of(self._api, self._job)]
        ends = [(node, (each.get("state") or {}).get("terminated") or {}) for node, told in pods for each in told]
        return {node: str(end.get("message") or "") for node, end in ends}

    def output(self, node: int) -> str | None:
        """See `HeldFiles.output`."""
        with unless_refused(*GONE):
            for name, _ in pods_of(self._api, self._job, str(node)):
                path = self._api.path("pods", name, "log")
                return self._api.content("GET", path, {"container": MAIN}).decode(errors="replace")
        return None

    def first(self, command: Sequence[str]) -> PodChannel | None:
        """See `HeldFiles.first`."""
        with unless_refused(*GONE):
            for name, status in pods_of(self._api, self._job, "0"):
                return PodChannel(self._api, name, command) if status["phase"] == "Running" else None
        return None


class GateTransport(HelperTransport):
    """Files and commands on the shared volume, through a pod that ends by itself when its time is over."""

    def __init__(self, api: Api, gate: Mapping[str, Any], python: str) -> None:
        super().__init__(gate["metadata"]["name"], python, "the pod that reaches the volume,", api.where)
        self._api, self._gate = api, gate

    def start(self, command: Sequence[str]) -> PodChannel:
        """See `HelperTransport.start`."""
        return PodChannel(self._api, self.name, command)

    def status(self) -> tuple[bool, str, bool]:
        """See `HelperTransport.status`."""
        pod = self._api.get("pods", self.name) or self._api.create("pods", self._gate) or {"metadata": {}}
        status, leaves = pod.get("status") or {}, "deletionTimestamp" in pod["metadata"]
        ready = any(each.get("ready") for each in status.get("containerStatuses") or ())
        if status.get("phase") in ("Succeeded", "Failed") and not leaves:
            self._api.delete("pods", self.name)
        kind, why = waiting_of(pod)
        return status.get("phase") == "Running" and ready and not leaves, why, kind == "image"
