"""Programs of ours that run on hosts: modules of this package, sent ahead of their standard input to a new interpreter.

Nothing of them stands on a command line or on a disk over there. They are standard library alone, Python 3.9.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

_PACKING = threading.Lock()  # many hosts want the same at the same moment
_ROOT = Path(__file__).resolve().parents[2]
# Makes the modules when they are imported. An older Python gets as far as the message, so this is plain Python. What a
# program leaves behind is not marked as a command of the connection (`ssh.watchdog`).
_BOOT = """\
import os, sys, zlib
if sys.version_info < (3, 9): sys.exit("%s is too old: Python %d.%d.%d" % ((sys.executable,) + sys.version_info[:3]))
left, packed = int(sys.argv[1]), b""
while left:
    piece = os.read(0, left)
    if not piece: sys.exit("the program was cut off on its way")
    left, packed = left - len(piece), packed + piece
words = zlib.decompress(packed).decode().split("\\0")
sources = dict(zip(words[::2], words[1::2]))
class Shipped:
    def find_spec(name, path=None, target=None):
        return type(sys.__spec__)(name, Shipped, is_package=not sources[name]) if name in sources else None
    def create_module(spec):
        return None
    def exec_module(module):
        exec(compile(sources[module.__name__], "<%s>" % module.__name__, "exec"), module.__dict__)
sys.meta_path.insert(0, Shipped)
main = __import__(sys.argv[2], fromlist=["main"]).main
del sys.argv[1:3]
os.environ.pop("ORC_SSH_COMMAND", None)
main()
"""


@dataclass(frozen=True)
class Program:
    """The function ``main`` of a module below ``orc.launchers``, and the other modules that it may import.

    It takes no arguments, reads ``sys.argv[1:]``, and returns or raises `SystemExit`.
    """

    module: str  # such as "backends.ssh.host_program"
    others: tuple[str, ...] = ()  # those of the runtime under their full names, such as "orc.runtime.core.names"

    @property
    def packed(self) -> bytes:
        """The compressed modules, which a new interpreter reads from its standard input before anything else."""
        with _PACKING:
            return self._packed

    @cached_property
    def _packed(self) -> bytes:
        names = [full_name(name) for name in (self.module, *self.others)]
        modules = {package: "" for name in names for package in _packages(name)}
        modules.update({name: source(name) for name in names})
        return zlib.compress("\0".join(word for module in modules.items() for word in module).encode(), 9)

    def argv(self, python: str, arguments: Sequence[str] = ()) -> tuple[str, ...]:
        """The command of a new interpreter, which reads `packed` first."""
        return (python, "-I", "-S", "-c", _BOOT, str(len(self.packed)), full_name(self.module), *arguments)


def source(name: str) -> str:
    """Return the text of one of our modules."""
    path = _ROOT / f"{full_name(name).removeprefix('orc.').replace('.', '/')}.py"
    return path.read_text(encoding="utf-8")


def full_name(name: str) -> str:
    """Return the name of one of a program's modules, the package included."""
    return name if name.startswith("orc.") else f"orc.launchers.{name}"


def _packages(name: str) -> list[str]:
    words = name.split(".")
    return [".".join(words[:depth]) for depth in range(1, len(words))]
