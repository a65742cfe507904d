"""`python -m orc.launch` and the script `orc-launch`: other spellings of `orc launch`."""

from __future__ import annotations

import sys
from typing import NoReturn


def main() -> NoReturn:
    """Run ``orc launch`` with the arguments of this process, and end it with the exit status."""
    from orc.orchestrator.cli.main import main as orc

    sys.argv[1:1] = ["launch"]
    sys.exit(orc())
