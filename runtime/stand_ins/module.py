"""`StandInModule`: a module whose names are looked up in the runtime when they are requested.

What the runtime does not have is a placeholder: importing it is harmless, using it raises with the replacement.
"""

from __future__ import annotations

import dis
import importlib
import sys
from types import FrameType, ModuleType
from typing import Any, NoReturn

import orc.runtime
from orc.runtime.core.parsing import nearest
from orc.runtime.stand_ins import names
from orc.runtime.stand_ins.package import PACKAGE


class StandInModule(ModuleType):
    """Module of the table."""

    def __getattr__(self, name: str) -> Any:
        """Return what *name* means in this module: a submodule, an object of the runtime, or a placeholder.

        Raises:
            ImportError: in ``from module import name``: there is no such name; says the nearest.
            AttributeError: the same, elsewhere.
        """
        value = self._find(name)
        if value is None:
            known = names.names_of(self.__name__)
            message = (
                f"module {self.__name__!r}, for which orc.runtime stands in, has no {name!r}{nearest(name, known)}"
            )
            if _is_import(sys._getframe(1)):
                raise ImportError(message, name=self.__name__)
            raise AttributeError(message, name=name, obj=self)
        setattr(self, name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        # Python puts a module into its package when it is imported; a name of the package goes before.
        if not (isinstance(value, ModuleType) and name in names.names_of(self.__name__)):
            super().__setattr__(name, value)

    def _find(self, name: str) -> Any:
        if f"{self.__name__}.{name}" in names.MODULES and name not in names.names_of(self.__name__):
            return importlib.import_module(f"{self.__name__}.{name}")
        if name == "__all__":  # for ``from module import *``
            return sorted(names.names_of(self.__name__) - names.ABSENT.keys())
        if name.startswith("__"):
            return names.VERSION if name == "__version__" else None
        if name not in names.names_of(self.__name__):
            return None
        if name in names.HERE:
            return getattr(importlib.import_module(names.HERE[name]), name)
        if name in orc.runtime.HOMES:
            return getattr(orc.runtime, name)
        return placeholder(name, names.hint(name))

    def __dir__(self) -> list[str]:
        return sorted({*vars(self), *names.names_of(self.__name__)})


def _is_import(frame: FrameType) -> bool:
    """Return True in the middle of a ``from ... import``: there Python replaces an `AttributeError`'s text."""
    code = frame.f_code.co_code
    return 0 <= frame.f_lasti < len(code) and dis.opname[code[frame.f_lasti]] == "IMPORT_FROM"


class Absent(type):
    """Metaclass of placeholders. `isinstance` and `issubclass` against one are false; any other use raises."""

    hint: str

    def _refuse(cls, what: str) -> str:
        return f"{PACKAGE}.{cls.__name__}{what} is not in orc.runtime, which stands in for {PACKAGE}. {cls.hint}"

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise `ImportError` with the nearest equivalent."""
        raise ImportError(cls._refuse("()"), name=PACKAGE)

    def __getattr__(cls, name: str) -> NoReturn:
        """Raise `AttributeError` with the nearest equivalent."""
        raise AttributeError(cls._refuse(f".{name}"))

    def __instancecheck__(cls, instance: object) -> bool:
        """No object is one of something that is absent."""
        return False

    def __repr__(cls) -> str:
        return f"<{PACKAGE}.{cls.__name__}: absent>"


def placeholder(name: str, hint: str) -> Absent:
    """Return the placeholder of *name*; *hint* is a sentence that names the nearest equivalent."""
    return Absent(name, (), {"hint": hint, "__doc__": f"Absent. {hint}", "__module__": PACKAGE})
