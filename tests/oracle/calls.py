"""The calls of the differential run: contract rows by their public path, in other dtypes, shapes, axes too."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from polyreme.conformance.case import Case
from polyreme.conformance.rows import ROWS
from polyreme.core import dtype as dtypes
from tests.oracle.side import View, encoded
from tests.test_api_coverage import tables

# where a function may be public, the most usual path first
NAMESPACES = """
    paddle paddle.linalg paddle.nn.functional paddle.fft paddle.signal paddle.geometric paddle.vision.ops paddle.text
    paddle.incubate paddle.incubate.nn.functional paddle.Tensor
""".split()  # noqa: SIM905
# elementwise: any shapes that broadcast; reductions: any shape, axis and keepdim
ELEMENTWISE = {"math", "arithmetic", "special", "activation", "complex"}
REDUCTIONS = {"reduce", "statistics", "quantile"}
DRAWING = """
    dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout rrelu gumbel_softmax empty empty_like
    exponential_ uniform_ normal_
""".split()  # noqa: SIM905
SHAPES = {
    1: [((),), ((0,),), ((2, 0, 3),), ((2, 1, 3),)],
    2: [((), (3,)), ((3,), ()), ((2, 1, 3), (4, 1)), ((0,), (1,)), ((2, 0), (1, 1, 1))],
}
AXES = {(): [None, 0, -1], (0,): [None, 0], (2, 0, 3): [None, 0, 1, -1], (2, 1, 3): [None, -2, 2]}


@dataclass(frozen=True)
class Call:
    """One call to be made on both sides.

    terms: rounded terms in one output element. random: the numbers are each side's own; shapes and dtypes count. way:
    eager, captured, program or open. aliased: arguments that are equal are one Tensor. row: the id of the call that
    this one was made of by changes. code: what is run in place of a call, in the names of side.Snippet.
    """

    path: str
    tag: str
    args: tuple
    kwargs: dict[str, Any] = field(default_factory=dict)
    layer: dict[str, Any] | None = None
    grad: bool = True
    terms: int = 8
    random: bool = False
    way: str = "eager"
    aliased: bool = False
    row: str = ""
    code: str = ""

    @property
    def id(self) -> str:
        return f"{self.path}:{self.tag}"

    def views(self) -> list[View]:
        """Arguments that are views of larger Tensors or cast."""
        return _of(View, (self.args, self.kwargs))

    def arrays(self) -> list[np.ndarray]:
        """Arguments that are arrays, those of views among them."""
        return [*_of(np.ndarray, (self.args, self.kwargs)), *(view.array for view in self.views())]

    def message(self) -> dict[str, Any]:
        """What side.py reads; raises TypeError for what cannot be sent, such as a function."""
        told = {"path": self.path, "args": encoded(list(self.args)), "kwargs": encoded(self.kwargs), "grad": self.grad}
        told |= {"way": self.way, "aliased": self.aliased}
        told |= {"code": self.code} if self.code else {}
        if self.layer is not None:
            kept = {k: encoded(self.layer[k]) for k in ("args", "kwargs")}
            more = {k: self.layer[k] for k in ("eval", "method", "steps") if k in self.layer}
            told["layer"] = {**kept, **more}
        return told


def _of(kind: type, value: Any) -> list[Any]:
    if isinstance(value, kind):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [leaf for part in parts for leaf in _of(kind, part)]


def public_path(name: str) -> str | None:
    """The path under which PaddlePaddle has an op; None if it has none."""
    for module in NAMESPACES:
        if name in tables.names()[module] and tables.found(module, name) is not None:
            return f"Tensor.{name}" if module == "paddle.Tensor" else f"{module}.{name}"
    return None


def op_calls() -> Iterator[Call]:
    """Every contract row that both sides can be given, with its variants."""
    for case in ROWS:
        path = public_path(case.name)
        if path is None:
            continue
        rest = dict(
            path=path,
            kwargs=case.kwargs,
            grad=not case.no_grad,
            terms=case.terms,
            random=case.fn.__module__.endswith(".random") or case.name in DRAWING,
        )
        args = case.arguments()
        yield Call(tag=case.tag or "row", args=args, **rest)
        for tag, changed in (*_dtypes(args), *_shapes(case, args)):
            yield Call(tag=f"{case.tag or 'row'}/{tag}", args=changed, **rest)
        yield from _axes(case, rest, args)


def _arrays(args: tuple) -> list[np.ndarray]:
    return [a for a in args if isinstance(a, np.ndarray)]


def _dtypes(args: tuple) -> Iterator[tuple[str, tuple]]:
    """The same call in other dtypes of the same kind, and floats as complex."""
    kinds = {a.dtype.name for a in _arrays(args)}
    for old, new in (("float32", "float64"), ("float32", "complex64"), ("int64", "int32"), ("int32", "int64")):
        if old not in kinds:
            continue
        yield new, _mapped(args, lambda a, o=old, n=new: _as(a, o, n))


def _as(array: np.ndarray, old: str, new: str) -> np.ndarray:
    if array.dtype.name != old:
        return array
    made = array.astype(new)
    with np.errstate(invalid="ignore"):
        return made + (0.5j * np.roll(array, 1)).astype(new) if new == "complex64" else made


def _mapped(value: Any, change: Any) -> Any:
    if isinstance(value, np.ndarray):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(v, change) for v in value)
    return value


def _table(case: Case) -> str:
    return case.fn.__module__.rpartition(".")[2]


def _shapes(case: Case, args: tuple) -> Iterator[tuple[str, tuple]]:
    """Elementwise functions on shapes that broadcast, 0-D and 0-size among them; values are those of the row."""
    count = len(_arrays(args))
    if _table(case) not in ELEMENTWISE or count not in SHAPES or case.name == "matmul":
        return
    for shapes in SHAPES[count]:
        wanted = iter(shapes)
        yield (
            "x".join(map(str, shapes)).replace(" ", ""),
            tuple(np.resize(a, next(wanted)) if isinstance(a, np.ndarray) else a for a in args),
        )


def _axes(case: Case, kept: dict[str, Any], args: tuple) -> Iterator[Call]:
    """Reductions over every kind of axis of every kind of shape."""
    op = getattr(case.fn, "op", None)
    names = list(inspect.signature(op.fn if op else case.fn).parameters)
    if _table(case) not in REDUCTIONS or not {"axis", "keepdim"} <= set(names) or len(_arrays(args)) != 1:
        return
    place = names.index("axis")
    rest = dict(zip(names[place:], args[place:], strict=False))
    for shape, axes in AXES.items():
        for axis in axes:
            for keepdim in (False, True):
                head = tuple(np.resize(a, shape) if isinstance(a, np.ndarray) else a for a in args[:place])
                kwargs = {**case.kwargs, **rest, "axis": axis, "keepdim": keepdim}
                tag = f"{case.tag or 'row'}/{str(shape).replace(' ', '')},axis={axis},keepdim={keepdim}"
                yield Call(tag=tag, args=head, **{**kept, "kwargs": kwargs})


def all_calls() -> list[Call]:
    """Every call that can be sent, each once."""
    from tests.oracle.layers import layer_calls  # noqa: PLC0415  (layers.py and objects.py build on Call)
    from tests.oracle.objects import object_calls  # noqa: PLC0415

    by_id: dict[str, Call] = {}
    for call in (*op_calls(), *layer_calls(), *object_calls()):
        try:
            call.message()
        except TypeError:
            continue
        by_id.setdefault(call.id, call)
    return list(by_id.values())


def inexact(array: np.ndarray) -> bool:
    """Whether rounding may make two results differ."""
    return dtypes.is_inexact(array.dtype)


# what the numeric library is, by its public namespaces
NUMERIC = """
    paddle paddle.Tensor paddle.linalg paddle.fft paddle.signal paddle.sparse* paddle.special paddle.functional
    paddle.geometric paddle.distribution paddle.nn paddle.nn.functional paddle.incubate paddle.incubate.nn* paddle.text
    paddle.audio.functional paddle.vision.ops paddle.metric
""".split()  # noqa: SIM905


def function_names() -> list[str]:
    """Functions, not classes, of the numeric library that both have, by path."""
    names = []
    for module, entries in tables.names().items():
        if any(fnmatchcase(module, pattern) for pattern in NUMERIC):
            for name in entries:
                there = tables.found(module, name)
                if inspect.isroutine(there) and not name.startswith("_"):
                    names.append(f"{'Tensor' if module == 'paddle.Tensor' else module}.{name}")
    return names
