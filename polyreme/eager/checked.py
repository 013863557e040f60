"""Calls of ops in the checked mode: the results of each are looked at; see core.checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from polyreme.core import dtype as dtypes
from polyreme.core import mode, state
from polyreme.core.checked import check_values, checked, floats_in, layer_here, raise_late
from polyreme.core.op import Op
from polyreme.core.state import TensorState
from polyreme.eager import tape
from polyreme.eager.dispatch import Eager
from polyreme.flags import FLAGS

_plain = mode.current.plain


class CheckedEager(Eager):
    """Runs ops as they are called, and looks at what they give and, on the way back, at their gradients."""

    def run(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of the op; raises NumericsError as core.checked says."""
        watching = state.watch.active
        if watching is not None and watching.records is True:
            return super().run(op, args, kwargs)
        if watching is None:
            raise_late()
        inputs = floats_in([*args, *kwargs.values()])
        layer = layer_here()
        if watching is not None and watching.detach:
            # jax will differentiate this code without walking the tape
            args = tuple(_observe(a, f"the backward of {op.name}", i, layer) for i, a in enumerate(args))
        result = super().run(op, args, kwargs)
        look(op.name, result, inputs, layer)
        return result


def look(what: str, result: Any, inputs: Sequence[Any], layer: str) -> None:
    """Look at what an op gave: a Tensor or several. given: floats_in its inputs; layer: layer_here() at the call."""
    results = list(result) if isinstance(result, (tuple, list)) else [result]
    for tensor in results:
        if tensor._node is not None:
            checked.layer_of[tensor._node] = layer
    names = ["its result"] if len(results) == 1 else [f"its result {i}" for i in range(len(results))]
    named = [(n, t._array) for n, t in zip(names, results, strict=True) if dtypes.is_inexact(t._array.dtype)]
    check_values(what, named, inputs, layer)


def _observe(value: Any, what: str, index: int, layer: str) -> Any:
    """value, whose cotangents are looked at when jax differentiates the code that is being captured."""
    if isinstance(value, (list, tuple)):
        return type(value)(_observe(v, what, index, layer) for v in value)
    if not isinstance(value, TensorState) or value.stop_gradient or not dtypes.is_inexact(value._array.dtype):
        return value

    @jax.custom_vjp
    def same(x: jax.Array) -> jax.Array:
        return x

    def back(_: None, cotangent: jax.Array) -> tuple[jax.Array]:
        check_values(what, [(f"the gradient of input {index}", cotangent)], [], layer)
        return (cotangent,)

    same.defvjp(lambda x: (x, None), back)
    seen = tape.factory.tensor(same(state.read(value)))
    seen.stop_gradient, seen._node, seen._index = False, value._node, value._index
    if value._node is None:
        seen._node, seen._index = tape.PassNode("leaf", value), 0  # the tape still finds the leaf
    return seen


_checked = CheckedEager()


def _follow() -> None:
    mode.current.settle(_checked if checked.is_on else _plain)


FLAGS["FLAGS_check_nan_inf"].changed.append(_follow)
_follow()
