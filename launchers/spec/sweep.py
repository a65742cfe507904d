"""Sweeps and arrays: the values that the members of a group of jobs differ in. Pure."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from orc.launchers.spec import grammar
from orc.launchers.spec.grammar import LocatedError
from orc.launchers.spec.options import FrozenModel, Number, Whole

DEFAULT_LIMIT = 1000
MOST_MEMBERS = 10_000
# All members run from one snapshot, on one cluster, and are held back together.
FIXED_KEYS = (
    *("sweep", "array", "max_parallel", "depends_on", "inputs", "outputs"),
    *("cluster", "workdir", "environment", "secrets"),
)
_INDICES = re.compile(r"(?P<first>\d{1,9})(?:-(?P<last>\d{1,9})(?::(?P<step>\d{1,9}))?)?")

Assignments = dict[str, Any]  # dotted keys of the job file, and the values of one member


def _key(value: Any) -> str:
    text = grammar.scalar_text(value)
    parts = text.split(".")
    if not all(part.strip() == part and part for part in parts):
        raise ValueError(f"{text!r} is not a key of the job file; write for example args.lr")
    if parts[0] in FIXED_KEYS:
        raise ValueError(f"{parts[0]} is the same for all members of a sweep")
    return text


Key = Annotated[str, BeforeValidator(_key)]
Values = Annotated[tuple[Any, ...], Field(min_length=1)]
Bounds = tuple[Number, Number]


class Draw(FrozenModel):
    """Distribution that a random sweep draws a key's values from: exactly one of its keys is given."""

    uniform: Bounds | None = Field(None, description="Any number between the two.")
    log_uniform: Bounds | None = Field(None, description="Any number between the two, evenly on a logarithmic scale.")
    int: tuple[Whole, Whole] | None = Field(None, description="A whole number from the first to the second.")
    choice: Values | None = Field(None, description="One of these values.")

    @model_validator(mode="after")
    def _one(self) -> Self:
        given = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError("expected exactly one of uniform, log_uniform, int, choice")
        if given[0] == "choice":
            return self
        low, high = getattr(self, given[0])
        if not low < high:
            raise LocatedError(((given[0],), f"expected [low, high] with low < high, not [{low}, {high}]"))
        if given[0] == "log_uniform" and low <= 0:
            raise LocatedError(((given[0],), "a logarithmic scale needs numbers above 0"))
        return self

    def value(self, at: float) -> Any:
        """Return the value at *at*, a number from 0 to 1 (1 excluded)."""
        if self.choice is not None:
            return self.choice[math.floor(at * len(self.choice))]
        if self.int is not None:
            return self.int[0] + math.floor(at * (self.int[1] - self.int[0] + 1))
        low, high = (self.uniform or self.log_uniform or (0, 1))[:2]
        if self.log_uniform is not None:
            drawn = math.exp(math.log(low) + at * (math.log(high) - math.log(low)))
        else:
            drawn = low + at * (high - low)
        return min(max(float(f"{drawn:.6g}"), low), high)  # six digits: people read and copy them


class RandomSweep(FrozenModel):
    """Random sweep: so many members, each with values drawn independently; the same seed draws the same."""

    count: Whole = Field(ge=1, le=MOST_MEMBERS, description="Number of members.")
    seed: Whole = Field(0, description="The same seed draws the same values, on every machine.")
    parameters: Annotated[dict[Key, Draw], Field(min_length=1)] = Field(
        description="Keys of the job file, and the distribution of each: uniform, log_uniform, int or choice."
    )


class Sweep(FrozenModel):
    """Sweep over keys of the job file: exactly one of grid, list and random."""

    grid: Annotated[dict[Key, Values], Field(min_length=1)] | None = Field(
        None, description="Keys and their values: a member for every combination."
    )
    list: (
        Annotated[dict[Key, Values], Field(min_length=1)]
        | Annotated[tuple[Annotated[dict[Key, Any], Field(min_length=1)], ...], Field(min_length=1)]
        | None
    ) = Field(None, description="Keys and equally long lists, or a list of mappings: one member for each entry.")
    random: RandomSweep | None = Field(None, description="Values drawn at random, with a seed.")
    limit: Whole = Field(DEFAULT_LIMIT, ge=1, le=MOST_MEMBERS, description="Members at most.")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        """Check that one kind is given, that lists are of one length, and that there are not too many members."""
        given = [name for name in ("grid", "list", "random") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError("expected exactly one of grid, list, random")
        if isinstance(self.list, Mapping) and len({len(values) for values in self.list.values()}) > 1:
            lengths = ", ".join(f"{key} has {len(values)}" for key, values in self.list.items())
            raise LocatedError((("list",), f"the lists must be of one length: {lengths}"))
        if self.size > self.limit:
            raise LocatedError(
                (
                    (given[0],),
                    f"makes {self.size} jobs, more than {self.limit}; give fewer values, or raise sweep.limit",
                )
            )
        return self

    @property
    def size(self) -> int:
        """Number of members."""
        if self.grid is not None:
            return math.prod(len(values) for values in self.grid.values())
        if isinstance(self.list, Mapping):
            return len(next(iter(self.list.values())))
        return len(self.list) if self.list is not None else self.random.count if self.random else 0

    def assignments(self) -> Iterator[Assignments]:
        """Yield the values of each member, in order."""
        if self.grid is not None:
            for values in itertools.product(*self.grid.values()):
                yield dict(zip(self.grid, values, strict=True))
        elif isinstance(self.list, Mapping):
            for values in zip(*self.list.values(), strict=True):
                yield dict(zip(self.list, values, strict=True))
        elif self.list is not None:
            yield from (dict(entry) for entry in self.list)
        elif self.random is not None:
            import random

            # `random()` is the one method that Python promises to give the same numbers in every version.
            source = random.Random(self.random.seed)  # noqa: S311
            for _ in range(self.random.count):
                yield {key: draw.value(source.random()) for key, draw in self.random.parameters.items()}


def target_of(path: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """Return the path in the job file that the value at *path* of a sweep is for; () for what is no such value."""
    parts = path[1:]
    if parts[:1] == ("grid",) and len(parts) >= 3:
        key, rest = parts[1], parts[3:]
    elif parts[:1] == ("list",) and len(parts) >= 3:
        key, rest = (parts[2], parts[3:]) if isinstance(parts[1], int) else (parts[1], parts[3:])
    elif parts[:2] == ("random", "parameters") and len(parts) >= 5 and parts[3] == "choice":
        key, rest = parts[2], parts[5:]
    else:
        return ()
    return (*str(key).split("."), *rest)


def _array(value: Any) -> str:
    """Return the indices of an array in their short form: ``0-9``, ``1,3,7``, ``0-30:10``."""
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError(f"expected a number of jobs, or indices such as 0-9 or 1,3,7, not {value!r}")
    if isinstance(value, int):
        if not 1 <= value <= MOST_MEMBERS:
            raise ValueError(f"expected 1 to {MOST_MEMBERS} jobs, not {value}")
        return f"0-{value - 1}"
    if value.strip().isdigit():  # quoted, or after --set
        return _array(int(value))
    array_indices(value)
    return value.replace(" ", "")


def array_indices(text: str) -> list[int]:
    """Return the indices that *text* names, in order. Raises `ValueError`."""
    found: list[int] = []
    for part in text.replace(" ", "").split(","):
        match = _INDICES.fullmatch(part)
        if match is None:
            raise ValueError(f"{text!r} names no indices; write a number of jobs, 0-9, 1,3,7 or 0-30:10")
        first, last, step = int(match["first"]), int(match["last"] or match["first"]), int(match["step"] or 1)
        if last < first or step < 1:
            raise ValueError(f"{part!r} names no indices")
        indices = range(first, last + 1, step)
        if len(found) + len(indices) > MOST_MEMBERS:
            raise ValueError(f"{text!r} makes more than {MOST_MEMBERS} jobs")
        found += indices
    if len(set(found)) != len(found):
        raise ValueError(f"{text!r} names an index twice")
    return found


Array = Annotated[str, BeforeValidator(_array, json_schema_input_type=int | str)]
