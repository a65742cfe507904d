"""Program of containers whose platform says nothing but a number: their inputs lie in a directory.

``entry.pyz PLATFORM DIRECTORY VARIABLE ARCHIVE REPORT``: the variable holds the number of the container, the hosts are
those of ``agent.json``. Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import os
import sys

from orc.launchers.containers.program import Container, main, read_json


def describe() -> Container:
    """Return this container, from the arguments."""
    platform, inputs, variable, archive, report = sys.argv[1:]
    hosts = [str(host["address"]) for host in read_json(f"{inputs}/agent.json")["hosts"]]
    return Container(platform, hosts, int(os.environ[variable]), inputs, archive, report=report)


if __name__ == "__main__":
    sys.exit(main(describe, failure=sys.argv[5]))
