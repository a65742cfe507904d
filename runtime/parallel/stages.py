"""Stages of a model, found by tracing it: where it is cut, and what passes from stage to stage.

What a stage makes for later ones goes to the next one alone, which passes it on: schedules that train send gradients
back the way the values came, and know no way but that from neighbour to neighbour.
"""

from __future__ import annotations

import contextlib
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from orc.runtime.collectives.tree import send_to_device
from orc.runtime.core.errors import OrcRuntimeError
from orc.runtime.core.parsing import nearest
from orc.runtime.memory.device_map import infer_auto_device_map
from orc.runtime.memory.sizes import compute_module_sizes
from orc.runtime.parallel.call_form import CallForm

Value = tuple[int, int]  # the stage that makes it, and the place among its outputs

# ---- cuts


def automatic_map(model: nn.Module, stages: int, whole: str | Sequence[str] | None) -> dict[str, int]:
    """Return the stage of every part of *model*: a device map over *stages* devices of the least equal memory."""
    if whole is None:
        whole = list(getattr(model, "_no_split_modules", None) or [])

    def plan(limit: int) -> dict[str, Any]:
        # Device 0 would keep room for offloaded layers, of which there are none: it gets nothing.
        limits: dict[int | str, int | str] = {0: 0, **dict.fromkeys(range(1, stages + 1), limit)}
        return infer_auto_device_map(model, limits, whole, clean_result=False, offload_buffers=True)

    largest = compute_module_sizes(model)[""]
    least = largest // stages
    while least < largest:
        middle = (least + largest) // 2
        if "disk" in plan(middle).values():
            least = middle + 1
        else:
            largest = middle
    return {name: device - 1 for name, device in plan(largest).items()}


def check_names(model: nn.Module, names: Sequence[str]) -> None:
    """Raise `ValueError` unless each of *names* is a module of *model* and none is there twice."""
    known = [name for name, _ in model.named_modules() if name]
    for name in names:
        if name not in known:
            raise ValueError(f"split_points: the model has no module {name!r}{nearest(str(name), known)}")
    if len(set(names)) < len(names):
        raise ValueError(f"split_points: a module is named twice in {list(names)}")


@contextlib.contextmanager
def _cut(model: nn.Module, begins: Mapping[str, Any]) -> Iterator[list[str]]:
    """Begin a stage where the first module of each kind in *begins* is called; yield the list that gets their names."""
    from torch.distributed.pipelining import pipe_split

    points: list[str] = []
    seen: set[Any] = set()

    def before(name: str, stage: Any) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            if stage not in seen:
                seen.add(stage)
                points.append(name)
                pipe_split()

        return hook

    handles = [
        module.register_forward_pre_hook(before(name, begins[name]), prepend=True)
        for name, module in model.named_modules()
        if name in begins
    ]
    try:
        yield points
    finally:
        for handle in handles:
            handle.remove()


def _first_calls(model: nn.Module, stages: Mapping[str, int]) -> dict[str, int]:
    """Return the modules of which the one that is called first begins a stage, after the first stage."""
    calls = {}
    for name, module in model.named_modules():
        owner = next((key for key in stages if name == key or name.startswith(f"{key}.")), None)
        # What has no weights is put anywhere, and may be called early.
        if owner is not None and stages[owner] > 0 and next(module.parameters(), None) is not None:
            calls[name] = stages[owner]
    return calls


# ---- trace


class _Flat(nn.Module):
    """Model between flat tensors. All inputs enter at the first stage, and all outputs leave at the last."""

    def __init__(self, model: nn.Module, form: CallForm) -> None:
        super().__init__()
        self.model = model
        self.form = form

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        call = self.form.arguments([tensor.view_as(tensor) for tensor in tensors])
        output = self.model(*call.args, **call.kwargs)
        return tuple(tensor.clone() for tensor in self.form.note_output(output))


@dataclass(frozen=True)
class Traced:
    """Traced model: its stages, the names of the modules that begin them, the inputs that the first one takes."""

    pipe: Any
    points: list[str]
    used: list[int]


def trace(
    model: nn.Module,
    split_points: str | Sequence[str],
    whole: str | Sequence[str] | None,
    form: CallForm,
    stages: int,
    runs: str = "process",
) -> Traced:
    """Trace *model* into as many *stages*.

    Args:
        model: the model, in the mode in which it will run.
        split_points: names of the modules that begin the second and later stages, or ``"auto"``.
        whole: names of classes that ``"auto"`` leaves whole.
        form: of the calls.
        stages: how many.
        runs: the noun for what runs one stage, for messages.

    Raises:
        ValueError: the split points make another number of stages, or name what is not there.
        OrcRuntimeError: the model cannot be traced.
    """
    from torch.distributed.pipelining import pipeline

    begins: Mapping[str, Any]
    if isinstance(split_points, str):
        if split_points != "auto":
            raise ValueError(f"split_points is 'auto' or a list of names of modules, not {split_points!r}")
        begins = _first_calls(model, automatic_map(model, stages, whole))
    else:
        check_names(model, split_points)
        if len(split_points) != stages - 1:
            raise ValueError(
                f"split_points names {len(split_points)} modules, which makes {len(split_points) + 1} stages, but "
                f"{_one_for_each(stages, runs)}: name {stages - 1}, which begin the later stages"
            )
        begins = {name: name for name in split_points}
    device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
    example = tuple(send_to_device(form.micro_batch(), device))
    with _cut(model, begins) as points, torch.no_grad(), warnings.catch_warnings():
        # PyTorch copies its own structures in a way that it warns of.
        warnings.filterwarnings("ignore", r".*isinstance\(treespec, LeafSpec\)", FutureWarning)
        try:
            pipe = pipeline(_Flat(model, form), example)
        except RuntimeError as error:
            cause = error.__cause__ or error
            if isinstance(cause, ValueError) and not isinstance(cause, torch._dynamo.exc.UserError):
                raise cause from None
            raise OrcRuntimeError(
                f"the model cannot be traced for a pipeline: {cause}. Shapes may not depend on values, and everything "
                "between inputs and outputs has to be PyTorch; see torch.export"
            ) from error
    _check_stages(split_points, points, pipe.num_stages, stages, runs)
    return Traced(pipe, points, _relay(pipe.split_gm))


def _one_for_each(stages: int, runs: str) -> str:
    return f"there are {stages} processes, one for each stage" if runs == "process" else f"there are {stages} {runs}"


def _check_stages(split_points: str | Sequence[str], points: Sequence[str], found: int, stages: int, runs: str) -> None:
    if found == stages and len(points) == stages - 1:
        return
    if not isinstance(split_points, str) and (silent := [name for name in split_points if name not in points]):
        raise ValueError(
            f"split_points: {silent[0]!r} is not called by the example; name a module that is (a list of modules is "
            "not: name its first element)"
        )
    raise ValueError(
        f"split_points={split_points!r} makes {found} stages{f' (at {points})' if points else ''}, but "
        f"{_one_for_each(stages, runs)}: name the {stages - 1} modules that begin the later stages, or start "
        f"{found} processes"
    )


# ---- what passes


def outputs_of(graph: fx.Graph) -> list[Any]:
    """Return the nodes that *graph* returns."""
    given: Any = next(node for node in graph.nodes if node.op == "output").args[0]
    return [given] if isinstance(given, fx.Node) else list(given)


def _relay(split: fx.GraphModule) -> list[int]:
    """Let the stages of *split* send contiguous tensors to the next stage alone; return the inputs in use."""
    calls = [node for node in split.graph.nodes if node.op == "call_module"]
    number = {node: index for index, node in enumerate(calls)}
    stages: list[Any] = [split.get_submodule(str(call.target)) for call in calls]
    received = [[_source(node, number) for node in call.args] for call in calls]
    last_user = {value: index for index, values in enumerate(received) for value in values if value is not None}
    made = [outputs_of(stage.graph) for stage in stages]
    examples = {(i, k): node.meta["val"].contiguous() for i, nodes in enumerate(made) for k, node in enumerate(nodes)}
    passing: list[Value] = []
    sent: list[fx.Node] = []
    for index, (call, stage) in enumerate(zip(calls, stages, strict=True)):
        held = dict(zip(received[index], (node for node in stage.graph.nodes if node.op == "placeholder"), strict=True))
        if index:
            call.args = tuple(sent)
            _take(stage.graph, held, passing, examples)
        passing = sorted(value for value, user in last_user.items() if value[0] <= index < user)
        if index < len(calls) - 1:
            _give(stage.graph, index, made[index], held, passing)
            with split.graph.inserting_before(calls[index + 1]):
                parts = [split.graph.call_function(operator.getitem, (call, place)) for place in range(len(passing))]
            sent = parts if len(parts) != 1 else [call]
        stage.recompile()
    for node in reversed(list(split.graph.nodes)):
        if node.target is operator.getitem and not node.users:
            split.graph.erase_node(node)
    split.recompile()
    inputs = [node for node in split.graph.nodes if node.op == "placeholder"]
    return [inputs.index(node) for node in calls[0].args]


def _source(node: Any, number: Mapping[fx.Node, int]) -> Value | None:
    """Return what *node* is the value of; `None` for an input of the whole."""
    if node.op == "placeholder":
        return None
    stage, place = node.args if node.target is operator.getitem else (node, 0)
    return number[stage], int(place)


def _take(graph: fx.Graph, held: dict[Any, fx.Node], wanted: list[Value], examples: Mapping[Value, Any]) -> None:
    """Give *graph* a placeholder for each of the values *wanted*, in their order."""
    for value in reversed(wanted):
        first = next(iter(graph.nodes))
        if value not in held:
            with graph.inserting_before(first):
                held[value] = graph.placeholder(f"relayed_{value[0]}_{value[1]}")
        elif held[value] is not first:
            first.prepend(held[value])
        held[value].meta["val"] = examples[value]


def _give(graph: fx.Graph, index: int, made: list[Any], held: Mapping[Any, fx.Node], wanted: list[Value]) -> None:
    """Let *graph* return the values *wanted*: its own, and views of what it has got."""
    end = next(node for node in graph.nodes if node.op == "output")
    aten, results = torch.ops.aten, []
    with graph.inserting_before(end):
        for value in wanted:
            node = made[value[1]] if value[0] == index else held[value]
            if value[0] != index:
                results.append(graph.call_function(aten.view_as.default, (node, node)))
            elif node.meta["val"].is_contiguous():
                results.append(node)
                continue
            else:
                results.append(graph.call_function(aten.contiguous.default, (node,)))
            results[-1].meta = {**node.meta, "val": node.meta["val"].contiguous()}
    end.args = (tuple(results) if len(results) != 1 else results[0],)
