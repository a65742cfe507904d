"""Who gets contents from whom: the laptop's line is used once where hosts reach each other."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from orc.launchers.transfer.peers import token_for

_CHILDREN = 2  # that one host serves at once
_FAILURES = 2  # of a peer, after which nobody is sent there
_DIRECT = 8  # streams from the laptop at once where there are no peers
_TICK_S = 3.0  # how often those who wait show their host a sign of life


@dataclass
class Peer:
    """A host that serves what it has, and what it gets as it comes."""

    host: str
    addresses: tuple[str, ...]
    port: int
    secret: str
    children: int = 0
    failures: int = 0

    def ticket(self) -> tuple[str, str]:
        """Label and token of one transfer."""
        label = secrets.token_hex(8)
        return label, token_for(self.secret, label)


@dataclass
class _State:
    waiting: set[str]  # hosts that may still need something
    direct: int = 0  # streams from the laptop
    peers: list[Peer] = field(default_factory=list)
    leaders: dict[str, str] = field(default_factory=dict)  # store identity -> host that brings it up to date
    gone: bool = False


class Interrupted(Exception):
    """The whole sync was given up."""


class Exchange:
    """Shared by the threads of all hosts."""

    def __init__(self, hosts: Iterable[str], fan_out: bool) -> None:
        self._state = _State(set(hosts))
        self._fan_out = fan_out and len(self._state.waiting) > 1
        self._changed = threading.Condition()

    def lead(self, host: str, identity: str, idle: Callable[[], None]) -> str | None:
        """`None` when *host* is the one to bring the store *identity* up to date; otherwise, when another has done
        it, that one's name: the caller looks again."""
        state = self._state
        with self._changed:
            leader = state.leaders.setdefault(identity, host)
        if leader == host:
            return None
        self._wait(lambda: leader not in state.waiting, idle)
        with self._changed:
            if state.leaders.get(identity) == leader:
                state.leaders[identity] = host  # should it have failed, we are next
        return leader

    def source(self, host: str, allow_peers: bool, idle: Callable[[], None]) -> Peer | None:
        """Wait for a turn: at a peer, or (`None`) at the laptop. Give it back with `release`."""
        state = self._state
        found: list[Peer | None] = []

        def turn() -> bool:
            if allow_peers and self._fan_out:
                free = [p for p in state.peers if p.children < _CHILDREN and p.failures < _FAILURES and p.host != host]
                if free:
                    peer = min(free, key=lambda p: p.children)  # of equal ones the first, which is nearer to the laptop
                    peer.children += 1
                    found.append(peer)
                    return True
                limit = 0 if any(p.failures < _FAILURES for p in state.peers) else 1
            else:
                limit = _DIRECT
            if state.direct < limit:
                state.direct += 1
                found.append(None)
                return True
            return False

        self._wait(turn, idle)
        return found[0]

    def release(self, source: Peer | None, failed: bool = False) -> None:
        """Give a turn back."""
        with self._changed:
            if source is None:
                self._state.direct -= 1
            else:
                source.children -= 1
                source.failures += failed
            self._changed.notify_all()

    def wanted(self, host: str) -> bool:
        """Whether a peer would have something to do."""
        with self._changed:
            return self._fan_out and bool(self._state.waiting - {host})

    def offer(self, peer: Peer) -> None:
        """A host serves from now on."""
        with self._changed:
            self._state.peers.append(peer)
            self._changed.notify_all()

    def withdraw(self, peer: Peer) -> None:
        """Nobody else is sent there."""
        with self._changed:
            peer.failures = _FAILURES
            self._changed.notify_all()

    def settle(self, host: str) -> None:
        """*host* has what it needs, or has failed."""
        with self._changed:
            self._state.waiting.discard(host)
            self._changed.notify_all()

    def until_all_settled(self, idle: Callable[[], None]) -> None:
        """Wait as long as somebody may need a peer."""
        self._wait(lambda: not self._state.waiting, idle)

    def interrupt(self) -> None:
        """Everybody who waits gets `Interrupted`."""
        with self._changed:
            self._state.gone = True
            self._changed.notify_all()

    def _wait(self, ready: Callable[[], bool], idle: Callable[[], None]) -> None:
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._state.gone or ready(), _TICK_S):
                    if self._state.gone:
                        raise Interrupted
                    return
            idle()
