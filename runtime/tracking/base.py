"""Base classes of the built-in trackers and of those that scripts bring along."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from orc.runtime.core.enums import StrEnum
from orc.runtime.logging import MultiProcessAdapter, process_rank

LOGGER = MultiProcessAdapter(logging.getLogger("orc.runtime.tracking"), {})

F = TypeVar("F", bound=Callable[..., Any])


class LoggerType(StrEnum):
    """Experiment trackers."""

    ALL = "all"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    TRACKIO = "trackio"
    AIM = "aim"
    COMETML = "comet_ml"
    MLFLOW = "mlflow"
    CLEARML = "clearml"
    DVCLIVE = "dvclive"
    SWANLAB = "swanlab"


def on_main_process(function: F) -> F:
    """Decorator of tracker methods: run on rank 0 only, unless the tracker has ``main_process_only = False``.

    Elsewhere the call returns `None`. Works before the processes have met.

    Args:
        function: the method.
    """

    @functools.wraps(function)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "main_process_only", True) and process_rank() != 0:
            return None
        return function(self, *args, **kwargs)

    return wrapper  # type: ignore[return-value]


class GeneralTracker:
    """Base of all trackers. A tracker of your own defines the three names below and the three functions.

    Attributes:
        name: what `Accelerator.get_tracker` knows it by, such as ``"wandb"``.
        requires_logging_directory: whether it writes below the project's logging folder.
        tracker: a property; the object of the library underneath, such as the run of wandb.
        main_process_only: `True`: used on rank 0 only. `False`: on every rank.

    The functions are ``__init__``, `store_init_configuration` and `log`; `start` and `finish` may be added.

    Raises:
        NotImplementedError: a name is missing.
    """

    name: str
    requires_logging_directory: bool
    main_process_only: bool = True

    def __init__(self, _blank: bool = False) -> None:
        if not _blank:
            check_tracker(self)

    if TYPE_CHECKING:  # not defined here at run time, so that a tracker without one is found out

        @property
        def tracker(self) -> Any:
            """The object of the library underneath."""

    def start(self) -> None:
        """Open the run. Called by `Accelerator.init_trackers`, when the processes have met; does nothing here."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store *values*, the experiment's configuration, once."""
        raise NotImplementedError(f"{type(self).__name__} must define store_init_configuration(values)")

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log *values* for *step*; *kwargs* come from ``log_kwargs`` of `Accelerator.log`."""
        raise NotImplementedError(f"{type(self).__name__} must define log(values, step)")

    def finish(self) -> None:
        """Close the run. Called by `Accelerator.end_training`; does nothing here."""


def check_tracker(tracker: GeneralTracker) -> None:
    """Raise `NotImplementedError` when *tracker* lacks a documented name."""
    # `dir`, because the property may be unable to answer yet.
    missing = [name for name in ("name", "requires_logging_directory", "tracker") if name not in dir(tracker)]
    if missing:
        raise NotImplementedError(
            f"{type(tracker).__name__} is no complete tracker: it must define {', '.join(f'`{m}`' for m in missing)}"
        )


class BlankTracker(GeneralTracker):
    """Stands for a tracker on the ranks where it does not run: every method can be called and does nothing."""

    requires_logging_directory = False

    def __init__(self, name: str) -> None:
        super().__init__(_blank=True)
        self.name = name

    @property
    def tracker(self) -> BlankTracker:
        """Itself."""
        return self

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Nothing."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


class LibraryTracker(GeneralTracker):
    """Base of the built-in trackers: opens the library's run late, so that the processes can meet first.

    The run is opened by `start`, or on first use by a script that takes a tracker without an Accelerator.
    """

    requires_logging_directory = False
    package: str  # what to install
    modules: tuple[str, ...]  # any of these being importable makes the tracker available
    _run: Any = None
    _finished = False

    def __init__(self, run_name: str | None, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self._kwargs = kwargs  # of what opens the run

    @property
    def tracker(self) -> Any:
        """The object of the library underneath; `None` on ranks where the tracker does not run.

        Raises:
            RuntimeError: the run is finished.
        """
        if self._run is None:
            if self._finished:
                raise RuntimeError(f"the run of the {self.name} tracker is finished; start() opens another one")
            self.start()
        return self._run

    @on_main_process
    def start(self) -> None:
        """Open the run, unless it is open."""
        if self._run is None:
            self._finished = False
            try:
                self._run = self._open()
            except ModuleNotFoundError as error:
                if error.name not in {module.split(".")[0] for module in self.modules}:
                    raise
                raise ImportError(f"the {self.name} tracker needs its library: pip install {self.package}") from error

    def _open(self) -> Any:
        raise NotImplementedError

    def _leave_out(self, key: str, value: Any, why: str | None = None) -> None:
        """Warn, once per name, that a value is not logged: another tracker beside this one may take it."""
        seen: set[str] = self.__dict__.setdefault("_left_out", set())
        if key not in seen:
            seen.add(key)
            LOGGER.warning("%s cannot log %r, it is left out: %s", self.name, key, why or f"a {type(value).__name__}")

    @on_main_process
    def finish(self) -> None:
        """Close the run, if it is open."""
        if self._run is not None:
            run, self._run, self._finished = self._run, None, True
            self._close(run)

    def _close(self, run: Any) -> None:
        raise NotImplementedError


def plain(value: Any) -> Any:
    """*value* as Python numbers and lists where it is a tensor or a number of NumPy; containers are gone through."""
    if isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    # Tensors of torch, arrays and numbers of NumPy, without importing either.
    return value.tolist() if hasattr(value, "tolist") else value


def scalars(values: Mapping[str, Any]) -> dict[str, Any]:
    """*values* with tensors and NumPy arrays of one element as Python numbers.

    For libraries that understand tensors, arrays and media of their own; what has more elements comes through,
    tensors without their gradients.
    """
    return {key: _scalar(value) for key, value in values.items()}


def _scalar(value: Any) -> Any:
    if isinstance(value, Mapping):
        return scalars(value)
    if hasattr(value, "tolist") and hasattr(value, "item"):
        if getattr(value, "size", None) == 1 or (hasattr(value, "numel") and value.numel() == 1):
            return value.item()
        return value.detach() if hasattr(value, "detach") else value
    return value


def numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """*values* as `scalars` has them, and what has more elements as lists of Python numbers.

    For libraries that log numbers only.
    """
    return {key: plain(value) for key, value in scalars(values).items()}


def directory(path: str | os.PathLike[str]) -> str:
    """*path* as text, made if it is not there."""
    os.makedirs(path, exist_ok=True)  # noqa: PTH103 (any PathLike)
    return os.fspath(path)
