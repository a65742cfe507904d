"""The program of a container: who it is, the platform says in variables."""

import os
import sys

from orc.launchers.containers.program import Container, main


def describe() -> Container:
    return Container(
        platform="pods",
        hosts=os.environ["POD_HOSTS"].split(","),
        node=int(os.environ["POD_NODE"]),
        inputs="/mnt/input",
        archive="/mnt/source.tar.gz",
    )


sys.exit(main(describe))
