"""Programs of ours that run on hosts: some of the modules of this package, packed so that they can be sent.

Nothing of them stands on a command line or on a disk over there. Where an interpreter runs already that was started
like a new one would be, a program is brought to it once and runs in a copy of it (`ssh.remote_fork`); else a new one
reads it from its standard input.
"""

from __future__ import annotations

import marshal
import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.machinery import SourceFileLoader
from pathlib import Path

from orc.launchers.remote.shipped import CODE

_PACKING = threading.Lock()  # many hosts want the same at the same moment
_HERE = Path(__file__).resolve().parents[1]
_ROOT = "orc.launchers"
# Reads what it is told to read and becomes that. Pythons older than we need say so themselves.
_BOOT = """\
import os,sys
if sys.version_info<(3,9):sys.exit("orc: this is Python %d.%d, 3.9 or newer is needed"%sys.version_info[:2])
m,n=int(sys.argv[1]),int(sys.argv[2]);b=b""
while len(b)<n:
 d=os.read(0,n-len(b))
 if not d:sys.exit("orc: cut off")
 b+=d
exec(b[:m]);run(b[m:],sys.argv[3:])
"""


@dataclass(frozen=True)
class Program:
    """The function ``main`` of a module below ``orc.launchers``, and the other modules that it may import.

    It takes no arguments, reads ``sys.argv[1:]``, and returns or raises `SystemExit`.
    """

    module: str  # such as "backends.ssh.host_program"
    others: tuple[str, ...] = ()  # those of the runtime under their full names, such as "orc.runtime.names"

    def packed(self, code: str = "") -> bytes:
        """What is sent: byte code for a Python with that (`shipped.CODE`) like ours, else the source."""
        coded = code == CODE
        with _PACKING:
            if coded not in self._forms:
                self._forms[coded] = self._pack(_code if coded else source)
            return self._forms[coded]

    @cached_property
    def _forms(self) -> dict[bool, bytes]:
        return {}

    def _pack(self, form: Callable[[str], str | bytes]) -> bytes:
        modules: dict[str, str | bytes | None] = {}
        for name in (self.module, *self.others):
            above = full_name(name).split(".")[:-1]
            modules.update({".".join(above[: depth + 1]): None for depth in range(len(above))})
        modules.update({full_name(name): form(name) for name in (self.module, *self.others)})
        return zlib.compress(marshal.dumps((f"{_ROOT}.{self.module}", modules), 2), 9)

    @cached_property
    def preface(self) -> bytes:
        """What a new interpreter reads from its standard input before anything else."""
        return source("remote.shipped").encode() + self.packed()

    def argv(self, python: str, arguments: Sequence[str] = ()) -> tuple[str, ...]:
        """The command of a new interpreter, which reads `preface` first."""
        size = len(self.preface)
        return (python, "-I", "-S", "-c", _BOOT, str(size - len(self.packed())), str(size), *arguments)


def source(name: str) -> str:
    """The text of one of our modules."""
    return _file(name).read_text(encoding="utf-8")


def _code(name: str) -> bytes:
    """The byte code of one of our modules, which this Python has at hand as a rule."""
    loader = SourceFileLoader(full_name(name), str(_file(name)))
    return marshal.dumps(loader.get_code(loader.name))


def full_name(name: str) -> str:
    """The name of one of a program's modules, the package included."""
    return name if name.startswith("orc.") else f"{_ROOT}.{name}"


def _file(name: str) -> Path:
    return _HERE.parent / f"{full_name(name).removeprefix('orc.').replace('.', '/')}.py"
