"""Masking: replacing the values of secrets in text that leaves a job's own logs, in all forms that programs print."""

from __future__ import annotations

import json
import re
from urllib.parse import quote, quote_plus

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

MASK = "***"
# What is shorter is no secret, and masking it would leave no other text readable.
LEAST = 3


def forms(values: Iterable[str]) -> set[str]:
    """Return *values* and each of their lines as they are, and as Python, JSON, URLs and shells write them."""
    pieces = {piece.strip() for value in values for piece in (value, *value.splitlines())} | set(values)
    found = {form for piece in pieces if len(piece.strip()) >= LEAST for form in _written(piece)}
    return {form for form in found if len(form) >= LEAST}


def _written(piece: str) -> Iterator[str]:
    yield piece
    for text in (repr(piece)[1:-1], repr(piece.encode("utf-8", "surrogateescape"))[2:-1], ascii(piece)[1:-1]):
        bare = text.replace("\\'", "'")  # which quotes are escaped depends on those around
        yield from (text, bare, bare.replace("'", "\\'"), bare.replace('"', '\\"'))
    yield from (json.dumps(piece)[1:-1], json.dumps(piece, ensure_ascii=False)[1:-1])
    for text in (
        quote(piece, "", errors="replace"),
        quote(piece, errors="replace"),
        quote_plus(piece, errors="replace"),
    ):
        yield from (text, re.sub("%[0-9A-F]{2}", lambda match: match[0].lower(), text))
    # What shells write: within single quotes (as shlex, as most shells), within double quotes, as `printf %q`.
    yield from (piece.replace("'", "'\"'\"'"), piece.replace("'", "'\\''"))
    yield re.sub(r'(["\\$`])', r"\\\1", piece)
    yield re.sub(r"([^\w@%+=:,./\n-])", r"\\\1", piece)


def longest(values: Iterable[str]) -> int:
    """Bytes of the longest form: how far in front of a cut a value may begin that reaches over it."""
    return max((len(form.encode("utf-8", "surrogateescape")) for form in forms(values)), default=0)


def masked(text: str, values: Iterable[str], start: int = 0, stop: int | None = None) -> str:
    """Return *text* with ``***`` for each value; of that what lies from *start* to *stop* (characters of *text*).

    A value that reaches over either of them is masked as a whole: whoever cuts a text has it masked here, uncut.
    """
    stop = len(text) if stop is None else min(stop, len(text))
    shown, at = [], start
    for begin, end in _spans(text, forms(values)):
        if end > start and begin < stop:
            shown += [text[at:begin], MASK]
            at = max(end, at)
    return "".join([*shown, text[at:stop]])


def _spans(text: str, wanted: Iterable[str]) -> list[tuple[int, int]]:
    """Return the places of *wanted*: joined where they touch, so that no part of one shows beside another."""
    found = []
    for form in wanted:
        at = text.find(form)
        while at >= 0:
            found.append((at, at + len(form)))
            at = text.find(form, at + 1)
    joined: list[tuple[int, int]] = []
    for begin, end in sorted(found):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined
