"""The API server of one cluster: requests as plain JSON, and every refusal in words. The client library signs in."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from orc.launchers.backends.kubernetes.options import Access
from orc.launchers.containers.http import exchange, refusal, unless_refused
from orc.launchers.errors import BackendError, BackendUnreachable

_OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
PAGE = 500  # objects of a list in one answer
GROUPS = {"jobs": "batch/v1", "jobsets": "jobset.x-k8s.io/v1alpha2", "workloads": "kueue.x-k8s.io/v1beta1"}
_ROLE = "apiVersion: rbac.authorization.k8s.io/v1\nkind: Role\nmetadata: {name: orc, namespace: %s}\nrules:"
_RULE = '- {apiGroups: ["%s"], resources: [%s], verbs: [%s]}'
_OBJECTS, _OWNED = ("create", "get", "list", "delete"), ("create", "get", "list", "patch", "delete")
_NEEDED = {
    "jobs": _OBJECTS,
    "pods": _OBJECTS,
    "pods/exec": ("create", "get"),
    "pods/log": ("get",),
    **dict.fromkeys(("secrets", "services", "configmaps"), _OWNED),
    "persistentvolumeclaims": ("get", "list"),
    "events": ("list",),
}


def group_of(resource: str) -> str:
    """Return the API group of a resource; empty for the core."""
    return GROUPS.get(resource, "").partition("/")[0]


def needed(access: Access) -> dict[str, Sequence[str]]:
    """Return the verbs that orc needs by resource, with those of what the options say is installed."""
    more = {"jobsets": (_OBJECTS, "jobset"), "workloads": (("list",), "queue")}
    return {**_NEEDED, **{name: verbs for name, (verbs, key) in more.items() if getattr(access, key, None)}}


def role(access: Access, namespace: str) -> str:
    """Return the Role that allows that."""
    rules = [_RULE % (group_of(name), name, ", ".join(verbs)) for name, verbs in needed(access).items()]
    return "\n".join((_ROLE % namespace, *rules))


class Api:
    """The API server for one namespace. Raises `BackendUnreachable` without an answer, `ApiRefusal` for a no."""

    def __init__(self, access: Access, where: str) -> None:
        self.access, self.where = access, where

    def check_installed(self) -> None:
        """Raise `BackendUnreachable` where the client library is missing: another process may have it."""
        if importlib.util.find_spec("kubernetes") is None:
            what, hint = "the Kubernetes client is not installed here", "pip install 'orc-launch[k8s]'"
            raise BackendUnreachable(what, where=self.where, hint=hint)

    @cached_property
    def client(self) -> Any:
        """The library's client, with the credentials of the context or of the pod that this runs in."""
        self.check_installed()
        from kubernetes import client, config

        try:
            if not self.access.in_cluster:
                return config.new_client_from_config(self.access.kubeconfig, self.access.context)
            configuration = client.Configuration()
            config.load_incluster_config(client_configuration=configuration)
            return client.ApiClient(configuration)
        except (config.ConfigException, OSError, ValueError) as error:
            hint = "Check `context` and `kubeconfig` under `options:`; `kubectl config get-contexts` lists them."
            what = f"no way to the cluster: {' '.join(str(error).split())}"
            raise BackendError(what, where=self.where, hint=hint) from None

    @cached_property
    def namespace(self) -> str:
        """The namespace of the options, else that of the context."""
        if self.access.namespace:
            return self.access.namespace
        if self.access.in_cluster:
            return _OWN_NAMESPACE.read_text(encoding="utf-8").strip() if _OWN_NAMESPACE.exists() else "default"
        _ = self.client
        from kubernetes import config

        contexts, active = config.list_kube_config_contexts(self.access.kubeconfig)
        chosen = next((each for each in contexts if each["name"] == self.access.context), active)
        return str(chosen["context"].get("namespace") or "default")

    def close(self) -> None:
        """Close the connections."""
        if client := self.__dict__.pop("client", None):
            client.rest_client.pool_manager.clear()

    @property
    def host(self) -> str:
        """The URL of the API server."""
        return str(self.client.configuration.host).rstrip("/")

    def headers(self) -> dict[str, str]:
        """Return what says who asks; a token that has run out is renewed as the context says."""
        settings = self.client.configuration.auth_settings().values()
        return {each["key"]: each["value"] for each in settings if each["in"] == "header" and each["value"]}

    def path(self, resource: str, name: str = "", more: str = "") -> str:
        """Return the path of a resource of the namespace: ``jobs``, ``pods``, ..."""
        group = f"apis/{GROUPS[resource]}" if resource in GROUPS else "api/v1"
        return "/".join(filter(None, (f"/{group}/namespaces/{self.namespace}", resource, name, more)))

    def request(self, method: str, path: str, query: Mapping[str, Any] | None = None, body: Any = None) -> Any:
        """Return the JSON of the answer; a *body* of text is sent as it is. `Uncertain`: it may have worked."""
        return json.loads(self.content(method, path, query, body))

    def content(self, method: str, path: str, query: Mapping[str, Any] | None = None, body: Any = None) -> bytes:
        """Return the answer; see `request`."""
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        url = self.host + path + (f"?{urlencode(query)}" if query else "")
        headers = {**self.headers(), "accept": "application/json, text/plain", "content-type": kind}
        data = (body if isinstance(body, str) else json.dumps(body)).encode() if body is not None else None
        return exchange(self.client.rest_client.pool_manager, method, url, data, headers, self.refusal, self.where)

    def refusal(self, status: int, data: bytes) -> BackendError:
        """Return the error of an answer."""
        try:
            said = json.loads(data)
            what, kind = str(said["message"]), str((said.get("details") or {}).get("kind", ""))
        except (ValueError, KeyError, TypeError, AttributeError):
            what, kind = data.decode(errors="replace")[:200].strip() or f"status {status}", ""
        hint = ""
        if status == 401:
            what = "the API server does not accept the credentials; the token may have run out"
            hint = "Log in again, or correct `context` under `options:` of the cluster."
        elif status == 403 and "exceeded quota" in what:
            hint = "Ask for less, or wait until other jobs of the namespace have ended."
        elif status == 403:
            hint = f"This Role, bound to the account, is what orc needs:\n{role(self.access, self.namespace)}"
        elif status == 404 and kind == "namespaces":
            hint = "Correct `namespace` under `options:` of the cluster."
            status = 0  # it says nothing of the object
        return refusal(status, what, self.where, hint)

    def get(self, resource: str, name: str) -> dict[str, Any] | None:
        """Return an object; `None` when there is none."""
        return self._unless(404, "GET", self.path(resource, name))

    def create(self, resource: str, body: Mapping[str, Any] | str) -> dict[str, Any] | None:
        """Create an object; `None` when there is one of its name."""
        return self._unless(409, "POST", self.path(resource), body)

    def delete(self, resource: str, name: str) -> None:
        """Delete an object and what it owns; one that is not there is fine."""
        self._unless(404, "DELETE", self.path(resource, name), {"propagationPolicy": "Background"})

    def _unless(self, code: int, method: str, path: str, body: Any = None) -> dict[str, Any] | None:
        with unless_refused(code):
            return dict(self.request(method, path, body=body))
        return None

    def items(self, resource: str, labels: str = "", path: str = "") -> Iterator[dict[str, Any]]:
        """Yield the objects with these labels, in pages."""
        query: dict[str, Any] = {"limit": PAGE, **({"labelSelector": labels} if labels else {})}
        while True:
            page = self.request("GET", path or self.path(resource), query)
            yield from page["items"]
            if not (follow := page["metadata"].get("continue")):
                return
            query["continue"] = follow

    def list_cluster(self, resource: str) -> list[dict[str, Any]]:
        """Return the objects of the whole cluster; none where the account may not list them."""
        with unless_refused(403):
            return [*self.items(resource, path=f"/api/v1/{resource}")]
        return []
