"""The command line of OpenSSH's client, for what needs a process or a terminal of its own. Pure."""

from __future__ import annotations

import os

from orc.launchers.remote.ssh.hosts import ConnectOptions, HostSpec


def ssh_argv(host: HostSpec, access: ConnectOptions, *, terminal: bool) -> tuple[str, ...]:
    """``ssh`` with the options that *host* is reached with, up to and with its name."""
    argv = ["ssh"]
    # As in `ConnectOptions`: one file instead of the user's and the system's.
    if config := access.ssh_config or os.environ.get("ORC_SSH_CONFIG"):
        argv += ["-F", os.path.expanduser(config)]  # noqa: PTH111 - a text
    checking = "accept-new" if access.host_keys == "accept-new" else "yes"
    timeout = max(1, round(access.connect_timeout_s))
    argv += ["-o", f"StrictHostKeyChecking={checking}", "-o", f"ConnectTimeout={timeout}", "-o", "LogLevel=ERROR"]
    # Nobody is there to answer a question, or to notice that the host has gone.
    alone = ("BatchMode=yes", f"ServerAliveInterval={timeout}", "ServerAliveCountMax=2")
    argv += [] if terminal else [word for option in alone for word in ("-o", option)]
    argv += ["-o", f"HostName={host.address}"] if host.address else []
    argv += ["-l", host.user] if host.user else []
    argv += ["-p", str(host.port)] if host.port else []
    argv += ["-J", host.via] if host.via else []
    return (*argv, "-t" if terminal else "-T", host.name, *(("sudo", "-n", "-H") if access.sudo else ()))
