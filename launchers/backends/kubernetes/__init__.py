"""Kubernetes: an attempt is one indexed Job. It is rendered without the client library and without a network."""

from orc.launchers.backends.kubernetes.backend import KubernetesBackend

BACKEND = KubernetesBackend

__all__ = ["BACKEND", "KubernetesBackend"]
