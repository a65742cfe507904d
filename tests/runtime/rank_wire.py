"""Length-prefixed pickles over a socket, between conftest.py and rank_server.py."""

import struct

import cloudpickle


def receive(connection):
    header = _exactly(connection, 8)
    return None if header is None else cloudpickle.loads(_exactly(connection, struct.unpack("!Q", header)[0]))


def send(connection, value):
    payload = cloudpickle.dumps(value)
    connection.sendall(struct.pack("!Q", len(payload)) + payload)


def _exactly(connection, size):
    parts = []
    while size:
        part = connection.recv(min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
