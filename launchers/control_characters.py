"""Control characters: escaping of the ones that would act on a terminal instead of being shown by it."""

from __future__ import annotations

import re

# C0 but tab and line feed, DEL and C1; the marks, embeddings, overrides and isolates that turn the direction of text;
# halves of surrogate pairs, which stand for bytes of file names that are not UTF-8 and cannot be printed.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def escape_controls(text: str, *, keep: str = "") -> str:
    r"""*text* with control characters made visible (``\x1b``, ``\u202e``); tab, line feed and *keep* stay."""
    return _CONTROLS.sub(lambda match: match[0] if match[0] in keep else _visible(match[0]), text)


def escape_controls_in_json(document: str) -> str:
    r"""The same JSON *document* without control characters: JSON itself lets DEL and all beyond stand in a string."""
    return _CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", document)


def _visible(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
