"""Small networks of several layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polyreme.errors import ConfigError, ShapeError
from polyreme.fluid import layers


def simple_img_conv_pool(
    input: Any, num_filters: int, filter_size: Any, pool_size: Any, pool_stride: Any, pool_padding: Any = 0,
    pool_type: str = "max", global_pooling: bool = False, conv_stride: Any = 1, conv_padding: Any = 0,
    conv_dilation: Any = 1, conv_groups: int = 1, param_attr: Any = None, bias_attr: Any = None,
    act: str | None = None, use_cudnn: bool = True,
) -> Any:  # fmt: skip
    """conv2d, then pool2d."""
    made = layers.conv2d(
        input, num_filters, filter_size, conv_stride, conv_padding, conv_dilation, conv_groups, param_attr, bias_attr,
        use_cudnn, act,
    )  # fmt: skip
    return layers.pool2d(made, pool_size, pool_type, pool_stride, pool_padding, global_pooling, use_cudnn)


def img_conv_group(
    input: Any, conv_num_filter: Sequence[int], pool_size: Any, conv_padding: Any = 1, conv_filter_size: Any = 3,
    conv_act: str | None = None, param_attr: Any = None, conv_with_batchnorm: Any = False,
    conv_batchnorm_drop_rate: Any = 0.0, pool_stride: Any = 1, pool_type: str = "max", use_cudnn: bool = True,
) -> Any:  # fmt: skip
    """Several conv2d, with batch_norm and dropout behind those that say so, then one pool2d.

    What is no list holds for all convolutions.
    """
    count = len(conv_num_filter)

    def spread(value: Any) -> list[Any]:
        found = list(value) if isinstance(value, (list, tuple)) else [value] * count
        if len(found) != count:
            raise ConfigError(f"img_conv_group: a list of {len(found)} for {count} convolutions: {value!r}")
        return found

    settings = zip(
        conv_num_filter, spread(conv_filter_size), spread(conv_padding), spread(param_attr),
        spread(conv_with_batchnorm), spread(conv_batchnorm_drop_rate), strict=True,
    )  # fmt: skip
    for filters, size, padding, attr, normalized, rate in settings:
        act = None if normalized else conv_act
        input = layers.conv2d(input, filters, size, padding=padding, param_attr=attr, use_cudnn=use_cudnn, act=act)
        if normalized:
            input = layers.batch_norm(input, act=conv_act)
            input = layers.dropout(input, rate) if rate else input
    return layers.pool2d(input, pool_size, pool_type, pool_stride, use_cudnn=use_cudnn)


def sequence_conv_pool(
    input: Any, num_filters: int, filter_size: int, param_attr: Any = None, act: str | None = "sigmoid",
    pool_type: str = "max", bias_attr: Any = None,
) -> Any:  # fmt: skip
    """sequence_conv, then sequence_pool."""
    made = layers.sequence_conv(input, num_filters, filter_size, param_attr=param_attr, bias_attr=bias_attr, act=act)
    return layers.sequence_pool(made, pool_type)


def glu(input: Any, dim: int = -1) -> Any:
    """The first half along dim times sigmoid of the second. Source: arXiv:1612.08083, equation 1."""
    first, second = layers.split(input, 2, dim)
    return layers.elementwise_mul(first, layers.sigmoid(second))


def scaled_dot_product_attention(
    queries: Any, keys: Any, values: Any, num_heads: int = 1, dropout_rate: float = 0.0
) -> Any:
    """softmax(q k / sqrt(head_dim)) v for each head: [n, q, d], [n, k, d], [n, k, e] -> [n, q, e].

    Source: arXiv:1706.03762, equation 1. Raises ShapeError for a width that the heads do not divide. num_heads above 1
    adds a projection of queries, keys and values, as 1.7 does.
    """
    for name, x in (("queries", queries), ("values", values)):
        if x.ndim != 3 or x.shape[-1] % num_heads:
            raise ShapeError(
                f"scaled_dot_product_attention: {name} {list(x.shape)}, {num_heads} heads; needs [n, len, width]"
            )
    if num_heads > 1:
        queries, keys, values = (layers.fc(x, x.shape[-1], num_flatten_dims=2) for x in (queries, keys, values))
    q, k, v = (_heads(x, num_heads) for x in (queries, keys, values))
    weights = layers.softmax(layers.matmul(q, k, transpose_y=True, alpha=float(q.shape[-1]) ** -0.5))
    if dropout_rate:
        weights = layers.dropout(weights, dropout_rate)
    out = layers.transpose(layers.matmul(weights, v), [0, 2, 1, 3])
    return layers.reshape(out, [0, 0, out.shape[2] * out.shape[3]])


def _heads(x: Any, count: int) -> Any:
    return layers.transpose(layers.reshape(x, [0, 0, count, x.shape[-1] // count]), [0, 2, 1, 3])


__all__ = ["glu", "img_conv_group", "scaled_dot_product_attention", "sequence_conv_pool", "simple_img_conv_pool"]
