"""Layer functions on Variables whose rows are sequences: sequence_pool, sequence_conv and the like.

Static mode alone, as in 1.7, but for sequence_mask. Where a result's number of rows depends on fed values other than
offsets (sequence_slice, sequence_expand of sequences, sequence_unpad by lengths that are fed), the Program is run op by
op instead of compiled. Source: PaddlePaddle 1.7, `fluid.layers`, sequence_lod.py; `name=` is accepted throughout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polyreme.core import state
from polyreme.errors import ConfigError, ProgramError, ShapeError
from polyreme.nn.functional import conv1d, unfold
from polyreme.ops import OPS
from polyreme.program.activations import activate
from polyreme.program.block import Variable
from polyreme.program.parameters import LayerParameters
from polyreme.sequences import lod as lods
from polyreme.sequences.lod import divided, inner, sequences


def sequence_pool(input: Any, pool_type: str, is_test: bool = False, pad_value: float = 0.0) -> Variable:
    """One row for each innermost sequence: its "sum", "average", "sqrt", "max", "min", "last" or "first".

    pad_value for an empty one. The result has the outer levels of input. is_test changes no value: what it leaves out,
    the indices of the maxima, is kept for nobody here.
    """
    x, lod = sequences("sequence_pool", input)
    return divided(OPS["sequence_pool"](x, inner(lod), pool_type, pad_value), lod[:-1])


def sequence_first_step(input: Any) -> Variable:
    """The first row of each sequence."""
    return sequence_pool(input, "first")


def sequence_last_step(input: Any) -> Variable:
    """The last row of each sequence."""
    return sequence_pool(input, "last")


def sequence_softmax(input: Any, use_cudnn: bool = False, name: str | None = None) -> Variable:
    """e^x / sum of e^x over each sequence, of rows of one number. use_cudnn chooses nothing: there is one kernel."""
    x, lod = sequences("sequence_softmax", input)
    return divided(OPS["sequence_softmax"](x, inner(lod)), lod)


def sequence_reverse(x: Any, name: str | None = None) -> Variable:
    """The rows of each sequence from last to first."""
    x, lod = sequences("sequence_reverse", x)
    return divided(OPS["sequence_reverse"](x, inner(lod)), lod)


def sequence_conv(
    input: Any,
    num_filters: int,
    filter_size: int = 3,
    filter_stride: int = 1,
    padding: bool = True,
    padding_start: int | None = None,
    bias_attr: Any = None,
    param_attr: Any = None,
    act: str | None = None,
    name: str | None = None,
) -> Variable:
    """A convolution over each sequence: act(rows t + padding_start ... side by side @ weight + bias).

    padding_start is -(filter_size // 2) unless given. padding changes nothing, as in 1.7: what lies outside of a
    sequence is zero, and there are as many rows as before. Raises ConfigError for a filter_stride other than 1.
    """
    if filter_stride != 1:
        raise ConfigError(f"sequence_conv: filter_stride={filter_stride}; sequences are convolved with stride 1 only")
    x, lod = sequences("sequence_conv", input)
    parts = LayerParameters("sequence_conv", name)
    weight = parts.parameter(param_attr, [filter_size * x.shape[-1], num_filters], x.dtype)
    bias = parts.bias(bias_attr, [num_filters], x.dtype)
    out = OPS["sequence_conv"](x, inner(lod), weight, filter_size, padding_start)
    return divided(activate(out if bias is None else out + bias, act), lod)


def row_conv(input: Any, future_context_size: int, param_attr: Any = None, act: str | None = None) -> Variable:
    """act of each row and the future_context_size rows that follow it in its sequence, weighted and added up.

    input: rows of sequences, or sequences of one length side by side, [batch, rows, width].
    """
    width = input.shape[-1]
    if len(input.shape) == 3 and not lods.lod_of(input):
        weight = LayerParameters("row_conv").parameter(param_attr, [future_context_size + 1, width], input.dtype)
        kernel = weight.transpose([1, 0]).unsqueeze(1)
        rows = conv1d(input.transpose([0, 2, 1]), kernel, padding=[0, future_context_size], groups=width)
        return activate(rows.transpose([0, 2, 1]), act)
    x, lod = sequences("row_conv", input)
    weight = LayerParameters("row_conv").parameter(param_attr, [future_context_size + 1, width], x.dtype)
    return divided(activate(OPS["row_conv"](x, inner(lod), weight), act), lod)


def sequence_enumerate(input: Any, win_size: int, pad_value: int = 0, name: str | None = None) -> Variable:
    """Each id with the win_size - 1 that follow it in its sequence, pad_value after the end."""
    x, lod = sequences("sequence_enumerate", input)
    return divided(OPS["sequence_enumerate"](x, inner(lod), win_size, pad_value), lod)


# to a rectangle and back


def sequence_pad(
    x: Any, pad_value: Any, maxlen: int | None = None, name: str | None = None
) -> tuple[Variable, Variable]:
    """(sequences side by side [n, maxlen, ...] with pad_value after their end, their lengths int64 [n]).

    maxlen is the length of the longest unless given. Raises ProgramError for sequences of sequences.
    """
    x, lod = sequences("sequence_pad", x)
    _one_level("sequence_pad", x, lod)
    size = maxlen if maxlen is not None else lods.longest(lod)
    if size is None:
        size = lods.counted(OPS["max"](inner(lod), keepdim=True))
    found, length = OPS["sequence_pad"](x, inner(lod), pad_value, size)
    lods.remember_padded(length, x, found)
    return divided(found, ()), divided(length, ())


def sequence_unpad(x: Any, length: Any, name: str | None = None) -> Variable:
    """The first length[i] rows of each x[i], as sequences."""
    x, length = (lods.variable("sequence_unpad", v) for v in (x, length))
    origin = lods.padded_from(length)
    if origin is not None:
        return divided(OPS["sequence_unpad"](x, length, lods.rows(origin[0])), origin[0].lod)
    found = OPS["sequence_unpad"](x, length, lods.counted(length))
    return divided(found, [lods.offsets(length)])


def sequence_mask(x: Any, maxlen: Any = None, dtype: Any = "int64", name: str | None = None) -> Any:
    """1 where the index is below the length x, else 0: [*b] -> [*b, maxlen]; maxlen is the longest unless given.

    Of Tensors with values too, in dynamic mode.
    """
    if not state.recording():
        return OPS["sequence_mask"](x, maxlen, dtype)
    x = lods.variable("sequence_mask", x)
    origin = lods.padded_from(x)
    if isinstance(maxlen, Variable):
        maxlen = lods.counted(maxlen)
    elif maxlen is None:
        maxlen = lods.counted(OPS["max"](x)) if origin is None else origin[1]._array.shape[1]
    return divided(OPS["mask_of_lengths"](x, maxlen, dtype), ())


def _one_level(what: str, x: Variable, lod: lods.Lod) -> None:
    if len(lod) > 1:
        raise ProgramError(f"{what}: {x.name!r} has {len(lod)} levels of sequences; it takes one")


# repetition, joining, parts


def sequence_expand(x: Any, y: Any, ref_level: int = -1, name: str | None = None) -> Variable:
    """Row i of x, or sequence i if x has sequences, as often as entry i of y's level ref_level has entries.

    Raises ConfigError for a level that y lacks, ProgramError if x has more than one.
    """
    x, lod = lods.variable("sequence_expand", x), lods.lod_of(x)
    y, of = sequences("sequence_expand", y)
    if not -1 <= ref_level < len(of):
        raise ConfigError(f"sequence_expand: ref_level={ref_level} of {len(of)} levels; give one from -1 on")
    level = ref_level % len(of)
    entries = lods.rows(y) if level == len(of) - 1 else lods.rows(lods.lengths(of[level + 1]))
    times = lods.lengths(of[level])
    if not lod:
        return divided(OPS["sequence_expand_as"](x, times, entries), ())
    _one_level("sequence_expand", x, lod)
    total = lods.counted(times * inner(lod))
    found, made = OPS["sequence_expand"](x, inner(lod), times, entries, total)
    return divided(found, [lods.offsets(made)])


def sequence_expand_as(x: Any, y: Any, name: str | None = None) -> Variable:
    """Row i of x once for every row of sequence i of y; the result has y's sequences."""
    x = lods.variable("sequence_expand_as", x)
    y, of = sequences("sequence_expand_as", y)
    _one_level("sequence_expand_as", y, of)
    return divided(OPS["sequence_expand_as"](x, inner(of), lods.rows(y)), of)


def sequence_concat(input: Sequence[Any], name: str | None = None) -> Variable:
    """Sequence i of each input one after the other, as sequence i."""
    if not isinstance(input, (list, tuple)) or not input:
        raise TypeError(f"sequence_concat takes a list of Variables, got {type(input).__name__}")
    pairs = [sequences("sequence_concat", x) for x in input]
    for x, lod in pairs:
        _one_level("sequence_concat", x, lod)
    found, made = OPS["sequence_concat"]([x for x, _ in pairs], [inner(lod) for _, lod in pairs])
    return divided(found, [lods.offsets(made)])


def sequence_reshape(input: Any, new_dim: int) -> Variable:
    """Each sequence's elements in rows of new_dim."""
    x, lod = sequences("sequence_reshape", input)
    _one_level("sequence_reshape", x, lod)
    found, made = OPS["sequence_reshape"](x, inner(lod), new_dim)
    return divided(found, [lods.offsets(made)])


def sequence_slice(input: Any, offset: Any, length: Any, name: str | None = None) -> Variable:
    """length[i] rows of sequence i from its row offset[i] on; offset and length are Variables [n, 1]."""
    x, lod = sequences("sequence_slice", input)
    _one_level("sequence_slice", x, lod)
    length = lods.variable("sequence_slice", length)
    found = OPS["sequence_slice"](x, inner(lod), offset, length, lods.counted(length))
    return divided(found, [lods.offsets(length)])


def sequence_scatter(input: Any, index: Any, updates: Any, name: str | None = None) -> Variable:
    """input with the updates of sequence i added to its row i, at the columns that sequence i of index names."""
    at, lod = sequences("sequence_scatter", index)
    add, _ = sequences("sequence_scatter", updates)
    return divided(OPS["sequence_scatter"](input, at, add, inner(lod)), ())


# dividing anew


def im2sequence(
    input: Any,
    filter_size: Any = 1,
    stride: Any = 1,
    padding: Any = 0,
    input_image_size: Any = None,
    out_stride: Any = 1,
    name: str | None = None,
) -> Variable:
    """The windows of each image [n, C, H, W] as a sequence of rows [C * kh * kw], from left to right and down.

    padding: one number, [height, width] or [up, left, down, right]. Raises ConfigError for input_image_size and
    out_stride, which mean images of sizes of their own: cut those out before.
    """
    if input_image_size is not None or out_stride not in (1, [1, 1], (1, 1)):
        raise ConfigError(
            f"im2sequence: input_image_size={input_image_size!r}, out_stride={out_stride!r} cannot be honoured; all "
            "images of a batch have one size"
        )
    x = lods.variable("im2sequence", input)
    columns = unfold(x, filter_size, stride, padding)
    size, windows = columns.shape[1:]
    if windows < 0:
        raise ShapeError(f"im2sequence: input of shape {list(x.shape)}; give data the height and width")
    found = OPS["reshape"](OPS["transpose"](columns, [0, 2, 1]), [-1, size])
    many = divided(OPS["full"]([lods.rows(x)], windows, "int64"), ())
    return divided(found, [lods.offsets(many)])


def lod_reset(x: Any, y: Any = None, target_lod: Sequence[int] | None = None) -> Variable:
    """x divided by the sequences of y, by y's values (offsets) if it has no sequences, or by the offsets target_lod.

    Raises ConfigError unless y or target_lod is given.
    """
    x = lods.variable("lod_reset", x)
    if (y is None) == (target_lod is None):
        raise ConfigError("lod_reset: give y or target_lod, one of them")
    if y is None:
        return divided(OPS["assign"](x), [lods.offsets_given("lod_reset", target_lod)])
    return divided(OPS["assign"](x), lods.lod_of(y) or [_as_offsets("lod_reset", y)])


def lod_append(x: Any, level: Any) -> Variable:
    """x with one more level, the innermost: offsets, or the last level of a Variable with sequences."""
    x = lods.variable("lod_append", x)
    if isinstance(level, Variable):
        inner = lods.lod_of(level)
        last = inner[-1] if inner else _as_offsets("lod_append", level)
    else:
        last = lods.offsets_given("lod_append", level)
    return divided(OPS["assign"](x), [*lods.lod_of(x), last])


def _as_offsets(what: str, y: Any) -> Variable:
    value = lods.variable(what, y)
    if len(value.shape) != 1:
        raise ShapeError(
            f"{what}: {value.name!r} of shape {list(value.shape)} has no sequences and is no list of offsets [n + 1]"
        )
    return value
