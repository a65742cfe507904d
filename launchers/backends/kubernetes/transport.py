"""The way into pods: a command over the API, and the gate, a pod that does nothing but reach the shared volume."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from orc.launchers.backends.kubernetes.api import TIMEOUT_S, ApiRefusal
from orc.launchers.backends.kubernetes.manifests import MAIN
from orc.launchers.backends.kubernetes.verdict import waiting_of
from orc.launchers.containers.transport import Channel, ContainerTransport
from orc.launchers.errors import BackendError, BackendUnreachable

if TYPE_CHECKING:
    from orc.launchers.backends.kubernetes.api import Api

START_S = 180.0  # for the gate: its image may have to be pulled
_PROTOCOLS = "v5.channel.k8s.io,v4.channel.k8s.io"
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
        self.sock.shutdown()


def _exit_status(said: Mapping[str, Any]) -> int:
    if said.get("status") == "Success":
        return 0
    causes = (said.get("details") or {}).get("causes") or ()
    codes = [int(each["message"]) for each in causes if each.get("reason") == "ExitCode"]
    if not codes:
        raise BackendError(str(said.get("message") or "it could not be started"))
    return codes[0]


class GateTransport(ContainerTransport):
    """Files and commands on the shared volume, through a pod that is made when it is needed and ends by itself."""

    def __init__(self, api: Api, gate: Mapping[str, Any], python: str) -> None:
        super().__init__("gate", python)
        self._api, self._gate, self._ready = api, gate, False

    def close(self) -> None:
        """See `Transport.close`. The gate stays for other processes, until its time is over."""
        self._ready = False

    def channel(self, command: Sequence[str]) -> PodChannel:
        """See `ContainerTransport.channel`."""
        name = str(self._gate["metadata"]["name"])
        for last in (False, True):
            if not self._ready:
                self._open(name)
            try:
                return PodChannel(self._api, name, command)
            except ApiRefusal as error:
                if last or error.code not in (400, 404, 409):
                    raise
                self._ready = False  # it has gone meanwhile
        raise AssertionError

    def _open(self, name: str) -> None:
        """Wait until the gate runs. Raises `BackendUnreachable` with what it waits for."""
        deadline = time.monotonic() + START_S
        while True:
            pod = self._api.get("pods", name) or self._api.create("pods", self._gate) or {}
            status, leaves = pod.get("status") or {}, "deletionTimestamp" in pod.get("metadata", {})
            ready = any(each.get("ready") for each in status.get("containerStatuses") or ())
            if status.get("phase") == "Running" and ready and not leaves:
                self._ready = True
                return
            if status.get("phase") in ("Succeeded", "Failed") and not leaves:
                self._api.delete("pods", name)
            waits, why = waiting_of(pod) if pod else ("", "")
            if waits == "image" or time.monotonic() > deadline:
                what = f"the pod {name}, which reaches the volume, does not start: {why or 'it is pending'}"
                raise (BackendError if waits == "image" else BackendUnreachable)(what, where=self._api.where)
            time.sleep(0.25)
