"""Python functions in Programs: Print, py_func and static_pylayer.

Each is recorded as one call that runs with the Program: on the host, between the compiled parts.
"""

from __future__ import annotations

import collections
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from polyreme.autograd.py_layer import PyLayer, PyLayerContext
from polyreme.core import dtype as dtypes
from polyreme.core import state, unique_name
from polyreme.core.op import recorded
from polyreme.core.symbol import DYNAMIC
from polyreme.eager.tensor import Tensor
from polyreme.errors import ConfigError, ProgramError, ShapeError
from polyreme.jit.host_calls import at_run_time
from polyreme.program.block import Variable

_printed: collections.Counter[str] = collections.Counter()
"""How often each Print has printed."""


def Print(
    input: Any,
    first_n: int = -1,
    message: str | None = None,
    summarize: int = 20,
    print_tensor_name: bool = True,
    print_tensor_type: bool = True,
    print_tensor_shape: bool = True,
    print_tensor_layout: bool = True,
    print_tensor_lod: bool = True,
    print_phase: str = "both",
) -> Any:
    """input; its value is printed on standard output whenever it is computed, its gradient when that is.

    What is printed hangs on the result, so go on with that. first_n: how many times, always if negative. summarize: how
    many elements, all if negative. print_phase: "forward", "backward" or "both".
    """
    if print_phase not in ("forward", "backward", "both"):
        raise ConfigError(f"Print: print_phase={print_phase!r}; it is 'forward', 'backward' or 'both'")
    shown = {
        "name": input.name if print_tensor_name else None,
        "lod": print_tensor_lod,
        "shape": print_tensor_shape,
        "layout": print_tensor_layout,
        "dtype": print_tensor_type,
    }
    offsets = [level for level in getattr(input, "lod", ()) if print_tensor_lod]
    return printed(input, offsets, print_phase, unique_name.generate("print"), first_n, message, summarize, shown)


@recorded(acts=True)
def printed(
    x: Any,
    offsets: Sequence[Any],
    phase: str,
    key: str,
    first_n: int,
    message: str | None,
    summarize: int,
    shown: dict[Any, Any],
) -> Any:
    """x, printed when its value and when its gradient is known; key counts apart for each Print."""

    def show(suffix: str, value: Any, *levels: Any) -> None:
        _printed[key + suffix] += 1
        if first_n < 0 or _printed[key + suffix] <= first_n:
            sys.stdout.write(_text(np.asarray(value), levels, message, summarize, shown, suffix))

    if phase != "backward":
        _call(lambda *arrays: show("", *arrays), state.read(x), *map(state.read, offsets))
    if phase == "forward" or x.stop_gradient:
        return x
    result = x.clone()
    result.register_hook(lambda g: _call(lambda array: show("@GRAD", array), state.read(g)))
    return result


def _call(fn: Callable[..., None], *arrays: Any) -> None:
    """fn(*arrays), now or when the program that is being compiled runs."""
    if state.capturing():
        at_run_time(fn, *arrays)
    else:
        fn(*arrays)


def _text(value: np.ndarray, lod: Sequence[Any], message: str | None, count: int, shown: dict, suffix: str) -> str:
    lines = [f"Variable: {shown['name']}{suffix}" if shown["name"] is not None else "Variable"]
    lines += [f"  - message: {message}"] if message is not None else []
    lines += [f"  - lod: {[np.asarray(level).tolist() for level in lod]}"] if shown["lod"] and lod else []
    lines += [f"  - shape: {list(value.shape)}"] if shown["shape"] else []
    lines += ["  - layout: row-major"] if shown["layout"] else []
    lines += [f"  - dtype: {value.dtype.name}"] if shown["dtype"] else []
    flat = value.reshape(-1)
    part = flat if count < 0 else flat[:count]
    rest = "" if part.size == flat.size else " ..."
    return "\n".join([*lines, f"  - data: [{' '.join(map(str, part.tolist()))}{rest}]", ""])


# functions of the user's


def py_func(
    func: Callable[..., Any],
    x: Any,
    out: Any,
    backward_func: Callable[..., Any] | None = None,
    skip_vars_in_backward_input: Any = None,
) -> Any:
    """out, with the values that func(*x) returns whenever the Program runs; func takes and returns ndarrays.

    out: Variables of the shapes and dtypes that func returns, made by create_var, where -1 is the size that x has at
    that dim (x's first unknown one, if it has none there); None calls func for what else it does.
    backward_func(*x, *out, *gradients of out) -> gradients of x (None for zeros), without those of x and out that
    skip_vars_in_backward_input lists; without it no gradient flows. Raises ProgramError outside static mode.
    """
    if not state.recording():
        raise ProgramError("py_func records a call of a Python function; call enable_static(), or call the function")
    xs, outs = _list(x), _list(out)
    for what, fn in (("func", func), ("backward_func", backward_func)):
        if not callable(fn) and (what == "func" or fn is not None):
            raise TypeError(f"py_func: {what} is a function, got {type(fn).__name__}")
    if not all(isinstance(v, Variable) for v in outs):
        raise TypeError(f"py_func: out is made of Variables of the Program, got {[type(v).__name__ for v in outs]}")
    skipped = _skip(xs, outs, _list(skip_vars_in_backward_input))
    metas = [(_sizes(v, xs), v.dtype.name) for v in outs]
    results = called(func, backward_func, skipped, metas, xs)
    for variable, result in zip(outs, results, strict=True):
        state.write(variable, state.read(result))
        variable.stop_gradient, variable._node = result.stop_gradient, result._node
    return out


def _list(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]


def _skip(xs: Sequence[Any], outs: Sequence[Any], given: Sequence[Any]) -> list[int]:
    """Positions, among inputs and outputs, of what backward_func does not want."""
    known = {v.name: at for at, v in enumerate([*xs, *outs])}
    names = [v if isinstance(v, str) else v.name for v in given]
    for name in names:
        if name not in known:
            raise ConfigError(f"py_func: skip_vars_in_backward_input has {name!r}; x and out are {sorted(known)}")
    return [known[name] for name in names]


def _sizes(out: Variable, xs: Sequence[Any]) -> list[int]:
    """out's sizes, those that are not known taken from x."""
    return [_size(out, at, xs) if size == DYNAMIC else size for at, size in enumerate(out.shape)]


def _size(out: Variable, at: int, xs: Sequence[Any]) -> int:
    unknown = [v.shape[at] for v in xs if v.ndim > at and v.shape[at] == DYNAMIC]
    unknown += [size for v in xs for size in v.shape if size == DYNAMIC]
    if not unknown:
        raise ConfigError(f"py_func: size {at} of out {out._array!r} is not known, and x has only known sizes; give it")
    return unknown[0]


@recorded(acts=True)
def called(
    func: Callable[..., Any],
    backward: Callable[..., Any] | None,
    skipped: Sequence[int],
    metas: Sequence[Any],
    xs: Sequence[Any],
) -> list[Any]:
    """What func(*xs) returns, as Tensors of these shapes and dtypes."""
    wanted = [jax.ShapeDtypeStruct(tuple(int(s) for s in sizes), dtypes.as_dtype(name)) for sizes, name in metas]
    if backward is None or not wanted:
        arrays = _on_host(func, wanted, [state.read(v) for v in xs], "py_func")
        return [Tensor(a) for a in arrays]
    layer = type("PyFunc", (_PyFunc,), {"func": func, "back": backward, "skipped": skipped, "wanted": wanted})
    return list(layer.apply(*xs))


class _PyFunc(PyLayer):
    """A function on ndarrays, with its backward."""

    func: Callable
    back: Callable
    skipped: Sequence[int]
    wanted: Sequence[Any]

    @classmethod
    def forward(cls, ctx: PyLayerContext, *xs: Any) -> tuple:  # type: ignore[override]
        arrays = _on_host(vars(cls)["func"], cls.wanted, [state.read(v) for v in xs], "py_func")
        outs = tuple(Tensor(a) for a in arrays)
        ctx.save_for_backward(*xs, *outs)
        return outs

    @classmethod
    def backward(cls, ctx: PyLayerContext, *gradients: Any) -> tuple:  # type: ignore[override]
        held = ctx.saved_tensor()
        xs = held[: len(held) - len(gradients)]
        given = [state.read(v) for at, v in enumerate(held) if at not in cls.skipped]  # type: ignore[arg-type]
        like = [jax.ShapeDtypeStruct(tuple(v.shape), v.dtype) for v in xs]  # type: ignore[union-attr]
        arrays = _on_host(
            vars(cls)["back"], like, [*given, *map(state.read, gradients)], "py_func: backward_func", zeros=True
        )
        return tuple(Tensor(a) for a in arrays)


def _on_host(fn: Callable, wanted: Sequence[Any], arrays: Sequence[Any], what: str, zeros: bool = False) -> list[Any]:
    """fn(*arrays) as arrays of the shapes and dtypes wanted: now, or each time that the program runs."""

    def run(*given: Any) -> list[np.ndarray]:
        results = _list(fn(*map(np.asarray, given)))
        if not wanted:
            return []
        if len(results) != len(wanted):
            raise ShapeError(f"{what} returned {len(results)} arrays, {len(wanted)} are declared")
        return [_fit(v, meta, what, zeros) for v, meta in zip(results, wanted, strict=True)]

    if not state.capturing():
        return [jnp.asarray(a) for a in run(*arrays)]
    if not wanted:
        at_run_time(lambda *given: fn(*map(np.asarray, given)) and None, *arrays)
        return []
    # what has a tangent cannot go to the host; the gradient is PyLayer's business
    still = [jax.lax.stop_gradient(a) for a in arrays]
    return list(io_callback(run, list(wanted), *still, ordered=True))


def _fit(value: Any, meta: Any, what: str, zeros: bool) -> np.ndarray:
    if value is None and zeros:
        return np.zeros(meta.shape, meta.dtype)
    array = np.asarray(value)
    if array.shape != meta.shape or array.dtype != meta.dtype:
        raise ShapeError(
            f"{what} returned {array.dtype.name}{list(array.shape)}, declared is {meta.dtype.name}{list(meta.shape)}"
        )
    return array


def static_pylayer(
    forward_fn: Callable[..., Any],
    inputs: Sequence[Any],
    backward_fn: Callable[..., Any] | None = None,
    name: str | None = None,
) -> Any:
    """forward_fn(*inputs), whose gradient is backward_fn(*gradients of the results) -> gradients of inputs.

    Both are made of ops on what they are given. Without backward_fn no gradient flows. A PyLayer does the same.
    """
    for what, fn in (("forward_fn", forward_fn), ("backward_fn", backward_fn)):
        if not callable(fn) and (what == "forward_fn" or fn is not None):
            raise TypeError(f"static_pylayer: {what} is a function, got {type(fn).__name__}")
    if backward_fn is None:
        return _layer(forward_fn, _no_gradient).apply(*[x.detach() for x in inputs])
    return _layer(forward_fn, backward_fn).apply(*inputs)


def _no_gradient(*_: Any) -> None:
    """Is not reached."""


def _layer(forward_fn: Callable, backward_fn: Callable) -> type[PyLayer]:
    def forward(ctx: PyLayerContext, *xs: Any) -> Any:
        return forward_fn(*xs)

    def backward(ctx: PyLayerContext, *gradients: Any) -> Any:
        return backward_fn(*gradients)

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(getattr(forward_fn, "__name__", "Given"), (PyLayer,), methods)
