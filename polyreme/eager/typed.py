"""FloatTensor and its like: Tensors of one dtype by the name of a class."""

from __future__ import annotations

from typing import Any

import numpy as np

from polyreme.core import dtype as dtypes
from polyreme.eager.tensor import Tensor, to_tensor
from polyreme.ops import OPS


class _OfDtype(type):
    """FloatTensor(data) is to_tensor(data, "float32"); FloatTensor(2, 3) has that shape and zeros; FloatTensor() is
    empty; isinstance(x, FloatTensor) asks for a Tensor of the dtype."""

    dtype: np.dtype

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if kwargs.pop("device", None) is not None or kwargs:
            raise TypeError(f"{cls.__name__} takes data or sizes, got {sorted(kwargs) or 'a device'}; use to_tensor")
        if args and all(isinstance(a, int) and not isinstance(a, bool) for a in args):
            return OPS["zeros"](list(args), cls.dtype)
        if len(args) > 1:
            raise TypeError(f"{cls.__name__} takes data, or sizes as whole numbers; got {len(args)} arguments")
        data = args[0] if args else []
        return OPS["cast"](data, cls.dtype) if isinstance(data, Tensor) else to_tensor(np.asarray(data), cls.dtype)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, Tensor) and instance.dtype == cls.dtype


def _typed_class(name: str, dtype: np.dtype) -> type[Tensor]:
    cls: Any = _OfDtype(name, (), {"dtype": dtype, "__doc__": f"A Tensor of {dtype.name}. {_OfDtype.__doc__}"})
    return cls


BFloat16Tensor: type[Tensor] = _typed_class("BFloat16Tensor", dtypes.bfloat16)
BoolTensor: type[Tensor] = _typed_class("BoolTensor", dtypes.bool_)
ByteTensor: type[Tensor] = _typed_class("ByteTensor", dtypes.uint8)
CharTensor: type[Tensor] = _typed_class("CharTensor", dtypes.int8)
DoubleTensor: type[Tensor] = _typed_class("DoubleTensor", dtypes.float64)
FloatTensor: type[Tensor] = _typed_class("FloatTensor", dtypes.float32)
HalfTensor: type[Tensor] = _typed_class("HalfTensor", dtypes.float16)
IntTensor: type[Tensor] = _typed_class("IntTensor", dtypes.int32)
LongTensor: type[Tensor] = _typed_class("LongTensor", dtypes.int64)
ShortTensor: type[Tensor] = _typed_class("ShortTensor", dtypes.int16)
