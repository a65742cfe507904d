"""Launchers for Python: `notebook_launcher` and `debug_launcher` run a function on several ranks of this machine.

See docs/how-to/notebooks.md. The ranks are children of this process: `orc.runtime.launch.ranks`.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from orc.runtime.core.config import to_env
from orc.runtime.core.errors import ContextError, LaunchError, RankFailure, SettingConflict
from orc.runtime.core.parsing import parse_bool

__all__ = ["debug_launcher", "notebook_launcher"]

Variables = list[dict[str, str]]


def notebook_launcher(
    function: Callable[..., Any],
    args: tuple[Any, ...] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: int | str = "29500",
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: Mapping[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
    *,
    start_method: str = "fork",
) -> None:
    """Run a training function on several ranks, from a notebook or any other Python that has begun already.

    The function makes its own Accelerator. What the ranks print appears below the cell. One process on one machine is
    this one; several are forked from it, so that the function may use whatever the notebook has defined. Configuration
    files are not read.

    Args:
        function: what each rank does.
        args: its arguments.
        num_processes: ranks on this machine; by default as many as there are GPUs, or one on the CPU. On a TPU all of
            its chips.
        mixed_precision: ``no``, ``fp16``, ``bf16`` or ``fp8``.
        use_port: where the ranks meet; one machine takes another port when this one is in use.
        master_addr: the address of the machine with ``node_rank`` 0.
        node_rank: this machine, from 0.
        num_nodes: machines; run the same cell on each of them, at the same time.
        rdzv_backend: ``static``, or another that torch.distributed.elastic knows, such as ``c10d``, which also gives
            the ranks of the nodes.
        rdzv_endpoint: ``host:port`` of that backend; master_addr and use_port without it.
        rdzv_conf: further settings of that backend.
        rdzv_id: the name of the run for that backend.
        max_restarts: start all ranks again so often after a failure.
        monitor_interval: seconds between looks at whether ranks are alive; failures that they tell come at once.
        log_line_prefix_template: put before each line of a rank, with ``${role_name}``, ``${rank}`` and
            ``${local_rank}``.
        start_method: ``fork``; ``forkserver`` or ``spawn`` start from a fresh Python, for which function and arguments
            are pickled (cloudpickle takes what a notebook has defined).

    Raises:
        RankFailure: a rank raised or died; the text has its number and its traceback. The other ranks are ended then.
        ContextError: an Accelerator or a process group exists already in this process, or CUDA is in use by it.
        LaunchError: there are fewer GPUs than processes, or the nodes did not meet.
        ValueError: an argument that cannot be.
    """
    settings, args, port = _settings(mixed_precision), _arguments(args), _port(use_port)
    _check(num_processes, node_rank, num_nodes, max_restarts, start_method)
    from orc.runtime.launch import xla

    on_cpu = _on_cpu()
    if not on_cpu and xla.wanted(os.environ):
        _refuse_what_is_there(start_method, cuda=False)
        _say("Launching training on the chips of a TPU.")
        with _variables(settings):
            xla.launch(function, args, one=num_processes == 1)
        return
    gpus = 0 if on_cpu else _gpu_count()
    count = num_processes or gpus or 1
    if gpus and count > gpus:
        raise LaunchError(
            f"num_processes={count}, but this machine has {gpus} GPU{'s' * (gpus > 1)}; lower it, or set "
            "ORC_USE_CPU=true before the launch to train on the CPU"
        )
    _say(_start_line(count, gpus))
    if count == 1 and num_nodes == 1:
        from orc.runtime.testing import isolated

        with isolated(), _variables(settings):
            function(*args)
        return
    _refuse_what_is_there(start_method, cuda=bool(gpus))
    if gpus and start_method == "fork" and _debugging():
        _try_cuda()
    from orc.runtime.launch import ranks

    with contextlib.ExitStack() as stack:
        if rdzv_backend == "static":
            rendezvous = _static(stack, master_addr, port, node_rank, num_nodes)
        else:
            endpoint = rdzv_endpoint or f"{master_addr}:{port}"
            rendezvous = _elastic(rdzv_backend, endpoint, rdzv_id, num_nodes, {"rank": node_rank, **(rdzv_conf or {})})
        for restart in range(max_restarts + 1):
            variables, first = rendezvous(count)
            for own in variables:
                own.update(settings, TORCHELASTIC_RESTART_COUNT=str(restart))
            try:
                ranks.run(
                    variables,
                    function,
                    args,
                    start_method=start_method,
                    interval_s=monitor_interval,
                    prefixes=ranks.prefixes(log_line_prefix_template, first, count),
                )
            except RankFailure as failure:
                if restart == max_restarts:
                    raise
                _say(f"{failure}\nrestart {restart + 1} of {max_restarts}", error=True)
            else:
                return


def debug_launcher(function: Callable[..., Any], args: tuple[Any, ...] = (), num_processes: int = 2) -> None:
    """Run a training function on several CPU processes of this machine, to test it.

    Args:
        function: what each rank does; it makes its own Accelerator.
        args: its arguments.
        num_processes: ranks.

    Raises:
        RankFailure: a rank raised or died; the text has its number and its traceback.
        ContextError: a process group exists already in this process. An Accelerator may: the ranks make their own.
    """
    args = _arguments(args)
    _check(num_processes, 0, 1, 0, "fork")
    _refuse_what_is_there("fork", accelerator=False, cuda=False)
    from orc.runtime.core.context import reset_default
    from orc.runtime.launch import ranks

    def anew(*args: Any) -> Any:
        reset_default()  # a forked rank has the context of this process
        return function(*args)

    settings = to_env({"use_cpu": True})
    with ranks.held_port() as port:
        variables = [
            {**ranks.launch_variables(rank, num_processes, num_processes, "127.0.0.1", port), **settings}
            for rank in range(num_processes)
        ]
        ranks.run(variables, anew, args, prefixes=[""] * num_processes)


# ---- where ranks meet

# Of so many ranks of this node: their variables, and the number of the first.
Rendezvous = Callable[[int], tuple[Variables, int]]


def _static(stack: contextlib.ExitStack, address: str, port: int, node_rank: int, num_nodes: int) -> Rendezvous:
    """Return the rendezvous at an address that is given in advance."""
    from orc.runtime.launch import ranks

    if num_nodes == 1:
        address, port = "127.0.0.1", stack.enter_context(ranks.held_port(port))
    return lambda count: _of_node(node_rank, num_nodes, count, address, port)


def _elastic(backend: str, endpoint: str, run: str, num_nodes: int, conf: Mapping[str, Any]) -> Rendezvous:
    """Return the rendezvous that torch.distributed.elastic arranges anew for each start; it counts the nodes."""
    from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    parameters = RendezvousParameters(
        backend=backend, endpoint=endpoint, run_id=run, min_nodes=num_nodes, max_nodes=num_nodes, **dict(conf)
    )
    try:
        handler = get_rendezvous_handler(parameters)
    except ValueError as error:
        raise ValueError(f"rdzv_backend={backend!r}: {error}") from None

    def rendezvous(count: int) -> tuple[Variables, int]:
        try:
            info = handler.next_rendezvous()
        except RendezvousError as error:
            raise LaunchError(f"the nodes did not meet at {endpoint}: {error}") from error
        place = info.bootstrap_store_info
        assert place is not None
        return _of_node(info.rank, info.world_size, count, place.master_addr, place.master_port)

    return rendezvous


def _of_node(node: int, nodes: int, count: int, address: str, port: int) -> tuple[Variables, int]:
    from orc.runtime.launch import ranks

    first = node * count
    made = [ranks.launch_variables(rank, nodes * count, count, address, port) for rank in range(first, first + count)]
    return made, first


# ---- what is asked for, and what is there


def _settings(mixed_precision: str) -> dict[str, str]:
    from orc.runtime.core.config import ConfigError

    try:
        return to_env({"mixed_precision": str(mixed_precision).lower()})
    except ConfigError as error:
        raise ValueError(str(error)) from None


def _arguments(args: tuple[Any, ...] | list[Any]) -> tuple[Any, ...]:
    if not isinstance(args, (tuple, list)):
        raise ValueError(f"args={args!r} is no tuple; a single argument is written args=(value,)")
    return tuple(args)


def _port(given: int | str) -> int:
    text = str(given)
    if not text.isdecimal() or int(text) > 65535:
        raise ValueError(f"use_port={given!r} is no port: a whole number from 0 to 65535")
    return int(text)


def _check(num_processes: int | None, node_rank: int, num_nodes: int, max_restarts: int, start_method: str) -> None:
    from orc.runtime.launch.ranks import START_METHODS

    if num_processes is not None and num_processes < 1:
        raise ValueError(f"num_processes={num_processes}: at least one process is needed")
    if num_nodes < 1 or not 0 <= node_rank < num_nodes:
        raise ValueError(f"node_rank={node_rank} is not below num_nodes={num_nodes}; nodes count from 0")
    if max_restarts < 0:
        raise ValueError(f"max_restarts={max_restarts} is below 0")
    if start_method not in START_METHODS:
        raise ValueError(f"start_method={start_method!r} is none of {', '.join(START_METHODS)}")


def _on_cpu() -> bool:
    from orc.runtime.core.config import resolve

    return bool(resolve({}, os.environ).use_cpu)


def _debugging() -> bool:
    text = os.environ.get("ORC_DEBUG_MODE") or os.environ.get("ACCELERATE_DEBUG_MODE") or "no"
    return parse_bool(text)


def _gpu_count() -> int:
    """Return the GPUs that this process could use, without taking one: a child could not use it then."""
    import torch

    return torch.cuda.device_count() if torch.backends.cuda.is_built() else 0


def _refuse_what_is_there(start_method: str, *, accelerator: bool = True, cuda: bool) -> None:
    """Raise `ContextError` for what ranks cannot be started beside."""
    import torch
    import torch.distributed as dist

    from orc.runtime.core.context import peek_context

    if (accelerator and peek_context() is not None) or (dist.is_available() and dist.is_initialized()):
        raise SettingConflict(
            "an Accelerator (or a process group) exists already in this process, and its ranks cannot be made from "
            "here: make it in the function that is launched, and nowhere else. Restart the kernel, then launch again"
        )
    if cuda and start_method == "fork" and torch.cuda.is_initialized():
        raise ContextError(
            "CUDA is in use by this process, and a child cannot use it then: keep all that touches a GPU (also "
            'tensor.to("cuda") and torch.cuda.mem_get_info) inside the function that is launched. Restart the kernel, '
            "then launch again, or launch with start_method='forkserver'"
        )


def _try_cuda() -> None:
    """Start one process that uses CUDA. Raises `LaunchError` when it cannot."""
    from orc.runtime.launch import ranks

    def touch() -> None:
        import torch

        torch.zeros(1, device="cuda").add_(1).item()

    try:
        ranks.run([{}], touch, (), timeout_s=120.0)
    except RankFailure as failure:
        raise LaunchError(
            f"a process that this one starts cannot use CUDA:\n{failure}\nSomething imported or run before has "
            "initialised it; restart the kernel, and keep what uses CUDA inside the function"
        ) from failure


# ---- words


def _start_line(count: int, gpus: int) -> str:
    if count == 1:
        return f"Launching training on {'one GPU' if gpus else 'CPU'}."
    return f"Launching training on {count} {'GPUs' if gpus else 'CPU processes'}."


def _say(text: str, *, error: bool = False) -> None:
    print(text, file=sys.stderr if error else sys.stdout, flush=True)


@contextlib.contextmanager
def _variables(settings: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
