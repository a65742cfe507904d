"""The API server: HTTP over the store, logs, and commands in pods over the real websocket protocol."""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import os
import pty
import re
import socket
import struct
import subprocess
import termios
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from kubernetes_nodes import Cluster, Process, total
from kubernetes_store import CLUSTER_WIDE, GROUPS, KINDS, VERSION, ApiError, Store

_PATH = re.compile(
    r"/(?:api/v1|apis/(?P<group>[^/]+)/[^/]+)(?:/namespaces/(?P<space>[^/]+))?"
    r"/(?P<resource>[^/]+)(?:/(?P<name>[^/]+))?(?:/(?P<sub>[^/]+))?$"
)
_VERBS = {"GET": "get", "POST": "create", "PATCH": "patch", "PUT": "update", "DELETE": "delete"}
GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


class Server:
    """An API server on a port of this machine, with its cluster below *home*."""

    def __init__(self, home: Path) -> None:
        self.store = Store()
        self.cluster = Cluster(self.store, home)
        self.token = "valid"
        self.forbidden: set[tuple[str, str]] = set()  # verb, resource
        self.quota: dict[str, float] = {}  # of the namespace: count/jobs.batch, requests.nvidia.com/gpu, ...
        self.fault: Callable[[str, str], str] = lambda method, path: ""  # cut before, cut after, or a status
        self.requests: list[tuple[str, str, bytes]] = []
        handler = type("Handler", (_Handler,), {"server_": self})
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.http.daemon_threads = True
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http.server_port}"

    def stop(self) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.cluster.stop()

    def allow(self, verb: str, resource: str, group: str, space: str) -> None:
        if (verb, resource) in self.forbidden:
            kind = resource.partition("/")[0] + (f".{group}" if group else "")
            raise ApiError(
                403,
                "Forbidden",
                f'{kind} is forbidden: User "dev" cannot {verb} resource "{resource}" '
                f'in API group "{group}" in the namespace "{space}"',
            )

    def within_quota(self, resource: str, body: dict[str, Any], space: str) -> None:
        counted = {"jobs": "count/jobs.batch", "pods": "pods"}.get(resource, "")
        for what, most in self.quota.items():
            if what == counted:
                used, own = float(len(self.store.list(resource, space))), 1.0
            elif resource == "jobs" and what.startswith("requests."):
                device = what.removeprefix("requests.")
                used, own = sum(total(job, device) for job in self.store.list("jobs", space)), total(body, device)
            else:
                continue
            if used + own > most:
                numbers = f"requested: {what}={own:g}, used: {what}={used:g}, limited: {what}={most:g}"
                told = f"exceeded quota: compute, {numbers}"
                raise ApiError(403, "Forbidden", f'{resource} "{body["metadata"]["name"]}" is forbidden: {told}')


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_: Server

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def answer(self, data: Any, status: int = 200, kind: str = "application/json") -> None:
        body = data if isinstance(data, bytes) else json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def handle_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server_.requests.append((self.command, self.path, body))
        fault = self.server_.fault(self.command, self.path)
        if fault == "before":
            self.close_connection = True
            return
        try:
            if fault.isdigit():
                raise ApiError(int(fault), "InternalError", "the server is not well")
            if self.server_.token and self.headers.get("Authorization") != f"Bearer {self.server_.token}":
                raise ApiError(401, "Unauthorized", "Unauthorized")
            parts = urlsplit(self.path)
            query = {key: values[-1] for key, values in parse_qs(parts.query, keep_blank_values=True).items()}
            answer = self.route(parts.path, query, parse_qs(parts.query), json.loads(body or b"{}"))
            if fault == "after":
                self.close_connection = True
            elif answer is not None:
                self.answer(answer, 201 if self.command == "POST" else 200)
        except ApiError as error:
            self.answer(error.to_dict(), error.code)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = handle_any

    def route(self, path: str, query: dict[str, str], many: dict[str, list[str]], body: Any) -> Any:
        if path in DISCOVERY:
            return DISCOVERY[path]
        if path.endswith("/selfsubjectaccessreviews"):
            asked = body["spec"]["resourceAttributes"]
            full = "/".join(filter(None, (asked["resource"], asked.get("subresource", ""))))
            return {**body, "status": {"allowed": (asked["verb"], full) not in self.server_.forbidden}}
        match = _PATH.fullmatch(path)
        if match is None or match["resource"] not in KINDS:
            space = re.fullmatch(r"/api/v1/namespaces(?:/([^/]+))?", path)
            if space is None:
                raise ApiError(404, "NotFound", "the server could not find the requested resource")
            return self.objects("namespaces", "", "", space[1] or "", query, body)
        resource, space, name, sub = match["resource"], match["space"] or "", match["name"] or "", match["sub"] or ""
        verb = _VERBS[self.command] if name or self.command != "GET" else "list"
        if sub in ("exec", "log"):
            self.server_.allow("get" if sub == "log" else "create", f"{resource}/{sub}", "", space)
            return getattr(self, sub)(space, name, query, many)
        self.server_.allow(verb, resource, match["group"] or "", space)
        return self.objects(resource, match["group"] or "", space, name, query, body)

    def objects(self, resource: str, group: str, space: str, name: str, query: dict[str, str], body: Any) -> Any:
        store, labels, fields = self.server_.store, query.get("labelSelector", ""), query.get("fieldSelector", "")
        kind = {"apiVersion": GROUPS.get(resource, "v1"), "kind": KINDS[resource]}
        if self.command == "POST":
            self.server_.within_quota(resource, body, space)
            if resource == "pods":
                body = {**body, "status": {"phase": "Pending"}}
            return {**kind, **store.create(resource, space, body, dry=query.get("dryRun") == "All")}
        if self.command in ("PATCH", "PUT"):
            return {**kind, **store.patch(resource, space, name, body)}
        if self.command == "DELETE":
            grace = query.get("gracePeriodSeconds", (body or {}).get("gracePeriodSeconds"))
            return {**kind, **store.delete(resource, space, name, None if grace is None else float(grace))}
        if name:
            return {**kind, **store.get(resource, space, name)}
        with store.lock:
            items = store.list(resource, space, labels, fields)
            meta: dict[str, Any] = {"resourceVersion": str(store.version)}
        start, most = int(query.get("continue") or 0), int(query.get("limit") or 0)
        if most and start + most < len(items):
            meta["continue"] = str(start + most)
        return {
            **kind,
            "kind": f"{kind['kind']}List",
            "metadata": meta,
            "items": [{**kind, **item} for item in items[start : start + most if most else None]],
        }

    # -- pods

    def process(self, space: str, name: str) -> Process:
        pod = self.server_.store.get("pods", space, name)
        process = self.server_.cluster.processes.get(pod["metadata"]["uid"])
        if process is None:
            raise ApiError(
                400, "BadRequest", f'container "main" in pod "{name}" is waiting to start: ContainerCreating'
            )
        return process

    def log(self, space: str, name: str, query: dict[str, str], _: Any) -> None:
        process = self.process(space, name)
        lines = (process.home / "main.log").read_bytes().splitlines(keepends=True)
        self.answer(b"".join(lines[-int(query.get("tailLines") or len(lines) or 1) :]), kind="text/plain")

    def exec(self, space: str, name: str, query: dict[str, str], many: dict[str, list[str]]) -> None:
        process = self.process(space, name)
        if process.popen.poll() is not None:
            raise ApiError(400, "BadRequest", "cannot exec into a container in a completed pod")
        offered = [word.strip() for word in self.headers.get("Sec-WebSocket-Protocol", "").split(",")]
        chosen = next((p for p in ("v5.channel.k8s.io", "v4.channel.k8s.io") if p in offered), "")
        if self.headers.get("Upgrade", "").lower() != "websocket" or not chosen:
            raise ApiError(400, "BadRequest", "unable to upgrade: websocket with v4 or v5.channel.k8s.io required")
        key = self.headers["Sec-WebSocket-Key"].encode()
        self.send_response(101)
        for header, value in (
            ("Upgrade", "websocket"),
            ("Connection", "Upgrade"),
            ("Sec-WebSocket-Protocol", chosen),
            ("Sec-WebSocket-Accept", base64.b64encode(hashlib.sha1(key + GUID).digest()).decode()),
        ):
            self.send_header(header, value)
        self.end_headers()
        self.wfile.flush()
        self.close_connection = True
        Exec(self.connection, self.rfile, chosen).run(process, many["command"], query.get("tty") == "true")


class Exec:
    """One command in a pod, and the websocket that its streams are channels of."""

    def __init__(self, connection: socket.socket, reader: Any, protocol: str) -> None:
        self.socket, self.reader, self.protocol = connection, reader, protocol
        self.sending = threading.Lock()

    def send(self, data: bytes, code: int = 2) -> None:
        size = len(data)
        head = bytes([0x80 | code])
        head += (
            bytes([size])
            if size < 126
            else struct.pack(">BH", 126, size)
            if size < 65536
            else struct.pack(">BQ", 127, size)
        )
        with self.sending:
            self.socket.sendall(head + data)

    def message(self) -> tuple[int, bytes] | None:
        """Return the next message of the client; `None` at the end."""
        whole, first = b"", 0
        while True:
            try:
                head = self.reader.read(2)
            except OSError:
                return None
            if len(head) < 2:
                return None
            size = head[1] & 127
            if size > 125:
                size = int.from_bytes(self.reader.read(2 if size == 126 else 8), "big")
            mask = self.reader.read(4) if head[1] & 128 else b"\0\0\0\0"
            data = self.reader.read(size)
            if len(data) < size:
                return None
            number = int.from_bytes(data, "little") ^ int.from_bytes((mask * (size // 4 + 1))[:size], "little")
            whole, first = whole + number.to_bytes(size, "little"), first or head[0] & 15
            if head[0] & 128:
                return first, whole

    def run(self, process: Process, command: list[str], tty: bool) -> None:
        try:
            argv = process.enter(command)
        except FileNotFoundError as error:
            self.finish({"status": "Failure", "message": str(error), "reason": "InternalError"})
            return
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        if tty:
            master, slave = pty.openpty()
            pipes = dict.fromkeys(pipes, slave)
            child = subprocess.Popen(
                argv,
                env=process.env,
                cwd="/",
                start_new_session=True,
                **pipes,
                preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            )
            os.close(slave)
            outputs, given = [(1, master)], master
        else:
            child = subprocess.Popen(argv, env=process.env, cwd="/", start_new_session=True, **pipes)
            outputs, given = [(1, child.stdout.fileno()), (2, child.stderr.fileno())], child.stdin.fileno()  # type: ignore[union-attr]
        pumps = [threading.Thread(target=self.pump, args=each, daemon=True) for each in outputs]
        for each in pumps:
            each.start()
        threading.Thread(target=self.feed, args=(child, given, tty), daemon=True).start()
        status = child.wait()
        for each in pumps:
            each.join(5)
        code = 128 - status if status < 0 else status
        causes = {"causes": [{"reason": "ExitCode", "message": str(code)}]}
        failure = {
            "status": "Failure",
            "reason": "NonZeroExitCode",
            "details": causes,
            "message": f"command terminated with non-zero exit code: exit status {code}",
        }
        self.finish(failure if code else {"status": "Success"})

    def finish(self, said: dict[str, Any]) -> None:
        try:
            self.send(b"\3" + json.dumps({"metadata": {}, **said}).encode())
            self.send(struct.pack(">H", 1000), 8)
        except OSError:
            return  # the client has gone

    def pump(self, channel: int, descriptor: int) -> None:
        try:
            while data := os.read(descriptor, 32768):
                self.send(bytes([channel]) + data)
        except OSError:
            return  # the end of a terminal, or the client has gone

    def feed(self, child: subprocess.Popen[bytes], descriptor: int, tty: bool) -> None:
        while (message := self.message()) is not None and message[0] != 8:
            code, data = message
            if code == 9:
                self.send(data, 10)
            elif data[:1] == b"\xff":
                if not tty and child.stdin:
                    child.stdin.close()
            elif data[:1] == b"\4" and tty:
                size = json.loads(data[1:])
                fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", size["Height"], size["Width"], 0, 0))
            elif data[:1] == b"\0":
                try:
                    view = memoryview(data)[1:]
                    while view:
                        view = view[os.write(descriptor, view) :]
                except OSError:
                    continue  # it reads no more
        if not tty and child.stdin and not child.stdin.closed:
            child.stdin.close()


def _resources(group: str, names: list[str]) -> dict[str, Any]:
    verbs = ["create", "delete", "get", "list", "patch", "watch"]
    short = {"pods": ["po"], "nodes": ["no"], "persistentvolumeclaims": ["pvc"]}
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": group,
        "resources": [
            {
                "name": name,
                "singularName": KINDS[name].lower(),
                "namespaced": name not in CLUSTER_WIDE,
                "kind": KINDS[name],
                "verbs": verbs,
                "shortNames": short.get(name, []),
            }
            for name in names
        ],
    }


def _group(name: str) -> dict[str, Any]:
    version = {"groupVersion": name, "version": name.partition("/")[2]}
    return {"name": name.partition("/")[0], "versions": [version], "preferredVersion": version}


DISCOVERY = {
    "/version": {"major": "1", "minor": VERSION.partition(".")[2], "gitVersion": f"v{VERSION}.0"},
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": [*map(_group, GROUPS.values())]},
    "/api/v1": _resources("v1", [name for name in KINDS if name not in GROUPS]),
    **{f"/apis/{group}": _resources(group, [name]) for name, group in GROUPS.items()},
}
