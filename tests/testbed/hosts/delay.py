"""Forward Ethernet frames between two interfaces, each a fixed time late.

usage: delay.py IF_A IF_B MILLISECONDS

Stands in for tc netem, which not every kernel has.  Both interfaces belong to
the namespace the program runs in and carry no address of their own.  Frames
keep their virtio-net header, so segmentation and checksum offload still work.
"""

import collections
import contextlib
import select
import socket
import struct
import sys
import time

ETH_P_ALL = 0x0003
SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23
SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33
PACKET_ADD_MEMBERSHIP, PACKET_MR_PROMISC = 1, 1


def open_raw(interface):
    s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    s.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    s.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    s.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 16 << 20)
    s.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, 16 << 20)
    s.bind((interface, ETH_P_ALL))
    index = socket.if_nametoindex(interface)
    s.setsockopt(SOL_PACKET, PACKET_ADD_MEMBERSHIP, struct.pack("iHH8s", index, PACKET_MR_PROMISC, 0, b""))
    s.setblocking(False)
    return s


def main():
    a, b = open_raw(sys.argv[1]), open_raw(sys.argv[2])
    late = float(sys.argv[3]) / 1000
    print("ready", flush=True)
    other = {a: b, b: a}
    queue = collections.deque()  # (due, socket to send on, frame), in order
    while True:
        wait = max(0.0, queue[0][0] - time.monotonic()) if queue else None
        readable, _, _ = select.select([a, b], [], [], wait)
        now = time.monotonic()
        for s in readable:
            try:
                while True:
                    queue.append((now + late, other[s], s.recv(70000)))
            except BlockingIOError:
                pass
        while queue and queue[0][0] <= time.monotonic():
            _, s, frame = queue.popleft()
            with contextlib.suppress(OSError):  # a full queue or a link that is down loses the frame
                s.send(frame)


main()
