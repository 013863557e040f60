"""to_static: a function or Layer whose calls run captured programs, one for each structure of arguments."""

from __future__ import annotations

import copy
import functools
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, overload

import jax
import numpy as np

from polyreme.call_site import where_defined
from polyreme.core import amp_policy, layout, state
from polyreme.core import dtype as dtypes
from polyreme.core.checked import checked
from polyreme.core.devices.device_memory import raise_explained
from polyreme.core.state import TensorState
from polyreme.eager import tape
from polyreme.eager.dist_members import lookup
from polyreme.eager.tensor import Tensor, to_tensor
from polyreme.errors import ArgumentTypeError, CaptureError, ConfigError, HostValueError
from polyreme.jit.convert import converted
from polyreme.jit.fusing import fusing
from polyreme.jit.program import CapturedProgram, OtherShapes, is_tensor
from polyreme.jit.structure import containers, contents, flatten, put_contents, rebuild, with_parts
from polyreme.jit.surroundings import same_parts

F = TypeVar("F", bound=Callable[..., Any])
_log = logging.getLogger("polyreme.jit")
# more programs than this for one function nearly always means a Python number that changes each call
_MANY_PROGRAMS = 16
_GROWING_PROGRAMS = 4
# a captured step takes megabytes and tens of the 65,530 mappings that Linux allows a process
_MOST_PROGRAMS = 256


_one_at_a_time = threading.RLock()


class _CaptureSwitch:
    """Whether to_static captures at all."""

    __slots__ = ("is_on",)

    def __init__(self) -> None:
        self.is_on = True


_switch = _CaptureSwitch()


class StaticFunction:
    """A function that runs as captured programs.

    A new program is captured for new shapes, dtypes, static arguments, train/eval flags, autocast or gradient mode;
    `retraces` says why, one line each.
    """

    falls_back: bool = False
    """Whether code that reads values on the host runs as eager code, instead of being refused: full_graph=False."""
    is_eager: bool = False
    """Whether it fell back."""

    def __init__(self, fn: Callable[..., Any], input_spec: Any = None, full_graph: bool | None = None) -> None:
        functools.update_wrapper(self, fn)
        if full_graph is not None:
            self.falls_back = not full_graph
        self.fn = fn
        self.input_spec = input_spec
        self.programs: dict[Any, list[CapturedProgram]] = {}
        # every program with its key, the oldest first
        self._captured: deque[tuple[Any, CapturedProgram]] = deque()
        # the same lists, by the form of a call with Tensors and plain values in order, and their shapes
        self._by_form: dict[Any, list[CapturedProgram]] = {}
        # by the form alone: the program last run that is a function; None where calls of that form have several shapes
        self._functions: dict[Any, CapturedProgram | None] = {}
        self.retraces: list[str] = []
        self._growing: set[str] = set()
        self._last: Any = None
        self._served: CapturedProgram | None = None
        self._specs = None if input_spec is None else jax.tree.leaves(input_spec, is_leaf=lambda s: hasattr(s, "shape"))

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        bound = self._alike(self.fn.__get__(instance, owner))
        # found on the instance from now on, so that its programs are kept
        instance.__dict__[self.fn.__name__] = bound
        return bound

    def __deepcopy__(self, memo: dict[Any, Any]) -> StaticFunction:
        """One for the copied instance; it captures anew."""
        return self._alike(copy.deepcopy(self.fn, memo))

    def _alike(self, fn: Callable[..., Any]) -> StaticFunction:
        return StaticFunction(fn, self.input_spec, not self.falls_back)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        active = _watch.active
        if active is not None:
            return active.converted(self.fn)(*args, **kwargs)
        if not _switch.is_on or self.is_eager:
            return self.fn(*args, **kwargs)
        # one at a time: while a function is traced its state Tensors hold tracers, and a program reads and writes them;
        # acquired by hand, as `with` takes twice as long
        _one_at_a_time.acquire()
        try:
            # what decides the programs besides shapes and dtypes; tuples that grow cost less than lists for a few parts
            form: tuple | None
            form = (_autocast.policy, _grad_mode.enabled, _default.dtype, _placed.layout, checked.is_on, fusing.is_on)
            tensors: tuple[TensorState, ...] = ()
            arrays: tuple[Any, ...] = ()
            for value in args:
                if isinstance(value, TensorState):
                    form += (value.stop_gradient, value._node is None)
                    tensors += (value,)
                    arrays += (value._array,)
                elif (cls := value.__class__) in _PLAIN:
                    form += (cls, _exact(value) if cls is float else value)
                else:
                    form = None
                    break
            if kwargs or (len(tensors) > 1 and _has_twice(tensors)):
                form = None
            function = self._functions.get(form)
            if function is not None and not lookup.used and function.guards.change() is None:
                self._served = function
                try:
                    return function.run_function(arrays, tensors)
                except OtherShapes:
                    pass
                except jax.errors.JaxRuntimeError as error:
                    raise_explained(error, f"captured {where_defined(function.fn)}")
            numbers = self._own_numbers() if self.falls_back else {}
            try:
                program, tensors = self._find_by_form(args, kwargs, form, tensors, arrays)
                if self.falls_back and (reason := program.discovery.without_gradient):
                    raise HostValueError(reason)
            except HostValueError as error:
                if not self.falls_back:
                    raise
                self.is_eager = True
                _log.warning("%s runs as eager code, as it cannot be captured: %s", where_defined(self.fn), error)
                for name, number in numbers.items():  # such as self.calls += 1
                    setattr(self.fn.__self__, name, number)  # type: ignore[attr-defined]
                return self.fn(*args, **kwargs)
            result = program.run(tensors)
            return result.reach((args, kwargs), self.fn) if result.__class__ is Changes else result
        finally:
            _one_at_a_time.release()

    def _own_numbers(self) -> dict[str, Any]:
        """Numbers among the attributes of the object whose method this is."""
        attributes = getattr(getattr(self.fn, "__self__", None), "__dict__", {})
        return {name: value for name, value in attributes.items() if isinstance(value, (int, float))}

    def compiled(self, *args: Any, **kwargs: Any) -> Any:
        """The program that a call with these arguments would run, compiled and not run: a jax.stages.Compiled.

        as_text() is its optimized HLO, memory_analysis() bytes per device, cost_analysis() FLOP. State that the
        function makes on its first call (optimizer state, say) is made.

        >>> double = to_static(lambda x: x + x)
        >>> "add" in double.compiled(to_tensor([1.0])).as_text()
        True
        """
        with _one_at_a_time:
            program, tensors = self._find(args, kwargs)
            return program.compiled(tensors)

    def _find_by_form(
        self, args: tuple, kwargs: dict[str, Any], form: tuple | None, tensors: Any, arrays: tuple
    ) -> tuple[CapturedProgram, Any]:
        """_find, where a form and the shapes and dtypes of the arrays lead to the programs that may serve the call."""
        if form is None:
            return self._find(args, kwargs)
        with_shapes = (form, *[(a.shape, a.dtype) for a in arrays])
        for program in self._by_form.get(with_shapes, ()):
            if program.serves(tensors):
                self._served = program
                break
        else:
            program, tensors = self._find(args, kwargs, with_shapes)
        if program.is_function and not lookup.used:
            known = self._functions.get(form, program)
            same = known is not None and known.shapes == program.shapes
            self._functions[form] = program if same else None
        return program, tensors

    def _find(self, args: tuple, kwargs: dict[str, Any], form: Any = None) -> tuple[CapturedProgram, list[Any]]:
        """The program that serves these arguments, captured now if none does yet, and the Tensors among them.

        form: under which later calls may find the program at once, if not None.
        """
        leaves: list[Any] = []
        spec = flatten((args, kwargs), leaves)
        tensors: list[Any] = []
        signature: list[Any] = []
        for at, leaf in enumerate(leaves):
            if not isinstance(leaf, TensorState) and isinstance(leaf, (np.ndarray, jax.Array)):
                leaf = leaves[at] = to_tensor(leaf)
            if isinstance(leaf, TensorState):
                array = leaf._array
                signature.append((_TENSOR, array.shape, array.dtype, leaf.stop_gradient, leaf._node is None))
                tensors.append(leaf)
            else:
                signature.append((leaf.__class__, _exact(leaf)))
        if self._specs is not None:
            for want, tensor in zip(self._specs, tensors, strict=False):
                _check_spec(want, tensor)
        key = (
            spec,
            tuple(signature),
            _repeats(tensors),
            amp_policy.active.policy,
            tape.grad_mode.enabled,
            dtypes.default_dtype(),
            layout.active.layout,
            checked.is_on,
            fusing.is_on,
        )
        program = self._serving(key, leaves, spec, tensors)
        if form is not None:
            self._by_form[form] = self.programs[key]
        return program, tensors

    def _serving(self, key: Any, leaves: list[Any], spec: Any, tensors: list[Any]) -> CapturedProgram:
        try:
            candidates = self.programs.get(key)
        except TypeError as error:
            raise CaptureError(
                f"{where_defined(self.fn)}: an argument is neither a Tensor nor hashable ({error}), so it cannot "
                "be told apart "
                "from other calls; pass Tensors, numbers, strings, or lists and dicts of these"
            ) from None
        for program in candidates or ():
            if program.serves(tensors):
                self._served = program
                return program
        return self._capture(key, leaves, spec, tensors)

    def _capture(self, key: Any, leaves: list[Any], spec: Any, tensors: list[TensorState]) -> CapturedProgram:
        static = [None if is_tensor(leaf) else (leaf,) for leaf in leaves]
        # a Tensor given twice is one Tensor inside too
        first = _repeats(tensors)
        fn = self.fn

        def call(given: list[TensorState]) -> Any:
            stream = iter(given if first is None else [given[i] for i in first])
            args, kwargs = rebuild(spec, iter([next(stream) if s is None else s[0] for s in static]))
            holders = list(containers(spec, (args, kwargs)))
            before = [contents(holder) for holder in holders]
            result = converted(fn)(*args, **kwargs)
            return Changes.since(before, holders, result)

        program = CapturedProgram(fn, call, tensors, [leaf for leaf in leaves if not is_tensor(leaf)])
        self._explain(key, tensors)
        if len(self._captured) == _MOST_PROGRAMS:
            self._let_go_of_oldest()
        self.programs.setdefault(key, []).append(program)
        self._captured.append((key, program))
        self._served = program
        return program

    def _let_go_of_oldest(self) -> None:
        key, program = self._captured.popleft()
        alike = self.programs[key]
        alike.remove(program)
        if not alike:
            del self.programs[key]
            self._by_form = {form: programs for form, programs in self._by_form.items() if programs is not alike}
        self._functions = {form: function for form, function in self._functions.items() if function is not program}

    def _explain(self, key: Any, tensors: list[TensorState]) -> None:
        known = self.programs.get(key)
        if known:
            reason = (self._served if self._served in known else known[-1]).mismatch(tensors)
        else:
            reason = "first call" if self._last is None else _difference(self._last, key)
        self._last = key
        self.retraces.append(reason)
        _log.info("capturing %s: %s", where_defined(self.fn), reason)
        self._name_what_grows()
        if len(self.retraces) == _MANY_PROGRAMS:
            _log.warning(
                "%s was captured %d times, each a compilation; the last reason: %s. Pass numbers that change as "
                "Tensors and "
                "pad shapes to a few sizes",
                where_defined(self.fn),
                _MANY_PROGRAMS,
                reason,
            )

    def _name_what_grows(self) -> None:
        """Warn, once for each, of a list outside to which the last few programs all added: each call compiles."""
        recent = [program.discovery.kept_places for _, program in list(self._captured)[-_GROWING_PROGRAMS:]]
        if len(recent) < _GROWING_PROGRAMS:
            return
        for place in recent[-1]:
            is_grown = all(any(p.is_same(place) and p.is_longer_now() for p in kept) for kept in recent)
            if is_grown and place.what not in self._growing:
                self._growing.add(place.what)
                _log.warning(
                    "%s: the list %s has more Tensors after each call, and each number of them is another program, a "
                    "compilation at each call. Return the Tensor, and append what the call gives outside of the "
                    "captured function; or empty the list before each call",
                    where_defined(self.fn),
                    place.what,
                )

    def concrete_programs(self) -> list[CapturedProgram]:
        """Every program captured so far."""
        return [p for programs in self.programs.values() for p in programs]

    @property
    def served(self) -> CapturedProgram | None:
        """The program that was captured or run last."""
        return self._served

    @property
    def fusions(self) -> list[str]:
        """Names of the patterns applied in the program captured or run last, once for each place (docs/capture.md).

        >>> to_static(lambda x, w, b: x @ w + b).fusions
        []
        """
        return [] if self._served is None else list(self._served.discovery.fused)

    @property
    def dygraph_function(self) -> Callable[..., Any]:
        """The function as written."""
        return self.fn


class _Argument(NamedTuple):
    """Stands for a list, dict or dataclass among the arguments, by its position."""

    position: int


class Changes(NamedTuple):
    """The results of a program whose function changes lists, dicts or dataclasses among its arguments: the function's
    result, and the new content of these arguments by position. The captured code changes copies."""

    result: Any
    contents: tuple[tuple[int, Any], ...]

    @classmethod
    def since(cls, before: list[Any], holders: list[Any], result: Any) -> Any:
        """The result alone where every holder has what it had before."""
        changed = [at for at, holder in enumerate(holders) if not same_parts(before[at], contents(holder))]
        if not changed:
            return result
        position = {id(holder): at for at, holder in enumerate(holders)}

        def marked(value: Any) -> Any:
            return with_parts(value, lambda part: _Argument(position[id(part)]) if id(part) in position else part)

        return cls(marked(result), tuple((at, marked(contents(holders[at]))) for at in changed))

    def reach(self, arguments: Any, fn: Callable[..., Any]) -> Any:
        """Change the caller's arguments alike; returns the function's result."""
        targets = list(containers(flatten(arguments, []), arguments))
        if len({id(target) for target in targets}) < len(targets):
            raise CaptureError(
                f"{where_defined(fn)} changes a list or dict among its arguments, and one is there twice; pass it once"
            )

        def own(value: Any) -> Any:
            return with_parts(value, lambda part: targets[part.position] if part.__class__ is _Argument else part)

        for at, held in self.contents:
            put_contents(targets[at], own(held))
        return own(self.result)


_TENSOR = "tensor"
_PLAIN = frozenset({bool, int, float, str, type(None)})
_watch, _autocast, _grad_mode = state.watch, amp_policy.active, tape.grad_mode
_default, _placed = dtypes.default, layout.active


def _has_twice(tensors: tuple) -> bool:
    """Whether one of two or more Tensors is among them twice."""
    return tensors[0] is tensors[1] or (len(tensors) > 2 and len({*tensors}) < len(tensors))


def _exact(value: Any) -> Any:
    """A value as a key: 0.0 and -0.0 are equal, and nan is not equal to itself."""
    return repr(value) if isinstance(value, (float, complex, np.inexact)) else value


def _repeats(tensors: list[Any]) -> tuple[int, ...] | None:
    """The position of the first appearance of each Tensor; None when all are distinct."""
    if len(tensors) < 2:
        return None
    first: dict[int, int] = {}
    at = tuple(first.setdefault(id(t), i) for i, t in enumerate(tensors))
    return at if len(first) < len(tensors) else None


def _difference(old: Any, new: Any) -> str:
    if old[0] != new[0]:
        return "arguments have another structure"
    for index, (a, b) in enumerate(zip(old[1], new[1], strict=True)):
        if a == b:
            continue
        if a[0] == b[0] == _TENSOR:
            names = ("shape", "dtype", "stop_gradient", "is_leaf")
            parts = [f"{n} {x} -> {y}" for n, x, y in zip(names, a[1:], b[1:], strict=True) if x != y]
            return f"tensor argument {index}: {', '.join(parts)}"
        return f"static argument {index}: {a[-1]!r} -> {b[-1]!r}"
    if old[2] != new[2]:
        return "which arguments are one and the same Tensor"
    names = ("autocast", "gradient mode", "default dtype", "plan", "FLAGS_check_nan_inf", "FLAGS_fuse_captured")
    for what, a, b in zip(names, old[3:], new[3:], strict=True):
        if a != b:
            return f"{what}: {a} -> {b}"
    return "a call like an earlier one"


@overload
def to_static(
    function: F,
    input_spec: Sequence[Any] | None = None,
    build_strategy: Any = None,
    backend: str | None = None,
    full_graph: bool | None = None,
) -> F: ...
@overload
def to_static(
    function: None = None,
    input_spec: Sequence[Any] | None = None,
    build_strategy: Any = None,
    backend: str | None = None,
    full_graph: bool | None = None,
) -> Callable[[F], F]: ...
def to_static(
    function: Any = None,
    input_spec: Any = None,
    build_strategy: Any = None,
    backend: Any = None,
    full_graph: bool | None = None,
    property: bool = False,
) -> Any:
    """Capture a function, method or Layer: each call runs one compiled program over the Tensors it reads and writes.

    A whole training step may be captured, backward() and optimizer.step() inside; the state it writes is donated.
    Works as a decorator, with or without arguments; a Layer gets its forward captured and is returned. property: a
    method that tells a fact of the model, such as a size; it is left as it is, and jit.save does not save it.
    build_strategy is taken and changes nothing: the fusions that it names, XLA does by itself, with the same values.
    full_graph=False: a function that reads values on the host runs as eager code, and a warning says so once; in
    scripts of PaddlePaddle that is the default, else True is. Raises ConfigError for a setting that has no meaning
    here, CaptureError (on call) for code that cannot be captured.
    """
    if backend not in (None, "CINN"):
        raise ConfigError(
            f"to_static: backend={backend!r} chooses another compiler; XLA is the only one here, leave it out"
        )
    if function is None:
        return lambda fn: to_static(fn, input_spec, full_graph=full_graph, property=property)
    if property:
        return not_to_static(function)
    if not callable(function):
        raise ArgumentTypeError(f"to_static: got a {type(function).__name__}; give a function, a method or a Layer")
    if hasattr(function, "forward") and not isinstance(function, type):
        if not isinstance(function.forward, StaticFunction):
            function.forward = StaticFunction(function.forward, input_spec, full_graph)
        return function
    return function if isinstance(function, StaticFunction) else StaticFunction(function, input_spec, full_graph)


def _check_spec(spec: Any, tensor: Tensor) -> None:
    want = [None if d in (None, -1) else d for d in spec.shape]
    have = tensor.shape
    fits = len(want) == len(have) and all(w is None or w == h for w, h in zip(want, have, strict=True))
    if not fits or (spec.dtype is not None and dtypes.as_dtype(spec.dtype) != tensor.dtype):
        raise CaptureError(
            f"input_spec asks for shape {want} dtype {spec.dtype}, the call gave shape {have} dtype {tensor.dtype.name}"
        )


def not_to_static(func: Callable[..., Any]) -> Callable[..., Any]:
    """Leave a function as it is: inside a capture its Python runs as written, without conversion of control flow."""
    func.not_converted = True  # type: ignore[attr-defined]
    return func


def enable_to_static(flag: bool) -> None:
    """Turn capturing off (everything runs eagerly, for debugging) or on again."""
    _switch.is_on = bool(flag)
