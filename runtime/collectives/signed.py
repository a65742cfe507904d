"""Pickles that the ranks of a run send each other, signed with the run's key: nothing else is unpickled.

A pickle may run code when it is read, and neither gloo nor NCCL knows who is at the other end.
"""

from __future__ import annotations

import hashlib
import hmac
from mmap import mmap

from orc.runtime.core.errors import ContextError

TAG = 32  # bytes in front of the content


def tag_of(content: bytes | memoryview | mmap, key: bytes) -> bytes:
    """The tag of *content*."""
    return hmac.new(key, content, hashlib.sha256).digest()  # `hmac.digest` takes no more than 2 GiB


def sign(content: bytes, key: bytes) -> bytes:
    """*content* behind its tag."""
    return tag_of(content, key) + content


def verified(message: bytes | memoryview, key: bytes) -> memoryview:
    """The content of what `sign` has made, in the memory of *message*. Raises `ContextError` for anything else."""
    tag, content = bytes(message[:TAG]), memoryview(message)[TAG:]
    if not hmac.compare_digest(tag, tag_of(content, key)):
        raise ContextError(
            "a message that should come from a rank of this run was not signed by one; it was not read. Ranks that "
            "were not started together have different keys, or somebody else on the network writes to this run's ports"
        )
    return content
