"""`StandInDistribution`: metadata of a package that is stood in for, as ``importlib.metadata`` reads it."""

from __future__ import annotations

import os
from importlib.metadata import Distribution

from orc.runtime.stand_ins.package import PACKAGE, VERSION

_METADATA = f"""Metadata-Version: 2.1
Name: {PACKAGE}
Version: {VERSION}
Summary: orc.runtime stands in for it
Home-page: https://github.com/huggingface/{PACKAGE}
"""  # Sentence Transformers takes a package for the one it wants by its home page
_FILES = {
    "METADATA": _METADATA,
    "top_level.txt": f"{PACKAGE}\n",
}


class StandInDistribution(Distribution):
    """Distribution without files."""

    def read_text(self, filename: str) -> str | None:
        """Return the text of one of the metadata's files; `None` for those that it does not have."""
        return _FILES.get(filename)

    def locate_file(self, path: str | os.PathLike[str]) -> os.PathLike[str]:  # type: ignore[override]
        """Raise: there are no files."""
        raise FileNotFoundError(f"{os.fspath(path)}: {PACKAGE} is stood in for by orc.runtime and has no files")
