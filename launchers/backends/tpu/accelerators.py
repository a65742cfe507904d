"""TPU slices by the name of their accelerator type: chips, worker machines, processes. Pure.

Source: the Cloud TPU documentation ("TPU architecture", "v2" to "v6e"). Types up to v4, and v5p, count TensorCores, of
which a chip has two; v5e (``v5litepod``) and v6e count chips.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

CHIPS_PER_HOST = 4  # of a slice with more than one machine, whatever its generation


@dataclass(frozen=True)
class Family:
    """Generation of TPUs."""

    name: str
    units_per_chip: int  # what the number in the type's name counts
    most_chips: int
    alone: tuple[int, ...]  # chips of slices that are one machine
    sizes: tuple[int, ...] = ()  # chips of larger slices; empty: any multiple of four
    cores_per_chip: int = 1  # as PyTorch/XLA counts devices: from v4 on, the cores of a chip are one

    def chips(self) -> str:
        """Return the sizes there are, as they stand in names; for messages."""
        shown = [str(chips * self.units_per_chip) for chips in (*self.alone, *(self.sizes or (8, 16, 32)))]
        return ", ".join(shown) + ("" if self.sizes else ", ...")


FAMILIES = {
    family.name: family
    for family in (
        Family("v2", 2, 256, (4,), (16, 64, 128, 256), 2),
        Family("v3", 2, 1024, (4,), (16, 32, 64, 128, 256, 512, 1024), 2),
        Family("v4", 2, 4096, (4,)),
        Family("v5litepod", 1, 256, (1, 4, 8), (16, 32, 64, 128, 256)),
        Family("v5p", 2, 8960, (4,)),
        Family("v6e", 1, 256, (1, 4, 8), (16, 32, 64, 128, 256)),
    )
}
_ALIASES = {"v5e": "v5litepod"}


@dataclass(frozen=True)
class Slice:
    """The shape of one TPU."""

    accelerator_type: str
    chips: int
    hosts: int
    cores_per_chip: int = 1  # devices of PyTorch/XLA

    @property
    def chips_per_host(self) -> int:
        """Chips of each worker machine, and PyTorch/XLA's default number of processes there."""
        return self.chips // self.hosts


def parse(accelerator_type: str) -> Slice:
    """Return the slice of a type such as ``v4-16``. Raises `ValueError` that lists the types."""
    family, size = _split(accelerator_type)
    if size is None:
        raise ValueError(f"{accelerator_type!r} has no size; write for example {family.name}-8")
    chips, odd = divmod(size, family.units_per_chip)
    sizes = family.sizes
    fits = chips in sizes if sizes else chips % CHIPS_PER_HOST == 0 and 0 < chips <= family.most_chips
    if odd or not (chips in family.alone or fits):
        raise ValueError(f"there is no {accelerator_type}; the sizes of {family.name} are {family.chips()}")
    hosts = 1 if chips in family.alone else chips // CHIPS_PER_HOST
    return Slice(f"{family.name}-{size}", chips, hosts, family.cores_per_chip)


def for_hosts(accelerator_type: str, hosts: int | None) -> Slice:
    """Return the slice of a type, or of a family such as ``v4`` that has *hosts* machines (one unless given).

    Raises `ValueError` when there is none, or when the type has another number of machines.
    """
    family, size = _split(accelerator_type)
    if size is not None:
        found = parse(accelerator_type)
        if hosts not in (None, found.hosts):
            raise ValueError(
                f"{found.accelerator_type} has {found.hosts} worker machine{'s' if found.hosts > 1 else ''}, "
                f"and the job asks for {hosts} nodes"
            )
        return found
    if hosts in (None, 1):
        return parse(f"{family.name}-{family.alone[-1] * family.units_per_chip}")
    assert hosts is not None
    chips = hosts * CHIPS_PER_HOST
    try:
        found = parse(f"{family.name}-{chips * family.units_per_chip}")
    except ValueError as error:
        raise ValueError(f"no {family.name} has {hosts} worker machines: {error}") from None
    if found.hosts != hosts:
        raise ValueError(f"no {family.name} has {hosts} worker machines; {found.accelerator_type} has {found.hosts}")
    return found


def check(accelerator_type: str) -> str:
    """Return a type or a family, as the service spells it. Raises `ValueError`."""
    family, size = _split(accelerator_type)
    return family.name if size is None else parse(accelerator_type).accelerator_type


def _split(text: str) -> tuple[Family, int | None]:
    match = re.fullmatch(r"(v\d+[a-z]*)(?:-(\d{1,6}))?", text.strip().lower())
    name = _ALIASES.get(match[1], match[1]) if match else ""
    if match is None or name not in FAMILIES:
        raise ValueError(f"{text!r} is no accelerator type; there are {', '.join(FAMILIES)}, as in v4-16")
    return FAMILIES[name], int(match[2]) if match[2] else None
