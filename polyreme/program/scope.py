"""Scope: persistable values by name, and the optimizers that update them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from polyreme.core import rng, state
from polyreme.core.state import TensorState
from polyreme.eager.tensor import Tensor
from polyreme.errors import ProgramError


class Update(Protocol):
    """What a scope knows of an Optimize operation."""

    key: str
    optimizer: Any
    pairs: list[tuple[str, str]]


class Scope:
    """Values that outlive a run: parameters, statistics, the state of optimizers. A child sees its parent's.

    >>> scope = Scope()
    >>> scope.var("x").get_tensor().set(np.ones(2, "float32"))
    >>> np.asarray(scope.find_var("x").get_tensor()).tolist()
    [1.0, 1.0]
    """

    def __init__(self, parent: Scope | None = None) -> None:
        self.parent = parent
        self._variables: dict[str, Tensor | None] = {}
        self._version = 0
        self._optimizers: dict[str, Any] = {}
        self._kids: list[Scope] = []
        self.generators: dict[int, rng.Generator] = {}

    # what users call

    def var(self, name: str) -> ScopeVariable:
        """The variable of this name, made empty if there is none."""
        if self.find_var(name) is None:
            self._variables[name] = None
        return ScopeVariable(self, name)

    def find_var(self, name: str) -> ScopeVariable | None:
        """The variable of this name here or in a parent, or None."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope._variables:
                return ScopeVariable(scope, name)
            scope = scope.parent
        return None

    def new_scope(self) -> Scope:
        """A child."""
        self._kids.append(Scope(self))
        return self._kids[-1]

    def drop_kids(self) -> None:
        """Forget the children."""
        self._kids.clear()

    def local_var_names(self) -> list[str]:
        """Names of its own variables."""
        return list(self._variables)

    def erase(self, names: list[str]) -> None:
        """Forget variables of its own."""
        for name in names:
            self._variables.pop(name, None)
        self._version += 1

    # what operations call

    @property
    def identity(self) -> tuple[int, ...]:
        """Which scope this is, and which Tensors it and its parents hold: another Tensor under a name changes it."""
        own = (id(self), self._version)
        return own if self.parent is None else (*own, *self.parent.identity)

    def find(self, name: str) -> Tensor | None:
        """The Tensor of this name here or in a parent, or None."""
        scope: Scope | None = self
        while scope is not None:
            found = scope._variables.get(name)
            if found is not None:
                return found
            scope = scope.parent
        return None

    def adopt(self, name: str, tensor: Tensor) -> None:
        """Hold this very Tensor under a name."""
        if self._variables.get(name) is not tensor:
            self._variables[name] = tensor
            self._version += 1

    def create(self, name: str, array: Any, template: Tensor) -> None:
        """A variable with this value, of the template's class and with its attributes.

        A Tensor that is there already keeps its identity, which optimizers and compiled programs hold on to.
        """
        have = self._variables.get(name)
        if have is not None and have._array.shape == array.shape and have._array.dtype == array.dtype:
            state.write(have, array)
            return
        made: Any = type(template).__new__(type(template))
        TensorState.__init__(made, array, template.stop_gradient)
        made.__dict__.update({k: v for k, v in template.__dict__.items() if k not in ("block", "_hooks")})
        made.name, made.persistable = name, True
        self.adopt(name, made)

    def optimizer(self, op: Update) -> Any:
        """The optimizer of an operation, bound to the parameters here; made on first use."""
        scope: Scope | None = self
        while scope is not None:
            if op.key in scope._optimizers:
                op.optimizer.lead(scope._optimizers[op.key])
                return scope._optimizers[op.key]
            scope = scope.parent
        return self.start_optimizer(op)

    def start_optimizer(self, op: Update) -> Any:
        """An optimizer over the parameters here, its state as before the first step and held under its names."""
        parameters = [self._parameter(name) for name, _ in op.pairs]
        with state.outside_capture():
            bound = op.optimizer.over(parameters)
            bound.create_state()
        self._optimizers[op.key] = bound
        for name, tensor in bound.state_tensors(op.key).items():
            self.adopt(name, tensor)
        return bound

    def _parameter(self, name: str) -> Tensor:
        parameter = self.find(name)
        if parameter is None:
            raise ProgramError(
                f"parameter {name!r} has no value in this scope; run the startup program in it first: "
                "exe.run(static.default_startup_program())"
            )
        return parameter

    def generator(self, seed: int) -> rng.Generator:
        """The stream of random numbers of programs with this seed."""
        if seed not in self.generators:
            with state.outside_capture():
                self.generators[seed] = rng.Generator().manual_seed(seed)
        return self.generators[seed]


class ScopeVariable:
    """A variable in a Scope, as `scope.var(name)` and `scope.find_var(name)` give it."""

    def __init__(self, scope: Scope, name: str) -> None:
        self._scope = scope
        self.name = name

    def get_tensor(self) -> HeldTensor:
        """Its value, to be read by numpy.asarray and changed by set()."""
        return HeldTensor(self._scope, self.name)


class HeldTensor:
    """The value of a variable in a Scope."""

    def __init__(self, scope: Scope, name: str) -> None:
        self._scope = scope
        self._name = name

    def _tensor(self) -> Tensor:
        found = self._scope._variables.get(self._name)
        if found is None:
            raise ProgramError(f"variable {self._name!r} has no value yet; set() one, or run the startup program")
        return found

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        value = self._tensor().numpy()
        return value if dtype is None else value.astype(dtype)

    def shape(self) -> list[int]:
        """Size of each dim."""
        return self._tensor().shape

    def set(self, array: Any, place: Any = None) -> None:
        """Replace the value: in place if shape and dtype stay. place: where it goes, its present device if None."""
        have = self._scope._variables.get(self._name)
        value = np.asarray(array)
        if have is not None and tuple(have.shape) == value.shape:
            have.set_value(value)
            return
        with state.outside_capture():
            made = Tensor(value, place=place)
        made.name, made.persistable = self._name, True
        self._scope.adopt(self._name, made)


class _ScopeInForce:
    def __init__(self) -> None:
        self.scope = Scope()


_current = _ScopeInForce()


def global_scope() -> Scope:
    """The scope that programs run in unless another is given."""
    return _current.scope


@contextmanager
def scope_guard(scope: Scope) -> Iterator[None]:
    """Make scope the global one inside the block."""
    outer, _current.scope = _current.scope, scope
    try:
        yield
    finally:
        _current.scope = outer
