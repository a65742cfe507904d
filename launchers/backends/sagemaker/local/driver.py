"""The process that runs one training job on this machine: ``python -m …local.driver DIRECTORY LOCK``.

It holds the file descriptor *LOCK* (inherited, locked) as long as it lives. ``request.json`` says what to do,
``status.json`` what has become of it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from orc.launchers.agent.network import Port
from orc.launchers.backends.sagemaker.local.containers import NamespaceContainers
from orc.launchers.backends.sagemaker.local.docker import DockerContainers
from orc.launchers.backends.sagemaker.local.storage import LocalStorage
from orc.launchers.backends.sagemaker.local.training import PlatformSettings, Training
from orc.launchers.remote.files import write_file


def main(directory: Path) -> int:
    """Run the job to its end."""
    request = json.loads((directory / "request.json").read_bytes())

    def note(state: dict[str, Any]) -> None:
        write_file(str(directory / "status.json"), json.dumps(state).encode(), 0o600)

    storage = LocalStorage(directory.parent.parent / "s3")
    if request["Mode"] == "docker":
        platform = PlatformSettings(private_network=False, engine=DockerContainers)
    else:
        # All hosts share the ports of this machine, also with other jobs: not the one that the plan names.
        port = Port()
        env = {"ORC_SAGEMAKER_PORT": str(port.number)}
        platform = PlatformSettings(private_network=False, env=env, engine=NamespaceContainers)
    Training(request, directory, storage, platform, on_change=note).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
