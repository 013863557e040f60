"""Tensor methods that give a Tensor another value, shape or dtype in place, or make one like it.

Tensors share no memory: where Paddle makes two names for one memory (set_, data), the value is taken over;
only x.data and parts of x (eager.views) stay bound to x.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from polyreme.core import dtype as dtypes
from polyreme.core import state
from polyreme.core.devices import place as places
from polyreme.eager import tape
from polyreme.eager.dispatch import rebind
from polyreme.eager.memory import contiguous_strides
from polyreme.errors import DTypeError, GradError, ShapeError
from polyreme.ops import creation
from polyreme.ops.arithmetic import cast
from polyreme.ops.by_dim import softmax
from polyreme.ops.manipulation import concat, reshape, split
from polyreme.ops.repetition import tile
from polyreme.ops.slicing import as_strided


class Rewriting:
    """Mixed into Tensor."""

    stop_gradient: bool
    data: Any

    __slots__ = ()
    softmax = softmax

    # gradients

    @property
    def requires_grad(self: Any) -> bool:
        """Whether it wants a gradient: not stop_gradient."""
        return not self.stop_gradient

    @requires_grad.setter
    def requires_grad(self: Any, value: bool) -> None:
        self.stop_gradient = not value

    def requires_grad_(self: Any, requires_grad: bool = True) -> Any:
        """Want a gradient from now on, or none; returns the Tensor."""
        self.stop_gradient = not requires_grad
        return self

    @property
    def grad_(self: Any) -> Any:
        """Another name of grad."""
        return self.grad

    @grad_.setter
    def grad_(self: Any, value: Any) -> None:
        self.grad = value

    @property
    def grad_fn(self: Any) -> Any:
        """The tape's node that made it, whose name is the op's; None for a leaf."""
        return self._node

    @property
    def inplace_version(self: Any) -> int:
        """The number of writes in place; a captured step counts once, when it is captured."""
        return self.__dict__.get("_version", 0)

    # another value

    def cast_(self: Any, dtype: Any) -> Any:
        """The value in another dtype, in place."""
        return rebind(self, cast(self, dtypes.as_dtype(dtype)), "cast_", retype=True)

    def resize_(self: Any, shape: Any, fill_zero: bool = False, name: str | None = None) -> Any:
        """Another shape in place: the first elements in row-major order; what is new is 0, fill_zero or not."""
        sizes = creation.as_shape(shape, "resize_")
        flat, count = reshape(self, [-1]), math.prod(sizes)
        if count > self._array.size:
            flat = concat([flat, creation.zeros([count - self._array.size], self.dtype)])
        return rebind(self, reshape(flat[:count], sizes), "resize_")

    def set_(
        self: Any,
        source: Any = None,
        shape: Any = None,
        stride: Any = None,
        offset: int = 0,
        name: str | None = None,
    ) -> Any:
        """Take over source's value, or part of it: `shape` elements, `stride` apart, from `offset` bytes on, in place.

        Without source: no elements, shape [0]. Raises DTypeError unless source has this Tensor's dtype, ShapeError for
        elements that source does not have.
        """
        if source is None:
            return rebind(self, creation.zeros([0], self.dtype), "set_")
        if source.dtype != self.dtype:
            raise DTypeError(f"set_: source is {source.dtype.name}, the Tensor {self.dtype.name}; cast source")
        sizes = source.shape if shape is None else creation.as_shape(shape, "set_")
        steps = contiguous_strides(sizes) if stride is None else stride
        return rebind(self, as_strided(source, sizes, steps, offset), "set_")

    def set_tensor(self: Any, value: Any) -> None:
        """Take over a Tensor's value, shape and dtype; not taped."""
        self.data = value

    def reconstruct_from_(self: Any, other: Any) -> None:
        """Become a leaf with other's value, shape, dtype and stop_gradient."""
        self.data = other
        self._node, self._index, self.stop_gradient = None, 0, other.stop_gradient

    def apply(self: Any, func: Callable[[Any], Any]) -> Any:
        """func(self). Raises GradError for a Tensor that wants a gradient, which func need not be able to carry."""
        self._check_apply("apply")
        return func(self)

    def apply_(self: Any, func: Callable[[Any], Any]) -> Any:
        """Take over the value, shape and dtype of func(self); returns the Tensor. Raises GradError as apply does."""
        self._check_apply("apply_")
        self.data = func(self)
        return self

    def _check_apply(self: Any, what: str) -> None:
        if not self.stop_gradient and tape.grad_mode.enabled:
            raise GradError(f"{what}: this Tensor wants a gradient; call the function on it, or use no_grad()")

    # others like it

    def new_zeros(self: Any, *size: Any, **options: Any) -> Any:
        """Zeros of a shape, new_zeros(2, 3) or new_zeros([2, 3]), in this Tensor's dtype and on its device.

        dtype, device, requires_grad and pin_memory as the function zeros takes them.
        """
        return self._new(creation.zeros, size, options)

    def new_ones(self: Any, *size: Any, **options: Any) -> Any:
        """Ones of a shape, in this Tensor's dtype and on its device; options as for new_zeros."""
        return self._new(creation.ones, size, options)

    def new_empty(self: Any, *size: Any, **options: Any) -> Any:
        """A Tensor to be written to later, in this Tensor's dtype and on its device; options as for new_zeros."""
        return self._new(creation.empty, size, options)

    def new_full(self: Any, size: Any, fill_value: Any, dtype: Any = None, **options: Any) -> Any:
        """One value in a shape, in this Tensor's dtype and on its device; options as for new_zeros."""

        def filled(sizes: Any, dtype: Any, **rest: Any) -> Any:
            return creation.full(sizes, fill_value, dtype, **rest)

        return self._new(filled, (size,), {"dtype": dtype, **options})

    def _new(self: Any, make: Callable[..., Any], size: tuple, options: dict[str, Any]) -> Any:
        if "size" in options:
            size = (options.pop("size"),)
        if "shape" in options:
            size = (options.pop("shape"),)
        sizes = size[0] if len(size) == 1 else size
        dtype, device = options.pop("dtype", None), options.pop("device", None)
        if device is None and not state.capturing() and self.place != places.default_place():
            device = self.place
        return make(sizes, self.dtype if dtype is None else dtype, device=device, **options)

    # parts

    def repeat(self: Any, *repeats: Any) -> Any:
        """tile: repeated that many times along each dim, repeat(2, 3) or repeat([2, 3])."""
        return tile(self, repeats[0] if len(repeats) == 1 else repeats)

    def split_with_sizes(self: Any, split_sizes: Any, dim: int = 0) -> Any:
        """Parts of the given sizes along dim. Raises ShapeError unless they are >= 0 and fill it."""
        if any(n < 0 for n in split_sizes):
            raise ShapeError(f"split_with_sizes: sizes {list(split_sizes)} must be >= 0")
        return split(self, list(split_sizes), dim)
