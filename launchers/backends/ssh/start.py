"""Start of an attempt on its hosts; completion of one that was started half, removal of one that must not go on.

The order is what makes a cut-off start readable afterwards: first the files on every host, then the agent of node 0,
then the others. Where a host lacks its files, or node 0 its lease, nothing has been started anywhere. The agents'
leases keep a second start, at whatever moment, from running anything twice.
"""

from __future__ import annotations

import json
import secrets as secret
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from orc.launchers.attempts.confidential import new_link_token
from orc.launchers.backends.ssh.hosts import START_TIMEOUT_S, WRITE_TIMEOUT_S
from orc.launchers.backends.ssh.rendering import file_for, hosts_of, start_command
from orc.launchers.errors import AmbiguousSubmit, BackendError, BackendUnreachable, LaunchError, NoRoom

if TYPE_CHECKING:
    from orc.launchers.backends.ssh.hosts import HostConnections
    from orc.launchers.backends.ssh.verdict import HostStatus
    from orc.launchers.plan import Plan, PlanCommand

_HELD, _BUSY, _TAKEN, _OTHER = "held", "busy", "taken", "other"
Link = dict[str, Any]


def start(hosts: HostConnections, plan: Plan, secrets: Mapping[str, str]) -> None:
    """Start the agents of *plan* on all of its hosts; those that run already are left as they are.

    Raises `NoRoom` when a host's slots are taken, `BackendUnreachable` and `BackendError` when nothing runs,
    `AmbiguousSubmit` when that cannot be known.
    """
    token = prepare(hosts, plan, secrets)
    names = hosts_of(plan)
    if token is None:  # it was here before and is over; what has not been started by now must not be
        undo(hosts, plan.marker, names, only_unstarted=True)
        return
    held: list[str] = []  # hosts whose agents run, or may run
    try:
        server = _start_one(hosts, plan.commands[0], 0, plan.marker, {"token": token})
        held.append(names[0])
        others = dict(zip(names[1:], plan.commands[1:], strict=True))
        link = _link(token, server)
        results = hosts.each(others, lambda name: _start_one(hosts, others[name], names.index(name), plan.marker, link))
        held += [name for name, result in results.items() if not _is_refusal(result)]
        for result in results.values():
            if isinstance(result, LaunchError):
                raise result
    except BackendUnreachable as error:
        raise AmbiguousSubmit(f"the start was cut off: {error.what}", where=error.where or plan.marker) from error
    except BackendError as error:
        # An agent that could not be ended keeps the attempt's name on its host: the attempt must not begin elsewhere.
        if away := [name for name in undo(hosts, plan.marker, names) if name in held]:
            raise AmbiguousSubmit(f"{error.what}; what was started on {away[0]} could not be ended") from error
        raise


def prepare(hosts: HostConnections, plan: Plan, secrets: Mapping[str, str]) -> str | None:
    """Write what the agents need on every host. Returns the token of the link between them.

    That is `None` when the attempt's first node has been there and has ended.
    """
    names = hosts_of(plan)
    linked = len(names) > 1 and hosts.settings.options.shared is not True
    token = new_link_token() if linked else secret.token_hex(32)  # agents without a link have no use for it

    def write(name: str) -> dict[str, Any]:
        file = file_for(plan, name)
        request = {
            "directory": hosts.directory(name, plan.marker),
            "node": names.index(name),
            "agent": file.content,
            "mode": file.mode,
            "secrets": {key: secrets[key] for key in plan.secrets},
            "token": token,
        }
        return hosts.call(name, "prepare", request, WRITE_TIMEOUT_S)

    written = hosts.each(names, write)
    failed = [result for result in written.values() if isinstance(result, LaunchError)]
    if failed:
        undo(hosts, plan.marker, names, only_unstarted=True)
        raise next((error for error in failed if not isinstance(error, BackendUnreachable)), failed[0])
    answers = {name: answer for name, answer in written.items() if isinstance(answer, dict)}
    for name, answer in answers.items():
        if answer["state"] == _OTHER:
            undo(hosts, plan.marker, names, only_unstarted=True)
            what = f"{name} still has this attempt as it was started for other hosts"
            raise NoRoom(what, where=name, holders=[plan.marker]).of(name)
    held = answers[names[0]]["token"]  # of several who do this at once, the one that was first there
    return str(held) if held else None


def complete(hosts: HostConnections, marker: str, statuses: Mapping[str, HostStatus]) -> bool:
    """Start what is missing of an attempt whose node 0 runs, from the files that are on the hosts.

    Returns whether anything was started. Raises `BackendError`.
    """
    placed = placement(statuses)
    missing = [name for name in placed[1:] if (own := statuses.get(name)) and own.present and not own.lease]
    first = statuses.get(placed[0]) if placed else None
    if not missing or first is None or not first.alive or any(_is_ending(status) for status in statuses.values()):
        return False
    token = hosts.token(placed[0], marker)
    link = _link(token, _start_one(hosts, _command(hosts, placed[0], 0, marker, first), 0, marker, None))

    def go_on(name: str) -> Link:
        node = placed.index(name)
        return _start_one(hosts, _command(hosts, name, node, marker, statuses[name]), node, marker, link)

    for result in hosts.each(missing, go_on).values():
        if isinstance(result, LaunchError):
            raise result
    return True


def undo(hosts: HostConnections, marker: str, names: Sequence[str], *, only_unstarted: bool = False) -> list[str]:
    """End and remove the attempt on *names*; agents on hosts that do not answer miss the others.

    Returns the hosts on which that could not be done.
    """

    def remove(name: str) -> None:
        request = {"directory": hosts.directory(name, marker), "only_unstarted": only_unstarted}
        hosts.call(name, "undo", request, WRITE_TIMEOUT_S)

    return [name for name, result in hosts.each(names, remove).items() if isinstance(result, LaunchError)]


def placement(statuses: Mapping[str, HostStatus]) -> tuple[str, ...]:
    """Return the attempt's hosts in node order, by the files on those that answered, of started ones first."""
    there = sorted((s for s in statuses.values() if s.present), key=lambda s: (not s.lease, s.answer["age"]))  # type: ignore[index]
    return tuple(str(host["name"]) for host in there[0].answer["config"]["hosts"]) if there else ()  # type: ignore[index]


def _is_ending(status: HostStatus) -> bool:
    """Return True when the attempt is over, or about to be: what is not started by now must not be."""
    records = (status.answer or {}).get("records", {})
    return any(name in ("cancel.json", "node-0/exit.json") or name.startswith("stop-r") for name in records)


def _is_refusal(result: Link | LaunchError) -> bool:
    """Return True when nothing was started on a host for certain."""
    return isinstance(result, LaunchError) and not isinstance(result, BackendUnreachable)


def _command(hosts: HostConnections, name: str, node: int, marker: str, status: HostStatus) -> PlanCommand:
    """Return the command that the plan had for that host, from the files there."""
    tree = str((status.answer or {})["config"]["runtime_tree"])
    return start_command(hosts.settings, name, node, tree, f"{hosts.directory(name, marker)}/agent.json", marker)


def _start_one(hosts: HostConnections, command: PlanCommand, node: int, marker: str, link: Link | None) -> Link:
    """Start one agent, and return its answer. Raises `NoRoom`, `BackendError`, `BackendUnreachable`."""
    name = str(command.host)
    request = {"directory": hosts.directory(name, marker), "node": node, "argv": command.argv, "link": link}
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        answer = hosts.call(name, "start", request, START_TIMEOUT_S)
        state = answer.get("state")
        holders = [str(holder) for holder in answer.get("holders", ())]
        if state != _BUSY or marker not in holders or time.monotonic() > deadline:
            break
        time.sleep(0.1)  # somebody else is just starting this very agent
    if state == _BUSY:
        by = f" (held by {', '.join(holders)})" if holders else ""
        raise NoRoom(f"the slots of {name} are taken{by}", where=name, holders=holders).of(name)
    if state not in (_HELD, _TAKEN):
        what = f"the agent could not start: {answer.get('reason') or json.dumps(answer)}"
        raise BackendError(what, where=name).of(name)
    return answer


def _link(token: str, server: Mapping[str, Any]) -> Link:
    return {"token": token, "hub": {"port": server.get("port"), "addresses": list(server.get("addresses") or ())}}
