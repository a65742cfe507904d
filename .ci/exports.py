"""Print ``runtime/__init__.pyi``: the public names as imports, for tools that do not run the package.

``make exports`` writes it, and a test compares it with what lies in the repository.
"""

from __future__ import annotations

import sys

import orc.runtime

HEAD = '''\
# ruff: noqa
# Written by `make exports` from the table in __init__.py.
"""Public API of the runtime for training scripts: ``from orc.runtime import Accelerator``."""

from orc.runtime import utils as utils
'''


def stub() -> str:
    """Return the text of the stub."""
    found = sorted((home, name) for name, home in orc.runtime.HOMES.items())
    imports = "".join(f"from orc.runtime.{home} import {name} as {name}\n" for home, name in found)
    names = "".join(f'    "{name}",\n' for name in orc.runtime.HOMES)
    return f"{HEAD}{imports}\nHOMES: dict[str, str]\n\n__all__ = [\n{names}]\n"


if __name__ == "__main__":
    sys.stdout.write(stub())
