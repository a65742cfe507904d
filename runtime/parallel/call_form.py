"""Form of the calls of a traced model: flat tensors in and out, cut into micro-batches and put together again."""

from __future__ import annotations

import inspect
import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

_CONSTANTS = (type(None), bool, int, float, str)
_TENSOR = object()  # its place among constants


class CallForm:
    """Form of the calls of a model, taken from an example.

    Tensors with as many rows as the batch are cut into micro-batches, other tensors go whole with each of them, and
    whatever is no tensor is fixed by the trace.
    """

    def __init__(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], chunks: int) -> None:
        if not args and not kwargs:
            raise ValueError("example_args: give the inputs of one batch, with which the model is traced")
        self.signature = inspect.signature(model.forward)
        named, self.spec = self._flatten(args, kwargs)
        self.names = [name for name, _ in named]
        self.example = [leaf for _, leaf in named]
        tensors = [leaf for leaf in self.example if isinstance(leaf, Tensor)]
        self.batch = next((leaf.shape[0] for leaf in tensors if leaf.ndim), 0)
        if not self.batch:
            raise ValueError("example_args: give at least one tensor whose first dimension is the batch, with a row")
        self.rows = -(-self.batch // chunks)  # of a micro-batch
        self.output: tuple[Any, list[Any]] | None = None  # structure and constants, once traced

    def _flatten(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[tuple[str, Any]], Any]:
        given = self.signature.bind(*args, **kwargs).arguments
        # What is passed as its default is as good as not passed.
        given = {name: value for name, value in given.items() if value is not self.signature.parameters[name].default}
        leaves, spec = pytree.tree_flatten_with_path(given)
        return [(cast(Any, path[0]).key + pytree.keystr(path[1:]), leaf) for path, leaf in leaves], spec

    def _is_cut(self, leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and leaf.ndim > 0 and leaf.shape[0] == self.batch

    def micro_batch(self) -> list[Tensor]:
        """Return the first micro-batch of the example as flat tensors, which is what is traced."""
        return [
            leaf[: self.rows] if self._is_cut(leaf) else leaf.unsqueeze(0)
            for leaf in self.example
            if isinstance(leaf, Tensor)
        ]

    def inputs(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], chunks: int | None = None
    ) -> tuple[list[Tensor], int]:
        """Return the tensors of a call, padded to whole micro-batches by their last rows, and the rows of its batch.

        With *chunks* always to so many micro-batches.

        Raises:
            ValueError: the call differs from the example in more than the size of the batch.
        """
        named, spec = self._flatten(args, kwargs)
        if spec != self.spec:
            names = ", ".join(name for name, _ in named)
            raise ValueError(f"the pipeline was made for the inputs {', '.join(self.names)}, not for {names}")
        first = next(leaf for (_, leaf), like in zip(named, self.example, strict=True) if self._is_cut(like))
        size = first.shape[0] if isinstance(first, Tensor) and first.ndim else 0
        if chunks is not None and size > chunks * self.rows:
            raise ValueError(
                f"a batch of {size} rows is larger than the example, which has {self.batch}; give an example of the "
                "largest batch"
            )
        chunks = -(-size // self.rows) if chunks is None else chunks
        tensors = []
        for (name, leaf), like in zip(named, self.example, strict=True):
            if not isinstance(like, Tensor):
                if leaf != like:
                    raise ValueError(f"{name} is {like!r} in the example, which fixes it; it cannot be {leaf!r}")
                continue
            self._check(name, leaf, like, size)
            if self._is_cut(like):
                missing = chunks * self.rows - size
                tensors.append(torch.cat([leaf, *[leaf[-1:]] * missing]) if missing else leaf.contiguous())
            else:
                tensors.append(leaf.contiguous().expand(chunks, *leaf.shape))
        return tensors, size

    def _check(self, name: str, leaf: Any, like: Tensor, size: int) -> None:
        wanted = (size, *like.shape[1:]) if self._is_cut(like) else tuple(like.shape)
        if not isinstance(leaf, Tensor) or (tuple(leaf.shape), leaf.dtype) != (wanted, like.dtype) or not size:
            rows = "any number of rows, " if self._is_cut(like) else ""
            raise ValueError(
                f"{name} is {_shown(leaf)}, but the example has {_shown(like)}: {rows}the same for all inputs, and "
                "otherwise the shape and dtype of the example are needed; pad it, or prepare with another example"
            )

    def arguments(self, tensors: Sequence[Tensor]) -> inspect.BoundArguments:
        """Return the arguments of the model for one micro-batch of flat *tensors*."""
        left = iter(tensors)
        leaves = [
            (next(left) if self._is_cut(leaf) else next(left)[0]) if isinstance(leaf, Tensor) else leaf
            for leaf in self.example
        ]
        return inspect.BoundArguments(self.signature, OrderedDict(pytree.tree_unflatten(leaves, self.spec)))

    def note_output(self, output: Any) -> list[Tensor]:
        """Keep the structure of what the model returns, and return its tensors.

        Raises:
            ValueError: something in it cannot be put together from micro-batches.
        """
        leaves, spec = pytree.tree_flatten_with_path(output)
        for path, leaf in leaves:
            where = "the output" + pytree.keystr(path)
            if isinstance(leaf, Tensor):
                if not leaf.ndim or leaf.shape[0] != self.rows:
                    raise ValueError(
                        f"{where} has shape {tuple(leaf.shape)}: its first dimension is not the batch (of "
                        f"{self.rows}), so that micro-batches of it cannot be joined; let the model not return it"
                    )
            elif not isinstance(leaf, _CONSTANTS):
                warnings.warn(f"{where} is a {type(leaf).__name__}: a pipeline returns None in its place", stacklevel=2)
        self.output = (
            spec,
            [
                _TENSOR if isinstance(leaf, Tensor) else leaf if isinstance(leaf, _CONSTANTS) else None
                for _, leaf in leaves
            ],
        )
        if not (tensors := [leaf for _, leaf in leaves if isinstance(leaf, Tensor)]):
            raise ValueError("there is no tensor in the output of the model; let it return tensors, in lists or dicts")
        return tensors

    @staticmethod
    def leaves(output: Any, rows: int) -> list[Tensor]:
        """Return the first *rows* of each tensor of a pipeline's *output*; none where another process has it."""
        return [] if output is None else [leaf[:rows] for leaf in ([output] if isinstance(output, Tensor) else output)]

    def result(self, tensors: Sequence[Tensor]) -> Any:
        """Return what the model returns, with *tensors* in it."""
        assert self.output is not None  # traced before it runs
        spec, constants = self.output
        left = iter(tensors)
        return pytree.tree_unflatten([next(left) if constant is _TENSOR else constant for constant in constants], spec)


def _shown(value: Any) -> str:
    return f"{tuple(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else repr(value)
