"""Kernels that make, reduce, scan, index and transform Tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polyreme import api, fft, linalg, signal, text
from polyreme.nn import functional as F
from polyreme.ops import creation, manipulation, random, scan, slicing
from polyreme.paddle_scripts.internals import clipping, signals
from polyreme.paddle_scripts.internals.kernels.registry import Kernels, listing, refuse

KERNELS: Kernels = {}
_kernel = listing(KERNELS)


@_kernel
def _full(shape: Any, value: Any, dtype: Any = None, place: Any = None) -> Any:
    return creation.full(shape, value, dtype)


@_kernel
def _full_(output: Any, shape: Any, value: Any, dtype: Any = None, place: Any = None) -> Any:
    return output.fill_(value)


@_kernel
def _full_like(x: Any, value: Any, dtype: Any = None, place: Any = None) -> Any:
    return creation.full_like(x, value, dtype)


@_kernel
def _arange(start: Any, end: Any, step: Any, dtype: Any, place: Any = None) -> Any:
    return creation.arange(start, end, step, dtype)


@_kernel
def _linspace(start: Any, stop: Any, num: Any, dtype: Any, place: Any = None) -> Any:
    return creation.linspace(start, stop, num, dtype)


@_kernel
def _ones(shape: Any, dtype: Any, place: Any = None) -> Any:
    return creation.ones(shape, dtype)


@_kernel
def _zeros(shape: Any, dtype: Any, place: Any = None) -> Any:
    return creation.zeros(shape, dtype)


@_kernel
def _uniform(shape: Any, dtype: Any, min: float, max: float, seed: int = 0, place: Any = None) -> Any:
    return api.uniform(shape, dtype, min, max, seed)


@_kernel
def _gaussian(shape: Any, mean: float, std: float, seed: int, dtype: Any, place: Any = None) -> Any:
    return random.gaussian(shape, mean, std, seed, dtype)


@_kernel
def _randint(low: int, high: int, shape: Any, dtype: Any, place: Any = None) -> Any:
    return api.randint(low, high, shape, dtype)


@_kernel
def _randperm(n: int, dtype: Any, place: Any = None) -> Any:
    return api.randperm(n, dtype)


@_kernel
def _prod(x: Any, axis: Any, keepdim: bool = False, reduce_all: bool = False) -> Any:
    return api.prod(x, None if reduce_all else axis, keepdim)


@_kernel
def _argmax(x: Any, axis: Any, keepdims: bool = False, flatten: bool = False, dtype: Any = "int64") -> Any:
    return api.argmax(x, None if flatten else axis, keepdims, dtype)


@_kernel
def _argmin(x: Any, axis: Any, keepdims: bool = False, flatten: bool = False, dtype: Any = "int64") -> Any:
    return api.argmin(x, None if flatten else axis, keepdims, dtype)


@_kernel
def _argsort(x: Any, axis: int = -1, descending: bool = False, stable: bool = False) -> tuple[Any, Any]:
    order = api.argsort(x, axis, descending, stable)
    return api.take_along_axis(x, order, axis), order


@_kernel
def _split_with_num(x: Any, num: int, axis: Any) -> list[Any]:
    return manipulation.split(x, num, axis)


@_kernel
def _slice(x: Any, axes: Any, starts: Any, ends: Any, infer_flags: Any = None, decrease_axis: Any = ()) -> Any:
    out = slicing.slice(x, axes, starts, ends)
    return manipulation.squeeze(out, list(decrease_axis)) if decrease_axis else out


@_kernel
def _logsumexp(x: Any, axis: Any, keepdim: bool, reduce_all: bool) -> Any:
    return api.logsumexp(x, None if reduce_all else axis, keepdim)


@_kernel
def _squared_l2_norm(x: Any) -> Any:
    return clipping._squared_l2_norm(x)


@_kernel
def _p_norm(x: Any, porder: float, axis: int, epsilon: float, keepdim: bool, asvector: bool) -> Any:
    return linalg.norm(x, porder, None if asvector else axis, keepdim)


def _without_place(function: Callable[..., Any], num_arguments: int) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        return function(*args[:num_arguments])

    return run


for _name, _number in {
    "empty": 2, "empty_like": 2, "ones_like": 2, "zeros_like": 2, "eye": 3, "tril_indices": 4, "triu_indices": 4,
    "logspace": 5,
}.items():  # fmt: skip
    KERNELS[_name] = _without_place(getattr(api, _name), _number)


def _scanned(function: Callable[..., Any], x: Any, axis: int, exclusive: bool, reverse: bool, start: float) -> Any:
    """function along axis, from the end with reverse; exclusive: of what stands before, start where nothing does."""
    x = manipulation.flip(x, axis) if reverse else x
    if exclusive:
        size = x.shape[axis]
        first = creation.full_like(slicing.slice(x, [axis], [0], [min(size, 1)]), start)
        x = manipulation.concat([first, slicing.slice(x, [axis], [0], [max(size - 1, 0)])], axis)
    out = function(x, axis)
    return manipulation.flip(out, axis) if reverse else out


@_kernel
def _cumsum(x: Any, axis: int = -1, flatten: bool = False, exclusive: bool = False, reverse: bool = False) -> Any:
    x, axis = (manipulation.reshape(x, [-1]), 0) if flatten else (x, axis)
    return _scanned(scan.cumsum, x, axis, exclusive, reverse, 0)


@_kernel
def _logcumsumexp(x: Any, axis: int = -1, flatten: bool = False, exclusive: bool = False, reverse: bool = False) -> Any:
    x, axis = (manipulation.reshape(x, [-1]), 0) if flatten else (x, axis)
    return _scanned(api.logcumsumexp, x, axis, exclusive, reverse, float("-inf"))


@_kernel
def _cumprod(x: Any, dim: int, exclusive: bool = False, reverse: bool = False) -> Any:
    return _scanned(api.cumprod, x, dim, exclusive, reverse, 1)


@_kernel
def _var(x: Any, axis: Any, keepdim: bool, unbiased: bool, correction: float = 1.0) -> Any:
    return api.var(x, axis or None, keepdim=keepdim, correction=correction)  # which unbiased does not change


@_kernel
def _std(x: Any, axis: Any, keepdim: bool, unbiased: bool, correction: float = 1.0) -> Any:
    return api.sqrt(_var(x, axis, keepdim, unbiased, correction))


@_kernel
def _median(x: Any, axis: Any, keepdim: bool, mode: str) -> tuple[Any, Any]:
    out = api.median(x, axis or None, keepdim, mode)
    return out if isinstance(out, tuple) else (out, None)


@_kernel
def _nanmedian(x: Any, axis: Any, keepdim: bool, mode: str) -> tuple[Any, Any]:
    out = api.nanmedian(x, axis or None, keepdim, mode)
    return out if isinstance(out, tuple) else (out, None)


@_kernel
def _mean_all(x: Any) -> Any:
    return api.mean(x)


@_kernel
def _l1_norm(x: Any) -> Any:
    return api.sum(api.abs(x))


@_kernel
def _norm(x: Any, axis: int, epsilon: float, is_test: bool = False) -> tuple[Any, Any]:
    length = api.sqrt(api.sum(x * x, axis, keepdim=True) + epsilon)
    return x / length, length


@_kernel
def _frobenius_norm(x: Any, axis: Any, keepdim: bool, reduce_all: bool) -> Any:
    return api.sqrt(api.sum(x * x, None if reduce_all else axis or None, keepdim=keepdim))


@_kernel
def _clip_by_norm(x: Any, max_norm: float) -> Any:
    return x * (max_norm / api.clip(linalg.norm(x), min=max_norm))


@_kernel
def _histogram(input: Any, weight: Any, bins: int, min: Any, max: Any, density: bool = False) -> Any:
    return api.histogram(input, bins, min, max, weight, density)


@_kernel
def _unique(
    x: Any, return_index: bool, return_inverse: bool, return_counts: bool, axis: Any, dtype: Any
) -> tuple[Any, Any, Any, Any]:
    wanted = (return_index, return_inverse, return_counts)
    out = api.unique(x, *wanted, axis[0] if axis else None, dtype)
    out, *extra = out if isinstance(out, (tuple, list)) else (out,)
    index, inverse, counts = (extra.pop(0) if flag else None for flag in wanted)
    return out, index, inverse, counts


@_kernel
def _unique_consecutive(
    x: Any, return_inverse: bool, return_counts: bool, axis: Any, dtype: Any
) -> tuple[Any, Any, Any]:
    wanted = (return_inverse, return_counts)
    out = api.unique_consecutive(x, *wanted, axis[0] if axis else None, dtype)
    out, *extra = out if isinstance(out, (tuple, list)) else (out,)
    inverse, counts = (extra.pop(0) if flag else None for flag in wanted)
    return out, inverse, counts


@_kernel
def _index_add(x: Any, index: Any, add_value: Any, axis: int) -> Any:
    return api.index_add(x, index, axis, add_value)


@_kernel
def _nonzero(condition: Any) -> Any:
    return api.nonzero(condition)


@_kernel
def _expand_as(x: Any, y: Any, target_shape: Any) -> Any:
    return api.expand(x, target_shape) if y is None else api.expand_as(x, y)


@_kernel
def _pad(x: Any, paddings: Any, pad_value: Any) -> Any:
    return F.pad(x, paddings, "constant", pad_value)


@_kernel
def _tensor_unfold(input: Any, axis: int, size: int, step: int) -> Any:
    return api.unfold(input, axis, size, step)


@_kernel
def _view_shape(input: Any, dims: Any) -> Any:
    return manipulation.reshape(input, dims)


@_kernel
def _view_dtype(input: Any, dtype: Any) -> Any:
    return api.view(input, dtype)


@_kernel
def _shape(input: Any) -> Any:
    return api.cast(api.shape(input), "int32")


@_kernel
def _shape64(input: Any) -> Any:
    return api.shape(input)


@_kernel
def _assign_out_(x: Any, output: Any) -> Any:
    return api.assign(x, output)


@_kernel
def _share_data(x: Any) -> Any:
    return x


@_kernel
def _fill(x: Any, value: Any) -> Any:
    return creation.full_like(x, value)


@_kernel
def _fill_diagonal(x: Any, value: Any, offset: int = 0, wrap: bool = False) -> Any:
    return x.clone().fill_diagonal_(value, offset, wrap)


@_kernel
def _fill_diagonal_tensor(x: Any, y: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    return x.fill_diagonal_tensor(y, offset, dim1, dim2)


@_kernel
def _gaussian_inplace(x: Any, mean: float = 0.0, std: float = 1.0, seed: int = 0) -> Any:
    return random.gaussian(x.shape, mean, std, seed, x.dtype)


@_kernel
def _uniform_inplace(
    x: Any, min: float = -1.0, max: float = 1.0, seed: int = 0, diag_num: int = 0, diag_step: int = 0,
    diag_val: float = 1.0,
) -> Any:  # fmt: skip
    refuse("uniform_inplace", diag_num=diag_num)
    return api.uniform(x.shape, x.dtype, min, max, seed)


@_kernel
def _elementwise_pow(x: Any, y: Any) -> Any:
    return api.pow(x, y)


@_kernel
def _repeat_interleave(x: Any, repeats: Any, axis: Any, output_size: Any = None) -> Any:
    return api.repeat_interleave(x, repeats, axis, output_size=output_size)


@_kernel
def _einsum(x: Any, equation: str) -> tuple[Any, list[Any], list[Any]]:
    return api.einsum(equation, *x), [], []


@_kernel
def _eigvalsh(x: Any, uplo: str = "L", is_test: bool = False) -> tuple[Any, None]:
    return linalg.eigvalsh(x, uplo), None


@_kernel
def _lu(x: Any, pivot: bool = True) -> tuple[Any, Any, Any]:
    return linalg.lu(x, pivot, True)


@_kernel
def _matrix_rank(x: Any, tol: float, use_default_tol: bool = True, hermitian: bool = False) -> Any:
    return linalg.matrix_rank(x, None if use_default_tol else tol, hermitian)


@_kernel
def _matrix_rank_tol(x: Any, atol_tensor: Any, use_default_tol: bool = True, hermitian: bool = False) -> Any:
    return linalg.matrix_rank(x, None if use_default_tol else atol_tensor, hermitian)


@_kernel
def _matrix_rank_atol_rtol(x: Any, atol: Any, rtol: Any, hermitian: bool = False) -> Any:
    return linalg.matrix_rank(x, None, hermitian, atol, rtol)


@_kernel
def _fft_c2c(x: Any, axes: Any, normalization: str, forward: bool) -> Any:
    return (fft.fftn if forward else fft.ifftn)(x, None, axes, normalization)


@_kernel
def _fft_r2c(x: Any, axes: Any, normalization: str, forward: bool, onesided: bool) -> Any:
    if not onesided:
        return (fft.fftn if forward else fft.ifftn)(x, None, axes, normalization)
    return (fft.rfftn if forward else fft.ihfftn)(x, None, axes, normalization)


@_kernel
def _fft_c2r(x: Any, axes: Any, normalization: str, forward: bool, last_dim_size: int = 0) -> Any:
    sizes = [*(x.shape[axis] for axis in axes[:-1]), last_dim_size] if last_dim_size else None
    return (fft.hfftn if forward else fft.irfftn)(x, sizes, axes, normalization)


@_kernel
def _stft(x: Any, window: Any, n_fft: int, hop_length: int, normalized: bool, onesided: bool) -> Any:
    return signal.stft(
        x, n_fft, hop_length, window=window, center=False, normalized=normalized, onesided=onesided
    )  # fmt: skip


@_kernel
def _frame(x: Any, frame_length: int, hop_length: int, axis: int = -1) -> Any:
    return signals.frame(x, frame_length, hop_length, axis)


@_kernel
def _overlap_add(x: Any, hop_length: int, axis: int = -1) -> Any:
    return signals.overlap_add(x, hop_length, axis)


@_kernel
def _viterbi_decode(potentials: Any, transition_params: Any, lengths: Any, include_bos_eos_tag: bool) -> Any:
    return text.viterbi_decode(potentials, transition_params, lengths, include_bos_eos_tag)


@_kernel
def _accuracy(x: Any, indices: Any, label: Any) -> tuple[Any, Any, Any]:
    correct = api.sum(api.any(api.equal(indices, label), axis=1).astype("int32"))
    total = creation.full([], x.shape[0], "int32")
    return correct.astype("float32") / x.shape[0], correct.astype("int32"), total
