"""Bodies of stages: traced parts of a model, which run with the parameters that the model has at that moment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

_PREFIX = "model."  # of names in the trace


class Body:
    """Traced stage of *model*.

    The tensors of the model are found by their names each time, because sharding exchanges them between two calls.
    """

    def __init__(self, traced: fx.GraphModule, model: nn.Module) -> None:
        self.traced = traced
        end = next(node for node in traced.graph.nodes if node.op == "output")
        given = end.args[0]
        self.results = [node.meta["val"] for node in ([given] if isinstance(given, fx.Node) else given)]
        self._links: list[tuple[dict[str, Any], str, dict[str, Any], str]] = []
        self.names: list[str] = []
        own = dict(model.named_modules())
        for path, module in traced.named_modules():
            if hasattr(module, "_run_with_interpreter"):
                module._run_with_interpreter = False  # the code that was made of the graph, which takes less time
            home = own.get(path[len(_PREFIX) :] if path.startswith(_PREFIX) else "")
            if home is None or not (path + ".").startswith(_PREFIX):
                continue
            for kind in ("_parameters", "_buffers"):
                table, source = getattr(module, kind), getattr(home, kind)
                for key in [key for key in table if key in source]:
                    self._links.append((table, key, source, key))
                    self.names.append(f"{path}.{key}"[len(_PREFIX) :])

    def bind(self, instead: Mapping[int, Tensor]) -> None:
        """Take the tensors that the model has now, or what stands for one of them (by its ``id``)."""
        for table, key, source, name in self._links:
            tensor = source[name]
            table[key] = instead.get(id(tensor), tensor)

    def release(self) -> None:
        """Forget the tensors until the next call."""
        for table, key, _, _ in self._links:
            table[key] = None

    def bound(self) -> list[Tensor]:
        """Return the tensors that it runs with."""
        return [table[key] for table, key, _, _ in self._links]


class StageForward:
    """Forward of a model of which stages alone are left: runs the stage of a number, on one micro-batch.

    A stage that has failed goes on with zeros, and its gradients are zeros: its neighbours wait for what it sends, and
    those that share its parameters for its gradients. The first error is kept.
    """

    def __init__(
        self, model: nn.Module, bodies: Mapping[tuple[int, bool], Body], device: torch.device, checkpointing: bool
    ) -> None:
        self._model, self._bodies, self._device, self._checkpointing = model, bodies, device, checkpointing
        self.error: Exception | None = None
        self.instead: dict[int, Tensor] = {}

    def __call__(self, number: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return what stage *number* makes of *tensors*."""
        body = self._bodies[number, self._model.training]
        body.bind(self.instead)
        if self.error is None:
            try:
                output = self._run(body, tensors)
                output = (output,) if isinstance(output, Tensor) else output
                # Of the dtypes that the next stage expects, also in mixed precision.
                return tuple(tensor.to(like.dtype) for tensor, like in zip(output, body.results, strict=True))
            except Exception as error:  # noqa: BLE001 - raised on every process when all have finished
                self.error = error
        return self._zeros(body, tensors)

    def _run(self, body: Body, tensors: tuple[Tensor, ...]) -> Any:
        if not (self._checkpointing and torch.is_grad_enabled()):
            return body.traced(*tensors)
        from torch.utils.checkpoint import checkpoint

        return checkpoint(body.traced, *tensors, use_reentrant=False)

    def _zeros(self, body: Body, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        results = [torch.zeros(val.shape, dtype=val.dtype, device=self._device) for val in body.results]
        if not torch.is_grad_enabled():
            return tuple(results)
        anchor = torch.zeros((), device=self._device)
        for tensor in (*body.bound(), *tensors):
            if tensor.requires_grad and tensor.numel():
                anchor = anchor + tensor.reshape(-1)[:1].sum().float() * 0
        return tuple(result + anchor.to(result.dtype) if result.is_floating_point() else result for result in results)


class Stage(nn.Module):
    """Stage as a schedule sees it: a module with a graph, which calls *model* for stage *number*."""

    def __init__(self, model: nn.Module, number: int, graph: fx.Graph) -> None:
        super().__init__()
        object.__setattr__(self, "model", model)  # its parameters are not of the stage: nothing is to move them
        self.number, self.graph = number, graph

    def forward(self, *tensors: Tensor) -> Any:
        """Return the tensors of the next stage, or of the output."""
        run: Callable[..., Any] = self.__dict__["model"]
        return run(self.number, *tensors)
