"""Parameter: a Tensor that training changes, and ParamAttr: how a Layer should make one."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import jax.numpy as jnp

from polyreme.core import dtype as dtypes
from polyreme.core import state, unique_name
from polyreme.core.devices.device_memory import part
from polyreme.core.symbol import Symbol
from polyreme.eager.tensor import Tensor
from polyreme.errors import ArgumentTypeError, ConfigError, ShapeError
from polyreme.nn.initializer.base import Filling, Initializer
from polyreme.regularizer import WeightDecayRegularizer

_order = itertools.count()
_SETTINGS = ("optimize_attr", "regularizer", "need_clip", "is_distributed")


class _Making(threading.local):
    """Whether parameters are made without values; see nn.lazy."""

    def __init__(self) -> None:
        self.lazily = False


making: _Making = _Making()


class Unmade(Symbol):
    """Stands for the array of a parameter made under LazyGuard, which has no memory yet.

    number: its place among all that were made, which is the order in which values would have been drawn.
    """

    number: int

    __slots__ = ("initializer", "number")
    initializer: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.number = next(_order)

    def refuse(self) -> ConfigError:
        """What is raised where its value is needed."""
        return ConfigError(
            f"parameter {self.name!r} was made under LazyGuard and has no value yet; call its initialize(), or load a "
            "state_dict into its layer"
        )

    def __jax_array__(self) -> Any:
        raise self.refuse()

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise self.refuse()


def is_made(parameter: Tensor) -> bool:
    """Whether a parameter has a value: not if it was made under LazyGuard and nothing gave it one."""
    return not isinstance(parameter._array, Unmade)


class Parameter(Tensor):
    """A Tensor that wants a gradient and is saved with its Layer.

    dims: the logical dim of each of its dims, such as ("embed", "ffn"); a Strategy maps them to mesh axes.
    is_statistic: a forward moves it, as the running mean of a batch norm; no optimizer does, and every device has all
    of it. has_sparse_rows: embedding(sparse=True) has looked up rows of it; Adam(lazy_mode=True) updates those alone.
    state_tier: where its optimizer state is kept if that is in files (optimizer.on_disk.FileTier).
    after_update: called with an update's `skip` (a 0-D bool Tensor or None) after each that changes it, captured with
    it; for what a Layer adjusts once a step, however many microbatches that has.
    """

    stop_gradient: bool

    dims: tuple[str | None, ...] | tuple[None, ...]
    optimize_attr: dict[str, float]

    is_statistic: bool = False
    has_sparse_rows: bool = False
    state_tier: Any = None
    after_update: Callable[[Any], None] | None = None

    def __init__(
        self,
        data: Any,
        dtype: Any = None,
        *,
        trainable: bool = True,
        requires_grad: bool = True,
        name: str | None = None,
        dims: Sequence[str | None] | None = None,
    ) -> None:
        super().__init__(data, dtype, stop_gradient=not (trainable and requires_grad))
        if dims is not None and len(dims) != self.ndim:
            raise ShapeError(
                f"Parameter of shape {list(self.shape)} has {self.ndim} dims, dims={tuple(dims)} names {len(dims)}"
            )
        self.name = name or unique_name.generate("param")
        self.persistable = True
        self.dims = tuple(dims) if dims is not None else (None,) * self.ndim
        self.optimize_attr = {"learning_rate": 1.0}
        self.regularizer: Any = None
        self.need_clip = True
        self.do_model_average = True
        self.is_distributed = False
        self.split_axis: int | None = None
        self.layouts: dict[str, Any] = {}
        # whether its entries, along the first dim, are parameters of Layers (nn.parameter_entry)
        self.has_entries = False

    @classmethod
    def from_tensor(cls, tensor: Any, **kwargs: Any) -> Parameter:
        """A Parameter with a Tensor's value; keywords as for the class, and optimize_attr, regularizer, need_clip and
        is_distributed. Raises ConfigError for another."""
        known = ("dtype", "trainable", "requires_grad", "name", "dims", *_SETTINGS)
        for setting in kwargs:
            if setting not in known:
                raise ConfigError(f"Parameter.from_tensor: {setting!r} is no setting of a Parameter; give {known}")
        parameter = cls(tensor, **{key: value for key, value in kwargs.items() if key not in _SETTINGS})
        for setting in _SETTINGS:
            if setting in kwargs:
                setattr(parameter, setting, kwargs[setting])
        return parameter

    @property
    def whole(self) -> Parameter:
        """What is placed and updated: itself, or the parameter that it is an entry of (nn.parameter_entry)."""
        return self

    def __deepcopy__(self, memo: dict[Any, Any]) -> Parameter:
        copied: Any = super().__deepcopy__(memo)
        if self.after_update is not None:
            # a method of the Layer that is copied with it, not of this one
            copied.after_update = copy.deepcopy(self.after_update, memo)
        return copied

    def sharding_of(self, kind: str) -> Any:
        """Sharding over a mesh of the parameter ("param"), of it while an op reads it ("use"), of its gradient ("grad")
        or of its optimizer state ("state"); None off a mesh.
        """
        return self.layouts.get(kind)

    def initialize(self) -> Parameter:
        """Give a parameter made under LazyGuard its initial values; one that has values keeps them."""
        if isinstance(self._array, Unmade):
            unmade = self._array
            state.write(self, unmade.initializer.values(list(unmade.shape), unmade.dtype))
        return self

    def set_value(self, value: Any) -> None:
        """Replace the value, keeping shape, dtype and layout over devices; not taped."""
        if isinstance(self._array, Unmade):
            array = jnp.array(state.read(value) if isinstance(value, state.TensorState) else value, self._array.dtype)
            if array.shape != self._array.shape:
                raise ShapeError(
                    f"set_value: the parameter has shape {list(self.shape)}, the value {list(array.shape)}"
                )
            state.write(self, array)
        else:
            super().set_value(value)
        optimizer = self.__dict__.get("_optimizer")  # one that keeps a master weight of this parameter
        if optimizer is not None and optimizer() is not None:
            optimizer().value_set(self)

    @property
    def trainable(self) -> bool:
        """True if it wants a gradient."""
        return not self.stop_gradient

    @trainable.setter
    def trainable(self, value: bool) -> None:
        self.stop_gradient = not value

    def __repr__(self) -> str:
        return f"Parameter containing:\n{super().__repr__()}"


@dataclass
class ParamAttr:
    """How to make a parameter: its name, initial values, learning-rate factor, regularizer, and whether it is trained.

    do_model_average: whether a ModelAverage averages it. need_clip: whether an optimizer's clip looks at its gradient.
    """

    name: str | None = None
    initializer: Any = None
    learning_rate: float = 1.0
    regularizer: Any = None
    trainable: bool = True
    do_model_average: bool = True
    need_clip: bool = True

    def changed(self, **fields: Any) -> Self:
        """The same, of the same class, with these fields changed."""
        made = copy.copy(self)
        vars(made).update(fields)
        return made

    @classmethod
    def of(cls, attr: Any) -> ParamAttr | None:
        """The ParamAttr that a weight_attr or bias_attr stands for.

        None, True, a name, an initializer or function of (param, block), a regularizer or a ParamAttr.

        None for False: no parameter. Raises ArgumentTypeError for anything else.
        """
        if attr is None or attr is True:
            return cls()
        if attr is False:
            return None
        if isinstance(attr, cls):
            return attr
        if isinstance(attr, str):
            return cls(name=attr)
        if isinstance(attr, WeightDecayRegularizer):
            return cls(regularizer=attr)
        if callable(attr):
            return cls(initializer=attr)
        raise ArgumentTypeError(
            f"a parameter attribute is None, False, a name, an initializer, a regularizer or a ParamAttr, got {attr!r}"
        )


ParamAttrLike: TypeAlias = ParamAttr | WeightDecayRegularizer | str | Callable[..., Any] | bool | None
"""What ParamAttr.of reads: False for no parameter, None and True for the default, a name, an initializer."""


def make_parameter(
    shape: Sequence[int],
    dtype: Any,
    attr: ParamAttr,
    default_initializer: Any,
    dims: Sequence[str | None] | None = None,
) -> Parameter:
    """A Parameter with initial values from attr's initializer, else from the default one."""
    initializer = attr.initializer if attr.initializer is not None else default_initializer
    if not isinstance(initializer, Initializer):
        initializer = Filling(initializer)
    sizes = [int(s) for s in shape]
    if min(sizes, default=0) < 0:
        raise ShapeError(f"create_parameter: shape {sizes}; sizes are at least 0")
    if (recorder := state.recorder()) is not None:
        symbol = Symbol(attr.name or unique_name.generate("param"), tuple(sizes), dtypes.as_dtype(dtype))
        made = _with_attributes(Parameter(symbol, trainable=attr.trainable, name=symbol.name, dims=dims), attr)
        return recorder.declare(symbol.name, made, initializer)
    if making.lazily:
        array = Unmade(attr.name or unique_name.generate("param"), tuple(sizes), dtypes.as_dtype(dtype))
        array.initializer = initializer
    else:
        array = initializer.values(sizes, dtypes.as_dtype(dtype))
    return _with_attributes(Parameter(array, trainable=attr.trainable, name=attr.name, dims=dims), attr)


@part("parameters", Parameter)
def _value_of(parameter: Any) -> Iterable[Any]:
    return (parameter._array,)


@part("gradients", Parameter)
def _gradient_of(parameter: Any) -> Iterable[Any]:
    return () if parameter._grad is None else (parameter._grad._array,)


def _with_attributes(made: Parameter, attr: ParamAttr) -> Parameter:
    made.optimize_attr = {"learning_rate": attr.learning_rate}
    made.regularizer = attr.regularizer
    made.need_clip = attr.need_clip
    made.do_model_average = attr.do_model_average
    return made
