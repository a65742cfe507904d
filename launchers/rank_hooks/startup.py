"""Shipped as ``sitecustomize.py`` on the ranks' PYTHONPATH: makes starting and ending a process with torch cheaper.

``import torch`` makes about half a million objects that live until the end. Python's cyclic garbage collector walks
over them again and again while they are made, and twice more when the interpreter ends. Here the collector rests
during that one import, and what came out of it is set aside with `gc.freeze` (its documented use). Nothing else about
the process changes: it starts, runs and ends as it would without. Numbers: docs/explanation/agent.md.
``ORC_FREEZE_IMPORT=0`` turns it off.

The ranks of an agent also learn to write their stacks when they are asked to (`answer_for_stacks`).

`fork_ranks` serves ``orc launch`` (launchers/foreground/launch.py): this interpreter imports torch once, becomes all
the ranks by `fork`, and each goes on to its script by itself, as if it had been started alone.

Where one launcher has started all ranks (``orc launch``), the others also let rank 0 come out of that import first.
They meet in a store that rank 0 hosts, and one that knocks before it is open tries again only half a second later.
"""

from __future__ import annotations

import gc
import os
import sys

GATE = "ORC_START_GATE"  # a pipe that rank 0 closes when it has imported torch: the others hold the reading end
GATE_S = 0.25  # how long the others wait for that at most
LEAD_S = 0.01  # and how far ahead rank 0 is then

LINES = "ORC_WHOLE_LINES"  # set where several ranks write to one place
STAND_IN = "ORC_STAND_IN"  # packages that the runtime stands in for; children inherit it
PRELOAD = "ORC_PRELOAD"  # what `fork_ranks` is to do, in JSON

STACKS_SIGNAL = 13  # above SIGRTMIN; orc.launchers.agent.stacks sends it

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


class TorchFinder:
    """First on ``sys.meta_path`` until torch is imported; finds it where the others do."""

    def __init__(self, gate: int | None) -> None:
        self.gate = gate

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec that the other finders give, prepared so that executing the module is framed by `_import`."""
        if name != "torch":
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                break
        else:
            return None
        loader = spec.loader
        if loader is not None and hasattr(loader, "__dict__") and "exec_module" not in vars(loader):
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                del vars(loader)["exec_module"]  # from here on the loader is as it was
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                resting = gc.isenabled()
                gc.disable()
                try:
                    execute(module)
                    bind_stores()
                    gc.freeze()
                finally:
                    if resting:
                        gc.enable()
                    if self.gate is not None:
                        pass_gate(self.gate)

            vars(loader)["exec_module"] = exec_module
        return spec


def bind_stores() -> None:
    """Bind torch's store, which a rank or torchrun serves, to the address that it is given, not to every one."""
    import importlib

    try:
        importlib.import_module("orc.runtime.launch.listening").bind_stores()
    except ImportError as error:
        if str(error.name).startswith("torch"):
            return  # without torch.distributed there is no store
        sys.stderr.write(f"orc: the store of this process listens on all addresses: {error}\n")


def take_gate() -> int | None:
    """The file descriptor from the environment, which neither the script nor its children get to see."""
    text = os.environ.pop(GATE, "")
    if not text.isdigit():
        return None
    try:
        os.set_inheritable(int(text), False)
    except OSError:  # started by something that closes what it does not know
        return None
    return int(text)


def pass_gate(gate: int) -> None:
    """Rank 0 opens the way; the others wait for it, but not long."""
    if os.environ.get("RANK") != "0":
        import select
        import time

        poll = select.poll()
        poll.register(gate, select.POLLIN)  # a hang-up is always reported
        if poll.poll(GATE_S * 1000):
            time.sleep(LEAD_S)
    os.close(gate)


def fork_ranks(text: str) -> None:
    """Import torch and fork the ranks; returns in the ranks only.

    They become children of the launcher, which is a child subreaper, when this process ends. Their numbers go through
    a pipe; when nothing comes out of it, for whatever reason, the launcher starts them one by one.
    """
    import importlib
    import json

    orders = json.loads(text)
    report, launcher, parent = int(orders["report"]), int(orders["launcher"]), os.getpid()
    try:
        importlib.import_module("torch")  # in the ranks' interpreter; nothing of the launch layer imports it
        if not is_forkable(orders["directory"]):
            os._exit(0)
        pids = []
        for number, variables in enumerate(orders["ranks"]):
            pid = os.fork()
            if pid == 0:
                os.close(report)
                become_rank(number, variables, parent, launcher)
                return
            pids.append(pid)
        os.write(report, json.dumps(pids).encode())
    except BaseException:  # noqa: BLE001 - whatever it is, the script itself shall run into it
        os._exit(0)
    os._exit(0)


def is_forkable(directory: str) -> bool:
    """Return whether this process has one thread, and would have imported the same with the script's directory on
    the path.
    """
    if len(os.listdir("/proc/self/task")) != 1:
        return False
    loaded = {name.partition(".")[0] for name in sys.modules}
    return not any(name in loaded for name in modules_in(directory))


def modules_in(directory: str) -> set[str]:
    """The names that can be imported from *directory*."""
    with os.scandir(directory) as entries:
        return {
            entry.name.partition(".")[0]
            for entry in entries
            if entry.name.endswith((".py", ".so")) or os.path.exists(os.path.join(entry.path, "__init__.py"))
        }


def become_rank(number: int, variables: dict[str, str], parent: int, launcher: int) -> None:
    """Give this process everything that a rank gets from a launcher that starts it alone."""
    import ctypes
    import signal
    import time

    while os.getppid() == parent:  # until it has ended; then the launcher, a child subreaper, is the parent
        time.sleep(0.0005)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != launcher:
        os._exit(1)
    os.environ.update(variables)
    if number:
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        time.sleep(LEAD_S)
    if "numpy.random" in sys.modules:  # Python's own generator is seeded anew after a fork, numpy's is not
        sys.modules["numpy.random"].seed()


def answer_for_stacks() -> None:
    """Have a rank write the stacks of all its threads to ``stacks-<rank>.txt`` at the agent's signal.

    By `faulthandler`, in C: it needs neither the interpreter lock nor the main thread, so it works in a rank that
    hangs. The signal is one that nothing uses; should somebody, it stays theirs.
    """
    directory, rank = os.environ.get("ORC_ATTEMPT_DIR"), os.environ.get("RANK")
    if not directory or not rank:
        return
    import _signal  # type: ignore[import-not-found]  # `signal` itself costs a millisecond
    import faulthandler

    number = _signal.SIGRTMIN + STACKS_SIGNAL
    if _signal.getsignal(number) != _signal.SIG_DFL:
        return
    path = f"{directory}/node-{os.environ.get('ORC_NODE_RANK', '0')}/stacks-{rank}.txt"
    try:
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        faulthandler.register(number, file=file)
    except (OSError, RuntimeError):  # a full disk; no room for the handler's own stack
        return


def install_stand_ins() -> None:
    """Have ``import accelerate`` give the runtime; a name without a stand-in ends the process with status 2."""
    import importlib

    try:
        importlib.import_module("orc.runtime.stand_ins.switch").stand_in_from_environment()
    except (ImportError, ValueError) as error:
        sys.stderr.write(f"orc: {STAND_IN}={os.environ[STAND_IN]!r}: {error}\n")
        sys.stderr.flush()
        os._exit(2)  # a run on other code than was asked for is worse than none


def run_shadowed() -> None:
    """Run the ``sitecustomize`` that this one hides, if the interpreter or the user has one."""
    here = os.path.dirname(os.path.abspath(__file__))
    from importlib.machinery import PathFinder

    elsewhere = [path for path in sys.path if os.path.abspath(path or os.curdir) != here]
    spec = PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        import importlib.util

        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def write_whole_lines() -> None:
    """Write whole lines: unbuffered, ``print`` makes one per word, and the words of all ranks get mixed."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True, write_through=False)


if __name__ == "sitecustomize":
    if os.environ.pop(LINES, ""):
        write_whole_lines()
    if os.environ.get("ORC_FREEZE_IMPORT", "1") != "0" and "torch" not in sys.modules:
        sys.meta_path.insert(0, TorchFinder(take_gate()))
    answer_for_stacks()
    if os.environ.get(STAND_IN):
        install_stand_ins()
    run_shadowed()
    if PRELOAD in os.environ:
        fork_ranks(os.environ.pop(PRELOAD))
