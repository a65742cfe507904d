"""Messages: the words and the bytes of one notification. Pure."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from email.message import EmailMessage
from email.utils import format_datetime
from typing import Any

from orc.launchers.control_characters import escape_controls

_WORDS = {
    "start": "runs",
    "success": "has succeeded",
    "failure": "has failed",
    "cancelled": "was cancelled",
    "requeue": "goes back into the queue",
    "stall": "has stalled",
    "test": "is a test of this target",
}
_REASON_LENGTH = 1500


def headline(payload: Mapping[str, Any]) -> str:
    """Return one line: ``digits-k3f9a2 has failed on gpu``."""
    where = f" on {payload['cluster']}" if payload.get("cluster") else ""
    return escape_controls(f"{payload['job']} {_WORDS.get(payload['event'], payload['event'])}{where}")


def details(payload: Mapping[str, Any]) -> list[str]:
    """Return the lines below the headline."""
    found = [
        f"{name}: {payload[name]}" for name in ("name", "owner", "project", "attempt", "state") if payload.get(name)
    ]
    if reason := str(payload.get("reason") or ""):
        found.append(f"reason: {reason[:_REASON_LENGTH]}")
    return [escape_controls(line) for line in found]


def webhook_body(payload: Mapping[str, Any]) -> bytes:
    """Return the JSON that a webhook gets: the payload, and its headline as ``text``."""
    return json.dumps({**payload, "text": headline(payload)}, sort_keys=True).encode()


def signature(key: str, message_id: str, timestamp: int, body: bytes) -> str:
    """Return the signature of Standard Webhooks: HMAC-SHA-256 over id, time and body, in base64.

    A *key* that begins with ``whsec_`` is base64 behind that, as the libraries of Standard Webhooks expect it; any
    other is taken as it is.
    """
    secret = base64.b64decode(key.removeprefix("whsec_")) if key.startswith("whsec_") else key.encode()
    signed = f"{message_id}.{timestamp}.".encode() + body
    return "v1," + base64.b64encode(hmac.new(secret, signed, hashlib.sha256).digest()).decode()


def slack_body(payload: Mapping[str, Any]) -> bytes:
    """Return the JSON that Slack and what is compatible with it gets: a bold headline, lines below."""
    lines = [f"*{_plain(headline(payload))}*", *(_plain(line) for line in details(payload))]
    return json.dumps({"text": "\n".join(lines)}).encode()


def _plain(text: str) -> str:
    """Return *text* so that Slack shows it as it is: no link, mention or channel comes out of a job's name."""
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return "".join(f"{c}​" if c in "*_~`" else c for c in escaped)


def mail(payload: Mapping[str, Any], message_id: str, sender: str, to: tuple[str, ...], at: float) -> EmailMessage:
    """Return the e-mail. Its Message-ID is that of the notification: a second copy is known as one."""
    message = EmailMessage()
    message["Subject"] = f"[orc] {headline(payload)}".replace("\n", " ")[:200]
    message["From"] = sender
    message["To"] = ", ".join(to)
    message["Date"] = format_datetime(datetime.fromtimestamp(at, UTC))
    message["Message-ID"] = f"<{message_id}@orc.invalid>"
    message["X-Orc-Id"] = message_id
    message["Auto-Submitted"] = "auto-generated"
    text = "\n".join([headline(payload), "", *details(payload), "", f"orc status {payload['job']}"])
    message.set_content(text + "\n")
    return message
