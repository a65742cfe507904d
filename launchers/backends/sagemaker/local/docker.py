"""Training jobs in docker, SageMaker's documented local mode: a container for each host, on a network of their own."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orc.launchers.backends.sagemaker.local.containers import Containers

_COMMAND_S = 120.0


def network_command(spec: Mapping[str, Any]) -> list[str]:
    """Makes the network on which the hosts find each other by name; a private one has no way out."""
    job = str(spec["job"])
    private = ["--internal"] if spec["network"] == "private" else []
    return ["docker", "network", "create", *private, "--label", f"orc={job}", job]


def variables(host: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment of a host's processes, without variables that mean nothing in an image."""
    ours = ("PATH", "HOME", "PYTHONUSERBASE", "HOSTNAME")
    return {name: value for name, value in host["env"].items() if name not in ours}


def run_command(spec: Mapping[str, Any], host: Mapping[str, Any]) -> list[str]:
    """Runs one host of *spec* (see `training.Training.start`) in the foreground.

    The values of its variables come from the environment of docker's client: a command line is for everybody to read.
    """
    job, name = str(spec["job"]), str(host["name"])
    entry, *arguments = host["argv"]
    mounts = [f"type=bind,source={host['ml']},target=/opt/ml"]
    mounts += [f"type=bind,source={source},target=/opt/ml/{target}" for target, source in host["binds"].items()]
    return [
        *("docker", "run", "--rm", "--init=false", "--name", f"{job}-{name}", "--hostname", name),
        *("--network", job, "--network-alias", name, "--label", f"orc={job}"),
        *("--shm-size", "1g"),
        *(("--gpus", "all") if spec["gpus"] else ()),
        *(word for name in sorted(variables(host)) for word in ("--env", name)),
        *(word for mount in mounts for word in ("--mount", mount)),
        *("--entrypoint", str(entry), str(spec["image"]), *map(str, arguments)),
    ]


def kill_command(job: str, host: str, signal: str) -> list[str]:
    """Sends a signal to the first process of one host."""
    return ["docker", "kill", "--signal", signal, f"{job}-{host}"]


class DockerContainers(Containers):
    """`Containers` in docker."""

    def __init__(self, path: Path, spec: Mapping[str, Any]) -> None:
        super().__init__(path, spec)
        self.job = str(spec["job"])
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._run(network_command(spec))
        for host in spec["hosts"]:
            _rename_interface(Path(host["ml"]) / "input/config/resourceconfig.json")
            with Path(host["log"]).open("ab") as log:
                self._processes[host["name"]] = subprocess.Popen(
                    run_command(spec, host),
                    env={**os.environ, **variables(host)},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )

    def __exit__(self, *_: object) -> None:
        """Nothing stays: neither containers nor their network."""
        self.send("kill")
        for process in self._processes.values():
            process.wait()
        self._run(["docker", "network", "rm", self.job])

    def send(self, command: str) -> None:
        """``term`` or ``kill`` to every host that runs."""
        for host in sorted(self.running):
            self._run(kill_command(self.job, host, "SIG" + command.upper()), may_fail=True)  # it may have just ended

    def wait(self, timeout_s: float) -> None:
        """Take note of who has ended."""
        time.sleep(timeout_s)
        for host in sorted(self.running):
            status = self._processes[host].poll()
            if status is not None:
                self.running.discard(host)
                self.ended[host] = 128 - status if status < 0 else status

    def _run(self, argv: list[str], *, may_fail: bool = False) -> None:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_COMMAND_S, check=False)
        if done.returncode and not may_fail:
            self.error = self.error or f"{' '.join(argv[:3])}: {done.stderr.strip()}"


def _rename_interface(path: Path) -> None:
    """On a network of docker the interface is called eth0."""
    resources = json.loads(path.read_text())
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps({**resources, "network_interface_name": "eth0"}))
    os.replace(temporary, path)  # noqa: PTH105 - one step
