"""Rules about logs: the section ``retry.on_log`` of a job, looked up in what a failed attempt has logged.

What is read and searched is bounded, and the search runs in a process of its own that is ended after `SEARCH_S`: a
regular expression can take for ever, and nothing else would stop it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from orc.launchers.errors import LaunchError

if TYPE_CHECKING:
    from orc.launchers.attempts.records import AttemptExit
    from orc.launchers.backends.base import Backend, Handle, LogSelector

TAIL_BYTES = 256 << 10
MOST_LOGS = 32
LINE_CHARACTERS = 2000
SEARCH_S = 10.0
_STEP_BYTES = 1 << 20

# Of a rule and a text the first line, by rules first: the order of the rules decides, not that of the logs.
_SEARCH = f"""
import json, re, sys
patterns, texts = json.load(sys.stdin)
for rule, pattern in enumerate(patterns):
    search = re.compile(pattern).search
    for number, text in enumerate(texts):
        for line in text.splitlines():
            if search(line[:{LINE_CHARACTERS}]):
                print(json.dumps([rule, number, line[:{LINE_CHARACTERS}]]))
                sys.exit()
print("null")
"""


@dataclass(frozen=True)
class LogMatch:
    """Line of a failed attempt's log for which its job has a rule; without an *action* the search went wrong."""

    action: str  # retry, fail, exclude_node
    line: str
    hosts: tuple[str, ...] = ()  # of the node whose log has the line

    @property
    def reason(self) -> str:
        """Text that is added to the reason of the job."""
        return f"log: {self.line.strip()[:200]}" if self.action else self.line


def match(
    rules: Sequence[Mapping[str, Any]],
    backend: Backend,
    handle: Handle,
    exit_: AttemptExit | None,
    hosts: Sequence[str],
) -> LogMatch | None:
    """Return the first of *rules* that matches a line of the attempt's logs; `None` when none does.

    *hosts* are the attempt's, in node order. Raises nothing: what cannot be read or searched is said by the match.
    """
    trouble = ""
    texts: list[str] = []
    nodes: list[int | None] = []
    try:
        for node, text in _texts(backend, handle, exit_):
            nodes.append(node)
            texts.append(text)
    except LaunchError as error:
        trouble = f"not all logs could be read: {error.what}"
    try:
        found = search([str(rule["pattern"]) for rule in rules], texts)
    except subprocess.TimeoutExpired:
        return LogMatch("", f"searching the logs for retry.on_log took longer than {SEARCH_S:g} s")
    if found is None:
        return LogMatch("", trouble) if trouble else None
    rule, number, line = found
    node = nodes[number]
    names = handle.hosts or tuple(hosts)
    blamed = (names[node],) if node is not None and node < len(names) and names[node] else ()
    return LogMatch(str(rules[rule]["action"]), line, blamed)


def search(patterns: Sequence[str], texts: Sequence[str]) -> tuple[int, int, str] | None:
    """Return the first match as numbers of its pattern and its text, and its line. Raises `TimeoutExpired`."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", _SEARCH],
        input=json.dumps([list(patterns), list(texts)]),
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=SEARCH_S,
        check=True,
    )
    found = json.loads(done.stdout)
    return None if found is None else (int(found[0]), int(found[1]), str(found[2]))


def _texts(backend: Backend, handle: Handle, exit_: AttemptExit | None) -> Iterator[tuple[int | None, str]]:
    """Yield the ends of the attempt's logs with the numbers of their nodes: that of the first failure first."""
    first = exit_.first_failure if exit_ else None
    if first is not None and first.log_tail:
        yield first.node, first.log_tail
    selectors = backend.log_selectors(handle)
    if first is not None:
        selectors = sorted(selectors, key=lambda s: s.rank is None or s.rank != first.rank)
    for selector in selectors[:MOST_LOGS]:
        yield _node_of(selector, exit_), tail(backend, handle, selector).decode(errors="replace")


def _node_of(selector: LogSelector, exit_: AttemptExit | None) -> int | None:
    if selector.rank is None or exit_ is None:
        return selector.node
    first = exit_.first_failure
    if first is not None and first.rank == selector.rank:
        return first.node
    each, rest = divmod(len(exit_.ranks), len(exit_.hosts) or 1)
    return selector.rank // each if each and not rest else None  # every launcher numbers ranks by node


def tail(backend: Backend, handle: Handle, selector: LogSelector) -> bytes:
    """Return the last `TAIL_BYTES` of a log. A long one is not read as a whole: its end is looked for."""

    def piece(offset: int) -> bytes:
        chunk = next(iter(backend.logs(handle, selector, offset)), None)
        return chunk.data if chunk else b""

    low, high, step = len(piece(0)), 0, _STEP_BYTES  # the log ends between the two
    while not high:  # ever larger steps, until one leads behind the end
        if ahead := piece(low + step):
            low, step = low + step + len(ahead), step * 2
        else:
            high = low + step
    while high - low > _STEP_BYTES:
        middle = (low + high) // 2
        if further := piece(middle):
            low = middle + len(further)
        else:
            high = middle
    begin = max(low - TAIL_BYTES, 0)
    found = bytearray()
    for chunk in backend.logs(handle, selector, begin):
        found += chunk.data
        if len(found) > TAIL_BYTES + 4 * _STEP_BYTES:  # it still grows
            break
    return bytes(found[-TAIL_BYTES:])
