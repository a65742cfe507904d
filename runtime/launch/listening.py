"""The addresses on which a training process listens: those that its peers need, and no others.

The server of torch's store binds every address of the host, also where MASTER_ADDR is the loopback address. Here it is
given a socket that is bound to MASTER_ADDR alone. What torch cannot do at all stands in
docs/explanation/threat-model.md.
"""

from __future__ import annotations

import errno
import functools
import os
import socket
import struct
from pathlib import Path
from typing import Any

LOOPBACK = ("127.0.0.1", "::1", "localhost")
_BACKLOG = 2048  # every rank connects at once
_SIOCGIFADDR = 0x8915


def own_address(host: str) -> str:
    """The address of this machine that *host* stands for; empty when it is none that could be listened on.

    A machine may call itself 127.0.1.1 while others know it by a real address (Debian): that is no answer either.
    """
    if host in LOOPBACK:
        return "127.0.0.1" if host == "localhost" else host
    try:
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return ""
    for family, _, _, _, where in addresses:
        address = str(where[0])
        if (address.startswith("127.") or address == "::1") and address != host:
            continue
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.bind((address, 0))
        except OSError:
            continue
        return address
    return ""


def listener(address: str, port: int) -> socket.socket:
    """A socket that listens on *port* of *address*. Raises `OSError`."""
    sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address, port))
        sock.listen(_BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


def bind_stores() -> None:
    """From now on a TCPStore that this process serves listens on the address of its host name, not on all."""
    import torch.distributed as dist

    if not dist.is_available():
        return
    from torch.distributed import TCPStore

    plain = TCPStore.__init__
    if hasattr(plain, "__wrapped__"):
        return

    @functools.wraps(plain)
    def bound(
        self: Any,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        *rest: Any,
        **more: Any,
    ) -> None:
        address = own_address(host_name) if is_master and len(rest) < 4 and "master_listen_fd" not in more else ""
        if address:
            try:
                sock = listener(address, port)
            except OSError as error:
                # In use: by a store of this process that it may share, or by somebody else, which torch then says.
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                port = sock.getsockname()[1]
                more["master_listen_fd"] = sock.detach()
        plain(self, host_name, port, world_size, is_master, *rest, **more)

    TCPStore.__init__ = bound  # type: ignore[method-assign]


def stay_on_loopback() -> None:
    """For a run on one machine: gloo and NCCL listen on the loopback interface unless the environment names another."""
    names = [name for _, name in socket.if_nameindex()]
    loopback = next((name for name in ("lo", "lo0") if name in names), None)
    if loopback is not None:
        # They read it in C++, when a group is made. NCCL takes a name without = for the beginning of one.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={loopback}")


def face_master(master: str) -> None:
    """For a run on several nodes: gloo listens on the interface that leads to *master*, or where the environment says.

    By itself it would take the one of the host's own name, which may be 127.0.1.1 (Debian). NCCL does not.
    """
    if "GLOO_SOCKET_IFNAME" not in os.environ and (interface := _interface_of(_address_towards(master))):
        os.environ["GLOO_SOCKET_IFNAME"] = interface


def _address_towards(master: str) -> str:
    """The address from which this machine reaches *master*; that of the default route where it is itself called so."""
    for host in (master, "192.0.2.1"):  # TEST-NET; connecting a UDP socket sends nothing
        try:
            addresses = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
        except OSError:
            continue
        for family, kind, protocol, _, where in addresses:
            try:
                with socket.socket(family, kind, protocol) as probe:
                    probe.connect(where)
                    address = str(probe.getsockname()[0])
            except OSError:
                continue
            if not address.startswith(("127.", "::1", "fe80:")):
                return address
    return ""


def _interface_of(address: str) -> str | None:
    """The interface that has *address*; `None` where the kernel does not tell (it is Linux that does)."""
    for _, name in socket.if_nameindex() if address else ():
        if address in _addresses_of(name):
            return name
    return None


def _addresses_of(interface: str) -> list[str]:
    import fcntl

    addresses = []
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()))
            addresses.append(socket.inet_ntoa(answer[20:24]))
    except OSError:
        pass  # it has no IPv4 address
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return addresses
    words = [line.split() for line in lines]
    return addresses + [socket.inet_ntop(socket.AF_INET6, bytes.fromhex(w[0])) for w in words if w[-1] == interface]
