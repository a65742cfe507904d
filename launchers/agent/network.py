"""Ports, addresses and interfaces of this host."""

from __future__ import annotations

import os
import socket

from orc.launchers.agent.errors import LaunchFailure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


class Port:
    """A free TCP port below the ephemeral range, held until it is closed, also against other users.

    What holds it is the port itself, bound and not listened on: nobody else gets it, but for those who set
    ``SO_REUSEADDR`` to listen on it, as every server does that is to take it over. A port from outside the ephemeral
    range is not taken by the next outgoing connection either.
    """

    def __init__(self, first: int = 20000, last: int = 32767) -> None:
        low = _ephemeral_start()
        if low is not None and low > first + 100:
            last = min(last, low - 1)
        count = last - first + 1
        begin = int.from_bytes(os.urandom(4), "big") % count  # only to make collisions rare
        for step in range(count):
            port = first + (begin + step) % count
            held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            try:
                held.bind(("", port))
            except OSError:
                held.close()
                continue
            # Only now: with it, two that look for a port would both get this one.
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.number = port
            self._held = held
            return
        raise LaunchFailure(f"no free TCP port between {first} and {last}")

    def close(self) -> None:
        """Release the port."""
        self._held.close()


def _ephemeral_start() -> int | None:
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as file:
            return int(file.read().split()[0])
    except (OSError, ValueError):
        return None


def own_address(peers: Iterable[str]) -> str:
    """An address of this machine that its peers can reach: found in the routing table, not by guessing.

    A host whose own name resolves to 127.0.1.1 (Debian's default) still gets its real address.
    """
    import socket

    def usable(address: str) -> bool:
        return not address.startswith(("127.", "::1", "fe80:", "0.0.0.0"))  # noqa: S104

    # 192.0.2.1 is TEST-NET: connecting a UDP socket sends nothing and shows the interface of the default route.
    for peer in (*peers, "192.0.2.1"):
        try:
            found = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)
        except OSError:
            continue
        for family, kind, protocol, _, where in found:
            try:
                with socket.socket(family, kind, protocol) as probe:
                    probe.connect(where)
                    address = str(probe.getsockname()[0])
            except OSError:
                continue
            if usable(address):
                return address
    return os.uname().nodename


def plain(address: str) -> str:
    """An IPv4 address as such, also when it was taken by an IPv6 socket; an IPv6 address without its scope."""
    address = address.partition("%")[0]
    return address[len("::ffff:") :] if address.startswith("::ffff:") and "." in address else address


def own_addresses() -> list[tuple[str, str]]:
    """Return ``(interface, address)`` of this host, IPv4 before IPv6, from the kernel."""
    import ctypes

    class Address(ctypes.Structure):
        _fields_ = (("family", ctypes.c_ushort), ("data", ctypes.c_ubyte * 26))

    class Entry(ctypes.Structure):
        pass

    Entry._fields_ = (
        ("next", ctypes.POINTER(Entry)),
        ("name", ctypes.c_char_p),
        ("flags", ctypes.c_uint),
        ("address", ctypes.POINTER(Address)),
    )
    libc = ctypes.CDLL(None, use_errno=True)
    head = ctypes.POINTER(Entry)()
    if libc.getifaddrs(ctypes.byref(head)):
        return []
    found = []
    try:
        entry = head
        while entry:
            item = entry.contents
            if item.flags & 1 and item.address:  # IFF_UP
                family, data = item.address.contents.family, bytes(item.address.contents.data)
                if family in (socket.AF_INET, socket.AF_INET6):
                    raw = data[2:6] if family == socket.AF_INET else data[6:22]
                    found.append((family, item.name.decode(), socket.inet_ntop(family, raw)))
            entry = item.next
    finally:
        libc.freeifaddrs(head)
    return [(name, address) for _, name, address in sorted(found, key=lambda one: one[0])]


def reachable_addresses() -> list[str]:
    """Return the addresses of this host that other hosts may reach."""
    found = [a for _, a in own_addresses() if not a.startswith(("127.", "fe80:", "169.254.")) and a != "::1"]
    return found or ["127.0.0.1"]


def allowed_address(network: Mapping[str, str]) -> tuple[str, str]:
    """Return ``(interface, address)`` of this host that a job's ``network`` allows. Raises `LaunchFailure`."""
    import ipaddress

    interface, cidr = network.get("interface"), network.get("cidr")
    own = own_addresses()
    here = ", ".join(f"{name} {address}" for name, address in own) or "no address at all"
    found = [one for one in own if not interface or one[0] == interface]
    if not found:
        raise LaunchFailure(f"network.interface is {interface}, and this node has {here}")
    if cidr:
        allowed = ipaddress.ip_network(cidr)
        found = [one for one in found if ipaddress.ip_address(one[1]) in allowed]
    else:
        found = [one for one in found if not one[1].startswith("fe80:")]  # good for nothing without its scope
    if not found:
        on = f"interface {interface}" if interface else "this node"
        raise LaunchFailure(f"network.cidr is {cidr}, and no address of {on} lies in it: this node has {here}")
    return found[0]


def listen_on(interface: str) -> dict[str, str]:
    """Return the variables that say where the ranks' libraries listen: NCCL takes a name for the beginning of one."""
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}


def on_loopback() -> dict[str, str]:
    """Return the variables that keep ranks of one machine on its loopback interface."""
    interface = interface_of("127.0.0.1")
    return listen_on(interface) if interface else {}


def towards(interface: str | None, root: str = "") -> dict[str, str]:
    """Return the variables for ranks whose hosts know each other by *interface*.

    NCCL looks for the fastest network by itself where there is InfiniBand: the one of SSH need not be it.
    """
    if not interface:
        return {}
    found = listen_on(interface)
    if os.path.isdir(f"{root}/sys/class/infiniband") and os.listdir(f"{root}/sys/class/infiniband"):
        del found["NCCL_SOCKET_IFNAME"]
    return found


def facing(master: str) -> dict[str, str]:
    """Return the variable for gloo on several nodes, the interface that leads to *master*.

    It would listen where the host's own name leads, maybe to 127.0.1.1; NCCL looks at the interfaces themselves.
    """
    interface = interface_of(own_address([master]))
    return {"GLOO_SOCKET_IFNAME": interface} if interface else {}


def interface_of(address: str) -> str | None:
    """The interface that has *address*."""
    return next((name for name, known in own_addresses() if known == address), None)
