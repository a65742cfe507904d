"""Files of an attempt that must not outlive it: the agents remove them, and the observer of the end does once more.

One of them holds the token by which agents know each other where their hosts share no file system.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from orc.launchers.agent.records import CONFIDENTIAL

if TYPE_CHECKING:
    from orc.launchers.remote.transport import Transport


def new_link_token() -> str:
    """Return a self-signed certificate and its key in PEM; its holders belong to the attempt."""
    from cryptography import x509  # 0.1 s, for attempts on several hosts alone
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "orc")])
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    # Valid whatever a host believes the time to be: it ends with its attempt, whose files are removed.
    builder = builder.not_valid_before(datetime(1970, 1, 1, tzinfo=UTC))
    builder = builder.not_valid_after(datetime(9999, 12, 31, tzinfo=UTC))
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return (builder.sign(key, hashes.SHA256()).public_bytes(pem) + private).decode()


_PER_CALL = 500
_TIMEOUT_S = 60.0
# With what a writer that was killed has left of them.
_REMOVE = "for d; do rm -f -- {}; done".format(" ".join(f'"$d/{name}" "$d"/.{name}.*.tmp' for name in CONFIDENTIAL))


def remove_confidential(transport: Transport, directories: Sequence[str]) -> None:
    """Remove them from attempts that have ended, which agents that were killed have not done. Raises `LaunchError`.

    One call for many. What a file system refuses stays: that the attempt has ended must be told all the same.
    """
    for start in range(0, len(directories), _PER_CALL):
        some = directories[start : start + _PER_CALL]
        transport.run(["/bin/sh", "-c", _REMOVE, "sh", *some], timeout_s=_TIMEOUT_S)
