"""The token by which the agents of an attempt know each other where their hosts share no file system."""

from __future__ import annotations

from datetime import UTC, datetime


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
