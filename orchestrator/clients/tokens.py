"""Requests about tokens; a service answers them to its admins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from orc.orchestrator.clients.requests import API, Request

Token = Mapping[str, Any]


def create(user: str, role: str, expires_s: float | None, note: str) -> Request[Token]:
    """Return the request for a new token; the answer has its secret as ``token``.

    One whose answer was lost is asked for again: nobody has the secret of the first.
    """
    body = {"user": user, "role": role, "expires_s": expires_s, "note": note}
    return Request("POST", f"{API}/tokens", lambda reply: dict(reply.json), body=body)


def every() -> Request[list[Token]]:
    """Return the request for all tokens, without their secrets."""
    return Request("GET", f"{API}/tokens", lambda reply: list(reply.json["tokens"]))


def revoke(token_id: str) -> Request[Token]:
    """Return the request for the end of a token."""
    return Request("DELETE", f"{API}/tokens/{quote(token_id, safe='')}", lambda reply: dict(reply.json))
