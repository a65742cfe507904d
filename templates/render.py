"""Rendering a template: ``render("slurm/job.sbatch.j2", attempt=...)``. Undefined names are errors, never blanks."""

from __future__ import annotations

import functools
import shlex
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment


@functools.cache
def _environment() -> Environment:
    # Imported here: jinja2 takes longer to import than everything else that a render needs.
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(  # noqa: S701 - shell scripts, not HTML: `sh` and `words` do the quoting
        loader=PackageLoader("orc.templates", package_path=""),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        auto_reload=False,
    )
    environment.filters["sh"] = lambda value: shlex.quote(str(value))
    environment.filters["words"] = lambda values: shlex.join(str(value) for value in values)
    environment.filters["path"] = lambda value: _path(str(value))
    environment.filters["paths"] = lambda values: " ".join(_path(str(value)) for value in values)
    return environment


def _path(value: str) -> str:
    """Quote one shell word; a leading ``~/`` is the home directory of the user who runs the script."""
    return f"~/{shlex.quote(value[2:])}" if value.startswith("~/") else shlex.quote(value)


def render(name: str, /, **values: Any) -> str:
    """The text of template *name* (a path below ``templates/``).

    Filters: ``sh`` quotes one shell word, ``words`` a list of them; ``path`` and ``paths`` do so and leave a leading
    ``~/`` to the shell. Raises `jinja2.UndefinedError` for a name that the
    template uses and *values* lacks.
    """
    return _environment().get_template(name).render(**values)
