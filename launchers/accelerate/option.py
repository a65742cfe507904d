"""Option of `accelerate launch`: its spellings, its value, and what it does here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

# done: it does here what is documented. ignored: taken, and nothing follows from it. job: a job file says it instead.
# refused: nothing here can do it.
Effect = Literal["done", "ignored", "job", "refused"]

GROUPS: Mapping[str, str] = {
    "launch": "Program",
    "hardware": "Hardware",
    "resource": "Resources",
    "paradigm": "Training paradigm",
    "machines": "Several machines and restarts",
    "logs": "Logs",
    "mpi": "MPI",
    "dynamo": "Compilation (torch.compile)",
    "tpu": "TPU",
    "fsdp": "Sharded data parallelism (FSDP)",
    "deepspeed": "DeepSpeed",
    "parallelism": "Parallelism",
    "fp8": "FP8",
    "megatron": "Megatron-LM",
    "sagemaker": "Amazon SageMaker",
    "file": "Keys of a file without a flag",
}


@dataclass(frozen=True)
class Option:
    """Option, documented as a flag of `accelerate launch`, as a key of its configuration file, or as both.

    Attributes:
        name: the name of its value, with underscores.
        group: key of `GROUPS`.
        doc: one sentence for ``--help``.
        parse: gives the value from a text or a YAML value; raises `ValueError`.
        effect: see `Effect`.
        does: the effect in words, for the documentation and for errors.
        flags: the documented spellings, with underscores; hyphens are taken too. None: a key of the file only.
        switch: the flag has no value.
        key: dotted path in a configuration file (``fsdp_config.fsdp_version``); `None` for a flag only.
        keys: other documented paths of the same value.
        variable: the documented environment variable that the script sees.
        setting: the key of `orc.runtime.core.config` that carries it to the ranks.
        choices: the values that a text can have.
        default: what is documented when nothing is said.
        job: the key of ``job.yaml`` that says the same.
    """

    name: str
    group: str
    doc: str
    parse: Callable[[Any], Any]
    effect: Effect
    does: str
    flags: tuple[str, ...] = ()
    switch: bool = False
    key: str | None = None
    keys: tuple[str, ...] = ()
    variable: str | None = None
    setting: str | None = None
    choices: tuple[str, ...] = ()
    default: Any = None
    job: str | None = None

    @property
    def flag(self) -> str:
        """The long documented spelling, or the key where there is no flag."""
        return next((flag for flag in self.flags if flag.startswith("--")), self.key or self.name)

    def says_nothing(self, value: Any) -> bool:
        """Return True for the documented default and for empty values, which files are full of."""
        return value in (None, False, "", [], {}, "no", "NO") or value == self.default

    def check(self, value: Any) -> Any:
        """Return *value*, parsed. Raises `ValueError` that begins with the flag or key."""
        try:
            return self.parse(value)
        except ValueError as error:
            raise ValueError(f"{self.flag} {value!r}: {error}") from None


def text(value: Any) -> str:
    """Parse one line of text; numbers are texts too."""
    if isinstance(value, (bool, dict, list)) or value is None:
        raise ValueError("expected text")
    found = str(value)
    if "\n" in found or "\0" in found:
        raise ValueError("expected one line of text")
    return found


def words(value: Any) -> list[str]:
    """Parse a list of words, or one text with commas between them."""
    if isinstance(value, str):
        return [word.strip() for word in value.split(",") if word.strip()]
    if not isinstance(value, (list, tuple)):
        raise ValueError("expected a list of words, or words separated by commas")
    return [text(word) for word in value]


def texts(value: Any) -> list[str]:
    """Parse a list of texts, each as it is with its commas and lines; a single text is a list of one."""
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, (list, tuple)) or not all(isinstance(one, str) and "\0" not in one for one in found):
        raise ValueError("expected a list of texts")
    return list(found)


def mapping(value: Any) -> dict[str, str]:
    """Parse ``key=value,key=value``, or a mapping."""
    if isinstance(value, Mapping):
        return {str(name): str(item) for name, item in value.items()}
    found: dict[str, str] = {}
    for part in words(value):
        name, equals, item = part.partition("=")
        if not equals or not name:
            raise ValueError("expected key=value,key=value")
        found[name] = item
    return found
