"""A command in a pod of an attempt, as ``kubectl exec``: ``python -m ... ACCESS plain|tty PYTHON JOB NODE WORDS...``"""

from __future__ import annotations

import json
import sys

from orc.launchers.backends.kubernetes.api import Api
from orc.launchers.backends.kubernetes.options import Access
from orc.launchers.backends.kubernetes.transport import PodChannel, pods_of
from orc.launchers.containers.transport import attach, attach_terminal
from orc.launchers.errors import BackendError, LaunchError


def main(arguments: list[str]) -> int:
    """Do what the command line says; returns the exit status."""
    access, mode, python, job, node, *words = arguments
    api = Api(Access.model_validate({key: value for key, value in json.loads(access).items() if value}), f"Job {job}")
    try:
        pod = next((name for name, each in pods_of(api, job, node) if each["phase"] == "Running"), "")
        if not pod:
            raise BackendError(f"the pod of node {node} does not run", where=f"Job {job}")
        if mode == "plain":
            return attach(lambda command: PodChannel(api, pod, command), python, words)
        channel = PodChannel(api, pod, words, tty=True)
        return attach_terminal(channel, channel.resize)
    except (LaunchError, OSError) as error:
        print(f"orc: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
