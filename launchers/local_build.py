"""The installation that runs, as a wheel: what other machines install so that they have the very same orc.

Nothing is built: a wheel is an archive of the packages and of their metadata, and both are here, in a checkout too.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import io
import zipfile
from pathlib import Path

from orc.launchers.errors import LaunchError

PACKAGE = "orc-launch"
_ROOMS = ("launch", "launchers", "orchestrator", "runtime", "templates")
_WHEEL = "Wheel-Version: 1.0\nGenerator: orc\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
_DATE = (1980, 1, 1, 0, 0, 0)  # the same files make the same archive


def wheel() -> tuple[str, bytes]:
    """Return the file name and the bytes of the wheel of this installation.

    Its version has a label that follows from the content, so that pip replaces another build of the same version.
    Raises `LaunchError` where the installation is not complete.
    """
    from importlib import metadata  # late: it takes long

    try:
        distribution = metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError:
        raise LaunchError(f"{PACKAGE} is not installed here", hint="pip install it first.") from None
    files = {f"orc/{room}/{path}": content for room in _ROOMS for path, content in _files(_folder(room)).items()}
    digest = hashlib.sha256(b"".join(name.encode() + files[name] for name in sorted(files))).hexdigest()[:12]
    version = f"{distribution.version.partition('+')[0]}+local.{digest}"
    folder = f"{PACKAGE.replace('-', '_')}-{version}"
    described = (distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or "").replace(
        f"\nVersion: {distribution.version}\n", f"\nVersion: {version}\n", 1
    )
    files[f"{folder}.dist-info/METADATA"] = described.encode()
    files[f"{folder}.dist-info/WHEEL"] = _WHEEL.encode()
    files[f"{folder}.dist-info/entry_points.txt"] = (distribution.read_text("entry_points.txt") or "").encode()
    records = [f"{name},sha256={_hash(content)},{len(content)}" for name, content in sorted(files.items())]
    record = f"{folder}.dist-info/RECORD"
    files[record] = ("\n".join([*records, f"{record},,"]) + "\n").encode()
    return f"{folder}-py3-none-any.whl", _zipped(files)


def _folder(room: str) -> Path:
    found = importlib.util.find_spec(f"orc.{room}")
    if found is None or not found.submodule_search_locations:
        raise LaunchError(f"orc.{room} is missing from this installation", hint="Install it again.")
    return Path(next(iter(found.submodule_search_locations)))


def _files(folder: Path) -> dict[str, bytes]:
    paths = (path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file())
    return {
        path.as_posix(): (folder / path).read_bytes()
        for path in paths
        if "__pycache__" not in path.parts and path.suffix != ".pyc"
    }


def _hash(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")


def _zipped(files: dict[str, bytes]) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in sorted(files.items()):
            archive.writestr(zipfile.ZipInfo(name, _DATE), content, zipfile.ZIP_DEFLATED)
    return target.getvalue()
