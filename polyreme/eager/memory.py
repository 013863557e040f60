"""Members of a Tensor about its memory: strides, address, device, whether it is spread over a mesh.

Arrays are contiguous in row-major order here and share no memory, so strides follow from the shape.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax

from polyreme.core import state
from polyreme.errors import PlacementError


def contiguous_strides(shape: Any) -> list[int]:
    """Elements from one index of each dim to the next, in row-major order.

    >>> contiguous_strides([2, 3, 4])
    [12, 4, 1]
    """
    strides, step = [], 1
    for size in reversed(list(shape)):
        strides.append(step)
        step *= max(size, 1)
    return strides[::-1]


class ElementCount(int):
    """Tensor.size: the number of elements; called, the sizes of the dims, or of one dim.

    >>> from polyreme.ops.creation import zeros
    >>> x = zeros([2, 3])
    >>> x.size, x.size(), x.size(-1)
    (6, paddle.Size([2, 3]), 3)
    """

    shape: tuple[int, ...]

    @classmethod
    def of(cls, shape: tuple[int, ...], count: int) -> ElementCount:
        """The count of a shape."""
        made = cls(count)
        made.shape = shape
        return made

    def __call__(self, dim: int | None = None) -> Any:
        return Size(self.shape) if dim is None else self.shape[dim]

    def __reduce__(self) -> Any:
        return int, (int(self),)


class Size(list[int]):
    """Sizes of dims, as Tensor.shape gives them: a list whose slices and sums are Sizes, equal to a tuple of the same
    sizes too, and numel(). Raises TypeError for what is no integer.

    >>> Size((2, 3)) + [4], Size([2, 3]).numel(), Size([2, 3]) == (2, 3)
    (paddle.Size([2, 3, 4]), 6, True)
    """

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, iterable: Any = ()) -> None:
        super().__init__(iterable)
        for index, size in enumerate(self):
            if not hasattr(size, "__index__"):
                raise TypeError(f"Size takes integers; item {index} is {size!r}, a {type(size).__name__}")

    @classmethod
    def of(cls, sizes: Iterable[int]) -> Size:
        """A Size of what is known to be sizes, at the cost of a list."""
        size: Size = _new(cls)
        size.extend(sizes)
        return size

    def numel(self) -> int:
        """The number of elements of a Tensor of these sizes."""
        count = 1
        for size in self:
            count *= size
        return count

    def __getitem__(self, index: Any) -> Any:
        part = _item(self, index)
        return Size.of(part) if part.__class__ is list else part

    def __add__(self, other: Any) -> Size:
        return Size.of((*self, *other))

    def __radd__(self, other: Any) -> Size:
        return Size.of((*other, *self))

    def __iadd__(self, other: Any) -> Size:  # else Python takes __add__, which makes a new one
        self.extend(other)
        return self

    def __mul__(self, times: Any) -> Size:
        return Size.of(list.__mul__(self, times))

    def __rmul__(self, times: Any) -> Size:
        return self * times

    def __eq__(self, other: Any) -> Any:
        return list.__eq__(self, list(other) if isinstance(other, tuple) else other)

    def __ne__(self, other: Any) -> Any:
        return list.__ne__(self, list(other) if isinstance(other, tuple) else other)

    def __repr__(self) -> str:
        return f"paddle.Size({list(self)})"

    def __reduce__(self) -> Any:
        return Size, (list(self),)


jax.tree_util.register_pytree_node(Size, lambda size: (tuple(size), None), lambda _, sizes: Size.of(sizes))
_new: Any = list.__new__
_item = list.__getitem__


class MemoryMembers:
    """Mixed into Tensor."""

    __slots__ = ()

    def stride(self: Any, dim: int | None = None) -> Any:
        """Elements from one index of a dim to the next; of all dims if none is given."""
        strides = contiguous_strides(self.shape)
        return strides if dim is None else strides[dim]

    def get_strides(self: Any) -> list[int]:
        """Elements from one index of each dim to the next."""
        return contiguous_strides(self.shape)

    @property
    def strides(self: Any) -> list[int]:
        """Elements from one index of each dim to the next."""
        return contiguous_strides(self.shape)

    @property
    def offset(self) -> int:
        """Bytes from the start of its memory to its first element: 0, as Tensors share no memory."""
        return 0

    @property
    def layout(self) -> str:
        """Order of the dims of images that ops take where they are not told another: "NCHW"."""
        return "NCHW"

    @property
    def type(self) -> str:
        """The kind of value, as in fluid.core.VarDesc.VarType."""
        return "lod_tensor"

    def data_ptr(self: Any) -> int:
        """Address of the first element. Raises PlacementError for a Tensor in pieces, CaptureError inside a capture.

        It holds until the Tensor is written to, which gives it other memory.
        """
        state.host(self, "Tensor.data_ptr()") if isinstance(self._array, state.Tracer) else None
        if len(self._array.sharding.device_set) > 1:
            raise PlacementError(
                f"data_ptr: this Tensor lies on {len(self._array.sharding.device_set)} devices, so it has no one "
                "address; gather it with polyreme.distributed.unshard_dtensor"
            )
        return self._array.unsafe_buffer_pointer()

    @property
    def __cuda_array_interface__(self: Any) -> Any:
        """The protocol by which GPU libraries read it without a copy; AttributeError for a Tensor not on a GPU."""
        return self._array.__cuda_array_interface__

    # where

    @property
    def device(self: Any) -> str:
        """The device: "cpu", "cuda:0", or another platform's name and an index."""
        place = self.place
        if place.is_cpu_place():
            return "cpu"
        return f"{'cuda' if place.is_gpu_place() else place.platform}:{place.index}"

    def get_device(self: Any) -> int:
        """Index of its device; -1 on the host's processor."""
        place = self.place
        return -1 if place.is_cpu_place() else place.index

    @property
    def is_cuda(self: Any) -> bool:
        """Whether it lies on a GPU."""
        return self.place.is_gpu_place()
