"""The eager mode: run an op now, through a kernel found by the op's attributes.

This is the hot path of imperative code: a call that was seen before costs a tuple, a dict lookup and the
jitted call.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.export import is_symbolic_dim

from polyreme.core import amp_policy, layout, mode, rng, state
from polyreme.core import dtype as dtypes
from polyreme.core.devices.device_memory import raise_explained
from polyreme.core.engine import backend
from polyreme.core.engine.turns import turns
from polyreme.core.kernel import Kernel
from polyreme.core.op import ATTR, KEY, TENSOR, Op
from polyreme.core.state import TensorState
from polyreme.core.symbol import DYNAMIC
from polyreme.eager import tape
from polyreme.eager.memory import Size
from polyreme.errors import ArgumentTypeError, CaptureError, ConfigError, DeviceError, DTypeError, GradError, ShapeError

_watch, _turns = state.watch, turns
_grad_mode, _saved_hooks, _factory = tape.grad_mode, tape.saved_hooks, tape.factory
_KernelNode, _next_number = tape.KernelNode, tape.next_number
_new: Any = object.__new__
_autocast = amp_policy.active
_placed = layout.active
_default = dtypes.default
_config = backend.config
_INEXACT, _float32 = dtypes.INEXACT, dtypes.float32
edge_of = tape.edge_of
T = TypeVar("T", bound=TensorState)


class Eager:
    """Runs ops as they are called."""

    def run(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of the op, taped when an input wants a gradient.

        A call of a form that was seen before (Tensors here, these attributes there) finds its kernel by that form.
        """
        if _watch.active is not None or _placed.layout is not None:
            return self._run(op, args, kwargs, None)
        form: tuple = (_autocast.policy, _default.dtype)
        # tuples that grow cost less than lists for the few inputs of an op; each input adds one part to the form.
        # an array's aval is an object that jax has at hand; its own dtype takes three times as long to ask for
        arrays: tuple = ()
        edges: tuple = ()
        large: tuple = ()
        taped = False
        try:
            for value in args:
                if isinstance(value, TensorState):
                    form += _ONE_TENSOR
                    array = value._array
                    arrays += (array,)
                    if value.stop_gradient:
                        edges += _NO_EDGE
                    elif (node := value._node) is not None:
                        edges += ((node, value._index),)
                        taped = True
                    elif (dtype := array.aval.dtype) is _float32 or dtype in _INEXACT:
                        edges += (value,)
                        taped = True
                    else:
                        edges += _NO_EDGE
                elif value.__class__ in _NUMBERS and op.kinds[len(form) - 2 : len(form) - 1] == _ONE_TENSOR:
                    form += _ONE_TENSOR
                    arrays += (constant(value),)
                    edges += _NO_EDGE
                    if value.__class__ is int and not 0 <= value <= _SMALL:
                        large += (value,)
                else:
                    form += (_attribute(value),)
        except AttributeError:  # jax has no array there: the leaf's value lies elsewhere, or there is none
            return self._run(op, args, kwargs, None)
        if kwargs:
            for name, value in kwargs.items():
                form += (name, _attribute(value))
        try:
            kernel = op.calls.get(form)
        except TypeError:  # an attribute that cannot be hashed as it stands
            return self._run(op, args, kwargs, None)
        if kernel is None:
            return self._run(op, args, kwargs, form)
        if large and op.integers != "any":
            _check_integers(op, large, arrays)
        try:
            if kernel.saves:
                return tape.apply(kernel, arrays, edges)
            outs = kernel.forward(*arrays)
            if _turns.are_taken:
                _turns.end(outs)
        except (ValueError, NotImplementedError, jax.errors.UnexpectedTracerError):
            return self._run(op, args, kwargs, None)  # which says what is wrong
        except jax.errors.JaxRuntimeError as error:
            raise_explained(error, f"op {op.name}")
        taped = taped and _grad_mode.enabled and not kernel.constant
        cls = outs.__class__
        if cls is tuple or cls is list or (taped and _saved_hooks.pair is not None):
            return tape.results(kernel, arrays, edges, outs) if taped else tape.untaped(outs)
        # as tape.results does, for one output: a Tensor and its node made here, as constructors cost more than they do
        tensor = _new(_factory.cls)
        tensor._array = outs
        tensor._index = 0
        tensor._grad = None
        if taped and ((dtype := outs.aval.dtype) is _float32 or dtype in _INEXACT):
            tensor.stop_gradient = False
            tensor._node = node = _new(_KernelNode)
            node.name = kernel.name
            node.edges = edges
            node.metas = None
            node.seq = _next_number()
            node.hooks = None
            node.kernel = kernel
            node.primals = arrays
            node.num_outputs = 1
            node.pullback = None
        else:
            tensor.stop_gradient = True
            tensor._node = None
        return tensor

    def _run(self, op: Op, args: tuple, kwargs: dict[str, Any], form: tuple | None) -> Any:
        """run, for calls of any kind. form: under which later calls like this one may find the kernel at once."""
        # read once: they are per thread, which makes reading them dear
        watching, placed = _watch.active, _placed.layout
        if watching is not None and watching.records is True:
            return watching.call(op.name, args, kwargs)
        out = None
        if form is not None and not _says_all(op, args, kwargs):
            form = None
        if kwargs:
            kwargs.pop("name", None)
            out = kwargs.pop("out", None)
        full = op.bind(args, kwargs) if kwargs or len(args) != len(op.names) or op.positional < len(args) else args
        arrays: list[Any] = []
        edges: list[Any] = []
        keys: list[Any] = []
        key: list[Any] = [(_autocast.policy, _default.dtype)]
        large: list[int] = []
        for index, (value, kind) in enumerate(zip(full, op.kinds, strict=True)):
            if kind is TENSOR:
                if isinstance(value, TensorState):
                    arrays.append(value._array if watching is None else watching.read(value))
                    edges.append(None if value.stop_gradient else edge_of(value))
                    key.append(-1 if placed is None else _gather(value))
                elif value is None:
                    key.append((None,))
                else:
                    arrays.append(constant(value))
                    edges.append(None)
                    key.append(-1)
                    if value.__class__ is int and not 0 <= value <= _SMALL:
                        large.append(value)
            elif kind is ATTR:
                cls = value.__class__
                if cls is not int and cls is not bool and cls is not str and value is not None:
                    value = op.attribute(index, value)
                    cls = _types(value)
                key.append((value, cls))
            elif kind is KEY:
                # a string: the name of the result, which PaddlePaddle's functions take here
                drawn = value is _EMPTY or value is None or value.__class__ is str
                keys.append(rng.default_generator.next_key() if drawn else constant(value))
                arrays.append(keys[-1])
                edges.append(None)
                key.append(-1)
            else:
                tensors = _tensor_list(op, value)
                for t in tensors:
                    if isinstance(t, TensorState):
                        arrays.append(state.read(t))
                        edges.append(edge_of(t))
                    else:
                        arrays.append(constant(t))
                        edges.append(None)
                key.append(len(tensors))
        if large and op.integers != "any":
            _check_integers(op, large, [a for a in arrays if not any(a is k for k in keys)])
        kernel_key = tuple(key)
        try:
            kernel = op.kernels.get(kernel_key)
        except TypeError as error:
            raise TypeError(
                f"{op.name}: an attribute cannot be hashed ({error}); attributes are plain Python values"
            ) from None
        if kernel is None:
            template = tuple((slot[0],) if isinstance(slot, tuple) else slot for slot in key[1:])
            kernel = op.kernel(template, _autocast.policy)
            _store(op, kernel_key, kernel)
        if form is not None:
            op.calls[form] = kernel
        try:
            result = tape.apply(kernel, tuple(arrays), tuple(edges))
        except ValueError as error:
            if any(isinstance(a, state.Elsewhere) for a in arrays):
                values = tuple(a.read() if isinstance(a, state.Elsewhere) else a for a in arrays)
                return tape.apply(kernel, values, tuple(edges))
            unmade = next((a for a in arrays if hasattr(type(a), "refuse")), None)
            if unmade is not None:
                raise unmade.refuse() from error
            if "incompatible devices" not in str(error):
                raise  # "from error" would make it its own cause: a cycle that keeps what its callers have
            where = str(error).splitlines()[0]
            raise DeviceError(
                f"{op.name}: inputs live on different devices; move them with .to(...): {where}"
            ) from error
        except jax.errors.JaxRuntimeError as error:
            raise_explained(error, f"op {op.name}")
        except NotImplementedError as error:
            if "Unsupported dtype" not in str(error):
                raise
            given = ", ".join(sorted({a.dtype.name for a in arrays}))
            raise DTypeError(f"{op.name}: there is no routine for {given}; use astype('float32')") from error
        except jax.errors.UnexpectedTracerError as error:
            raise CaptureError(
                f"{op.name}: an input belongs to a captured function that has ended and has no value; return it from "
                "that function instead of keeping it in a list or attribute outside"
            ) from error
        if out is not None:
            return rebind_each(out, result, op.name, retype=True)
        if watching is not None:
            watching.called(op.name, full, {}, result)
        return result


_EMPTY = inspect.Parameter.empty
_SMALL = 127  # integers from 0 to this are of every integer dtype
# of one op: a number that is another one in each call makes a kernel in each, which takes about a MiB
_MOST_KERNELS = 1024
_ONE_TENSOR, _NO_EDGE = (TENSOR,), (None,)
_NUMBERS = frozenset({bool, int, float, complex})
_PLAIN = frozenset({bool, int, float, str, type(None)})


def _check_integers(op: Op, values: Sequence[int], arrays: Sequence[Any]) -> None:
    """Raise ConfigError for a Python integer that no array's dtype holds; a floating one holds every integer."""
    strong = [a.dtype for a in arrays if not getattr(a, "weak_type", False)]
    whole = [d for d in strong if dtypes.is_integer(d)]
    if not whole or any(d in _INEXACT for d in strong):
        return
    widest = max(whole, key=lambda d: dtypes.iinfo(d).max)
    least = -(2 ** (8 * widest.itemsize - 1))
    for value in values:
        wraps = op.integers == "wrap" and least <= value < -2 * least
        if not wraps and not any(dtypes.holds(d, value) for d in whole):
            dtypes.check_holds(op.name, widest, value)


def _attribute(value: Any) -> tuple:
    """The key that distinguishes an attribute from others: 1, 1.0 and True are equal and hash alike, and so are 0.0 and
    -0.0."""
    cls = value.__class__
    if cls is list or cls is tuple or cls is Size:
        return (len(value), *map(type, value), *value)
    return (cls, repr(value)) if cls is float and _is_zero_or_nan(value) else (cls, value)


def _is_zero_or_nan(number: float) -> bool:
    return not (number < 0 or number > 0)


def _store(op: Op, key: tuple, kernel: Kernel) -> None:
    """Keep a kernel of an op; the oldest one goes where there are too many."""
    for oldest in list(op.kernels)[: max(0, len(op.kernels) + 1 - _MOST_KERNELS)]:
        gone = op.kernels.pop(oldest, None)
        for form in [f for f, k in list(op.calls.items()) if k is gone]:
            op.calls.pop(form, None)
    op.kernels[key] = kernel


def _says_all(op: Op, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether the form of a call decides its kernel, and its Tensors are the kernel's arrays in order."""
    kinds, known = op.kinds, [op.index[n] for n in kwargs if n in op.index]
    # Tensors by name may come in another order than the op's parameters, or be named in another spelling
    if len(args) > op.positional or len(known) < len(kwargs) or any(kinds[at] is not ATTR for at in known):
        return False
    given = [*zip(kinds, args, strict=False), *zip((ATTR,) * len(known), kwargs.values(), strict=True)]
    for kind, value in given:
        if kind is ATTR:
            many = isinstance(value, (list, tuple))
            parts = value if many else (value,)
            if any(part.__class__ not in _PLAIN for part in parts):
                return False
            if many and any(part.__class__ is float and _is_zero_or_nan(part) for part in parts):
                return False
        elif kind is not TENSOR or not (value is None or value.__class__ in _NUMBERS or isinstance(value, TensorState)):
            return False
    # what is left out is an attribute or no Tensor
    rest = zip(kinds[len(args) :], op.defaults[len(args) :], strict=True)
    return all(kind is ATTR or (kind is TENSOR and default is None) for kind, default in rest)


def _gather(tensor: TensorState) -> Any:
    """The kernel's slot for a Tensor under a plan: how a parameter kept in pieces is laid out while it is read."""
    layouts = getattr(tensor, "layouts", None)
    return layouts.get("use", -1) if layouts else -1


def _types(value: Any) -> Any:
    """The types inside a frozen attribute: 1, 1.0 and True are equal and hash alike but mean different kernels; and how
    floats are written, as 0.0 and -0.0 are equal too.
    """
    if isinstance(value, tuple):
        return tuple(_types(v) for v in value)
    return (value.__class__, repr(value)) if isinstance(value, (float, complex)) else value.__class__


def _tensor_list(op: Op, value: Any) -> list[Any]:
    if isinstance(value, TensorState) or not isinstance(value, (list, tuple)):
        raise TypeError(f"{op.name} takes a list of Tensors, got {type(value).__name__}")
    return list(value)


@functools.lru_cache(maxsize=4096)
def _scalar(cls: type, value: Any, text: str, device: Any) -> jax.Array:
    # cls and text are part of the key because 1, 1.0 and True are equal, and so are 0.0 and -0.0
    with jax.ensure_compile_time_eval():
        return jnp.asarray(value)


def constant(value: Any) -> Any:
    """An array for something that is not a Tensor: a weakly typed scalar, or an ndarray or nested list as it stands."""
    if isinstance(value, (bool, int, float, complex)):
        if isinstance(value, np.generic):  # a float64 or complex128, which is a Python number too: np.sqrt(2)
            value = value.item()
        return _scalar(value.__class__, value, "" if value else repr(value), _config.jax_default_device)
    if isinstance(value, jax.Array):
        return value
    if is_symbolic_dim(value):  # a size that an export leaves open
        return jnp.asarray(value)
    if isinstance(value, (np.ndarray, np.generic, list, tuple)):
        array = np.asarray(value)
        if array.dtype.kind in "OUSM":
            what = f"{type(value).__name__} with dtype {array.dtype}"
            raise ArgumentTypeError(f"cannot make a Tensor of {what}; give numbers")
        return jnp.asarray(array)
    advice = "to_dense() makes one" if hasattr(value, "to_dense") else "give a Tensor, a number or an ndarray"
    raise ArgumentTypeError(f"cannot make a Tensor of {type(value).__name__}; {advice}")


def rebind(target: T, result: TensorState, what: str, *, retype: bool = False, where: Any = None) -> T:
    """Write result into target in place, tape entry included; target keeps its dtype unless retype. Under no_grad only
    the value changes: a Parameter written there still wants its gradient. where: the (arrays, spec) of an index outside
    of which nothing has changed.

    Raises GradError for a leaf that wants a gradient, DTypeError if the result has another dtype.
    """
    is_part = target.holder is not target  # of a leaf, then
    wants = not target.stop_gradient or (is_part and not result.stop_gradient)
    if tape.grad_mode.enabled and wants and (is_part or target._node is None):
        raise GradError(
            f"{what}: in-place change of a leaf Tensor that wants a gradient; do it under no_grad(), or use the form "
            "that returns a new Tensor"
        )
    if result._array.dtype != target._array.dtype and not retype:
        raise DTypeError(
            f"{what}: the result is {result._array.dtype.name}, the Tensor changed in place is "
            f"{target._array.dtype.name}; cast an input, or use the form that returns a new Tensor"
        )
    refuse_copy(target, what)
    take_over(target, result)
    written(target, where)
    return target


def take_over(target: TensorState, result: TensorState) -> None:
    """rebind without its checks, and without a word to what shares the target's elements."""
    takes_history = tape.grad_mode.enabled and target.holder is target
    (state.write if takes_history else state.write_value)(target, result._array)
    target.__dict__["_version"] = target.__dict__.get("_version", 0) + 1
    if takes_history:
        target._node = result._node
        target._index = result._index
        target.stop_gradient = result.stop_gradient


def written(target: TensorState, where: Any = None) -> None:
    """Bring what shares the target's elements, as x and x[0] do, in line once the target was written in place."""
    if (views := getattr(target, "_views", None)) is not None:
        views.written(target, where)


def rebind_each(target: Any, result: Any, what: str, *, retype: bool = False) -> Any:
    """rebind of one result, or of each of several to a tuple of as many Tensors; ConfigError for fewer or more.

    What no gradient flows through gives a leaf that wants one another value and nothing else.
    """
    if isinstance(result, TensorState):
        leaf = target.holder is target and target._node is None and not target.stop_gradient
        with tape.GradEnabled(tape.grad_mode.enabled and not (leaf and result.stop_gradient)):
            return rebind(target, result, what, retype=retype)
    count = len(target) if isinstance(target, (tuple, list)) else 1
    if not isinstance(target, (tuple, list)) or count != len(result):
        raise ConfigError(f"{what}: out= of {count} Tensors for {len(result)} results; give a tuple of {len(result)}")
    return tuple(rebind_each(t, r, what, retype=retype) for t, r in zip(target, result, strict=True))


def refuse_copy(target: TensorState, what: str) -> None:
    """Raise GradError for what x.data gives inside a capture: a copy, writes to which would reach nothing."""
    if "_copy_of_data" in target.__dict__:
        raise GradError(
            f"{what}: x.data is a copy inside a captured function or a static Program, so writing to it changes "
            "nothing; write to x itself, under no_grad() if it wants a gradient, or use x.set_value"
        )


def inplace(fn: Any) -> Any:
    """The `name_` form of an op: writes the result into its first argument and returns it."""

    parameters = list(inspect.signature(fn).parameters)
    dtype_at = parameters.index("dtype") if "dtype" in parameters else None

    @functools.wraps(fn)
    def run(x: TensorState, *args: Any, **kwargs: Any) -> TensorState:
        result = fn(x, *args, **kwargs)
        is_wider = result._array.dtype != x._array.dtype and dtypes.is_integer(x._array.dtype)
        if is_wider and dtype_at is not None and "dtype" not in kwargs and len(args) < dtype_at:
            result = fn(x, *args, dtype=x._array.dtype, **kwargs)  # sums of integers are wider unless told
        # reshape_ and its like change the shape, but none changes how many elements there are
        sizes = result._array.size, x._array.size
        if sizes[0] != sizes[1] and DYNAMIC not in sizes:
            raise ShapeError(
                f"{run.__name__}: the result has shape {list(result._array.shape)}, the Tensor changed in place "
                f"{list(x._array.shape)}, which does not grow; use the form that returns a new Tensor"
            )
        # a comparison makes x bool
        return rebind(x, result, run.__name__, retype=result._array.dtype == np.bool_)

    run.__name__ = run.__qualname__ = f"{fn.__name__}_"
    run.__doc__ = f"In-place form of `{fn.__name__}`: the result is written into the first argument, which is returned."
    return run


_eager = Eager()
mode.current.settle(_eager)
