"""Command line of the agent: one role for each word. Standard library only, Python >= 3.9."""

from __future__ import annotations

import sys

from orc.launchers.agent.config import load_config
from orc.launchers.agent.errors import EXIT_LAUNCH, LaunchFailure, log_stderr
from orc.launchers.agent.processes import make_private

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

USAGE = """usage: python -I -S <runtime tree> node <agent.json> --owner OWNER [--node-rank N] [--restart N]
                                                     [--master-host HOST]
       python -I -S <runtime tree> gang <agent.json> --owner OWNER
       python -I -S <runtime tree> start <agent.json> --owner OWNER --node-rank N
       python -I -S <runtime tree> stacks <attempt directory> [--timeout SECONDS]
       python -I -S <runtime tree> kill <attempt directory>
       python -I -S <runtime tree> rank -- program [arg ...]
       python -I -S <runtime tree> rsh [options] host command [arg ...]"""


def _number(options: Mapping[str, str], name: str) -> int:
    text = options.get(name, "0")
    if not text.isdigit():
        raise LaunchFailure(f"{name} {text!r} is not a number")
    return int(text)


def main(arguments: Sequence[str]) -> int:
    """Run one of the roles; returns the exit status."""
    mode, *rest = arguments or ("",)
    if mode == "rank" and rest[:1] == ["--"]:
        from orc.launchers.agent.shim import run as run_rank

        run_rank(rest[1:])
    if mode == "rsh":
        from orc.launchers.agent.calls import rsh

        return rsh(rest)
    if mode == "stacks" and rest:
        from orc.launchers.agent.stacks import main as stacks

        return stacks(rest)
    if mode == "kill" and len(rest) == 1:
        from orc.launchers.agent.cleanup import kill_attempt

        kill_attempt(rest[0])
        return 0
    options = dict(zip(rest[1::2], rest[2::2]))
    known = {
        "node": {"--owner", "--node-rank", "--restart", "--master-host"},
        "gang": {"--owner"},
        "start": {"--owner", "--node-rank"},
    }.get(mode)
    if known is None or not rest or len(rest) % 2 == 0 or not set(options) <= known or "--owner" not in options:
        print(USAGE, file=sys.stderr)
        return 2
    make_private()
    config = load_config(rest[0])
    if mode == "gang":
        from orc.launchers.agent.gang import Gang

        return Gang(config, options["--owner"]).run()
    node = _number(options, "--node-rank")
    if mode == "start":
        from orc.launchers.agent.start import start

        return start(config, node, options["--owner"])
    restart = _number(options, "--restart")
    from orc.launchers.agent.node import Node

    return Node(config, node, options["--owner"], restart, master_host=options.get("--master-host")).run()


def run(arguments: Sequence[str]) -> int:
    """Run `main`; report what cannot be followed in one line."""
    try:
        return main(arguments)
    except LaunchFailure as failure:
        log_stderr(str(failure))
        return EXIT_LAUNCH


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
