"""Placeholders for what the runtime does not have: importing one is harmless, using it raises with the replacement."""

from __future__ import annotations

from typing import Any, NoReturn

from orc.runtime.stand_ins.package import PACKAGE


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
