"""What an instance type has: virtual CPUs, memory, GPUs. Pure; the table is `instance_table`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from orc.launchers.backends.sagemaker.instance_table import SIZES

# Types with AWS's own accelerators: the stock PyTorch images do not run on them.
_NEURON = "ml.trn"


@dataclass(frozen=True)
class Instance:
    """One instance type."""

    name: str  # ml.p3.16xlarge
    vcpus: int
    memory_gib: int
    gpus: int

    @property
    def neuron(self) -> bool:
        """Whether its accelerators are Trainium chips."""
        return self.name.startswith(_NEURON)


@cache
def instances() -> dict[str, Instance]:
    """All known types by name."""
    found = {}
    for family, sizes in SIZES.items():
        for entry in sizes.split(", "):
            size, vcpus, memory, gpus = entry.split()
            name = f"ml.{family}.{size}"
            found[name] = Instance(name, int(vcpus), int(memory), int(gpus))
    return found
