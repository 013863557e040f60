"""One declaration per op. Eager, tape, capture, Program, AMP, errors, docs and tests all read it.

    @op(amp="low")
    def matmul(x: Inexact[Array, "*b m k"], y: ..., transpose_x: bool = False) -> ...:

A parameter annotated with an array type is a tensor, `list[Array]` a list of tensors, `Array | None` an optional one,
`Key` a random key that the default generator fills in; every other parameter is an attribute, part of the kernel's
identity.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
import re
import types
import typing
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Literal, NewType, TypeVar, overload

import jax
import numpy as np

from polyreme.core import amp_policy, dims, mode, spelling, state
from polyreme.core import dtype as dtypes
from polyreme.core.amp_policy import AmpClass
from polyreme.core.compiled import DRAWS, Alone
from polyreme.core.engine import xla_flags
from polyreme.core.kernel import Kernel
from polyreme.core.sharding_rule import DimsRule, RuleFor
from polyreme.errors import (
    ArgumentTypeError,
    ConfigError,
    DTypeError,
    HostValueError,
    NumericsError,
    ProgramError,
    ShapeError,
)

F = TypeVar("F", bound=Callable[..., Any])
Key = NewType("Key", jax.Array)
DRAWN = typing.cast(Key, None)
"""The default of a Key parameter: left out by the caller, drawn from the default generator for the array function."""
Integers = Literal["fit", "wrap", "any"]
"""Of Python integers that stand for a tensor: those that the integer dtype of the others holds, those of as many bits,
which count modulo 2 ** bits, or any, because the function says what it gives."""
TENSOR, TENSORS, ATTR, KEY = "tensor", "tensors", "attr", "key"
# what jax raises when a traced function asks for a value
_log = logging.getLogger("polyreme.core")

_READS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
_OURS = (ShapeError, DTypeError, ConfigError, NotImplementedError, NumericsError)
# of arguments that an op's function did not expect, unless it says more than Python does
_UNEXPECTED = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, AssertionError)
# what Python and jax say of an attribute of another type
_OF_TYPES = re.compile(
    r"unsupported operand|not supported between instances|must be real number|cannot be interpreted|must be str|"
    r"Only integer scalar|object is not|has no len|can't multiply|could not convert string|not a valid JAX"
)
_OF_PYTHON = re.compile(r"(tuple|list|string) index out of range|pop from|out of bounds for axis|by zero$|modulo")


class Op:
    """A pure array function and the facts every floor above needs about it.

    fn's signature is the public one (`name=None` and `out=None` are accepted for every op, the name behind the
    parameters too). positional: how many of its parameters may be given by place. amp: dtype class under autocast.
    saves: keep residuals for backward rather than compute them again. method: also a Tensor method. inplace: there is
    a `name_` that writes the result back into the first tensor. rule: how its dims go together over a mesh, a
    function of the call or dims such as "*b [n] -> *b [n]"; None for an op whose function tells. uncast: parameters
    that autocast leaves in their dtype. in_pieces: parameters that fn takes as they are kept, and gathers itself.
    integers: which Python integers stand for a tensor; see Integers. real: refuses complex tensors, as all does that
    compares numbers. constant: its results want no gradient, as their derivative is 0 everywhere or unknown. opaque:
    whether fn, with these arguments, is made of calls that XLA cannot look into and of moves of data, which compile
    sooner unfused. kernels: by attributes in full; calls: the same kernels by the form of eager calls.
    """

    name: str
    uncast: frozenset[str]
    positional: int
    names: tuple[str, ...]
    index: dict[str, int]

    def __init__(
        self,
        fn: Callable[..., Any],
        amp: AmpClass,
        saves: bool,
        method: bool,
        inplace: bool,
        rule: RuleFor | str | None = None,
        uncast: Sequence[str] = (),
        integers: Integers = "fit",
        opaque: Callable[..., bool] | None = None,
        in_pieces: Sequence[str] = (),
        real: bool = False,
        constant: bool = False,
    ) -> None:
        self.fn = fn
        self.real = real
        self.constant = constant
        self.opaque = opaque
        self.integers: Integers = integers
        self.name = fn.__name__
        self.amp: AmpClass = amp
        self.saves = saves
        self.method = method
        self.inplace = inplace
        self.declared_rule = rule
        self.uncast = frozenset(uncast)
        self.in_pieces = frozenset(in_pieces)
        self.kernels: dict[Any, Kernel] = {}
        self.calls: dict[Any, Kernel] = {}
        # read off the code object: inspect.signature of every op would take a tenth of the import
        code, defaults, keyword_defaults = fn.__code__, fn.__defaults__ or (), fn.__kwdefaults__ or {}
        if code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS):
            raise TypeError(f"op {self.name!r} has starred parameters; name each")
        self.positional = code.co_argcount
        self.names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        self.index = {n: i for i, n in enumerate(self.names)}
        by_keyword = tuple(keyword_defaults.get(n, inspect.Parameter.empty) for n in self.names[self.positional :])
        self.defaults: tuple[Any, ...] = (
            (inspect.Parameter.empty,) * (self.positional - len(defaults)) + defaults + by_keyword
        )

    @functools.cached_property
    def annotations(self) -> dict[str, Any]:
        return typing.get_type_hints(self.fn)

    @functools.cached_property
    def kinds(self) -> tuple[str, ...]:
        return tuple(_kind(self.annotations.get(n)) for n in self.names)

    @functools.cached_property
    def required(self) -> frozenset[str]:
        """Tensor parameters that may not be None."""
        return frozenset(
            n
            for n, default in zip(self.names, self.defaults, strict=True)
            if default is not None and type(None) not in typing.get_args(self.annotations.get(n))
        )

    @functools.cached_property
    def single(self) -> frozenset[int]:
        """Positions of the attributes that are one number: a Tensor of one element stands for its element there."""
        return frozenset(
            i for i, n in enumerate(self.names) if self.kinds[i] is ATTR and _takes_one(self.annotations.get(n))
        )

    def attribute(self, index: int, value: Any) -> Any:
        """The kernel's value, hashable, of the attribute at this position for a caller's value."""
        frozen = freeze(value)
        return _single(frozen) if hasattr(value, "ndim") and index in self.single else frozen

    @functools.cached_property
    def dims(self) -> dict[str, str]:
        """Tensor parameter -> its dims, for those declared with some: "x" -> "*b m k"."""
        found = {n: _array_type(self.annotations.get(n)) for n in self.names}
        return {n: t.dim_str for n, t in found.items() if t is not None and hasattr(t, "dim_str")}

    @functools.cached_property
    def dtypes(self) -> dict[str, tuple[str, ...]]:
        """Tensor parameter -> names of the dtypes it takes, for those declared with some."""
        found = {n: _array_type(self.annotations.get(n)) for n in self.names}
        return {
            n: tuple(t.dtypes) for n, t in found.items() if t is not None and isinstance(getattr(t, "dtypes", 0), list)
        }

    @functools.cached_property
    def rule(self) -> RuleFor | None:
        """The declared sharding rule; None for an op whose function tells how its dims go together."""
        return self.read_rule(self.declared_rule, self.name)

    def read_rule(self, rule: RuleFor | str | None, what: str) -> RuleFor | None:
        """A rule, read if it is written as dims. ConfigError, beginning with `what`, for dims that do not fit."""
        if not isinstance(rule, str):
            return rule
        if TENSORS in self.kinds:
            raise ConfigError(f"{what} takes a list of tensors, whose sharding no rule can tell; leave it out")
        tensors = [n for n, kind in zip(self.names, self.kinds, strict=True) if kind is TENSOR]
        return DimsRule.parse(rule, tensors, what)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """All parameters in order; raises TypeError as a Python call would. Other spellings: core.spelling."""
        most = self.positional
        if len(args) > most:
            args = spelling.without_name(spelling.gathered(self.name, args), most)
        if len(args) > most:
            by_keyword = f", and {', '.join(self.names[most:])} by name" if most < len(self.names) else ""
            raise TypeError(
                f"{self.name}() takes {most} arguments ({', '.join(self.names[:most])}){by_keyword}, got {len(args)}"
            )
        full = [*args, *self.defaults[len(args) :]]
        for key, value in kwargs.items():
            index = self.index.get(key)
            if index is None:
                index = self.index.get(spelling.parameter(key, self.index) or "")
            if index is None:
                raise TypeError(f"{self.name}() has no parameter {key!r}; it has {', '.join(self.names)}")
            if index < len(args):
                raise TypeError(f"{self.name}() got {key!r} twice")
            full[index] = value
        for index, value in enumerate(full):
            if value is inspect.Parameter.empty and self.kinds[index] is not KEY:
                raise TypeError(f"{self.name}() needs {self.names[index]!r}")
        return full

    def kernel(self, template: tuple[Any, ...], policy: amp_policy.Policy | None) -> Kernel:
        """fn with its attributes filled in: arrays -> result.

        template: per parameter, an int n >= 0 for a list of n tensors, -1 for one tensor, a Sharding for one tensor
        that is laid out so before it is used, or (value,) for an attribute.
        """
        left = _inputs_of(self.uncast, self.names, template)
        slots = self._without_gathers(template)

        def fn(*arrays: jax.Array) -> Any:
            if self.amp == "low" and self.name not in _told_to_widen:
                _tell_widening(self.name, arrays)
            cast = iter(amp_policy.cast(policy, self.name, self.amp, _without(arrays, left)))
            given = iter([array if i in left else next(cast) for i, array in enumerate(arrays)])
            filled = [_fill(slot, given) for slot in slots]
            self._check(filled)
            try:
                return self.call(filled)
            except _OURS:
                raise
            except _UNEXPECTED as error:
                if isinstance(error, (IndexError, ZeroDivisionError)) and not _OF_PYTHON.search(str(error)):
                    raise
                raise self._explain(error, filled) from error

        gathered = _gathered_inputs(template)
        alone = DRAWS if KEY in self.kinds else None
        if self.opaque is not None and not gathered:
            alone = Alone(xla_flags.UNFUSED, self._is_opaque(template))
        return Kernel(fn, self.name, saves=self.saves, gathered=gathered, alone=alone, constant=self.constant)

    def _without_gathers(self, template: tuple) -> tuple:
        """The template for fn, which gathers parameters in_pieces itself."""
        return tuple(
            -1 if name in self.in_pieces and not isinstance(slot, (int, tuple)) else slot
            for name, slot in zip(self.names, template, strict=True)
        )

    def call(self, values: Sequence[Any]) -> Any:
        """fn of a value for each of its parameters."""
        most = self.positional
        if most == len(values):
            return self.fn(*values)
        return self.fn(*values[:most], **dict(zip(self.names[most:], values[most:], strict=True)))

    def _is_opaque(self, template: tuple) -> Callable[..., bool]:
        """opaque of a kernel's arrays."""
        opaque: Any = self.opaque

        def fits(*arrays: jax.Array) -> bool:
            given = iter(arrays)
            return opaque(*[_fill(slot, given) for slot in template])

        return fits

    def _check(self, filled: list[Any]) -> None:
        shapes = {}
        for name, kind, value in zip(self.names, self.kinds, filled, strict=True):
            if kind is ATTR and not _is_one(self.annotations.get(name), value):
                raise ArgumentTypeError(f"{self.name}: {name}={value!r}; give {_numbers(self.annotations[name])}")
            if kind is ATTR and _has_fraction(value) and _takes_integers(self.annotations.get(name)):
                raise ArgumentTypeError(f"{self.name}: {name}={value!r}; give integers")
            if kind is not TENSOR:
                continue
            if value is None:
                if name in self.required:
                    raise ArgumentTypeError(f"{self.name}: {name} is None; it needs a Tensor")
                continue
            shapes[name] = value.shape
            if self.real and dtypes.is_complex(value.dtype):
                raise DTypeError(
                    f"{self.name}: {name} is {value.dtype.name}, and it takes real numbers, as complex ones have no "
                    "order; give abs(x), real(x) or imag(x)"
                )
            allowed = self.dtypes.get(name)
            if allowed is not None and value.dtype.name not in allowed:
                raise DTypeError(
                    f"{self.name}: {name} is {value.dtype.name}, needs one of {', '.join(allowed)}; use astype"
                )
        dims.check(self.name, self.dims, shapes)

    def _explain(self, error: Exception, filled: list[Any]) -> Exception:
        """error with the op's name and its inputs; jax states shape faults as TypeError or ValueError alike."""
        shown = []
        for name, kind, value in zip(self.names, self.kinds, filled, strict=True):
            if kind is TENSOR and value is not None:
                shown.append(f"{name} {value.dtype.name}{list(value.shape)}")
            elif kind is TENSORS and value is not None:
                shown.append(f"{name} {[list(v.shape) for v in value]}")
            elif kind is ATTR:
                shown.append(f"{name}={value!r}")
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        if isinstance(error, _READS):
            return HostValueError(
                f"{self.name}({', '.join(shown)}): its function needs the value of an input, and there is none while "
                f"it is compiled ({text}); compute with jax.numpy, take jax.numpy.where or jax.lax.cond in place "
                "of `if`, or make that input an attribute: a Python value"
            )
        kind = DTypeError if "does not accept dtype" in text or "not supported for input types" in text else ShapeError
        if _OF_TYPES.search(text):
            kind = ArgumentTypeError
        return kind(f"{self.name}({', '.join(shown)}): {_unbroadcast(text) or text}")


_told_to_widen: set[str] = set()
"""Ops of which this process was warned that they met float64 and narrower arrays."""


def _tell_widening(name: str, arrays: Sequence[jax.Array]) -> None:
    """Warn once of an op that computes a product of float64 and narrower arrays in float64.

    Mostly that is data that NumPy has made float64, in a model of float32: every layer then computes in float64.
    """
    floats = [a for a in arrays if dtypes.is_floating(a.dtype) and a.ndim and not getattr(a, "weak_type", False)]
    wide = [a.dtype == dtypes.float64 for a in floats]
    if all(wide) or not any(wide):
        return
    _told_to_widen.add(name)
    _log.warning(
        "%s(%s) is computed in float64, the widest of them, which takes twice the time and which autocast leaves "
        "alone; data that NumPy has made float64 is cast by x.astype('float32')",
        name,
        ", ".join(f"{a.dtype.name}{list(a.shape)}" for a in floats),
    )


_UNBROADCAST = re.compile(r"ncompatible (?:shapes|types) for broadcasting")


def _unbroadcast(text: str) -> str:
    """The message for shapes that do not broadcast, with the dims that differ; "" if jax's error is another one."""
    if not _UNBROADCAST.search(text):
        return ""
    shapes = [[int(n) for n in re.findall(r"\d+", sizes)] for sizes in re.findall(r"[(\[]([\d, ]*)[)\]]", text)]
    differ = []
    for at in range(1, 1 + max(map(len, shapes), default=0)):
        sizes = [shape[-at] for shape in shapes if len(shape) >= at]
        if len({*sizes, 1}) > 2:
            differ.append(f"dim {-at} is {' and '.join(map(str, sizes))}")
    shown = f"shapes {' and '.join(map(str, shapes))} do not broadcast"
    return f"{shown}: {', '.join(differ)}; make them equal or 1" if differ else ""


def _fill(slot: Any, arrays: Iterator[jax.Array]) -> Any:
    if isinstance(slot, tuple):
        return slot[0]
    if isinstance(slot, int):
        return next(arrays) if slot < 0 else [next(arrays) for _ in range(slot)]
    return jax.lax.with_sharding_constraint(next(arrays), slot)


def _inputs_of(wanted: Collection[str], names: Sequence[str], template: tuple) -> frozenset[int]:
    """Positions, among the kernel's arrays, of those that belong to the parameters wanted."""
    owners: list[str] = []
    for name, slot in zip(names, template, strict=True):
        if not isinstance(slot, tuple):
            owners += [name] * (slot if isinstance(slot, int) and slot >= 0 else 1)
    return frozenset(i for i, name in enumerate(owners) if name in wanted)


def _without(arrays: tuple, places: Collection[int]) -> tuple:
    return tuple(a for i, a in enumerate(arrays) if i not in places) if places else arrays


def _gathered_inputs(template: tuple) -> frozenset[int]:
    """Positions, among the kernel's arrays, of those laid out anew before they are used."""
    gathered, index = set(), 0
    for slot in template:
        if isinstance(slot, int):
            index += 1 if slot < 0 else slot
        elif not isinstance(slot, tuple):
            gathered.add(index)
            index += 1
    return frozenset(gathered)


OPS: dict[str, Callable[..., Any]] = {}
RECORDED: dict[str, Callable[..., Any]] = {}
"""What a static Program may hold besides ops: composites and methods of Tensor, by qualified name."""


def op(
    fn: Callable[..., Any] | None = None,
    *,
    amp: AmpClass = "widest",
    saves: bool = False,
    method: bool = True,
    inplace: bool = False,
    rule: RuleFor | str | None = None,
    uncast: Sequence[str] = (),
    integers: Integers = "fit",
    opaque: Callable[..., bool] | None = None,
    in_pieces: Sequence[str] = (),
    real: bool = False,
    constant: bool = False,
) -> Any:
    """Declare a function on arrays as an op; returns the public function, which takes Tensors.

    rule: how its dims go together over a mesh, where its function does not tell; see core/sharding_rule.py. uncast:
    parameters that autocast leaves in their dtype, beside products that it does in fewer bits. integers: which
    Python integers it takes in the place of a tensor. real: refuse complex tensors. constant, opaque, in_pieces: see
    Op. Raises ValueError if the name is taken or there is no docstring.
    """

    def declare(fn: Callable[..., Any]) -> Callable[..., Any]:
        new = Op(fn, amp, saves, method, inplace, rule, uncast, integers, opaque, in_pieces, real, constant)
        _register(new.name, fn)
        current = mode.current

        def public(*args: Any, **kwargs: Any) -> Any:
            return current.mode.run(new, args, kwargs)

        functools.update_wrapper(public, fn)
        public.op = new  # type: ignore[attr-defined]
        OPS[new.name] = public
        return public

    return declare if fn is None else declare(fn)


@overload
def composite(fn: F) -> F: ...
@overload
def composite(*, method: bool = True) -> Callable[[F], F]: ...
def composite(fn: Any = None, *, method: bool = True) -> Any:
    """Register a public function written with other ops (on Tensors, not arrays), so that tests and docs see it too."""

    def declare(fn: Callable[..., Any]) -> Callable[..., Any]:
        _register(fn.__name__, fn)
        public = recorded(fn, checks=True)
        public.composite = True  # type: ignore[attr-defined]
        public.method = method  # type: ignore[attr-defined]
        OPS[fn.__name__] = public
        return public

    return declare if fn is None else declare(fn)


@overload
def recorded(fn: F) -> F: ...
@overload
def recorded(*, acts: bool = False, draws: bool | None = None, checks: bool = False) -> Callable[[F], F]: ...
def recorded(fn: Any = None, *, acts: bool = False, draws: bool | None = None, checks: bool = False) -> Any:
    """fn, which a static Program records as one call, by its qualified name, rather than as the ops inside it.

    acts: it does more than compute, such as print, so it runs with every run of the Program and never ahead of it.
    draws: whether it takes random numbers; None where a call has to be tried to know. checks: raise ArgumentTypeError
    for texts, lists and other numbers in the place of parameters that are one number, as ops do.
    """

    def declare(fn: Callable[..., Any]) -> Callable[..., Any]:
        name, watch = fn.__qualname__, state.watch
        RECORDED[name] = fn
        fn.acts, fn.draws = acts, draws  # type: ignore[attr-defined]
        code = fn.__code__
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]

        @functools.wraps(fn)
        def public(*args: Any, **kwargs: Any) -> Any:
            if kwargs:
                kwargs = spelling.renamed(kwargs, names)
            if checks:
                _check_numbers(fn, args, kwargs)
            active = watch.active
            if active is None:
                return fn(*args, **kwargs)
            if active.records is True:
                return active.call(name, args, kwargs)
            result = fn(*args, **kwargs)
            active.called(name, args, kwargs, result)
            return result

        return public

    return declare if fn is None else declare(fn)


@functools.cache
def _number_parameters(fn: Callable[..., Any]) -> tuple[dict[str, Any], tuple[tuple[str, tuple[type, ...]], ...]]:
    """Annotations of the parameters of fn that are one number, and each parameter with the types that need no look."""
    hints, names = typing.get_type_hints(fn), tuple(inspect.signature(fn).parameters)
    numbers = {name: hints[name] for name in names if _takes_one(hints.get(name))}
    return numbers, tuple((name, _choices(numbers[name]) if name in numbers else ()) for name in names)


def _check_numbers(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    numbers, parameters = _number_parameters(fn)
    for (name, types_), value in zip(parameters, args, strict=False):
        if types_ and value.__class__ not in types_:
            _check_number(fn, name, numbers[name], value)
    for name, value in kwargs.items():
        if name in numbers:
            _check_number(fn, name, numbers[name], value)


def _check_number(fn: Callable[..., Any], name: str, annotation: Any, value: Any) -> None:
    if value.__class__ is not annotation and not _is_one(
        annotation, tuple(value) if value.__class__ is list else value
    ):
        raise ArgumentTypeError(f"{fn.__name__}: {name}={value!r}; give {_numbers(annotation)}")


def function_of(name: str) -> Callable[..., Any]:
    """The public function of an op, composite or Tensor method by the name it is recorded under.

    Raises ProgramError if there is none.
    """
    found = OPS.get(name) or RECORDED.get(name)
    if found is None:
        raise ProgramError(f"a Program calls {name!r}, which is not declared here; import the module that declares it")
    return found


def _register(name: str, fn: Callable[..., Any]) -> None:
    if name in OPS:
        raise ValueError(f"op {name!r} is already declared in {OPS[name].__module__}; one declaration per op")
    if not fn.__doc__:
        raise ValueError(f"op {name!r} needs a docstring; its API page is made of it")


def freeze(value: Any) -> Any:
    """An attribute as a hashable value: lists become tuples, Tensors and NumPy scalars become Python numbers, and so do
    Tensors and arrays of one element in a list. Every nan is one object, as it is equal to itself alone."""
    if value.__class__ is float and value != value:
        return math.nan
    if isinstance(value, (list, tuple)):
        return tuple(_single(freeze(v)) if hasattr(v, "ndim") else freeze(v) for v in value)
    if isinstance(value, state.TensorState):
        sizes = state.sizes_of(value)
        return freeze((state.host(value, "a Tensor given as an attribute") if sizes is None else sizes).tolist())
    if isinstance(value, np.ndarray):
        return freeze(value.tolist())
    if isinstance(value, np.generic):
        return freeze(value.item())
    if isinstance(value, dict):
        return tuple(sorted((k, freeze(v)) for k, v in value.items()))
    return value


def _single(value: Any) -> Any:
    """The element of what has one, however deep: (2,) and ((2,),) are 2."""
    while value.__class__ is tuple and len(value) == 1:
        value = value[0]
    return value


def _takes_one(annotation: Any) -> bool:
    """Whether an attribute of this annotation is a number, a bool or None, never several."""
    return all(choice in (bool, int, float, complex, type(None)) for choice in _choices(annotation))


def _choices(annotation: Any) -> tuple[Any, ...]:
    return typing.get_args(annotation) if _is_union(annotation) else (annotation,)


def _is_one(annotation: Any, value: Any) -> bool:
    """False for a text, a list, or a number of another kind, where the annotation is of numbers alone."""
    if not _takes_one(annotation) or not isinstance(value, (str, tuple, int, float, complex)):
        return True
    choices = _choices(annotation)
    if isinstance(value, complex):
        return complex in choices
    if isinstance(value, float):
        return float in choices or complex in choices or (int in choices and value.is_integer())
    return isinstance(value, int) and (bool(set(choices) - {bool, type(None)}) or value in (0, 1))


def _has_fraction(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(map(_has_fraction, value))
    return isinstance(value, float) and not value.is_integer()


def _takes_integers(annotation: Any) -> bool:
    """Whether an attribute of this annotation is an integer or several, or None."""
    whole = (int, typing.SupportsIndex)
    return all(
        choice in (*whole, types.NoneType) or typing.get_args(choice)[:1] in ((kind,) for kind in whole)
        for choice in _choices(annotation)
    )


def _numbers(annotation: Any) -> str:
    """The meaning of an annotation of numbers, in words."""
    words = {bool: "True or False", int: "an integer", float: "a number", complex: "a number", type(None): "None"}
    return " or ".join(dict.fromkeys(words[choice] for choice in _choices(annotation)))


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)


def _array_type(annotation: Any) -> Any:
    """The array type in an annotation (itself, or inside `X | None`), else None."""
    if _is_union(annotation):
        return next((t for t in map(_array_type, typing.get_args(annotation)) if t is not None), None)
    return annotation if annotation is jax.Array or hasattr(annotation, "dim_str") else None


def _kind(annotation: Any) -> str:
    if annotation is Key or (typing.get_origin(annotation) is not None and Key in typing.get_args(annotation)):
        return KEY
    if _array_type(annotation) is not None:
        return TENSOR
    if (
        typing.get_origin(annotation) in (list, typing.Sequence)
        and _array_type(typing.get_args(annotation)[0]) is not None
    ):
        return TENSORS
    return ATTR
