"""The checkpoints of one run: where they go, what they are called, which to resume from, what is written beside it."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orc.runtime.checkpoint.errors import CheckpointError, CheckpointMisfit, RankMissing, RanksElsewhere, tell
from orc.runtime.checkpoint.format.layout import CheckpointRoot, number_of
from orc.runtime.checkpoint.load import load
from orc.runtime.checkpoint.replication.barrier import Barrier, BarrierAlone, attempt
from orc.runtime.checkpoint.replication.sites import Survey
from orc.runtime.checkpoint.save import Progress, Save, SaveRequest, looks
from orc.runtime.checkpoint.state.ownership import PROJECT_FOLDER, release_all
from orc.runtime.checkpoint.state.staging import Stage
from orc.runtime.checkpoint.state.strategies import check_savable_alone, strategy_wanted
from orc.runtime.checkpoint.storage.remote import Location, Remote, RemoteRoot, place
from orc.runtime.checkpoint.verified import Verified, newest_first, offer, offers, verified
from orc.runtime.data.position import training_loader

if TYPE_CHECKING:
    from orc.runtime.checkpoint.storage.destination import Destination
    from orc.runtime.core.context import RunContext
    from orc.runtime.core.handlers import LoadHook, ProjectConfiguration, SaveHook
    from orc.runtime.core.prepared import Prepared


class Background:
    """Runs one action in a thread. The interpreter does not exit before it has finished."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._what = ""
        self._pid = os.getpid()
        reference = weakref.ref(self)
        atexit.register(lambda: _tell(reference()))

    @property
    def failed(self) -> bool:
        """Return whether the action has ended with an error that `finish` has not raised yet."""
        return self._failure is not None

    @property
    def running(self) -> bool:
        """Return whether the action is running."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, what: str, action: Callable[[], object]) -> None:
        """Run *action*; *what* names it in errors. Call `finish` before."""
        self._what = what

        def run() -> None:
            try:
                action()
            except BaseException as error:  # noqa: BLE001 - raised by `finish`
                self._failure = error

        # No daemon: the end of the interpreter waits for it.
        self._thread = threading.Thread(target=run, name="orc-checkpoint", daemon=False)
        self._thread.start()

    def finish(self) -> None:
        """Wait for the action. Raises `CheckpointError` when it failed, once."""
        thread, self._thread = self._thread, None
        if thread is not None and os.getpid() == self._pid:
            thread.join()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise CheckpointError(f"{self._what} failed in the background: {failure}") from failure


def _tell(background: Background | None) -> None:
    if background is None or os.getpid() != background._pid:
        return
    try:
        background.finish()
    except CheckpointError as error:
        tell(error)  # the process ends: no caller is left that could catch it


@dataclass(frozen=True)
class Resumed:
    """The point at which training continues after `Accelerator.resume`.

    Attributes:
        path: the checkpoint that was loaded.
        step: optimizer steps taken before.
        epoch: the epoch to go on with. The prepared loader starts in the middle of it where it was saved there.
        offset: samples of that epoch that all ranks have already taken.
    """

    path: Location
    step: int
    epoch: int
    offset: int


class RunCheckpoints:
    """Saves and loads the state of what an Accelerator has prepared.

    Attributes:
        base_step: optimizer steps of earlier processes; the run's step is this plus the steps taken here.
        saved_step: the step of the last load, or of the last save that `resume` would find.
        state: name of the strategy that saves sharded models; `None` is what the FSDP plug-in says, else shards.
    """

    def __init__(
        self,
        context: RunContext,
        prepared: Prepared,
        project: ProjectConfiguration,
        *,
        timeout: timedelta | None = None,
    ) -> None:
        self.state: str | None = None
        self.context = context
        self.prepared = prepared
        self.project = project
        self._timeout_s = None if timeout is None else timeout.total_seconds()
        self.base_step = 0
        self.saved_step = 0
        self._told_alone = False
        self.background = Background()

    @cached_property
    def barrier(self) -> Barrier:
        """The barriers in which the ranks agree, over a connection that is made on first use."""
        return Barrier(self.context, self._timeout_s)

    @cached_property
    def _background_barrier(self) -> Barrier:
        """The same for what is written in the background: its thread has a connection of its own too."""
        return Barrier(self.context, self._timeout_s, name="background")

    @cached_property
    def _survey(self) -> Survey:
        shared = "0" if self.project.save_on_each_node else self.context.config.checkpoint_shared
        return Survey(self.context, self.barrier, shared)

    @cached_property
    def _stage(self) -> Stage:
        return Stage()

    @property
    def root(self) -> CheckpointRoot | RemoteRoot | None:
        """The root of automatically named checkpoints: below the project's folder, or the configured directory."""
        project, configured = self.project, self.context.config.checkpoint_dir
        if project.project_dir is not None and (project.automatic_checkpoint_naming or configured is None):
            where = place(os.fspath(project.project_dir)) / PROJECT_FOLDER
        elif configured is not None:
            where = place(configured)
        else:
            return None
        return RemoteRoot(where) if isinstance(where, Remote) else CheckpointRoot(where)

    @property
    def step(self) -> int:
        """Optimizer steps of the whole run."""
        return self.base_step + self.prepared.steps()

    @property
    def keep(self) -> int | None:
        """The number of automatically named checkpoints to keep."""
        return self.project.total_limit or self.context.config.checkpoint_keep

    def progress(self) -> Progress:
        """Step, and the place of the loader that training reads."""
        loader = training_loader(self.prepared.dataloaders)
        guard = self.prepared.guard
        norms = () if guard is None else guard.norms(self.prepared.optimizers)
        if loader is None:
            return Progress(self.step, norms=norms)
        state = loader.state_dict()
        return Progress(self.step, state["epoch"], state["offset"], norms)

    def save(
        self,
        directory: Location | None,
        *,
        safe: bool = True,
        hooks: Sequence[SaveHook] = (),
        block: bool = True,
        engine_options: Mapping[str, Any] | None = None,
    ) -> Location:
        """Save to *directory*, or where the next automatically named checkpoint belongs.

        Waits for a save that is still being written. Without *block* it returns when the state is copied, and the copy
        is written in the background.

        Raises:
            CheckpointError: it could not be saved, or the one before in the background could not; nothing has changed.
            ValueError: no directory was given, named or configured.
        """
        self.finish()
        root = self.root
        if self.project.automatic_checkpoint_naming and root is not None:
            directory = None  # as documented: automatic naming decides
        if directory is None and root is None:
            raise ValueError(
                "save_state needs a directory: pass output_dir, or Accelerator(project_dir=...) with "
                "ProjectConfiguration(automatic_checkpoint_naming=True), or set ORC_CHECKPOINT_DIR"
            )
        numbered = directory is None
        state = self.state or strategy_wanted(getattr(self.context, "fsdp_plugin", None))
        request = SaveRequest(
            directory,
            root,
            self.project.iteration,
            self.progress(),
            safe,
            tuple(hooks),
            state,
            engine_options or {},
            keep=self.keep,
        )
        first = "barrier" not in self.__dict__
        try:
            destination = self._save(request, block, self.barrier, self._survey)
            if numbered:
                self.saved_step = self.step
        except RanksElsewhere as elsewhere:
            destination = self._save_alone(request, block, elsewhere)
            if first:  # peers may meet for something else first
                self.barrier.withdraw()
                del self.barrier, self._survey
        target = destination.target
        if numbered:
            self.project.iteration = (number_of(target) or 0) + 1
        return target

    def _save_alone(self, request: SaveRequest, block: bool, elsewhere: RanksElsewhere) -> Destination:
        """Save on rank 0, where the others are *elsewhere*; for them this is no save, so `saved_step` stays."""
        check_savable_alone(self.prepared, elsewhere)
        if not self._told_alone:
            tell(
                f"save_state: rank 0 saves alone ({elsewhere}); the random states of the other ranks are not in the "
                "checkpoint. Called on every rank it saves them too, and waits for nobody"
            )
            self._told_alone = True
        barrier = BarrierAlone(self.context, self._timeout_s, name="alone")
        survey = Survey(self.context, barrier, "1")  # who shares no directory gets a copy when it loads
        destination = self._save(replace(request, alone=True), block, barrier, survey)
        self.barrier.note_alone(str(destination.target))
        return destination

    def _save(self, request: SaveRequest, block: bool, barrier: Barrier, survey: Survey) -> Destination:
        save = Save(self.context, barrier, self.prepared, request)
        save.open(survey)
        save.collect(None if block else self._stage)
        if block:
            save.write(barrier)
            return save.destination
        beside = barrier if request.alone else self._background_barrier

        def later() -> None:
            save.write(beside, writers=1)
            beside.part()

        self.background.start(f"saving {save.destination.target}", later)
        return save.destination

    def finish(self) -> None:
        """Wait for what is written in the background. Raises `CheckpointError` when it could not be, once."""
        try:
            self.background.finish()
        except CheckpointError:
            self.saved_step = -1
            raise

    def close(self) -> None:
        """Wait for what is written in the background, and let other runs save where this one did."""
        try:
            self.finish()
        finally:
            release_all()

    def load(
        self,
        directory: Location | None,
        *,
        hooks: Sequence[LoadHook] = (),
        map_location: Any = None,
        model_options: Mapping[str, Any] | None = None,
    ) -> Resumed:
        """Load *directory*, or the newest automatically named checkpoint.

        Raises:
            CheckpointError: there is none, it is damaged, or it does not fit; what was prepared is unchanged unless
                the error says that a state does not fit.
        """
        self.finish()
        root = self.root
        asked = None if directory is None else str(directory)
        if directory is None:
            bid = [asked, *self._offers(root)]
        else:
            bid = [asked, offer(directory) if self.context.is_local_main else [], None]
        number, identity = self.barrier.hold("load_state", bid, self._choose)
        if directory is None:
            assert root is not None
            directory = root.numbered(number)
        elif not isinstance(directory, Remote):
            directory = directory.absolute()
        with self._verified(directory, identity, "load_state", hooks) as checked:
            return self._load(directory, checked, hooks, map_location, model_options, roll_over=True)

    def resume(self, *, hooks: Sequence[LoadHook] = ()) -> Resumed | None:
        """Load the newest checkpoint that is whole; `None` when there is none, or with ``resume: never``.

        A damaged checkpoint is reported on stderr and passed over.

        Raises:
            CheckpointError: there are checkpoints, but none is whole; or the newest does not fit.
        """
        self.finish()
        if self.context.config.resume == "never":
            return None
        root = self.root
        if root is None:
            return None
        candidates = self.barrier.hold("resume", self._offers(root), newest_first)
        failures = []
        for number, identity in candidates:
            candidate = root.numbered(number)
            with ExitStack() as stack:
                try:
                    checked = stack.enter_context(self._verified(candidate, identity, "resume", hooks))
                except CheckpointError as error:
                    failures.append(str(error))
                    if self.context.is_main:
                        tell(error)
                    continue
                return self._load(candidate, checked, hooks)
        if failures:
            raise CheckpointError("no checkpoint can be resumed from:\n" + "\n".join(failures))
        return None

    def _verified(
        self, directory: Location, identity: str | None, what: str, hooks: Sequence[LoadHook]
    ) -> AbstractContextManager[Verified]:
        sites = None
        if isinstance(directory, Path) and identity is not None:  # for what nobody has no directory is made
            sites = self._survey.at(directory.parent, what)
        # Hooks are given the directory, and may read whatever is in it.
        return verified(self.context, self.barrier, directory, sites=sites, identity=identity, whole=bool(hooks))

    def _offers(self, root: CheckpointRoot | RemoteRoot | None) -> list[Any]:
        """Return this machine's checkpoints below *root*, listed by one of its ranks, and the error of the listing."""
        if root is None or not looks(self.context, root):
            return [[], None]
        return list(attempt(lambda: offers(root)))

    def _choose(self, bids: list[Any]) -> tuple[int | None, str | None]:
        asked = [given for given, *_ in bids]
        if len(set(asked)) > 1:
            raise CheckpointError(f"load_state was called with different directories on different ranks: {asked}")
        newest = newest_first([bid for _, *bid in bids])
        if asked[0] is not None:
            return None, newest[0][1] if newest else None
        root = self.root
        if root is None:
            raise CheckpointError(
                "load_state needs a directory: pass input_dir, or use automatic checkpoint naming, or set "
                "ORC_CHECKPOINT_DIR"
            )
        if not newest:
            raise CheckpointError(f"{root.path} holds no complete checkpoint")
        return newest[0]

    def _load(
        self,
        path: Location,
        checked: Verified,
        hooks: Sequence[LoadHook],
        map_location: Any = None,
        model_options: Mapping[str, Any] | None = None,
        *,
        roll_over: bool = False,
    ) -> Resumed:
        try:
            load(
                self.context,
                self.barrier,
                self.prepared,
                checked,
                hooks=tuple(hooks),
                map_location=map_location,
                model_options=model_options,
                roll_over=roll_over,
            )
        except RankMissing:
            raise
        except CheckpointError as error:  # its files are whole
            raise CheckpointMisfit(str(error)) from error
        manifest = checked.manifest
        if self.prepared.guard is not None:
            self.prepared.guard.load_norms(self.prepared.optimizers, manifest.norms)
        self.base_step = manifest.step - self.prepared.steps()
        self.saved_step = manifest.step
        number = number_of(path)
        if number is not None:
            self.project.iteration = max(self.project.iteration, number + 1)
        if isinstance(path, Path):
            path = checked.directory
        return Resumed(path, manifest.step, manifest.epoch, manifest.offset)
