"""Wait for one of so many slots, then become another program. Run by its path; standard library only.

``python function_slots.py DIRECTORY COUNT program args...``: the slots are files in DIRECTORY, held with flock(2) for
as long as that program runs.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time

LOOK_S = 0.1


def take(directory: str, count: int) -> int:
    """A descriptor that holds one of the slots; waits for it."""
    files = [os.open(os.path.join(directory, f"slot-{n}"), os.O_RDWR | os.O_CREAT, 0o600) for n in range(count)]  # noqa: PTH118
    while True:
        for file in files:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            return file
        time.sleep(LOOK_S)


if __name__ == "__main__":
    os.set_inheritable(take(sys.argv[1], int(sys.argv[2])), True)
    os.execv(sys.argv[3], sys.argv[3:])  # noqa: S606
