"""Command line of the agent: one role for each word. Standard library only, Python >= 3.9."""

from __future__ import annotations

import sys

from orc.launchers.agent.config import load_config
from orc.launchers.agent.errors import EXIT_LAUNCH, LaunchFailure, log_stderr
from orc.launchers.agent.processes import make_private

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

USAGE = """usage: python -I -S <runtime tree> node <agent.json> --owner OWNER [--node-rank N] [--restart N]
                                                     [--master-host HOST]
       python -I -S <runtime tree> gang <agent.json> --owner OWNER
       python -I -S <runtime tree> start <agent.json> --owner OWNER --node-rank N
       python -I -S <runtime tree> stacks <attempt directory> [--timeout SECONDS]
       python -I -S <runtime tree> kill <attempt directory>
       python -I -S <runtime tree> rank -- program [arg ...]
       python -I -S <runtime tree> rsh [options] host command [arg ...]"""


_OPTIONS = {
    "node": {"--owner", "--node-rank", "--restart", "--master-host"},
    "gang": {"--owner"},
    "start": {"--owner", "--node-rank"},
}


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
        from orc.launchers.agent.processes import kill_attempt

        kill_attempt(rest[0])
        return 0
    options = dict(zip(rest[1::2], rest[2::2]))
    if not rest or len(rest) % 2 == 0 or not set(options) <= _OPTIONS.get(mode, set()) or "--owner" not in options:
        print(USAGE, file=sys.stderr)
        return 2
    make_private()
    config, owner = load_config(rest[0]), options["--owner"]
    for name in ("--node-rank", "--restart"):
        if not options.setdefault(name, "0").isdigit():
            raise LaunchFailure(f"{name} {options[name]!r} is not a number")
    node = int(options["--node-rank"])
    if mode == "node":
        from orc.launchers.agent.node import Node

        return Node(config, node, owner, int(options["--restart"]), master_host=options.get("--master-host")).run()
    from orc.launchers.agent.start import Gang, start

    return Gang(config, owner).run() if mode == "gang" else start(config, node, owner)


def run(arguments: Sequence[str]) -> int:
    """Run `main`; report what cannot be followed in one line."""
    try:
        return main(arguments)
    except LaunchFailure as failure:
        log_stderr(str(failure))
        return EXIT_LAUNCH


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
