"""What a .json program of PaddlePaddle 3 says, in the words that its .pdmodel has for the same.

Source: files written by PaddlePaddle 3.3.1.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from polyreme.core import dtype as dtypes
from polyreme.errors import CheckpointError, DTypeError
from polyreme.paddle_models.description import PaddleBlock, PaddleOperation, PaddleVariable

_DTYPES = {
    "t_bool": dtypes.bool_, "t_ui8": dtypes.uint8, "t_i8": dtypes.int8, "t_i16": dtypes.int16, "t_i32": dtypes.int32,
    "t_i64": dtypes.int64, "t_f16": dtypes.float16, "t_bf16": dtypes.bfloat16, "t_f32": dtypes.float32,
    "t_f64": dtypes.float64, "t_c64": dtypes.complex64, "t_c128": dtypes.complex128,
}  # fmt: skip
_NO_VALUE = ("a_place", "a_layout")  # kinds of attributes that say where a value lies


class _Spelling(NamedTuple):
    """An operation in the older words: its type, slots in order ("_" for what has no effect), attributes' names."""

    type: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    renamed: Mapping[str, str]


def _spelled(line: str) -> _Spelling:
    """Of "type: slots of inputs -> slots of outputs | theirs=older ..."; X -> Out if there are none."""
    head, _, renamed = line.partition("|")
    kind, _, slots = head.partition(":")
    inputs, _, outputs = slots.partition("->")
    names = dict(pair.split("=") for pair in renamed.split())
    return _Spelling(kind.strip(), tuple(inputs.split()) or ("X",), tuple(outputs.split()) or ("Out",), names)


_UNARY = """abs acos asin atan bitwise_not ceil celu cos cosh elu erf exp expm1 flip floor gelu log log10 log1p log2
log_softmax logical_not logsigmoid meshgrid pixel_shuffle reciprocal relu relu6 round rsqrt selu sigmoid sign silu sin
sinh softmax softplus softsign sqrt square swish tan tanh tanh_shrink thresholded_relu tril triu unbind p_norm
assign full_int_array"""
_BINARY = """equal not_equal less_than less_equal greater_than greater_equal logical_and logical_or logical_xor
bitwise_and bitwise_or bitwise_xor bmm dot"""
_CONV = "Input Filter -> Output"
_REDUCED = "X Axis | axis=dim keepdim=keep_dim dtype=out_dtype"
_RESIZED = "X OutSize SizeTensor Scale | data_format=data_layout"
_LINES = {
    **{name: f"{name}:" for name in _UNARY.split()},
    **{name: f"{name}: X Y" for name in _BINARY.split()},
    **{name: f"elementwise_{older}: X Y" for name, older in {
        "add": "add", "subtract": "sub", "multiply": "mul", "divide": "div", "maximum": "max", "minimum": "min",
        "elementwise_pow": "pow", "remainder": "mod", "floor_divide": "floordiv", "fmax": "fmax",
        "fmin": "fmin"}.items()},
    **{name: f"reduce_{name}: {_REDUCED}" for name in ("mean", "sum", "max", "min", "prod", "all", "any")},
    **{f"{mode}_interp": f"{mode}_interp_v2: {_RESIZED}" for mode in (
        "nearest", "bilinear", "bicubic", "linear", "trilinear")},
    "add_n": "sum:", "addmm": "addmm: Input X Y | alpha=Alpha beta=Beta", "arange": "range: Start End Step",
    "argmax": "arg_max: X Axis", "argmin": "arg_min: X Axis", "argsort": "argsort: X -> Out Indices",
    "assign_value": "assign_value: _", "atan2": "atan2: X1 X2",
    "batch_norm": "batch_norm: X Mean Variance Scale Bias -> Y _ _ _ _ _ | data_format=data_layout",
    "cast": "cast: X | dtype=out_dtype", "clip": "clip: X Min Max", "concat": "concat: X AxisTensor",
    "conv2d": f"conv2d: {_CONV}", "depthwise_conv2d": f"depthwise_conv2d: {_CONV}", "conv3d": f"conv3d: {_CONV}",
    "conv2d_transpose": "conv2d_transpose: Input Filter OutputSizeTensor -> Output",
    "depthwise_conv2d_transpose": "depthwise_conv2d_transpose: Input Filter OutputSizeTensor -> Output",
    "conv3d_transpose": f"conv3d_transpose: {_CONV}", "cumsum": "cumsum: X Axis",
    "dropout": "dropout: X _ Probability -> Out _ | mode=dropout_implementation",
    "embedding": "lookup_table_v2: Ids W | sparse=is_sparse", "expand": "expand_v2: X Shape",
    "expand_as": "expand_as_v2: X Y", "eye": "eye: Rows Columns",
    "flatten": "flatten_contiguous_range: X -> Out _", "full": "fill_constant:", "full_like": "fill_any_like: X Value",
    "full_with_tensor": "fill_constant: ValueTensor ShapeTensor", "gather": "gather: X Index Axis",
    "gather_nd": "gather_nd: X Index", "grid_sample": "grid_sampler: X Grid -> Output",
    "group_norm": "group_norm: X Scale Bias -> Y _ _ | data_format=data_layout", "hardshrink": "hard_shrink:",
    "hardsigmoid": "hard_sigmoid:", "hardswish": "hard_swish:", "hardtanh": "brelu:",
    "increment": "increment: | value=step", "index_sample": "index_sample: X Index",
    "index_select": "index_select: X Index | axis=dim", "instance_norm": "instance_norm: X Scale Bias -> Y _ _",
    "isfinite": "isfinite_v2:", "isinf": "isinf_v2:", "isnan": "isnan_v2:",
    "layer_norm": "layer_norm: X Scale Bias -> Y _ _", "leaky_relu": "leaky_relu: | negative_slope=alpha",
    "linspace": "linspace: Start Stop Num", "logsumexp": "logsumexp:",
    "matmul": "matmul_v2: X Y | transpose_x=trans_x transpose_y=trans_y",
    "max_pool2d_with_index": "max_pool2d_with_index: X -> Out Mask | kernel_size=ksize", "mean_all": "mean:",
    "mish": "mish: | lambda=threshold", "mv": "mv: X Vec", "norm": "norm: X -> Out Norm", "numel": "size: Input",
    "one_hot": "one_hot_v2: X depth_tensor", "pad3d": "pad3d: X Paddings | pad_value=value",
    "pool2d": "pool2d: X Sizes", "pool3d": "pool3d: X | kernel_size=ksize", "pow": "pow: | y=factor",
    "prelu": "prelu: X Alpha",
    "reshape": "reshape2: X Shape -> Out _", "rnn": "rnn: Input PreState WeightList SequenceLength _ -> Out _ State _",
    "roll": "roll: X ShiftsTensor", "scale": "scale: X ScaleTensor", "scatter": "scatter: X Ids Updates",
    "set_value": "set_value: Input StartsTensorList EndsTensorList StepsTensorList",
    "set_value_with_tensor": "set_value: Input ValueTensor StartsTensorList EndsTensorList StepsTensorList",
    "shape": "shape: Input", "shape64": "shape64: Input", "slice": "slice: Input StartsTensor EndsTensor",
    "softshrink": "softshrink: | threshold=lambda", "split": "split: X SectionsTensorList AxisTensor",
    "split_with_num": "split: X AxisTensor", "squeeze": "squeeze2: X Axes -> Out _", "stack": "stack: X -> Y",
    "strided_slice": "strided_slice: Input StartsTensor EndsTensor StridesTensor",
    "sync_batch_norm": "batch_norm: X Mean Variance Scale Bias -> Y _ _ _ _ _ | data_format=data_layout",
    "take_along_axis": "take_along_axis: Input Index -> Result | axis=Axis", "tile": "tile: X RepeatTimes",
    "topk": "top_k_v2: X K -> Out Indices", "transpose": "transpose2: X -> Out _ | perm=axis",
    "allclose": "allclose: Input Other Rtol Atol", "isclose": "isclose: Input Other Rtol Atol",
    "crop": "crop_tensor: X Shape Offsets", "cumprod": "cumprod:", "diag": "diag_v2:", "diagonal": "diagonal: Input",
    "fold": "fold: X -> Y", "index_add": "index_add: X Index AddValue", "inverse": "inverse: Input -> Output",
    "kron": "kron: X Y", "label_smooth": "label_smooth: X PriorDist", "lgamma": "lgamma:", "logit": "logit:",
    "maxout": "maxout:", "pixel_unshuffle": "pixel_unshuffle:",
    "put_along_axis": "put_along_axis: Input Index Value -> Result | axis=Axis reduce=Reduce include_self=Include_self",
    "repeat_interleave": "repeat_interleave: | repeats=Repeats axis=dim", "trunc": "trunc:",
    "scatter_nd_add": "scatter_nd_add: X Index Updates", "searchsorted": "searchsorted: SortedSequence Values",
    "trace": "trace: Input", "unstack": "unstack: X -> Y",
    "affine_grid": "affine_grid: Theta OutputShape -> Output",
    "box_coder": "box_coder: PriorBox PriorBoxVar TargetBox -> OutputBox", "channel_shuffle": "channel_shuffle:",
    "deformable_conv": "deformable_conv: Input Offset Filter Mask -> Output",
    "einsum": "einsum: Operands -> Out _ _", "prior_box": "prior_box: Input Image -> Boxes Variances",
    "roi_align": "roi_align: X ROIs RoisNum", "roi_pool": "roi_pool: X ROIs RoisNum -> Out _",
    "unfold": "unfold: X -> Y", "yolo_box": "yolo_box: X ImgSize -> Boxes Scores",
    "unsqueeze": "unsqueeze2: X AxesTensor -> Out _", "where": "where: Condition X Y",
}  # fmt: skip
SPELLINGS = {name: _spelled(line) for name, line in _LINES.items()}
"""Operation of a .json program -> the type, slots and attributes that a .pdmodel has for it."""


def is_pir(head: bytes) -> bool:
    """Whether a file that begins so is a .json program of PaddlePaddle's."""
    return head[:1] == b"{" and b'"base_code"' in head[:64]


def read_pir(data: bytes, where: str) -> PaddleBlock:
    """The program as a block. Raises CheckpointError for another format, control flow, and for operations that are not
    known, all of them by name.
    """
    try:
        said = json.loads(data)
        if said["base_code"]["magic"] != "pir":
            raise ValueError("its base_code is not pir")
        (region,) = said["program"]["regions"]
        (block,) = region["blocks"]
        _check_kinds(block["ops"], where)
        return _Reader(where).block(block["ops"])
    # whatever Python says of a member that is missing or of another class
    except (AttributeError, LookupError, TypeError, ValueError, OverflowError, RecursionError, DTypeError) as error:
        raise CheckpointError(
            f"{where}: no program of PaddlePaddle 3 in one block ({type(error).__name__}: {error!s:.200}); it is cut, "
            "altered, or of a later format"
        ) from error


class _Reader:
    """Names for the numbered values of a program."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.names: dict[int, tuple[str, ...]] = {0: ()}  # 0 stands for a value that is left out
        self.lists: set[int] = set()
        self.variables: dict[str, PaddleVariable] = {}

    def block(self, operations: list[Any]) -> PaddleBlock:
        read = [operation for said in operations for operation in self.operations(said)]
        return PaddleBlock(self.variables, tuple(read))

    def inner(self, region: dict[str, Any]) -> PaddleBlock:
        """A block of a loop or branch: its arguments have numbers below 0, and what it gives is yielded last."""
        (block,) = region["blocks"]
        for argument in block["args"]:
            self.named({"%": argument["#"], "TT": argument["TT"]}, f"%{argument['#']}")
        arguments = tuple(f"%{argument['#']}" for argument in block["args"])
        *operations, last = block["ops"]
        if last["#"] != "2.yield":
            raise ValueError(f"a block ends with {last['#']}, not with 2.yield")
        read = self.block(operations)
        results = tuple(name for value in last["I"] for name in self.names[value["%"]])
        return PaddleBlock(read.variables, read.operations, arguments, results)

    def operations(self, said: dict[str, Any]) -> Iterator[PaddleOperation]:
        """What one operation is in the older words: none for what only gives names to values."""
        kind = said["#"].partition(".")[2]
        if said["#"] == "p":
            (is_persistable, is_still, *_), name = said["OA"], said["A"][3]
            self.named(said["O"], name, not is_still, bool(is_persistable))
            return
        attributes = {a["N"]: _attribute(a["AT"]) for a in said["A"] if _kind(a["AT"]) not in _NO_VALUE}
        inputs = [self.names[i["%"]] for i in said["I"]]
        if said["#"] == "0.combine":
            self.names[said["O"][0]["%"]] = tuple(name for names in inputs for name in names)
        elif said["#"] == "0.split":
            for output, name in zip(said["O"], inputs[0], strict=True):
                self.names[output["%"]] = (name,)
        elif said["#"] == "0.slice":
            self.names[said["O"][0]["%"]] = (inputs[0][attributes["index"]],)
        elif kind in ("data", "feed"):
            self.named(said["O"][0], attributes["name"])
            yield PaddleOperation("feed", {}, {"Out": (attributes["name"],)}, {"col": attributes.get("col", 0)})
        elif kind in _WITH_BLOCKS:
            names = tuple(name for each in inputs for name in each)
            blocks = tuple(self.inner(region) for region in said["regions"])
            outputs = tuple(name for value in said["O"] for name in self.output(value))
            yield PaddleOperation(_WITH_BLOCKS[kind], {"X": names}, {"Out": outputs}, {}, blocks)
        elif kind == "fetch":
            yield from self.fetched(inputs[0], attributes)
        else:
            yield self.spelled(kind, said, inputs, attributes)

    def fetched(self, values: tuple[str, ...], attributes: dict[str, Any]) -> Iterator[PaddleOperation]:
        """An output, by the name that predictors have for it."""
        name = attributes.get("name")
        if len(values) == 1 and name and name not in self.variables:
            self.variables[name] = replace(self.variables[values[0]], name=name, persistable=False)
            yield PaddleOperation("assign", {"X": values}, {"Out": (name,)}, {})
            values = (name,)
        yield PaddleOperation("fetch", {"X": values}, {}, {"col": attributes.get("col", 0)})

    def spelled(
        self, kind: str, said: Any, inputs: list[tuple[str, ...]], attributes: dict[str, Any]
    ) -> PaddleOperation:
        spelling = _spelling(kind)
        assert spelling is not None  # block has looked
        extra = [names for names in inputs[len(spelling.inputs) :] if names]
        if extra:
            raise CheckpointError(
                f"{self.where}: {kind} has {len(inputs)} inputs, of which {spelling.inputs} are known"
            )
        slots = zip(spelling.inputs, inputs, strict=False)
        outputs = [self.output(value) for value in said["O"]]
        if kind.endswith("_") and spelling.type != "batch_norm" and said["I"]:
            self.names[said["I"][0]["%"]] = outputs[0]  # it works in place: whoever reads the input later reads this
        return PaddleOperation(
            spelling.type,
            {slot: names for slot, names in slots if slot != "_"},
            {slot: names for slot, names in zip(spelling.outputs, outputs, strict=False) if slot != "_"},
            {spelling.renamed.get(name, name): value for name, value in attributes.items() if name != "struct_name"},
        )

    def output(self, value: dict[str, Any]) -> tuple[str, ...]:
        """Names for a value, or for the members of a list."""
        number, kind = value["%"], value.get("TT", {})
        if kind.get("#") != "0.t_vec":
            self.named(value, f"%{number}")
            return self.names[number]
        names = tuple(f"%{number}.{i}" for i in range(len(kind["D"])))
        for name, member in zip(names, kind["D"], strict=True):
            self.named({"%": number, "TT": member}, name)
        self.names[number] = names
        return names

    def named(self, value: dict[str, Any], name: str, is_parameter: bool = False, persistable: bool = False) -> None:
        described = value.get("TT", {})
        dtype, shape = None, ()
        if described.get("#") == "0.t_dtensor":
            dtype, shape = _DTYPES.get(_kind(described["D"][0])), tuple(int(n) for n in described["D"][1])
        self.names[value["%"]] = (name,)
        self.variables[name] = PaddleVariable(name, dtype, shape, persistable, is_parameter)


def _check_kinds(operations: list[Any], where: str) -> None:
    """Raises CheckpointError for operations that are not known, all of them by name."""
    kinds, waiting = set(), list(operations)
    while waiting:
        said = waiting.pop()
        kinds.add(said["#"])
        waiting += [op for region in said.get("regions", ()) for block in region["blocks"] for op in block["ops"]]
    theirs = {kind for kind in kinds if kind.startswith("1.")}
    unknown = {
        kind
        for kind in theirs
        if kind[2:] not in _ENDS and _spelling(kind[2:]) is None and kind[2:] not in _WITH_BLOCKS
    }
    unknown |= kinds - theirs - _BUILTIN
    if unknown:
        raise CheckpointError(
            f"{where}: {len(unknown)} of its types of operations are not known here: {', '.join(sorted(unknown)[:60])}"
        )


_ENDS = ("data", "feed", "fetch")
_WITH_BLOCKS = {"while": "while_by_arguments", "if": "if"}
_BUILTIN = {"2.yield", "p", "0.combine", "0.split", "0.slice"}


def _spelling(kind: str) -> _Spelling | None:
    return SPELLINGS.get(kind) or SPELLINGS.get(kind.removesuffix("_"))


def _kind(said: dict[str, Any]) -> str:
    return said["#"].partition(".")[2]


def _attribute(said: dict[str, Any]) -> Any:
    kind = _kind(said)
    value: Any = said.get("D")
    if kind == "a_array":
        return [_attribute(item) for item in value]
    if kind == "a_dtype":
        return "" if "undefined" in value.lower() else dtypes.as_dtype(value).name
    if kind in ("a_f32", "a_f64"):
        return float(value)
    if kind == "a_scalar" and isinstance(value, list):
        return np.array(value[-1]).item()
    return value
