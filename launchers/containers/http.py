"""Requests to the API of a platform: what was refused, what never arrived, and what may have had its effect."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from orc.launchers.errors import BackendError, BackendUnreachable

TIMEOUT_S = 30.0
GONE = (400, 404, 409)  # codes of refusals: what was asked for has gone, or has not begun


class ApiRefusal(BackendError):
    """The API has answered with an error: nothing was changed."""

    code = 0


class Uncertain(BackendUnreachable):
    """The request was sent and no answer came: it may have had its effect."""


@contextmanager
def unless_refused(*codes: int) -> Iterator[None]:
    """Leave the block where the API refuses with one of *codes*; other refusals are raised."""
    try:
        yield
    except ApiRefusal as error:
        if error.code not in codes:
            raise


def exchange(
    pool: Any,
    method: str,
    url: str,
    data: bytes | None,
    headers: Mapping[str, str],
    refused: Callable[[int, bytes], BackendError],
    where: str,
) -> bytes:
    """Return the answer to a request over *pool* of urllib3; *refused* makes the error of one that is no.

    Raises `BackendUnreachable` for a request that was not sent, `Uncertain` for one without an answer.
    """
    from urllib3.exceptions import ConnectTimeoutError, HTTPError, NewConnectionError

    try:
        answer = pool.request(method, url, body=data, headers=dict(headers), timeout=TIMEOUT_S, retries=False)
    except HTTPError as error:
        never = isinstance(error, (NewConnectionError, ConnectTimeoutError))
        what = f"the API server does not answer: {error}"
        raise (BackendUnreachable if never else Uncertain)(what, where=where) from None
    if answer.status >= 300:
        raise refused(answer.status, bytes(answer.data))
    return bytes(answer.data)


def refusal(status: int, what: str, where: str, hint: str = "") -> BackendError:
    """Return the error for the status of an answer: a server that is not well is asked again."""
    if status == 429 or status >= 500:
        return (Uncertain if status >= 500 else BackendUnreachable)(f"the API server: {what}", where=where)
    error = ApiRefusal(what, where=where, hint=hint)
    error.code = status
    return error
