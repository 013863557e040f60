"""Contract rows of ops/quantization.py."""

import ml_dtypes
import numpy as np

from polyreme.conformance.case import Case
from polyreme.errors import ConfigError, DTypeError, ShapeError

NF4 = np.array(
    [
        *(-1, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.09105004, 0, 0.0795803, 0.1609302),
        *(0.2461123, 0.3379152, 0.4407098, 0.562617, 0.7229568, 1),
    ],
    "float32",
)
TOP = {"int8": 127, "int4": 7, "nf4": 1, "fp8": 448}
ROUNDED = "codes are whole numbers or float8"
STRAIGHT = "rounding passes its gradient by"


def quantized(w, kind, group=-1):
    """Codes [out, in] that are not packed, and scales."""
    inputs = w.shape[0]
    size = inputs if group == -1 else group
    parts = [np.abs(w[at : at + size]).max(0) for at in range(0, inputs, size)]
    scale = (np.stack(parts) / np.float32(TOP[kind])).astype("float32")
    spread = np.repeat(scale, size, 0)[:inputs].T
    scaled = w.T.astype("float32") / spread
    if kind == "nf4":
        codes = np.abs(scaled[..., None] - NF4).argmin(-1).astype("int8")
    elif kind == "fp8":
        codes = scaled.astype(ml_dtypes.float8_e4m3fn)
    else:
        codes = np.round(scaled).astype("int8")
    return codes, scale[0] if group == -1 else scale


def packed(codes):
    low, high = codes[::2].view("uint8") & 15, codes[1::2].view("uint8") & 15
    return (low | high << 4).view("int8")


def stored(w, kind, group=-1):
    codes, scale = quantized(w, kind, group)
    return (packed(codes) if kind in ("int4", "nf4") else codes.view("int8")), scale


def values(w, kind, group=-1):
    """The weight [in, out] that is left after rounding."""
    codes, scale = quantized(w, kind, group)
    levels = NF4[codes] if kind == "nf4" else codes.astype("float32")
    size = w.shape[0] if group == -1 else group
    return (levels * np.repeat(np.atleast_2d(scale), size, 0)[: w.shape[0]].T).T


WEIGHT = np.random.default_rng(3).standard_normal((12, 8)).astype("float32")
KINDS = [("int8", -1), ("int4", 4), ("nf4", 5), ("fp8", -1)]


def rounded_rows(x, kind="int8"):
    step = np.abs(x).max(-1, keepdims=True) / TOP[kind]
    codes = np.round(x / step) if kind == "int8" else (x / step).astype(ml_dtypes.float8_e4m3fn).astype("float32")
    return codes * step


def apart(x):
    wide = np.abs(x).max((0, 1)) > 2
    w = values(WEIGHT, "int8")
    return np.where(wide, x, 0) @ w + rounded_rows(np.where(wide, 0, x)) @ w


def grid(x, scale, bits=8, axis=-1):
    step = (scale if scale.size == 1 else scale.reshape([-1 if d == axis % x.ndim else 1 for d in range(x.ndim)])) / (
        2 ** (bits - 1) - 1
    )
    return np.clip(np.round(x / step), -(2 ** (bits - 1)) + 1, 2 ** (bits - 1) - 1) * step


def rows(rng):
    return rng.standard_normal((2, 3, 12)).astype("float32")


SCALES = np.array([0.5, 1.0, 2.0], "float32")
ZEROS = np.array([0.0, 3.0, -2.0], "float32")


def whole(x, scale, zero, bits, axis):
    return np.clip(np.round(x / (scale[:, None] / 7)) + zero[:, None], -8, 7)


CASES = [
    *(
        Case(
            "weight_quantize",
            lambda rng, kind=kind, group=group: (WEIGHT, kind, None, group),
            lambda w, kind, arch, group: stored(w, kind, group),
            no_grad=ROUNDED,
            bad=((WEIGHT, "int9"), ConfigError, "unknown algo 'int9'"),
            tag=kind,
        )
        for kind, group in KINDS
    ),
    *(
        Case(
            "weight_dequantize",
            lambda rng, kind=kind, group=group: (*stored(WEIGHT, kind, group), kind, "float32", group),
            lambda c, s, kind, dtype, group: values(WEIGHT, kind, group),
            no_grad=ROUNDED,
            bad=((WEIGHT, SCALES, "int8"), DTypeError, "codes of int8 are int8, got float32"),
            tag=kind,
        )
        for kind, group in KINDS
    ),
    *(
        Case(
            "weight_dequantize",
            lambda rng, kind=kind, group=group: (
                *(np.stack([part, part]) for part in stored(WEIGHT, kind, group)),
                kind,
                "float32",
                group,
            ),
            lambda c, s, kind, dtype, group: np.stack([values(WEIGHT, kind, group)] * 2),
            no_grad=ROUNDED,
            bad=((np.zeros((2, 4, 3), "int8"), np.ones((2, 5), "float32"), "int8"), ShapeError, r"scales \[5\] for"),
            tag=f"{kind}-several",
        )
        for kind, group in KINDS
    ),
    *(
        Case(
            "weight_only_linear",
            lambda rng, kind=kind, group=group: (
                rows(rng),
                (both := stored(WEIGHT, kind, group))[0],
                rng.standard_normal(8).astype("float32"),
                both[1],
                kind,
                None,
                group,
            ),
            lambda x, c, b, s, kind, arch, group: x @ values(WEIGHT, kind, group) + b,
            terms=12,
            no_ref_grad="the oracle has the scales of a constant",
            bad=(
                (np.ones((2, 12), "float32"), stored(WEIGHT, "int8")[0], None, SCALES),
                ShapeError,
                r"scales \[3\] for codes \[8, 12\]",
            ),
            tag=kind,
        )
        for kind, group in KINDS
    ),
    Case(
        "llm_int8_linear",
        lambda rng: (rows(rng) * 1.2, (both := stored(WEIGHT, "int8"))[0], None, both[1], 2.0),
        lambda x, c, b, s, t: apart(x),
        terms=12,
        no_grad=STRAIGHT,
        bad=((np.ones((2, 12), "float32"), stored(WEIGHT, "int8")[0]), ConfigError, "no weight_scale"),
    ),
    *(
        Case(
            "low_bit_product",
            lambda rng, kind=kind: (rows(rng), *stored(WEIGHT, kind), kind),
            lambda x, c, s, kind: rounded_rows(x, kind) @ values(WEIGHT, kind),
            terms=12,
            no_grad=STRAIGHT,
            bad=((np.ones((2, 12), "float32"), *stored(WEIGHT, "int4"), "int4"), ConfigError, "int8 or fp8"),
            tag=kind,
        )
        for kind in ("int8", "fp8")
    ),
    Case(
        "apply_per_channel_scale",
        lambda rng: (rng.standard_normal((2, 3)).astype("float32"), SCALES),
        lambda x, s: x * s,
    ),
    Case(
        "fake_quantize",
        lambda rng: (rng.standard_normal((3, 4)).astype("float32"), SCALES, 4, 0),
        grid,
        no_grad=STRAIGHT,
        bad=((SCALES, SCALES, 1), ConfigError, "bit_length=1; give 2 to 16"),
    ),
    Case(
        "quantize_linear",
        lambda rng: (rng.standard_normal((3, 4)).astype("float32"), SCALES, ZEROS, 4, 0),
        whole,
        no_grad=STRAIGHT,
        bad=((SCALES, SCALES, ZEROS, 40), ConfigError, "bit_length=40"),
    ),
    Case(
        "dequantize_linear",
        lambda rng: (np.arange(-6.0, 6).reshape(3, 4).astype("float32"), SCALES, ZEROS, 4, 0),
        lambda x, s, z, bits, axis: (x - z[:, None]) * s[:, None] / 7,
        bad=((SCALES, SCALES, ZEROS, 40), ConfigError, "bit_length=40"),
    ),
]
