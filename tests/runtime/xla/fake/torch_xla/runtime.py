"""``torch_xla.runtime``."""

import os

from torch_xla import ordinal, world


def world_size():
    return world()


def global_ordinal():
    return ordinal()


def local_ordinal():
    return ordinal()


def local_process_count():
    return world()


def host_index():
    return 0


def device_type():
    return os.environ.get("PJRT_DEVICE")


def is_spmd():
    return os.environ.get("XLA_USE_SPMD") == "1"
