"""Messages between programs of ours: one JSON object a line. Standard library only, Python >= 3.9."""

from __future__ import annotations

import json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any


def encode_message(message: Mapping[str, Any]) -> bytes:
    """Return the line of one message."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def decode_message(line: bytes) -> dict[str, Any]:
    """Return the message of one line. Raises `ValueError` for what is none."""
    try:
        message = json.loads(line)
    except RecursionError:
        message = None
    if not isinstance(message, dict):
        raise ValueError("not a message")
    return message
