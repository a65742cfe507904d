"""Environment variables: reading them, and changing them for a while."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from orc.runtime.core.config import parse_bool

T = TypeVar("T")


@contextlib.contextmanager
def clear_environment() -> Iterator[None]:
    """A block in which the environment is empty. What the block sets is gone afterwards, also after an exception."""
    before = dict(os.environ)
    os.environ.clear()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def patch_environment(**kwargs: Any) -> Iterator[None]:
    """A block in which the variables *kwargs* (names in capitals) are set; they are as before afterwards.

    Example:
        >>> with patch_environment(omp_num_threads=1):
        ...     os.environ["OMP_NUM_THREADS"]
        '1'
    """
    changes = {name.upper(): str(value) for name, value in kwargs.items()}
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        _restore(before)


def _restore(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


_OURS = ("ORC_", "ACCELERATE_")


def purge_accelerate_environment(func_or_cls: T) -> T:
    """Decorator for tests: afterwards the ``ORC_`` and ``ACCELERATE_`` variables are as they were before.

    On a class it covers every method whose name begins with ``test``, those of classes derived from it too; on a
    coroutine function, the awaited call.

    Args:
        func_or_cls: the test function, or the class of tests.

    Returns:
        *func_or_cls*, wrapped.
    """
    import inspect

    if isinstance(func_or_cls, type):
        _purge_methods(func_or_cls)
        inherited = func_or_cls.__init_subclass__

        def derived(cls: type, /, **kwargs: Any) -> None:
            if hasattr(inherited, "__func__"):  # its own, or that of a class above; object's has nothing to do
                inherited.__func__(cls, **kwargs)
            _purge_methods(cls)

        func_or_cls.__init_subclass__ = classmethod(derived)  # type: ignore[assignment]
        return func_or_cls
    function: Any = func_or_cls
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def awaiting(*args: Any, **kwargs: Any) -> Any:
            with _our_variables_kept():
                return await function(*args, **kwargs)

        return awaiting  # type: ignore[return-value]

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with _our_variables_kept():
            return function(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


def _purge_methods(cls: type) -> None:
    for name, member in list(vars(cls).items()):
        if not name.startswith("test"):
            continue
        if isinstance(member, staticmethod | classmethod):
            setattr(cls, name, type(member)(purge_accelerate_environment(member.__func__)))
        elif callable(member):
            setattr(cls, name, purge_accelerate_environment(member))


@contextlib.contextmanager
def _our_variables_kept() -> Iterator[None]:
    before = {name: value for name, value in os.environ.items() if name.startswith(_OURS)}
    try:
        yield
    finally:
        for name in [name for name in os.environ if name.startswith(_OURS)]:
            del os.environ[name]
        os.environ.update(before)


def str_to_bool(value: str) -> int:
    """Return 1 for ``y yes t true on 1``, 0 for ``n no f false off 0``, any case. Raises `ValueError` for others.

    Args:
        value: the word.
    """
    if not value.strip():
        raise ValueError(f"invalid truth value {value!r}")
    try:
        return int(parse_bool(value))
    except ValueError:
        raise ValueError(f"invalid truth value {value!r}") from None


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """Return the truth value of the variable *key*; *default* when it is not set."""
    return bool(_parsed(key, str_to_bool, default))


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """Return the variable *key* as text; *default* when it is not set."""
    return os.environ.get(key, str(default))


def get_int_from_env(env_keys: Iterable[str], default: int) -> int:
    """Return the first of the variables *env_keys* that holds a whole number from 0 on; *default* when none does."""
    for key in env_keys:
        value: int = _parsed(key, int, -1)
        if value >= 0:
            return value
    return default


def _parsed(key: str, parse: Callable[[str], Any], default: Any) -> Any:
    text = os.environ.get(key)
    if text is None:
        return default
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(f"{key}={text!r}: {error}") from None


def are_libraries_initialized(*library_names: str) -> list[str]:
    """Return those of *library_names* that this process has imported already."""
    import sys

    return [name for name in library_names if name in sys.modules]
