"""Names of files that come from outside: in manifests, indexes, archives and records of whoever wrote them.

Standard library alone, Python 3.9: this module also travels to hosts by itself.
"""

from __future__ import annotations

import re

# An absolute path, an empty part, `.` or `..`, with either separator; a drive; control characters and line separators,
# which are no path's business and a log's or terminal's danger; halves of characters, which no file system takes.
_UNSAFE = re.compile(r"(?:^|[/\\])\.{0,2}(?:[/\\]|\Z)|^[A-Za-z]:[/\\]|[\x00-\x1f\x7f-\x9f\u2028\u2029]|[\ud800-\udfff]")


def safe_relative_name(name: str) -> str:
    """Return *name* if, below any directory without symbolic links, it can only be a file inside of it.

    Raises:
        ValueError: it could lead anywhere else, or is no name.
    """
    if _UNSAFE.search(name):
        raise ValueError(f"{name!r} is not the relative name of a file")
    return name


def safe_name(name: str) -> str:
    """Return *name* if it is one part of a path, see `safe_relative_name`. Raises `ValueError`."""
    if "/" in safe_relative_name(name):
        raise ValueError(f"{name!r} is not the name of a file")
    return name
