"""vmap: a function of one example, run for every example of a batch at once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from polyreme.core import dtype as dtypes
from polyreme.core import state
from polyreme.core.kernel import Kernel
from polyreme.core.state import TensorState
from polyreme.eager import tape
from polyreme.eager.tensor import Tensor
from polyreme.errors import CaptureError, ConfigError, ProgramError, ShapeError
from polyreme.jit.region import Inputs, Out, Region, evaluate, separating, trace
from polyreme.jit.structure import flatten, rebuild
from polyreme.jit.to_static import to_static

Axes = int | None | Sequence[int | None]


def vmap(func: Callable[..., Any], in_axes: Axes = 0, out_axes: int | Sequence[int] = 0) -> Callable[..., Any]:
    """A function that gives, stacked, what func gives of each example of a batch.

    func: of one example's Tensors, which may be in lists, tuples and dicts; other arguments are the same for every
    example. It may read other Tensors (a network's parameters), take derivatives, branch on Tensors, and be a vmap
    itself; it writes no Tensor and draws no random numbers: CaptureError.
    in_axes: the dim of an argument's Tensors that counts examples, None for those that every example gets whole; one
    for all arguments or one for each. out_axes: where that dim stands in the results; one for all or one for each.

    Results can be differentiated by the arguments and by what func reads. The call is captured as a whole, as by
    to_static, once for each form of its arguments: keep what vmap gives, and call that.
    Raises ShapeError where numbers of examples differ or a dim is not there, ConfigError where no argument is mapped.

    >>> x = Tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> vmap(lambda row: (row * row).sum())(x).tolist()
    [5.0, 25.0]
    """
    if not callable(func):
        raise ConfigError(f"vmap takes a function of one example, got {type(func).__name__}")
    ins = in_axes if in_axes is None else _places("in_axes", in_axes, allows_none=True)
    outs = _places("out_axes", out_axes, allows_none=False)
    captured = to_static(lambda *args: separating(lambda: _map(func, ins, outs, args)))

    @functools.wraps(func)
    def mapped(*args: Any) -> Any:
        if state.recorder() is not None:
            raise ProgramError("vmap: not while a static Program is recorded; write it in code for to_static")
        return captured(*args)

    return mapped


def _places(name: str, axes: Any, allows_none: bool) -> Any:
    given = list(axes) if isinstance(axes, (list, tuple)) else [axes]
    for axis in given:
        if not (isinstance(axis, int) and not isinstance(axis, bool)) and not (allows_none and axis is None):
            raise ConfigError(f"vmap: {name} holds {axis!r}; give dims{', or None' if allows_none else ''}")
    return tuple(given) if isinstance(axes, (list, tuple)) else axes


class _Arguments(NamedTuple):
    """The arguments of a call: their structure, its leaves, and for each Tensor among them the mapped dim, or None."""

    spec: Any
    leaves: list[Any]
    tensors: list[Any]
    axes: tuple[int | None, ...]

    @classmethod
    def of(cls, args: tuple[Any, ...], in_axes: Any) -> _Arguments:
        for_args = in_axes if isinstance(in_axes, tuple) else (in_axes,) * len(args)
        if len(for_args) != len(args):
            raise ConfigError(f"vmap: in_axes has {len(for_args)} entries for {len(args)} arguments; give one for each")
        leaves: list[Any] = []
        axes: list[int | None] = []
        specs = []
        for arg, axis in zip(args, for_args, strict=True):
            before = len(leaves)
            specs.append(flatten(arg, leaves))
            axes += [axis for leaf in leaves[before:] if isinstance(leaf, TensorState)]
        tensors = [leaf for leaf in leaves if isinstance(leaf, TensorState)]
        return cls((tuple, None, tuple(specs)), leaves, tensors, tuple(axes))

    def of_one(self, arrays: Sequence[Any]) -> tuple[Any, ...]:
        """The arguments of one example."""
        ones = iter([Tensor(a, stop_gradient=not dtypes.is_inexact(a.dtype)) for a in arrays])
        return rebuild(self.spec, iter([next(ones) if isinstance(x, TensorState) else x for x in self.leaves]))

    def avals(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes and dtypes of one example. Raises ShapeError and ConfigError as vmap says."""
        counts: dict[int, list[int]] = {}
        avals = []
        for tensor, axis in zip(self.tensors, self.axes, strict=True):
            shape = list(tensor.shape)
            if axis is not None:
                if not -len(shape) <= axis < len(shape):
                    raise ShapeError(f"vmap: in_axes={axis} is no dim of a Tensor of shape {shape}")
                counts.setdefault(shape.pop(axis), list(tensor.shape))
            avals.append(jax.ShapeDtypeStruct(tuple(shape), tensor._array.dtype))
        if not counts:
            raise ConfigError("vmap: no argument is mapped; give a Tensor whose dim in in_axes counts examples")
        if len(counts) > 1:
            told = ", ".join(f"{count} in a Tensor of shape {shape}" for count, shape in counts.items())
            raise ShapeError(f"vmap: numbers of examples differ: {told}; in_axes says which dim counts them")
        return avals


def _map(func: Callable[..., Any], in_axes: Any, out_axes: Any, args: tuple[Any, ...]) -> Any:
    arguments = _Arguments.of(args, in_axes)
    watcher = state.code_watcher()
    converted = func if watcher is None else watcher.converted(func)
    region = trace(lambda *arrays: [converted(*arguments.of_one(arrays))], arguments.avals())
    _refuse_changes(region)
    inputs = Inputs([region])
    consts = inputs.consts(region)
    first = len(inputs.arrays)
    spec, leaves = region.values[0]
    outs = [leaf for leaf in leaves if isinstance(leaf, Out)]
    places = out_axes if isinstance(out_axes, tuple) else (out_axes,) * len(outs)
    if len(places) != len(outs):
        raise ConfigError(
            f"vmap: out_axes has {len(places)} entries, func gives {len(outs)} Tensors; give one for each"
        )
    for place, out in zip(places, outs, strict=True):
        if not -len(out.shape) - 1 <= place <= len(out.shape):
            raise ShapeError(f"vmap: out_axes={place}, but func gives {list(out.shape)}, which has no place for it")

    def fn(*arrays: Any) -> tuple[Any, ...]:
        closed = [arrays[c] for c in consts]

        def one(*entries: Any) -> tuple[Any, ...]:
            results = evaluate(region, closed, *entries)
            return tuple(results[out.index] for out in outs)

        return jax.vmap(one, arguments.axes, places)(*arrays[first:])

    results = tape.apply(
        Kernel(fn, "vmap", saves=True),
        (*inputs.arrays, *map(state.read, arguments.tensors)),
        (*inputs.edges, *map(tape.edge_of, arguments.tensors)),
    )
    for out, result in zip(outs, results, strict=True):
        if out.stop_gradient:
            result.stop_gradient, result._node = True, None
    following = iter(results)
    return rebuild(spec, iter([next(following) if isinstance(leaf, Out) else leaf for leaf in leaves]))


def _refuse_changes(region: Region) -> None:
    if region.written or region.grads:
        raise CaptureError(
            "vmap: func writes a Tensor, draws random numbers or changes a .grad, for many examples at once; return "
            "the value, draw before and pass the numbers as an argument, take gradients with paddle.grad"
        )
