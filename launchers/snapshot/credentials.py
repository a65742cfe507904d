"""Files of a working tree that hold credentials: they travel with the job unless excluded, so they are named."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from orc.launchers.findings import Finding

_SHOWN = 5
_BYTES = 4096  # in which a file shows that it holds a private key
_PRIVATE_KEY = re.compile(rb"-----BEGIN [A-Z0-9 ]*PRIVATE KEY( BLOCK)?-----")
# By their names alone. What is a template for others to fill in is none.
_NAMED = re.compile(
    r"""(?:^|/)(?:
        \.env(?:\.(?!(?:example|sample|template|dist|defaults?)$)[^/]+)?
        | id_(?:rsa|dsa|ecdsa|ed25519)(?:_sk)? | [._]netrc | \.pgpass | \.git-credentials | \.pypirc | \.htpasswd
        | \.aws/credentials | \.kube/config | \.docker/config\.json
        | [^/]+\.(?:p12|pfx|jks|keystore|kdbx|ppk)
    )$""",
    re.VERBOSE,
)
# These may also hold certificates or public keys: their content tells.
_PERHAPS = re.compile(r"\.(?:pem|key|asc|gpg)$|(?:credential|service.?account)[^/]*\.json$", re.IGNORECASE)


def credential_findings(sources: Mapping[str, bytes]) -> list[Finding]:
    """Return a warning that names the files with credentials among *sources* (path in the tree -> place on disk)."""
    found = [path for path, full in sources.items() if _NAMED.search(path) or (_PERHAPS.search(path) and _holds(full))]
    if not found:
        return []
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return [
        Finding(
            "warning",
            f"the snapshot holds what looks like credentials: {', '.join(sorted(found)[:_SHOWN])}{more}",
            hint="Exclude them in .orcignore or workdir.exclude, and pass values to the ranks by `secrets:`.",
        )
    ]


def _holds(path: bytes) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False  # gone since the tree was read
    try:
        return _PRIVATE_KEY.search(os.read(fd, _BYTES)) is not None
    finally:
        os.close(fd)
