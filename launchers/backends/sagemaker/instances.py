"""Instance types: virtual CPUs, memory, GPUs. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

# Families without GPUs in which the size says all: GiB of memory per virtual CPU, and the sizes, in xlarge (4 CPUs).
_REGULAR = {
    "c5": (2, "1 2 4 9 18"),
    "c6i": (2, "1 2 4 8 12 16 24 32"),
    "c7i": (2, "0.5 1 2 4 8 12 16 24 48"),
    "c7i-flex": (2, "1 2 4 8 12 16"),
    "c8i": (2, "1 2 4 8 12 16 24 32 48 96"),
    "c8i-flex": (2, "1 2 4 8 12 16"),
    "m4": (4, "1 2 4 10 16"),
    "m5": (4, "0.5 1 2 4 12 24"),
    "m6i": (4, "0.5 1 2 4 8 12 16 24 32"),
    "m7i": (4, "0.5 1 2 4 8 12 16 24 48"),
    "m7i-flex": (4, "0.5 1 2 4 8 12 16"),
    "m8i": (4, "0.5 1 2 4 8 12 16 24 32 48 96"),
    "m8i-flex": (4, "0.5 1 2 4 8 12 16"),
    "r5": (8, "0.5 1 2 4 8 12 16 24"),
    "r5d": (8, "0.5 1 2 4 8 12 16 24"),
    "r6i": (8, "0.5 1 2 4 8 12 16 24 32"),
    "r7i": (8, "0.5 1 2 4 8 12 16 24 48"),
    "r8i": (8, "0.5 1 2 4 8 12 16 24 32 48 96"),
    "r8i-flex": (8, "0.5 1 2 4 8 12 16"),
    "trn1": (4, "2 32"),
    "trn1n": (4, "32"),
}
# Others: size, virtual CPUs, GiB of memory, GPUs.
_G4 = "xlarge 4 16 1, 2xlarge 8 32 1, 4xlarge 16 64 1, 8xlarge 32 128 1, 12xlarge 48 192 4, 16xlarge 64 256 1"
_SIZES = {
    "c4": "xlarge 4 7 0, 2xlarge 8 15 0, 4xlarge 16 30 0, 8xlarge 36 60 0",
    "c5n": "xlarge 4 10 0, 2xlarge 8 21 0, 4xlarge 16 42 0, 9xlarge 36 96 0, 18xlarge 72 192 0",
    "g4dn": _G4,
    "g5": f"{_G4}, 24xlarge 96 384 4, 48xlarge 192 768 8",
    "g6": f"{_G4}, 24xlarge 96 384 4, 48xlarge 192 768 8",
    "g6e": (
        "xlarge 4 32 1, 2xlarge 8 64 1, 4xlarge 16 128 1, 8xlarge 32 256 1, 12xlarge 48 384 4, "
        "16xlarge 64 512 1, 24xlarge 96 768 4, 48xlarge 192 1536 8"
    ),
    "g7": (
        "2xlarge 8 32 1, 4xlarge 16 64 1, 8xlarge 32 128 1, 12xlarge 48 192 2, 24xlarge 96 384 4, 48xlarge 192 768 8"
    ),
    "g7e": (
        "2xlarge 8 64 1, 4xlarge 16 128 1, 8xlarge 32 256 1, 12xlarge 48 512 2, 24xlarge 96 1024 4, 48xlarge 192 2048 8"
    ),
    "p2": "xlarge 4 61 1, 8xlarge 32 488 8, 16xlarge 64 732 16",
    "p3": "2xlarge 8 61 1, 8xlarge 32 244 4, 16xlarge 64 488 8",
    "p3dn": "24xlarge 96 768 8",
    "p4d": "24xlarge 96 1152 8",
    "p4de": "24xlarge 96 1152 8",
    "p5": "4xlarge 16 256 1, 48xlarge 192 2048 8",
    "p5e": "48xlarge 192 2048 8",
    "p5en": "48xlarge 192 2048 8",
    "p6-b200": "48xlarge 192 2048 8",
    "p6-b300": "48xlarge 192 4096 8",
    "p6e-gb200": "36xlarge 144 960 4",
    "t3": "medium 2 4 0, large 2 8 0, xlarge 4 16 0, 2xlarge 8 32 0",
    "trn2": "48xlarge 192 2048 0",
}


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
    rows = [(family, *entry.split()) for family, sizes in _SIZES.items() for entry in sizes.split(", ")]
    for family, (memory, sizes) in _REGULAR.items():
        for size in map(float, sizes.split()):
            name = "large" if size < 1 else "xlarge" if size == 1 else f"{size:g}xlarge"
            rows.append((family, name, f"{4 * size:g}", f"{4 * size * memory:g}", "0"))
    found = (Instance(f"ml.{family}.{size}", *map(int, numbers)) for family, size, *numbers in rows)
    return {instance.name: instance for instance in sorted(found, key=lambda instance: instance.name)}
