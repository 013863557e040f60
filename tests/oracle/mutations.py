"""How the fuzzer changes a call: its arguments, how they are spelled, and what it is called through."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from tests.oracle.calls import Call, op_calls
from tests.oracle.layers import ROWS
from tests.oracle.side import VIEWS, Made, Sparse, View
from tests.test_api_coverage import tables

CHANGED = " ~ "  # between the tag of a row and what was changed in it
DTYPES = tuple(
    "bool uint8 int8 int16 int32 int64 float16 float32 float64 complex64 complex128".split()  # noqa: SIM905
)
EDGES = {
    "i": [0, 1, -1, 2, 7],
    "u": [0, 1, 2, 7],
    "f": [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 1e-30, 3.4e38],
    "b": [True, False],
    "c": [0j, 1j, -1, complex(0.0, -0.0), complex(np.inf, 0), complex(0, np.nan), 1e30 + 1e-30j],
}
INTEGERS = [0, 1, -1, 2, 3, 127, 256, -129, 2**31 - 1, 2**31, -(2**31) - 1, 2**40]
FLOATS = [0.0, -0.0, 0.5, 1.0, -1.0, 2.0, 1e-30, 1e30, float("inf"), -float("inf"), float("nan")]
# what parameters without a value in any row may be given; others get what some row gives a parameter of their name
SETTINGS: dict[str, list[Any]] = {
    "grad_clip": [
        Made("nn.ClipGradByNorm", (0.5,)),
        Made("nn.ClipGradByGlobalNorm", (0.5,)),
        Made("nn.ClipGradByValue", (0.3,)),
    ],
    "weight_decay": [0.1, 0.0, Made("regularizer.L1Decay", (0.1,)), Made("regularizer.L2Decay", (0.1,))],
    "weight_attr": [False],
    "bias_attr": [False],
    "learning_rate": [0.0, 0.1, Made("optimizer.lr.StepDecay", (0.1, 1)), Made("optimizer.lr.NoamDecay", (4, 2))],
    "beta1": [0.0, 0.5, 1.0, -0.1],
    "beta2": [0.0, 0.5, 1.0, -0.1],
    "rho": [0.0, 0.5, 1.0],
    "momentum": [0.0, 0.5, 1.0],
    "epsilon": [0.0, 1e-3, 1.0],
    "learning_rate_range": [(1e-5, 50.0), (0.01, 0.02)],
    "etas": [(0.5, 1.2), (0.1, 2.0)],
    "axis": [0, 1, -1, -2, [0, 1], (0, -1), []],
    "dtype": [np.dtype(name) for name in DTYPES],
    "padding_mode": ["zeros", "reflect", "replicate", "circular"],
}
_OPTIMIZERS = "ASGD Adadelta Adagrad Adam AdamW Adamax Lamb Momentum NAdam RAdam RMSProp Rprop SGD".split()  # noqa: SIM905
# what is drawn differs from side to side
_DRAWN = {"dropout", "attn_dropout", "act_dropout", "dropout_p", "dropout_rate", "key"}
_STAY = _DRAWN | {
    *("parameters", "out", "name", "x", "input", "self", "apply_decay_param_fun", "exclude_from_weight_decay_fn"),
}

Change = Callable[[np.random.Generator, Any], Any]


def optimizer_calls() -> Iterator[Call]:
    """Three steps of every optimizer."""
    arrays = [np.float32([[0.5, -1.0, 2.0], [0.0, 0.25, -3.0]]), np.float32([1.0, -2.0])]
    gradients = [np.float32([[0.1, -0.2, 0.0], [1.0, -1.0, 0.3]]), np.float32([-0.5, 4.0])]
    for name in _OPTIMIZERS:
        layer = {"args": [], "kwargs": {"learning_rate": 0.05}, "steps": 3}
        yield Call(f"paddle.optimizer.{name}", "steps", (arrays, gradients), layer=layer, grad=False, terms=64)


@cache
def parameters(path: str) -> list[tuple[str, Any]]:
    """PaddlePaddle's parameters of a function or class, with their defaults; `...` for none, and for an expression."""
    module, _, name = path.rpartition(".")
    text = tables.names().get("paddle.Tensor" if module == "Tensor" else module, {}).get(name)
    if text is None or "<" in text:
        return []
    listed = ast.parse(f"def f({text}): pass").body[0].args  # type: ignore[attr-defined]
    defaults = [None] * (len(listed.args) - len(listed.defaults)) + listed.defaults
    return [(a.arg, _literal(d)) for a, d in zip(listed.args, defaults, strict=True)]


def _literal(node: Any) -> Any:
    try:
        return ast.literal_eval(node) if node is not None else ...
    except ValueError:
        return ...


@cache
def values_seen() -> dict[str, list[Any]]:
    """What the rows of ops and layers give parameters that are no Tensors, by the parameter's name."""
    seen: dict[str, list[Any]] = {name: list(values) for name, values in SETTINGS.items()}

    def note(path: str, args: tuple, kwargs: dict[str, Any]) -> None:
        names = [name for name, _ in parameters(path)]
        for name, value in (*zip(names, args, strict=False), *kwargs.items()):
            if isinstance(value, (bool, int, float, str, list, tuple)) and not _has_arrays(value):
                values = seen.setdefault(name, [])
                if not any(type(v) is type(value) and v == value for v in values):
                    values.append(value)

    for call in op_calls():
        note(call.path, call.args, call.kwargs)
    for name, args, kwargs, _ in ROWS:
        note(f"paddle.nn.{name}", args, kwargs)
    return seen


def _has_arrays(value: Any) -> bool:
    return any(isinstance(leaf, (np.ndarray, View, Sparse)) for _, leaf in places(value))


def places(value: Any, path: tuple = ()) -> Iterator[tuple[tuple, Any]]:
    """(where, leaf) of everything in lists, tuples and dicts."""
    if isinstance(value, (View, Sparse, Made)):
        yield path, value
    elif isinstance(value, (list, tuple)):
        for number, part in enumerate(value):
            yield from places(part, (*path, number))
        if value and all(isinstance(part, int) for part in value):
            yield path, value
    elif isinstance(value, dict):
        for name, part in value.items():
            yield from places(part, (*path, name))
    else:
        yield path, value


def put(value: Any, path: tuple, leaf: Any) -> Any:
    """value with another leaf."""
    if not path:
        return leaf
    if isinstance(value, dict):
        return {**value, path[0]: put(value[path[0]], path[1:], leaf)}
    parts = [put(part, path[1:], leaf) if number == path[0] else part for number, part in enumerate(value)]
    return type(value)(parts)


def _cast(rng: np.random.Generator, array: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return array.real.astype(rng.choice(DTYPES))


def _with_edge(rng: np.random.Generator, array: np.ndarray) -> np.ndarray:
    edges = EDGES.get(array.dtype.kind, [])
    if not edges or not array.size:
        return array
    changed = array.copy()
    with np.errstate(all="ignore"):
        changed.reshape(-1)[rng.integers(array.size)] = edges[rng.integers(len(edges))]
        if array.dtype.kind in "iu" and rng.random() < 0.3:
            limits = np.iinfo(array.dtype)
            beyond = [2**31, 2**32 + 1, -(2**31) - 1] if array.dtype == np.int64 else []
            changed.reshape(-1)[0] = rng.choice([limits.min, limits.max, *beyond])
    return changed


def _emptied(rng: np.random.Generator, array: np.ndarray) -> np.ndarray:
    return array.take([], axis=rng.integers(array.ndim)) if array.ndim else array


def _widened(rng: np.random.Generator, array: np.ndarray) -> np.ndarray:
    return np.expand_dims(array, rng.integers(array.ndim + 1))


def _narrowed(rng: np.random.Generator, array: np.ndarray) -> np.ndarray:
    return np.asarray(array.take(0, axis=rng.integers(array.ndim))) if array.ndim and array.size else array


def _one_long(rng: np.random.Generator, array: np.ndarray) -> np.ndarray:
    return array.take([0], axis=rng.integers(array.ndim)) if array.ndim and array.size else array


def _turned(rng: np.random.Generator, array: np.ndarray) -> np.ndarray:
    return array.transpose(rng.permutation(array.ndim))


def _viewed(rng: np.random.Generator, array: np.ndarray) -> np.ndarray | View:
    how = list(VIEWS)[rng.integers(len(VIEWS))]
    if how == "bfloat16":
        return View(array.astype("float32"), how) if array.dtype.kind == "f" else array
    return View(array, how) if array.ndim or how == "row" else array


ARRAYS: tuple[Change, ...] = (
    *(_cast, _cast, _with_edge, _with_edge, _emptied, _widened, _narrowed, _one_long, _turned, _viewed, _viewed),
)


def _number(rng: np.random.Generator, value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        near = [value - 1, value + 1, -value - 1]
        return int(rng.choice(near)) if rng.random() < 0.7 else int(rng.choice(INTEGERS))
    return float(rng.choice(FLOATS))


def _integers(rng: np.random.Generator, value: Any) -> Any:
    choice = rng.integers(5)
    if choice == 0:
        return value[::-1]
    if choice == 1:
        return value[:-1]
    if choice == 2:
        return type(value)([*value, value[-1]])
    return value[0] if choice == 3 else (tuple if isinstance(value, list) else list)(value)


def _as_tensor(rng: np.random.Generator, value: Any) -> np.ndarray:
    dtype = rng.choice(["int64", "int64", "int32"]) if not isinstance(value, float) else "float32"
    return np.asarray(value, dtype)


def _leaf(rng: np.random.Generator, value: Any) -> tuple[Change, Any] | None:
    """A change of an argument, and what it makes of it."""
    if isinstance(value, Sparse):
        change = _with_edge if rng.random() < 0.5 else _cast
        return change, Sparse(change(rng, value.array), value.layout)
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biufc":
            return None
        change = ARRAYS[rng.integers(len(ARRAYS))]
    elif isinstance(value, bool) or not isinstance(value, (int, float, list, tuple)):
        if not isinstance(value, bool):
            return None
        change = _number
    else:
        change = _integers if isinstance(value, (list, tuple)) else _number
        if rng.random() < 0.25 and all(-(2**31) <= v < 2**31 for v in np.ravel(value) if v == v):
            change = _as_tensor
    return change, change(rng, value)


def _changed_argument(call: Call, rng: np.random.Generator) -> tuple[Call, str] | None:
    """The call with another value for one of its arguments, or of the arguments that make its layer."""
    layer = call.layer or {"args": [], "kwargs": {}}
    whole = (call.args, call.kwargs, layer["args"], layer["kwargs"])
    arguments = [
        (w, v) for w, v in places(whole) if isinstance(v, (np.ndarray, Sparse, int, float)) or type(v) in (list, tuple)
    ]
    if not arguments:
        return None
    where, leaf = arguments[rng.integers(len(arguments))]
    change_and_value = _leaf(rng, leaf)
    if change_and_value is None or (
        where[0] > 1 and not isinstance(leaf, np.ndarray) and isinstance(change_and_value[1], np.ndarray)
    ):
        return None  # layers are made of numbers
    if "steps" in layer and isinstance(change_and_value[1], View):
        return None  # an optimizer's parameters are set to arrays
    if where[0] > 1 and isinstance(change_and_value[1], int) and abs(change_and_value[1]) > 64:
        return None  # so many parameters
    if where[-1] in _DRAWN:
        return None
    change, value = change_and_value
    args, kwargs, layer_args, layer_kwargs = put(whole, where, value)
    layer = None if call.layer is None else {**call.layer, "args": layer_args, "kwargs": layer_kwargs}
    return replace(call, args=args, kwargs=kwargs, layer=layer), f"{change.__name__[1:]}{list(where[1:])}"


def _more(call: Call, rng: np.random.Generator) -> tuple[Call, str] | None:
    """The call with a value for a parameter that it leaves at its default."""
    args, kwargs = (call.args, call.kwargs) if call.layer is None else (call.layer["args"], call.layer["kwargs"])
    if call.layer is not None and "method" in call.layer:
        return None
    left = [
        (n, d) for n, d in parameters(call.path)[len(args) :] if n not in kwargs and n not in _STAY and d is not ...
    ]
    if not left:
        return None
    name, default = left[rng.integers(len(left))]
    values = values_seen().get(name, [])
    if values and rng.random() < 0.7:
        value = values[rng.integers(len(values))]
    elif isinstance(default, (bool, int, float)):
        value = _number(rng, default)
    else:
        return None
    kwargs = {**kwargs, name: value}
    if call.layer is None:
        return replace(call, kwargs=kwargs), name
    return replace(call, layer={**call.layer, "kwargs": kwargs}), name


def _named(call: Call, rng: np.random.Generator) -> tuple[Call, str] | None:
    """The call with a `name`, which PaddlePaddle's functions and layers take."""
    if "name" not in dict(parameters(call.path)):
        return None
    if call.layer is not None:
        return replace(call, layer={**call.layer, "kwargs": {**call.layer["kwargs"], "name": "n1"}}), "name"
    return replace(call, kwargs={**call.kwargs, "name": "n1"}), "name"


def _by_keyword(call: Call, rng: np.random.Generator) -> tuple[Call, str] | None:
    """The call with some of its positional arguments by PaddlePaddle's names."""
    if call.layer is not None or call.path.startswith("Tensor."):
        return None
    names = [name for name, _ in parameters(call.path)][: len(call.args)]
    first = int(rng.integers(len(names) + 1))
    if len(names) < len(call.args) or first == len(names):
        return None
    keywords = dict(zip(names[first:], call.args[first:], strict=True))
    return replace(call, args=call.args[:first], kwargs={**keywords, **call.kwargs}), "keywords"


def _as_method(call: Call, rng: np.random.Generator) -> tuple[Call, str] | None:
    """The call as a method of its first argument, half of the time as one that changes it."""
    name = call.path.rpartition(".")[2]
    methods = tables.names()["paddle.Tensor"]
    there = [n for n in (name, f"{name}_") if n in methods and tables.found("paddle.Tensor", n) is not None]
    if call.layer is not None or not there or not call.args or not isinstance(call.args[0], (np.ndarray, View)):
        return None
    return replace(call, path=f"Tensor.{there[rng.integers(len(there))]}"), "method"


_WAYS = (*[_changed_argument] * 8, _more, _more, _named, _by_keyword, _by_keyword, _as_method, _as_method)


def changed(call: Call, rng: np.random.Generator) -> Call:
    """The call with one to three changes."""
    names, row = [], call.id
    for _ in range(rng.integers(1, 4)):
        made = _WAYS[rng.integers(len(_WAYS))](call, rng)
        if made is not None:
            call, name = made
            names.append(name)
    aliased = rng.random() < 0.1
    tag = "+".join([*names, *(["aliased"] if aliased else [])])
    return replace(call, tag=f"{call.tag}{CHANGED}{tag}", aliased=aliased, row=row)
