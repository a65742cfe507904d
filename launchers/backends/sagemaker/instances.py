"""Instance types: virtual CPUs, memory, GPUs. Pure; the table is `instance_table`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from orc.launchers.backends.sagemaker.instance_table import SIZES

# Types with AWS's own accelerators: the stock PyTorch images do not run on them.
_NEURON = "ml.trn"
# Families with disks of their own in the place of a volume that is made for the job.
_LOCAL_DISK = frozenset(
    (
        *("r5d", "g4dn", "g5", "g6", "g6e", "p3dn", "p4d", "p4de", "p5", "p5e", "p5en", "p6-b200", "p6-b300"),
        *("trn1", "trn1n", "trn2"),
    )
)


@dataclass(frozen=True)
class Instance:
    """Instance type with its resources."""

    name: str  # ml.p3.16xlarge
    vcpus: int
    memory_gib: int
    gpus: int

    @property
    def neuron(self) -> bool:
        """True for a type whose accelerators are Trainium chips."""
        return self.name.startswith(_NEURON)

    @property
    def local_disk(self) -> bool:
        """True for a type with a disk of its own, whose size and key cannot be chosen."""
        return self.name.removeprefix("ml.").partition(".")[0] in _LOCAL_DISK


@cache
def instances() -> dict[str, Instance]:
    """Return all known types by name."""
    found = {}
    for family, sizes in SIZES.items():
        for entry in sizes.split(", "):
            size, vcpus, memory, gpus = entry.split()
            name = f"ml.{family}.{size}"
            found[name] = Instance(name, int(vcpus), int(memory), int(gpus))
    return found
