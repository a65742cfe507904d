"""Delivery: due messages of the outbox are written and sent, at least once, by the process that takes them first.

In a thread of its own (`Deliverer`), so that no pass and no request ever waits for a target.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import random
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.message import EmailMessage
from email.utils import format_datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from orc.launchers.control_characters import escape_controls
from orc.launchers.errors import LaunchError
from orc.launchers.secrets import resolve_secrets
from orc.orchestrator.ledger import outbox
from orc.orchestrator.ledger.outbox import Notification
from orc.orchestrator.notifications.sending import TOTAL_S, Undelivered, post, send_mail
from orc.orchestrator.notifications.targets import (
    Policy,
    Secrets,
    Settings,
    Target,
    Undeliverable,
    load_settings,
    shown,
    target_of,
)

if TYPE_CHECKING:
    from orc.orchestrator.ledger.store import Ledger

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
_HEADLINE_REASON = 200


def headline(payload: Mapping[str, Any]) -> str:
    """Return one line: ``digits-k3f9a2m4xq has failed on gpu: ValueError: x (rank 1 on a exited with 1)``."""
    where = f" on {payload['cluster']}" if payload.get("cluster") else ""
    reason = str(payload.get("reason") or "").partition("\n")[0] if payload["event"] == "failure" else ""
    why = f": {reason[:_HEADLINE_REASON]}" if reason else ""
    return escape_controls(f"{payload['job']} {_WORDS.get(payload['event'], payload['event'])}{where}{why}")


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


MAX_TRIES = 12  # with these pauses, over about two and a half hours
FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 3600.0
TAKEN_S = 3 * TOTAL_S  # longer than any delivery takes
AT_ONCE = 8


@dataclass
class Report:
    """Report of one round of deliveries."""

    sent: int = 0
    again: int = 0  # are tried again
    dead: list[str] = field(default_factory=list)  # why nobody tries again


def deliver_due(
    ledger: Ledger,
    *,
    settings: Callable[[], Settings] = load_settings,
    policy: Policy = Policy(),  # noqa: B008 - frozen
    secrets: Secrets = resolve_secrets,
    clock: Callable[[], float] = time.time,
) -> Report:
    """Deliver what is due now, at most `AT_ONCE` at a time; returns after all of it has been tried once.

    Args:
        ledger: The ledger; of this thread.
        settings: Reads the settings, when something is due.
        policy: What addresses of jobs may be.
        secrets: Looks up the values of secrets.
        clock: The time.

    Raises:
        LedgerError: The ledger cannot be read or written.
    """
    report = Report()
    began = clock()
    if ledger.volatile:  # nothing could be marked as sent
        return report
    while batch := _take(ledger, began, clock()):
        try:
            given: Settings | LaunchError = settings()
        except LaunchError as error:  # a mistake in the file: what is due waits until it is mended
            given = error
        with ThreadPoolExecutor(AT_ONCE, "orc-notify") as threads:
            outcomes = threads.map(partial(_deliver, given, policy, secrets, clock), batch)
            for notification, outcome in zip(batch, outcomes, strict=True):
                _mark(ledger, notification, outcome, clock(), report)
    return report


def _take(ledger: Ledger, due_at: float, now: float) -> list[Notification]:
    with ledger.database.read() as connection:
        found = outbox.due(connection, due_at, AT_ONCE)
    if not found:
        return []
    with ledger.database.write() as connection:
        taken = [one for one in found if outbox.take(connection, one, now + TAKEN_S)]
    # Another process has taken them all: there may be more.
    return taken or _take(ledger, due_at, now)


def _deliver(
    settings: Settings | LaunchError,
    policy: Policy,
    secrets: Secrets,
    clock: Callable[[], float],
    notification: Notification,
) -> Exception | None:
    """Try the delivery once; return the error."""
    try:
        if isinstance(settings, LaunchError):
            raise Undelivered(str(settings))
        target = target_of(notification.target, settings, policy, secrets)
        send(target, dict(notification.payload), notification.message_id, clock())
    except Exception as error:  # noqa: BLE001 - it is written down, and others have to be told all the same
        return error
    return None


def send(target: Target, payload: dict[str, object], message_id: str, now: float) -> None:
    """Notify *target*. Raises `Undelivered`, or `Undeliverable` where it makes no sense to try again."""
    payload = {**payload, "id": message_id}
    if target.kind == "email" and target.mail:
        send_mail(target, mail(payload, message_id, target.mail.sender, target.to, now))
        return
    body = slack_body(payload) if target.kind == "slack" else webhook_body(payload)
    headers = {"content-type": "application/json", "user-agent": "orc", "webhook-id": message_id}
    headers["webhook-timestamp"] = str(int(now))
    if target.key:
        headers["webhook-signature"] = signature(target.key, message_id, int(now), body)
    post(target, body, headers)


def _mark(ledger: Ledger, one: Notification, error: Exception | None, now: float, report: Report) -> None:
    tries = one.tries + 1
    if error is None:
        report.sent += 1
        with ledger.database.write() as connection:
            outbox.sent(connection, one.id)
        return
    known = isinstance(error, (Undelivered, Undeliverable))
    why = str(error) if known else f"{type(error).__name__} while it was sent"
    again_at = None
    if isinstance(error, Undelivered) and tries < MAX_TRIES:
        again_at = now + max(pause(tries), error.after_s)
        report.again += 1
    else:
        why += f" (after {tries} tries)" if isinstance(error, Undelivered) else ""
        report.dead.append(f"{shown(one.target)}: {why}")
    with ledger.database.write() as connection:
        outbox.failed(connection, one.id, why, again_at)


def pause(tries: int) -> float:
    """Return the seconds before the next try: doubled each time, and never the same for two."""
    length = min(FIRST_PAUSE_S * 2.0 ** (tries - 1), LONGEST_PAUSE_S)
    return length * random.uniform(0.8, 1.2)  # noqa: S311


LOOK_S = 2.0  # between two looks into the outbox
TROUBLE_S = 30.0  # ... while the ledger cannot be used


class Deliverer:
    """Thread that delivers, with a ledger of its own. Used as a context manager; leaving it ends the thread.

    A delivery that is under way when the context is left goes on for its time-out at most; should the process end
    meanwhile, another process delivers it again.
    """

    def __init__(
        self,
        open_ledger: Callable[[], Ledger],
        *,
        policy: Policy = Policy(),  # noqa: B008 - frozen
        report_line: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._open_ledger = open_ledger
        self._policy = policy
        self._report_line = report_line
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="orc-notifications", daemon=True)

    def __enter__(self) -> Deliverer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(LOOK_S)

    def _work(self) -> None:
        ledger: Ledger | None = None
        trouble = ""
        while not self._stop.is_set():
            length = LOOK_S
            try:
                ledger = ledger or self._open_ledger()
                for why in deliver_due(ledger, policy=self._policy).dead:
                    self._report_line(f"notification given up: {why}")
                trouble = ""
            except LaunchError as error:  # its disk is full, its server away: what is due waits
                length = TROUBLE_S
                if str(error) != trouble:
                    trouble = str(error)
                    self._report_line(f"notifications: {trouble}")
                _close(ledger)
                ledger = None
            self._stop.wait(length)
        _close(ledger)


def _close(ledger: Ledger | None) -> None:
    if ledger is not None:
        ledger.close()


def drain(ledger: Ledger, until: Callable[[], bool]) -> None:
    """Deliver until nothing is due any more, over all tries, or until *until* is true. Raises `LedgerError`."""
    while not until():
        deliver_due(ledger)
        with ledger.database.read() as connection:
            at = outbox.next_due(connection)
        if at is None:
            return
        time.sleep(min(max(at - time.time(), 0.1), LOOK_S))
