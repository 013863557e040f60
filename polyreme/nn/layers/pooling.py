"""Pooling layers, of 1 to 3 spatial dims.

Each is one function of polyreme.nn.functional with its settings.
"""

from __future__ import annotations

from typing import Any, ClassVar

from polyreme.core.alias import Alias
from polyreme.core.annotations import Sizes
from polyreme.core.spelling import takes_second_names
from polyreme.nn import functional as F
from polyreme.nn.layers.functional_layer import FunctionalLayer


class MaxPool1D(FunctionalLayer):
    """Largest element of each window of [batch, channel, length]; with return_mask also its flat index."""

    _function = staticmethod(F.max_pool1d)

    def __init__(
        self,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        return_mask: bool = False,
        ceil_mode: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(
            name, kernel_size=kernel_size, stride=stride, padding=padding, return_mask=return_mask, ceil_mode=ceil_mode
        )


class MaxPool2D(FunctionalLayer):
    """Largest element of each window of [batch, channel, height, width]; with return_mask also its flat index."""

    _function = staticmethod(F.max_pool2d)
    _attribute_names: ClassVar = {"kernel_size": "ksize"}

    def __init__(
        self,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        return_mask: bool = False,
        ceil_mode: bool = False,
        data_format: str = "NCHW",
        name: str | None = None,
    ) -> None:
        super().__init__(
            name,
            kernel_size=kernel_size,
            stride=stride,
            padding=padding,
            return_mask=return_mask,
            ceil_mode=ceil_mode,
            data_format=data_format,
        )


class MaxPool3D(FunctionalLayer):
    """Largest element of each window of [batch, channel, depth, height, width]; return_mask: and its flat index."""

    _function = staticmethod(F.max_pool3d)
    _attribute_names: ClassVar = {"kernel_size": "ksize"}

    def __init__(
        self,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        return_mask: bool = False,
        ceil_mode: bool = False,
        data_format: str = "NCDHW",
        name: str | None = None,
    ) -> None:
        super().__init__(
            name,
            kernel_size=kernel_size,
            stride=stride,
            padding=padding,
            return_mask=return_mask,
            ceil_mode=ceil_mode,
            data_format=data_format,
        )


class AvgPool1D(FunctionalLayer):
    """Mean of each window of [batch, channel, length]; exclusive leaves padding out of the count."""

    _function = staticmethod(F.avg_pool1d)

    def __init__(
        self,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        exclusive: bool = True,
        ceil_mode: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(
            name, kernel_size=kernel_size, stride=stride, padding=padding, exclusive=exclusive, ceil_mode=ceil_mode
        )


class AvgPool2D(FunctionalLayer):
    """Mean of each window of [batch, channel, height, width]; exclusive leaves padding out of the count."""

    _function = staticmethod(F.avg_pool2d)
    _attribute_names: ClassVar = {"kernel_size": "ksize", "divisor_override": "divisor"}

    def __init__(
        self,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        exclusive: bool = True,
        divisor_override: int | None = None,
        data_format: str = "NCHW",
        name: str | None = None,
    ) -> None:
        super().__init__(
            name,
            kernel_size=kernel_size,
            stride=stride,
            padding=padding,
            ceil_mode=ceil_mode,
            exclusive=exclusive,
            divisor_override=divisor_override,
            data_format=data_format,
        )


class AvgPool3D(FunctionalLayer):
    """Mean of each window of [batch, channel, depth, height, width]; exclusive leaves padding out of the count."""

    _function = staticmethod(F.avg_pool3d)
    _attribute_names: ClassVar = {"kernel_size": "ksize", "divisor_override": "divisor"}

    def __init__(
        self,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        exclusive: bool = True,
        divisor_override: int | None = None,
        data_format: str = "NCDHW",
        name: str | None = None,
    ) -> None:
        super().__init__(
            name,
            kernel_size=kernel_size,
            stride=stride,
            padding=padding,
            ceil_mode=ceil_mode,
            exclusive=exclusive,
            divisor_override=divisor_override,
            data_format=data_format,
        )


class AdaptiveAvgPool1D(FunctionalLayer):
    """Mean of each of output_size windows that together cover [batch, channel, length]."""

    _function = staticmethod(F.adaptive_avg_pool1d)

    def __init__(
        self,
        output_size: Any,
        name: str | None = None,
    ) -> None:
        super().__init__(name, output_size=output_size)


class AdaptiveAvgPool2D(FunctionalLayer):
    """Mean of each of output_size windows that together cover [batch, channel, height, width]."""

    _function = staticmethod(F.adaptive_avg_pool2d)
    _attribute_prefix = "_"
    output_size: Alias[Sizes] = Alias("_output_size")

    def __init__(
        self,
        output_size: Any,
        data_format: str = "NCHW",
        name: str | None = None,
    ) -> None:
        super().__init__(name, output_size=output_size, data_format=data_format)


class AdaptiveAvgPool3D(FunctionalLayer):
    """Mean of each of output_size windows that together cover [batch, channel, depth, height, width]."""

    _function = staticmethod(F.adaptive_avg_pool3d)
    _attribute_prefix = "_"
    output_size: Alias[Sizes] = Alias("_output_size")

    def __init__(
        self,
        output_size: Any,
        data_format: str = "NCDHW",
        name: str | None = None,
    ) -> None:
        super().__init__(name, output_size=output_size, data_format=data_format)


class AdaptiveMaxPool1D(FunctionalLayer):
    """Largest element of each of output_size windows that together cover [batch, channel, length]."""

    _function = staticmethod(F.adaptive_max_pool1d)
    return_indices: Alias[bool] = Alias("return_mask")

    @takes_second_names
    def __init__(
        self,
        output_size: Any,
        return_mask: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(name, output_size=output_size, return_mask=return_mask)


class AdaptiveMaxPool2D(FunctionalLayer):
    """Largest element of each of output_size windows that together cover [batch, channel, height, width]."""

    _function = staticmethod(F.adaptive_max_pool2d)
    _attribute_prefix = "_"
    return_indices: Alias[bool] = Alias("_return_mask")

    @takes_second_names
    def __init__(
        self,
        output_size: Any,
        return_mask: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(name, output_size=output_size, return_mask=return_mask)


class AdaptiveMaxPool3D(FunctionalLayer):
    """Largest element of each of output_size windows that together cover [batch, channel, depth, height, width]."""

    _function = staticmethod(F.adaptive_max_pool3d)
    _attribute_prefix = "_"
    return_indices: Alias[bool] = Alias("_return_mask")

    @takes_second_names
    def __init__(
        self,
        output_size: Any,
        return_mask: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(name, output_size=output_size, return_mask=return_mask)


class _MaxUnPool(FunctionalLayer):
    """forward may be given another output_size at each call."""

    _attribute_names: ClassVar = {"kernel_size": "ksize"}

    def forward(self, x: Any, indices: Any, output_size: Any = None) -> Any:  # type: ignore[override]
        given = {} if output_size is None else {"output_size": output_size}
        return self._function(x, indices, **{**self.settings, **given})


class MaxUnPool1D(_MaxUnPool):
    """Inverse of MaxPool1D: (values, mask) -> values at their places, zeros elsewhere."""

    _function = staticmethod(F.max_unpool1d)

    def __init__(
        self,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        data_format: str = "NCL",
        output_size: Any = None,
        name: str | None = None,
    ) -> None:
        super().__init__(
            name,
            kernel_size=kernel_size,
            stride=stride,
            padding=padding,
            data_format=data_format,
            output_size=output_size,
        )


class MaxUnPool2D(_MaxUnPool):
    """Inverse of MaxPool2D: (values, mask) -> values at their places, zeros elsewhere."""

    _function = staticmethod(F.max_unpool2d)

    def __init__(
        self,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        data_format: str = "NCHW",
        output_size: Any = None,
        name: str | None = None,
    ) -> None:
        super().__init__(
            name,
            kernel_size=kernel_size,
            stride=stride,
            padding=padding,
            data_format=data_format,
            output_size=output_size,
        )


class MaxUnPool3D(_MaxUnPool):
    """Inverse of MaxPool3D: (values, mask) -> values at their places, zeros elsewhere."""

    _function = staticmethod(F.max_unpool3d)

    def __init__(
        self,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        data_format: str = "NCDHW",
        output_size: Any = None,
        name: str | None = None,
    ) -> None:
        super().__init__(
            name,
            kernel_size=kernel_size,
            stride=stride,
            padding=padding,
            data_format=data_format,
            output_size=output_size,
        )


class LPPool1D(FunctionalLayer):
    """(sum of |x|^norm_type)^(1 / norm_type) of each window of [batch, channel, length]."""

    _function = staticmethod(F.lp_pool1d)

    def __init__(
        self,
        norm_type: float,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        data_format: str = "NCL",
        name: str | None = None,
    ) -> None:
        super().__init__(
            name,
            norm_type=norm_type,
            kernel_size=kernel_size,
            stride=stride,
            padding=padding,
            ceil_mode=ceil_mode,
            data_format=data_format,
        )


class LPPool2D(FunctionalLayer):
    """(sum of |x|^norm_type)^(1 / norm_type) of each window of [batch, channel, height, width]."""

    _function = staticmethod(F.lp_pool2d)
    _attribute_names: ClassVar = {"kernel_size": "ksize"}

    def __init__(
        self,
        norm_type: float,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        data_format: str = "NCHW",
        name: str | None = None,
    ) -> None:
        super().__init__(
            name,
            norm_type=norm_type,
            kernel_size=kernel_size,
            stride=stride,
            padding=padding,
            ceil_mode=ceil_mode,
            data_format=data_format,
        )


class FractionalMaxPool2D(FunctionalLayer):
    """Max pooling with output_size windows a dim, whose uneven borders follow from random_u, drawn if None."""

    _function = staticmethod(F.fractional_max_pool2d)
    _attribute_prefix = "_"

    def __init__(
        self,
        output_size: Any,
        kernel_size: Any = None,
        random_u: float | None = None,
        return_mask: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(
            name, output_size=output_size, kernel_size=kernel_size, random_u=random_u, return_mask=return_mask
        )


class FractionalMaxPool3D(FractionalMaxPool2D):
    """FractionalMaxPool2D over depth, height and width."""

    _function = staticmethod(F.fractional_max_pool3d)
