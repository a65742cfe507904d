"""Relays of a traced pipeline: what a stage makes for later ones goes to the next one alone, which passes it on.

Schedules that train send gradients back the way the values came, and know no way but that from neighbour to neighbour.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

Value = tuple[int, int]  # stage that makes it, and the place among its outputs


def relay(split: fx.GraphModule) -> None:
    """Let the stages of *split* send to the next stage alone, in place."""
    calls = [node for node in split.graph.nodes if node.op == "call_module"]
    number = {node: index for index, node in enumerate(calls)}
    inputs = [_values(call, number) for call in calls]
    last_user = {value: index for index, values in enumerate(inputs) for value in values if value is not None}
    graphs: list[Any] = [split.get_submodule(str(call.target)).graph for call in calls]
    made = [_outputs(graph) for graph in graphs]
    examples = {(i, k): node.meta["val"] for i, nodes in enumerate(made) for k, node in enumerate(nodes)}
    passing = [sorted(v for v, user in last_user.items() if v[0] < i <= user) for i in range(len(calls) + 1)]
    for index, graph in enumerate(graphs):
        held = dict(zip(inputs[index], (n for n in graph.nodes if n.op == "placeholder"), strict=True))
        if index:
            _take(graph, held, passing[index], examples)
        if index < len(graphs) - 1:
            _give(graph, index, made[index], held, passing[index + 1])
    _connect(split, calls, passing)


def _values(call: fx.Node, number: dict[fx.Node, int]) -> list[Value | None]:
    """Return what *call* gets; `None` for the inputs of the whole."""
    values: list[Value | None] = []
    for node in call.args:
        assert isinstance(node, fx.Node)
        if node.op == "placeholder":
            values.append(None)
        elif node.target is operator.getitem:
            source, place = node.args
            values.append((number[source], int(place)))  # type: ignore[arg-type, index]
        else:
            values.append((number[node], 0))
    return values


def _outputs(graph: fx.Graph) -> list[fx.Node]:
    end = next(node for node in graph.nodes if node.op == "output")
    given: Any = end.args[0]
    return [given] if isinstance(given, fx.Node) else list(given)


def _take(graph: fx.Graph, held: dict[Any, fx.Node], wanted: list[Value], examples: dict[Value, Any]) -> None:
    """Give *graph* a placeholder for each of the values *wanted*, in their order."""
    for value in reversed(wanted):
        first = next(iter(graph.nodes))
        node = held.get(value)
        if node is None:
            with graph.inserting_before(first):
                node = graph.placeholder(f"relayed_{value[0]}_{value[1]}")
            node.meta["val"] = examples[value]
            held[value] = node
        elif node is not first:
            first.prepend(node)


def _give(graph: fx.Graph, index: int, made: list[fx.Node], held: dict[Any, fx.Node], wanted: list[Value]) -> None:
    """Let *graph* return the values *wanted*: its own, and views of what it has got."""
    end = next(node for node in graph.nodes if node.op == "output")
    results = []
    with graph.inserting_before(end):
        for value in wanted:
            if value[0] == index:
                results.append(made[value[1]])
                continue
            node = graph.call_function(torch.ops.aten.view_as.default, (held[value], held[value]))
            node.meta["val"] = held[value].meta["val"]
            results.append(node)
    end.args = (tuple(results) if len(results) != 1 else results[0],)


def _connect(split: fx.GraphModule, calls: list[fx.Node], passing: list[list[Value]]) -> None:
    graph = split.graph
    sent: list[fx.Node] = []
    for index, call in enumerate(calls):
        if index:
            call.args = tuple(sent)
        if index == len(calls) - 1:
            break
        count = len(passing[index + 1])
        with graph.inserting_before(calls[index + 1]):
            sent = [call] if count == 1 else [graph.call_function(operator.getitem, (call, k)) for k in range(count)]
    for node in reversed(list(graph.nodes)):
        if node.target is operator.getitem and not node.users:
            graph.erase_node(node)
    split.recompile()
