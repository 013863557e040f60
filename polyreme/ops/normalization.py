"""Normalization: over the last dims, over batches, instances, groups and neighbouring channels.

Statistics are computed in at least float32; results have x's dtype.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from polyreme import kernels
from polyreme.core import dtype as dtypes
from polyreme.core import state
from polyreme.core.annotations import AnyTensor, ShapeLike
from polyreme.core.batch_parts import batch_parts
from polyreme.core.dtype import floating
from polyreme.core.op import composite, op
from polyreme.core.sharding_rule import OpCall, ShardingRule
from polyreme.errors import ConfigError, ShapeError
from polyreme.ops.activation import channel_dim, positive_dim, wide
from polyreme.ops.matrices.norms import p_norm
from polyreme.ops.sharding import along_axis, by_batch, dim_names, unnamed, without


def _last_dims(x: Array, normalized_shape: Any, what: str) -> tuple[int, ...]:
    sizes = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    if not sizes or tuple(x.shape[x.ndim - len(sizes) :]) != sizes:
        raise ShapeError(f"{what}: normalized_shape {list(sizes)} is not the last dims of x {list(x.shape)}")
    return sizes


def _vector(value: Array | None, fill: float, sizes: tuple[int, ...], what: str) -> Array:
    count = math.prod(sizes)
    if value is None:
        return jnp.full((count,), fill, dtypes.float32)
    if value.size != count:
        raise ShapeError(f"{what} {list(value.shape)} does not fit; needs {list(sizes)}")
    return value.reshape(count)


def _layer_norm_rule(call: OpCall) -> ShardingRule:
    """The normalized dims are whole, the ones before go through."""
    sizes = call.attrs["normalized_shape"]
    ndim = len(call.shapes[0])
    last = 1 if isinstance(sizes, int) else len(sizes)
    names = without(dim_names(call.shapes[0]), *range(ndim - last, ndim))
    return ShardingRule((names, *unnamed(call.shapes[1:])), (names,), piecewise=True)


def _check_epsilon(what: str, epsilon: float) -> None:
    if epsilon < 0:
        raise ConfigError(f"{what}: epsilon={epsilon}; it must be at least 0")


@op(amp="fp32", method=False, rule=_layer_norm_rule, real=True)
def layer_norm(
    x: Array,
    normalized_shape: ShapeLike,
    weight: Array | None = None,
    bias: Array | None = None,
    epsilon: float = 1e-05,
) -> Array:
    """(x - mean) / sqrt(variance + epsilon) * weight + bias over the last dims, whose sizes are normalized_shape.

    weight and bias: normalized_shape, or flat. Source: arXiv:1607.06450. Raises ShapeError for sizes that do not fit.
    """
    _check_epsilon("layer_norm", epsilon)
    x = floating(x)
    sizes = _last_dims(x, normalized_shape, "layer_norm")
    flat = x.reshape(*x.shape[: x.ndim - len(sizes)], math.prod(sizes))
    w, b = _vector(weight, 1, sizes, "layer_norm: weight"), _vector(bias, 0, sizes, "layer_norm: bias")
    return kernels.layer_norm(flat, w, b, epsilon).reshape(x.shape)


@op(amp="fp32", method=False, rule=_layer_norm_rule, real=True)
def rms_norm(input: Array, normalized_shape: ShapeLike, weight: Array | None = None, eps: float = 1e-05) -> Array:
    """input / sqrt(mean(input^2) + eps) * weight over the last dims, whose sizes are normalized_shape.

    Source: arXiv:1910.07467. Raises ShapeError for sizes that do not fit.
    """
    x = floating(input)
    sizes = _last_dims(x, normalized_shape, "rms_norm")
    flat = x.reshape(*x.shape[: x.ndim - len(sizes)], math.prod(sizes))
    return kernels.rms_norm(flat, _vector(weight, 1, sizes, "rms_norm: weight"), eps).reshape(x.shape)


def _along_channels(value: Array, x: Array, dim: int, what: str) -> Array:
    """value [C] shaped to broadcast along the channels of x."""
    if value.size != x.shape[dim]:
        raise ShapeError(f"{what} {list(value.shape)} for x {list(x.shape)}; needs [{x.shape[dim]}], one a channel")
    return wide(value).reshape([-1 if d == dim else 1 for d in range(x.ndim)])


def _per_channel(value: Array | None, x: Array, dim: int, what: str) -> Array | None:
    return None if value is None else _along_channels(value, x, dim, what)


def _scale(unit: Array, weight: Array | None, bias: Array | None, dim: int, what: str) -> Array:
    w, b = _per_channel(weight, unit, dim, f"{what}: weight"), _per_channel(bias, unit, dim, f"{what}: bias")
    unit = unit if w is None else unit * w
    return unit if b is None else unit + b


def _moments(x: Array, dims: tuple[int, ...], axis: str | None = None) -> tuple[Array, Array]:
    """Mean and biased variance over dims, kept, and over the equal parts of the devices along a mesh axis."""

    def averaged(value: Array) -> Array:
        mean = jnp.mean(value, dims, keepdims=True)
        return mean if axis is None else lax.pmean(mean, axis)

    mean = averaged(x)
    return mean, averaged(jnp.square(x - mean))


def _normalized(
    dims: tuple[int, ...], axis: str | None, epsilon: float, x: Array, weight: Array | None, bias: Array | None
) -> tuple[Array, Array, Array]:
    """x by its own _moments, scaled and moved; and these moments, through which _move lets no gradient."""
    mean, var = _moments(x, dims, axis)
    y = (x - mean) * lax.rsqrt(var + epsilon)
    y = y if weight is None else y * weight
    y = y if bias is None else y + bias
    return y, mean, var


# two sums over the batch where jax's derivative has four more: in half the time, and in two thirds to compile
_normalized_alone = jax.custom_vjp(_normalized, nondiff_argnums=(0, 1, 2))


def _normalized_fwd(
    dims: tuple[int, ...], axis: str | None, epsilon: float, x: Array, weight: Array | None, bias: Array | None
) -> tuple[tuple[Array, Array, Array], tuple]:
    y, mean, var = _normalized(dims, axis, epsilon, x, weight, bias)
    return (y, mean, var), (x - mean, lax.rsqrt(var + epsilon), weight, bias)


def _normalized_bwd(
    dims: tuple[int, ...], axis: str | None, epsilon: float, residuals: tuple, cotangents: tuple
) -> tuple[Array, Array | None, Array | None]:
    centred, inverse, weight, bias = residuals
    dy, unit = cotangents[0], centred * inverse
    total = lambda v: jnp.sum(v, dims, keepdims=True)
    mean = lambda v: jnp.mean(v, dims, keepdims=True)  # of the same sums, which XLA computes once
    dx = (dy - mean(dy) - unit * mean(dy * unit)) * (inverse if weight is None else inverse * weight)
    return dx, None if weight is None else total(dy * unit), None if bias is None else total(dy)


_normalized_alone.defvjp(_normalized_fwd, _normalized_bwd)


def _move(running: Array, batch: Array, momentum: float) -> Array:
    """momentum * running + (1 - momentum) * batch, outside the gradient."""
    batch = lax.stop_gradient(batch).reshape(running.shape)
    return (momentum * wide(running) + (1 - momentum) * batch).astype(running.dtype)


@op(amp="fp32", method=False, rule=by_batch, real=True)
def batch_norm_train(
    x: Array,
    running_mean: Array,
    running_var: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    momentum: float = 0.9,
    epsilon: float = 1e-05,
    data_format: str = "NCHW",
    axis: str | None = None,
) -> tuple[Array, Array, Array]:
    """batch_norm by the batch's own statistics -> (y, running_mean moved, running_var moved).

    moved = momentum * running + (1 - momentum) * batch statistic; the variance is the biased one in both uses. axis:
    of the mesh whose devices have equal parts of the batch, under shard_map.
    """
    _check_epsilon("batch_norm", epsilon)
    x = floating(x)
    dim = channel_dim(data_format, x.ndim, "batch_norm")
    for name, value in (("running_mean", running_mean), ("running_var", running_var)):
        _along_channels(value, x, dim, f"batch_norm: {name}")
    w, b = _per_channel(weight, x, dim, "batch_norm: weight"), _per_channel(bias, x, dim, "batch_norm: bias")
    # the sums of the gradient are the device's own too: along an axis jax says what they are
    normalize = _normalized_alone if axis is None else _normalized
    y, mean, var = normalize(tuple(d for d in range(x.ndim) if d != dim), axis, epsilon, wide(x), w, b)
    return y.astype(x.dtype), _move(running_mean, mean, momentum), _move(running_var, var, momentum)


@op(amp="fp32", method=False, rule=by_batch, real=True)
def batch_norm_eval(
    x: Array,
    running_mean: Array,
    running_var: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    epsilon: float = 1e-05,
    data_format: str = "NCHW",
) -> Array:
    """batch_norm by the running statistics."""
    _check_epsilon("batch_norm", epsilon)
    x = floating(x)
    dim = channel_dim(data_format, x.ndim, "batch_norm")
    mean = _along_channels(running_mean, x, dim, "batch_norm: running_mean")
    var = _along_channels(running_var, x, dim, "batch_norm: running_var")
    unit = (wide(x) - mean) * lax.rsqrt(var + epsilon)
    return _scale(unit, weight, bias, dim, "batch_norm").astype(x.dtype)


@composite(method=False)
def batch_norm(
    x: AnyTensor,
    running_mean: AnyTensor,
    running_var: AnyTensor,
    weight: AnyTensor | None = None,
    bias: AnyTensor | None = None,
    training: bool = False,
    momentum: float = 0.9,
    epsilon: float = 1e-05,
    data_format: str = "NCHW",
    use_global_stats: bool | None = None,
    name: str | None = None,
) -> AnyTensor:
    """(x - mean) / sqrt(var + epsilon) * weight + bias for each channel. Source: arXiv:1502.03167.

    With use_global_stats (default: not training) mean and var are the running statistics. Else they are the batch's,
    var the biased one, and the running statistics are moved in place: momentum * running + (1 - momentum) * batch.
    x: [N, C, ...] or [N, ..., C] as data_format says; the rest [C]. Raises ShapeError for sizes that do not fit.
    """
    if use_global_stats if use_global_stats is not None else not training:
        return batch_norm_eval(x, running_mean, running_var, weight, bias, epsilon, data_format)
    axis = batch_parts.axis if batch_parts.sync_batch_norm else None
    y, mean, var = batch_norm_train(x, running_mean, running_var, weight, bias, momentum, epsilon, data_format, axis)
    state.write(running_mean, state.read(mean))
    state.write(running_var, state.read(var))
    return y


@composite(method=False)
def sync_batch_norm(
    x: AnyTensor,
    running_mean: AnyTensor,
    running_var: AnyTensor,
    weight: AnyTensor | None = None,
    bias: AnyTensor | None = None,
    training: bool = False,
    momentum: float = 0.9,
    epsilon: float = 1e-05,
    data_format: str = "NCHW",
    use_global_stats: bool | None = None,
    name: str | None = None,
) -> AnyTensor:
    """batch_norm whose batch is that of all devices, also in a Program that is run on part of it on each of them."""
    with batch_parts.along(batch_parts.axis, True):
        return batch_norm(
            x, running_mean, running_var, weight, bias, training, momentum, epsilon, data_format, use_global_stats
        )


@op(amp="fp32", method=False, rule=by_batch, real=True)
def instance_norm_train(
    x: Array,
    running_mean: Array | None = None,
    running_var: Array | None = None,
    weight: Array | None = None,
    bias: Array | None = None,
    momentum: float = 0.9,
    eps: float = 1e-05,
    data_format: str = "NCHW",
) -> list[Array]:
    """instance_norm by each instance's own statistics -> [y], and the running statistics moved if they are given."""
    _check_epsilon("instance_norm", eps)
    x = floating(x)
    if x.ndim < 2:
        raise ShapeError(f"instance_norm: x {list(x.shape)} needs at least 2 dims: batch and channels")
    dim = 1 if x.ndim == 2 else channel_dim(data_format, x.ndim, "instance_norm")
    mean, var = _moments(wide(x), tuple(d for d in range(1, x.ndim) if d != dim))
    unit = (wide(x) - mean) * lax.rsqrt(var + eps)
    y = _scale(unit, weight, bias, dim, "instance_norm").astype(x.dtype)
    moved = [
        _move(running, jnp.mean(batch, 0), momentum)
        for running, batch in ((running_mean, mean), (running_var, var))
        if running is not None and _per_channel(running, x, dim, "instance_norm: running statistic") is not None
    ]
    return [y, *moved]


@composite(method=False)
def instance_norm(
    x: AnyTensor,
    running_mean: AnyTensor | None = None,
    running_var: AnyTensor | None = None,
    weight: AnyTensor | None = None,
    bias: AnyTensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.9,
    eps: float = 1e-05,
    data_format: str = "NCHW",
    name: str | None = None,
) -> AnyTensor:
    """batch_norm with a mean and a variance for each instance: over all dims but batch and channels.

    Running statistics, if given, are moved toward the batch's mean of them; use_input_stats=False normalizes by them.
    Source: arXiv:1607.08022. Raises ConfigError when only one is given, or none with use_input_stats=False.
    """
    if (running_mean is None) != (running_var is None) or (running_mean is None and not use_input_stats):
        raise ConfigError(
            f"instance_norm: use_input_stats={use_input_stats} with running_mean "
            f"{'missing' if running_mean is None else 'given'} and running_var "
            f"{'missing' if running_var is None else 'given'}; give both, or none with use_input_stats=True"
        )
    if not use_input_stats:
        return batch_norm_eval(x, running_mean, running_var, weight, bias, eps, data_format)
    results = instance_norm_train(x, running_mean, running_var, weight, bias, momentum, eps, data_format)
    if running_mean is not None and running_var is not None:
        for running, moved in zip((running_mean, running_var), results[1:], strict=True):
            state.write(running, state.read(moved))
    return results[0]


@op(amp="fp32", method=False, rule=by_batch, real=True)
def group_norm(
    x: Array,
    num_groups: int,
    epsilon: float = 1e-05,
    weight: Array | None = None,
    bias: Array | None = None,
    data_format: str = "NCHW",
) -> Array:
    """Normalize each group of neighbouring channels of each instance by its own mean and variance.

    weight and bias: [C]. Source: arXiv:1803.08494. Raises ShapeError unless num_groups divides the channels.
    """
    _check_epsilon("group_norm", epsilon)
    x = floating(x)
    dim = channel_dim(data_format, x.ndim, "group_norm")
    if x.ndim < 2 or num_groups < 1 or x.shape[dim] % num_groups:
        raise ShapeError(f"group_norm: num_groups={num_groups} does not divide the channels of x {list(x.shape)}")
    split = x.reshape(*x.shape[:dim], num_groups, x.shape[dim] // num_groups, *x.shape[dim + 1 :])
    v = wide(split)
    mean, var = _moments(v, tuple(d for d in range(1, split.ndim) if d != dim))
    unit = ((v - mean) * lax.rsqrt(var + epsilon)).reshape(x.shape)
    return _scale(unit, weight, bias, dim, "group_norm").astype(x.dtype)


@op(amp="fp32", method=False, rule=by_batch, real=True)
def local_response_norm(
    x: Array, size: int, alpha: float = 0.0001, beta: float = 0.75, k: float = 1.0, data_format: str = "NCHW"
) -> Array:
    """x / (k + alpha * mean of x^2 over `size` neighbouring channels)^beta; missing neighbours count as 0.

    Channel c looks at c - size // 2 ... c + (size - 1) // 2. Source: Krizhevsky et al. 2012, section 3.3.
    """
    x = floating(x)
    dim = channel_dim(data_format, x.ndim, "local_response_norm")
    if x.ndim < 3 or size < 1:
        raise ShapeError(f"local_response_norm: x {list(x.shape)} with size={size}; needs 3 dims or more and size >= 1")
    v = wide(x)
    window = [size if d == dim else 1 for d in range(x.ndim)]
    pads = [(size // 2, (size - 1) // 2) if d == dim else (0, 0) for d in range(x.ndim)]
    total = lax.reduce_window(jnp.square(v), np.zeros((), v.dtype), lax.add, window, [1] * x.ndim, pads)
    return (v / jnp.power(k + alpha / size * total, beta)).astype(x.dtype)


@op(amp="fp32", method=False, rule=along_axis())
def normalize(x: Array, p: float = 2, axis: int = 1, epsilon: float = 1e-12) -> Array:
    """x / max(||x||_p, epsilon) along axis; p is a number or inf."""
    x = floating(x)
    v = wide(x)
    norm = p_norm(v, float(p), positive_dim(axis, x.ndim, "normalize"), True)
    return (v / jnp.maximum(norm, epsilon)).astype(x.dtype)


ALIASES: dict[str, str] = {}
