"""Instance types: virtual CPUs, memory, GPUs. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

SIZES = {
    "c4": "xlarge 4 7 0, 2xlarge 8 15 0, 4xlarge 16 30 0, 8xlarge 36 60 0",
    "c5": "xlarge 4 8 0, 2xlarge 8 16 0, 4xlarge 16 32 0, 9xlarge 36 72 0, 18xlarge 72 144 0",
    "c5n": "xlarge 4 10 0, 2xlarge 8 21 0, 4xlarge 16 42 0, 9xlarge 36 96 0, 18xlarge 72 192 0",
    "c6i": (
        "xlarge 4 8 0, 2xlarge 8 16 0, 4xlarge 16 32 0, 8xlarge 32 64 0, 12xlarge 48 96 0, "
        "16xlarge 64 128 0, 24xlarge 96 192 0, 32xlarge 128 256 0"
    ),
    "c7i": (
        "large 2 4 0, xlarge 4 8 0, 2xlarge 8 16 0, 4xlarge 16 32 0, 8xlarge 32 64 0, 12xlarge 48 96 0, "
        "16xlarge 64 128 0, 24xlarge 96 192 0, 48xlarge 192 384 0"
    ),
    "c7i-flex": ("xlarge 4 8 0, 2xlarge 8 16 0, 4xlarge 16 32 0, 8xlarge 32 64 0, 12xlarge 48 96 0, 16xlarge 64 128 0"),
    "c8i": (
        "xlarge 4 8 0, 2xlarge 8 16 0, 4xlarge 16 32 0, 8xlarge 32 64 0, 12xlarge 48 96 0, "
        "16xlarge 64 128 0, 24xlarge 96 192 0, 32xlarge 128 256 0, 48xlarge 192 384 0, "
        "96xlarge 384 768 0"
    ),
    "c8i-flex": ("xlarge 4 8 0, 2xlarge 8 16 0, 4xlarge 16 32 0, 8xlarge 32 64 0, 12xlarge 48 96 0, 16xlarge 64 128 0"),
    "g4dn": ("xlarge 4 16 1, 2xlarge 8 32 1, 4xlarge 16 64 1, 8xlarge 32 128 1, 12xlarge 48 192 4, 16xlarge 64 256 1"),
    "g5": (
        "xlarge 4 16 1, 2xlarge 8 32 1, 4xlarge 16 64 1, 8xlarge 32 128 1, 12xlarge 48 192 4, "
        "16xlarge 64 256 1, 24xlarge 96 384 4, 48xlarge 192 768 8"
    ),
    "g6": (
        "xlarge 4 16 1, 2xlarge 8 32 1, 4xlarge 16 64 1, 8xlarge 32 128 1, 12xlarge 48 192 4, "
        "16xlarge 64 256 1, 24xlarge 96 384 4, 48xlarge 192 768 8"
    ),
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
    "m4": "xlarge 4 16 0, 2xlarge 8 32 0, 4xlarge 16 64 0, 10xlarge 40 160 0, 16xlarge 64 256 0",
    "m5": ("large 2 8 0, xlarge 4 16 0, 2xlarge 8 32 0, 4xlarge 16 64 0, 12xlarge 48 192 0, 24xlarge 96 384 0"),
    "m6i": (
        "large 2 8 0, xlarge 4 16 0, 2xlarge 8 32 0, 4xlarge 16 64 0, 8xlarge 32 128 0, "
        "12xlarge 48 192 0, 16xlarge 64 256 0, 24xlarge 96 384 0, 32xlarge 128 512 0"
    ),
    "m7i": (
        "large 2 8 0, xlarge 4 16 0, 2xlarge 8 32 0, 4xlarge 16 64 0, 8xlarge 32 128 0, "
        "12xlarge 48 192 0, 16xlarge 64 256 0, 24xlarge 96 384 0, 48xlarge 192 768 0"
    ),
    "m7i-flex": (
        "large 2 8 0, xlarge 4 16 0, 2xlarge 8 32 0, 4xlarge 16 64 0, 8xlarge 32 128 0, "
        "12xlarge 48 192 0, 16xlarge 64 256 0"
    ),
    "m8i": (
        "large 2 8 0, xlarge 4 16 0, 2xlarge 8 32 0, 4xlarge 16 64 0, 8xlarge 32 128 0, "
        "12xlarge 48 192 0, 16xlarge 64 256 0, 24xlarge 96 384 0, 32xlarge 128 512 0, 48xlarge 192 768 0, "
        "96xlarge 384 1536 0"
    ),
    "m8i-flex": (
        "large 2 8 0, xlarge 4 16 0, 2xlarge 8 32 0, 4xlarge 16 64 0, 8xlarge 32 128 0, "
        "12xlarge 48 192 0, 16xlarge 64 256 0"
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
    "r5": (
        "large 2 16 0, xlarge 4 32 0, 2xlarge 8 64 0, 4xlarge 16 128 0, 8xlarge 32 256 0, "
        "12xlarge 48 384 0, 16xlarge 64 512 0, 24xlarge 96 768 0"
    ),
    "r5d": (
        "large 2 16 0, xlarge 4 32 0, 2xlarge 8 64 0, 4xlarge 16 128 0, 8xlarge 32 256 0, "
        "12xlarge 48 384 0, 16xlarge 64 512 0, 24xlarge 96 768 0"
    ),
    "r6i": (
        "large 2 16 0, xlarge 4 32 0, 2xlarge 8 64 0, 4xlarge 16 128 0, 8xlarge 32 256 0, "
        "12xlarge 48 384 0, 16xlarge 64 512 0, 24xlarge 96 768 0, 32xlarge 128 1024 0"
    ),
    "r7i": (
        "large 2 16 0, xlarge 4 32 0, 2xlarge 8 64 0, 4xlarge 16 128 0, 8xlarge 32 256 0, "
        "12xlarge 48 384 0, 16xlarge 64 512 0, 24xlarge 96 768 0, 48xlarge 192 1536 0"
    ),
    "r8i": (
        "large 2 16 0, xlarge 4 32 0, 2xlarge 8 64 0, 4xlarge 16 128 0, 8xlarge 32 256 0, "
        "12xlarge 48 384 0, 16xlarge 64 512 0, 24xlarge 96 768 0, 32xlarge 128 1024 0, "
        "48xlarge 192 1536 0, 96xlarge 384 3072 0"
    ),
    "r8i-flex": (
        "large 2 16 0, xlarge 4 32 0, 2xlarge 8 64 0, 4xlarge 16 128 0, 8xlarge 32 256 0, "
        "12xlarge 48 384 0, 16xlarge 64 512 0"
    ),
    "t3": "medium 2 4 0, large 2 8 0, xlarge 4 16 0, 2xlarge 8 32 0",
    "trn1": "2xlarge 8 32 0, 32xlarge 128 512 0",
    "trn1n": "32xlarge 128 512 0",
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
    found = {}
    for family, sizes in SIZES.items():
        for entry in sizes.split(", "):
            size, vcpus, memory, gpus = entry.split()
            name = f"ml.{family}.{size}"
            found[name] = Instance(name, int(vcpus), int(memory), int(gpus))
    return found
