"""A progress bar on one process of each machine."""

from __future__ import annotations

import importlib
from typing import Any

from orc.runtime.core.availability import is_package


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """Return `tqdm.auto.tqdm` that only the first process of each machine shows.

    Args:
        args: as for tqdm: the iterable.
        main_process_only: `False` shows one bar per process.
        kwargs: as for tqdm; ``disable=True`` shows none at all.

    Raises:
        ImportError: tqdm is not installed.

    Example:
        >>> for batch in tqdm(range(3), disable=True):
        ...     pass
    """
    if not is_package("tqdm"):
        raise ImportError("the progress bar needs tqdm: pip install tqdm")
    if main_process_only and not kwargs.get("disable"):
        from orc.runtime.core.context import current_context

        kwargs["disable"] = not current_context().is_local_main
    return importlib.import_module("tqdm.auto").tqdm(*args, **kwargs)
