"""For tests of training code: contexts without processes, ranks in threads, ranks in processes, a clean state.

See docs/how-to/test-distributed-code.md.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from orc.runtime.core import context as context_module
from orc.runtime.core.context import RunContext, use_context
from orc.runtime.core.errors import RankFailure, add_note

if TYPE_CHECKING:
    import torch

    from orc.runtime.testing.in_memory import InMemoryWorld

__all__ = ["InMemoryWorld", "RankFailure", "fake_context", "isolated", "reset", "run_ranks", "run_threads"]


def __getattr__(name: str) -> Any:
    if name == "InMemoryWorld":
        from orc.runtime.testing.in_memory import InMemoryWorld

        return InMemoryWorld
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# ---- a clean state


def reset() -> None:
    """Forget the process context and all settings; the next Accelerator makes new ones from the environment.

    An open process group stays open and is used again.
    """
    _retire(context_module._default)
    context_module.reset_default()


# What watches over a run in the background, by context; modules that were not imported watch nothing.
_WATCHERS = (
    ("orc.runtime.preemption.preemption", "Preemption"),
    ("orc.runtime.observe.watch", "Watch"),
    ("orc.runtime.preemption.notices", "Notices"),
)


def _retire(context: RunContext | None) -> None:
    """End the background threads of *context*: its run is over, though this process goes on."""
    for name, watcher in _WATCHERS:
        module = sys.modules.get(name)
        if module is not None and context is not None:
            getattr(module, watcher).forget(context)


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """A block without a process context, and whose context and environment variables are gone afterwards.

    The context and the environment from before the block are back then.
    """
    outer, variables = context_module._default, dict(os.environ)
    token = context_module._override.set(None)
    context_module._default = None
    try:
        yield
    finally:
        reset()
        context_module._default = outer
        context_module._override.reset(token)
        os.environ.clear()
        os.environ.update(variables)


# ---- no processes


def fake_context(
    rank: int = 0,
    world_size: int = 1,
    *,
    nodes: int = 1,
    device: torch.device | str = "cpu",
    world: InMemoryWorld | None = None,
) -> RunContext:
    """The context of one rank of a run that does not exist; `RunContext.fake` is the same.

    Args:
        rank: this rank.
        world_size: ranks of the run.
        nodes: machines that they are spread over evenly.
        device: where this rank computes.
        world: where the ranks exchange tensors. Without it the rank is alone among mirrors of itself: every peer has
            the same tensors, so a broadcast changes nothing, a sum is a multiple, a gather repeats.

    Raises:
        ValueError: *nodes* does not divide *world_size*, or *world* has another size.
        LaunchError: *rank* is not below *world_size*.
    """
    import torch

    from orc.runtime.core.environment import LaunchEnvironment
    from orc.runtime.testing.in_memory import mirror_group

    if nodes < 1 or world_size % nodes:
        raise ValueError(f"{world_size} ranks cannot be spread evenly over {nodes} nodes")
    if world is not None and world.size != world_size:
        raise ValueError(f"the world has {world.size} ranks, not {world_size}")
    local = world_size // nodes
    env = LaunchEnvironment("fake", rank, world_size, rank % local, local, rank // local)
    group = None
    if world_size > 1:
        group = mirror_group(rank, world_size) if world is None else world.groups[rank]
        group.register()  # closing a real process group makes torch.distributed forget all groups
    return RunContext(
        rank=rank,
        world_size=world_size,
        local_rank=env.local_rank,
        local_world_size=local,
        node_rank=env.node_rank,
        device=torch.device(device),
        backend="in-memory" if world_size > 1 else None,
        env=env,
        group=group,
        store=world.store if world is not None and world_size > 1 else None,
        mirrored=world is None and world_size > 1,
    )


def run_threads(
    world_size: int, function: Callable[..., Any], *args: Any, nodes: int = 1, timeout_s: float = 60.0
) -> list[Any]:
    """``function(*args)`` on every rank of an in-memory world, each in a thread of its own; the results by rank.

    In each thread the current context is that rank's, so that `Accelerator()` and the collectives work as usual.
    Threads share what belongs to the process: global random number generators, environment, modules.

    Args:
        world_size: ranks.
        function: what each rank does.
        args: its arguments, the same objects for all.
        nodes: simulated machines.
        timeout_s: how long a rank waits in a collective, in seconds.

    Raises:
        Exception: what the first rank that failed raised, with a note that names the rank.
    """
    from orc.runtime.testing.in_memory import InMemoryWorld, PeerFailed

    world = InMemoryWorld(world_size, timeout_s)
    results: list[Any] = [None] * world_size
    failures: dict[int, BaseException] = {}

    def live(rank: int) -> None:
        context = fake_context(rank, world_size, nodes=nodes, world=world)
        try:
            with use_context(context):
                results[rank] = function(*args)
        except BaseException as error:  # noqa: BLE001 (it is raised again by the caller's thread)
            failures[rank] = error
            world.exchange.fail(rank, error)
        finally:
            _retire(context)

    threads = [
        threading.Thread(target=live, args=(rank,), name=f"rank-{rank}", daemon=True) for rank in range(world_size)
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException as interrupt:  # let no thread wait for one that was not started
        world.exchange.fail(0, interrupt)
        raise
    finally:
        world.close()
    if failures:
        causes = [rank for rank, error in failures.items() if not isinstance(error, PeerFailed)] or list(failures)
        error = failures[causes[0]]
        add_note(error, f"on rank {causes[0]} of {world_size}")
        raise error
    return results


# ---- processes


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    env: Mapping[str, str] | Sequence[Mapping[str, str]] | None = None,
    nodes: int = 1,
    timeout_s: float = 120.0,
) -> list[Any]:
    """``function(*args)`` in *world_size* new processes on this machine that meet on loopback; the results by rank.

    The function makes its own Accelerator. Function, arguments and results are pickled: define the function at the top
    of a module, or install cloudpickle, with which it may be local.

    Args:
        world_size: processes.
        function: what each does.
        args: its arguments.
        env: more environment variables, for all ranks or a sequence with those of each.
        nodes: simulated machines.
        timeout_s: for everything, in seconds.

    Raises:
        RankFailure: a rank raised, died or was not done in time. No process is left then.
    """
    if nodes < 1 or world_size % nodes:
        raise ValueError(f"{world_size} ranks cannot be spread evenly over {nodes} nodes")
    from orc.runtime.launch import ranks

    with ranks.held_port() as port:
        variables = []
        for rank in range(world_size):
            more = env[rank] if isinstance(env, Sequence) else env or {}
            own = ranks.launch_variables(rank, world_size, world_size // nodes, "127.0.0.1", port)
            variables.append(own | dict(more))
        return ranks.run(
            variables, function, args, start_method="forkserver", timeout_s=timeout_s, clean=True, results=True
        )
