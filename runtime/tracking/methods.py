"""The Accelerator's methods around trackers. Nothing of a tracker is imported unless the script requests one."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from orc.runtime.core.errors import add_note, group_errors

if TYPE_CHECKING:
    from orc.runtime.core.context import RunContext
    from orc.runtime.core.handlers import ProjectConfiguration
    from orc.runtime.tracking.base import GeneralTracker
    from orc.runtime.tracking.selection import Chosen


class Tracking:
    """The part of the Accelerator that logs to experiment trackers.

    Args:
        ctx: the process context.
        project: where trackers write.
        log_with: the argument of the Accelerator.
    """

    def __init__(self, ctx: RunContext, project: ProjectConfiguration, log_with: Any) -> None:
        self.ctx = ctx
        self.project = project
        self.log_with: list[Chosen] = []  # the argument, as far as libraries are installed
        if log_with is not None:
            from orc.runtime.tracking.selection import filter_trackers

            self.log_with = filter_trackers(log_with, project.logging_dir)
        self._trackers: tuple[GeneralTracker, ...] = ()  # those that run on this rank
        self._tracker_names: tuple[str, ...] = ()  # on all ranks
        self._open_trackers: tuple[GeneralTracker, ...] = ()  # not finished yet

    @property
    def trackers(self) -> list[GeneralTracker]:
        """The trackers that `init_trackers` has started on this process; elsewhere than on rank 0 usually none."""
        return list(self._trackers)

    def init_trackers(
        self,
        project_name: str,
        config: dict[str, Any] | None = None,
        init_kwargs: dict[str, dict[str, Any]] | None = None,
    ) -> None:
        """Start the trackers of ``log_with``. All processes call it.

        Args:
            project_name: name of project, experiment or run, as each tracker understands it.
            config: what the run's configuration is, stored once.
            init_kwargs: arguments for single trackers, by name: ``{"wandb": {"tags": ["a"]}}``; those of built-in
                trackers that are not in use are ignored.

        Raises:
            ValueError: *init_kwargs* names something that is no tracker.
        """
        from orc.runtime.tracking.base import GeneralTracker
        from orc.runtime.tracking.selection import TRACKERS

        self.finish(built_in=True)  # of an earlier call
        options = init_kwargs or {}
        trackers: list[GeneralTracker] = []
        for chosen in self.log_with:
            if isinstance(chosen, GeneralTracker):
                trackers.append(chosen)
                continue
            if isinstance(chosen, type):
                place = (self.project.logging_dir,) if chosen.requires_logging_directory else ()
                make: Any = chosen
                trackers.append(make(project_name, *place, **options.get(chosen.name, {})))
                continue
            kind: Any = TRACKERS[chosen]
            arguments = options.get(str(chosen), {})
            if kind.requires_logging_directory:
                arguments = {"logging_dir": self.project.logging_dir, **arguments}
            trackers.append(kind(project_name, **arguments))
        self._tracker_names = tuple(tracker.name for tracker in trackers)
        _check_names("init_kwargs", options, self._tracker_names)
        self._trackers = tuple(
            tracker for tracker in trackers if self.ctx.is_main_process or not tracker.main_process_only
        )
        self._open_trackers = ()
        for tracker in self._trackers:
            with _named(tracker, "start"):
                tracker.start()
            self._open_trackers += (tracker,)
        if config is not None:
            for tracker in self._trackers:
                with _named(tracker, "store_init_configuration"):
                    tracker.store_init_configuration(config)

    def log(
        self,
        values: dict[str, Any],
        step: int | None = None,
        log_kwargs: dict[str, dict[str, Any]] | None = None,
    ) -> None:
        """Log *values* to all trackers; on ranks without one the call costs nothing.

        Args:
            values: numbers, tensors of one element, text, or what the trackers in use take.
            step: of the training.
            log_kwargs: arguments for single trackers, by name, as in `init_trackers`.

        Raises:
            ValueError: *log_kwargs* names something that is no tracker.
        """
        if self.log_with and not self._tracker_names:
            _warn_early()
        if log_kwargs:
            _check_names("log_kwargs", log_kwargs, self._tracker_names)
        for tracker in self._trackers:
            with _named(tracker, "log"):
                tracker.log(values, step=step, **(log_kwargs.get(tracker.name, {}) if log_kwargs else {}))

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return the tracker called *name*.

        On processes where it does not run a stand-in comes back, all of whose methods do nothing.

        Args:
            name: such as ``"wandb"``.
            unwrap: the object of the library underneath, such as the run of wandb.

        Raises:
            ValueError: there is no such tracker, or `init_trackers` was not called.
        """
        for tracker in self._trackers:
            if tracker.name == name:
                return tracker.tracker if unwrap else tracker
        if name in self._tracker_names:
            from orc.runtime.tracking.base import BlankTracker

            return BlankTracker(name)
        started = ", ".join(self._tracker_names) or "none; call init_trackers first"
        raise ValueError(f"{name} is not an available tracker of this Accelerator (available: {started})")

    def finish(self, built_in: bool = False) -> None:
        """Finish what is not finished yet, all of it even when one fails; with *built_in*, leave the script's own."""
        trackers, self._open_trackers = self._open_trackers, ()
        errors = []
        for tracker in trackers:
            if built_in and any(tracker is own for own in self.log_with):
                continue
            try:
                with _named(tracker, "finish"):
                    tracker.finish()
            except Exception as error:  # noqa: BLE001 (raised below)
                errors.append(error)
        if len(errors) == 1:
            raise errors[0]
        if errors:
            raise group_errors("several trackers could not finish", errors)


@contextmanager
def _named(tracker: GeneralTracker, what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        add_note(error, f"in {what} of the tracker {tracker.name!r}")
        raise


@functools.cache  # once
def _warn_early() -> None:
    from orc.runtime.tracking.base import LOGGER

    LOGGER.warning("Accelerator.log was called before init_trackers: nothing is logged")


def _check_names(argument: str, given: Mapping[str, Any], in_use: tuple[str, ...]) -> None:
    from orc.runtime.tracking.base import LoggerType

    for name in given:
        if name not in in_use and name not in {*LoggerType}:
            raise ValueError(f"{argument}: there is no tracker {name!r} (in use: {', '.join(in_use) or 'none'})")
