"""The layers of the differential run: constructor arguments and inputs; both sides get equal parameters."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tests.oracle.calls import Call


def x(*shape: int) -> np.ndarray:
    """Distinct values in (-2, 2), none near a kink of the usual activations."""
    size = int(np.prod(shape))
    return (2 * np.sin(2.3 * np.arange(size) + 0.7)).reshape(shape).astype("float32")


def unit(*shape: int) -> np.ndarray:
    """Values in (0.05, 0.95)."""
    return (0.5 + 0.225 * x(*shape)).astype("float32")


def ids(high: int, *shape: int) -> np.ndarray:
    """Integers below high."""
    return (np.arange(int(np.prod(shape))) * 7 % high).reshape(shape).astype("int64")


def signs(*shape: int) -> np.ndarray:
    """+1 and -1."""
    return np.where(ids(3, *shape) > 0, 1.0, -1.0).astype("float32")


ACTIVATIONS = """
    CELU ELU GELU Hardshrink Hardsigmoid Hardswish Hardtanh LeakyReLU LogSigmoid LogSoftmax Mish ReLU ReLU6 SELU
    Sigmoid Silu Softmax Softplus Softshrink Softsign Swish Tanh Tanhshrink ThresholdedReLU
""".split()  # noqa: SIM905
TWO = (x(4, 3), x(3, 4).T.copy())
# name, constructor arguments, constructor keywords, inputs
ROWS: list[tuple[str, tuple, dict, tuple]] = [
    *((name, (), {}, (x(2, 3, 4),)) for name in ACTIVATIONS),
    ("CELU", (0.5,), {}, (x(3, 4),)),
    ("ELU", (0.5,), {}, (x(3, 4),)),
    ("GELU", (True,), {}, (x(3, 4),)),
    ("Softplus", (2.0, 1.0), {}, (x(3, 4),)),
    ("Softmax", (1,), {}, (x(2, 3, 4),)),
    ("Softmax2D", (), {}, (x(2, 3, 4, 2),)),
    ("Maxout", (2,), {}, (x(2, 4, 3, 3),)),
    ("GLU", (), {}, (x(3, 4),)),
    ("PReLU", (3,), {}, (x(2, 3, 4, 4),)),
    ("Linear", (4, 5), {}, (x(2, 3, 4),)),
    ("Linear", (4, 5), {"bias_attr": False}, (x(4),)),
    ("Bilinear", (4, 3, 5), {}, (x(2, 4), x(2, 3))),
    ("Embedding", (7, 3), {}, (ids(7, 2, 4),)),
    ("Embedding", (7, 3), {"padding_idx": 0}, (ids(7, 2, 4),)),
    ("Identity", (), {}, (x(3),)),
    ("Flatten", (), {}, (x(2, 3, 4),)),
    ("Unflatten", (1, (2, 2)), {}, (x(2, 4),)),
    ("Conv1D", (2, 4, 3), {}, (x(2, 2, 9),)),
    ("Conv1D", (2, 4, 3), {"padding": "SAME", "stride": 2}, (x(2, 2, 9),)),
    ("Conv1D", (2, 2, 3), {"padding": 1, "padding_mode": "circular", "groups": 2}, (x(2, 2, 9),)),
    ("Conv2D", (2, 4, 3), {"padding": 1, "stride": 2}, (x(2, 2, 7, 6),)),
    ("Conv2D", (4, 4, (3, 2)), {"groups": 2, "dilation": 2}, (x(1, 4, 8, 8),)),
    ("Conv2D", (2, 3, 3), {"data_format": "NHWC", "padding": [1, 0]}, (x(1, 6, 7, 2),)),
    ("Conv2D", (2, 3, 3), {"padding": 2, "padding_mode": "reflect"}, (x(1, 2, 6, 7),)),
    ("Conv3D", (2, 3, 2), {"stride": 2, "padding": 1}, (x(1, 2, 4, 5, 4),)),
    ("Conv1DTranspose", (2, 3, 3), {"stride": 2, "output_padding": 1}, (x(1, 2, 5),)),
    ("Conv2DTranspose", (4, 4, 3), {"stride": 2, "padding": 1, "groups": 2}, (x(1, 4, 5, 4),)),
    ("Conv2DTranspose", (2, 3, 3), {"dilation": 2}, (x(1, 2, 5, 4),)),
    ("Conv3DTranspose", (2, 3, 2), {"stride": 2}, (x(1, 2, 3, 3, 2),)),
    ("AvgPool1D", (3, 2, 1), {}, (x(2, 2, 9),)),
    ("AvgPool2D", (3, 2, 1), {}, (x(1, 2, 7, 6),)),
    ("AvgPool2D", (3, 2, 1), {"exclusive": False, "ceil_mode": True}, (x(1, 2, 7, 6),)),
    ("AvgPool2D", (2,), {"divisor_override": 3}, (x(1, 2, 6, 6),)),
    ("AvgPool3D", (2, 2), {}, (x(1, 2, 4, 5, 4),)),
    ("MaxPool1D", (3, 2, 1), {}, (x(2, 2, 9),)),
    ("MaxPool2D", (3, 2, 1), {"ceil_mode": True}, (x(1, 2, 7, 6),)),
    ("MaxPool2D", (2, 2), {"return_mask": True}, (x(1, 2, 6, 6),)),
    ("MaxPool3D", (2, 2), {}, (x(1, 2, 4, 5, 4),)),
    ("MaxUnPool1D", (2,), {}, (x(1, 2, 2), np.array([[[0, 3], [1, 2]]], "int32"))),
    ("MaxUnPool2D", (2,), {}, (x(1, 1, 2, 2), np.array([[[[0, 3], [9, 15]]]], "int32"))),
    ("LPPool1D", (2, 3), {}, (unit(1, 2, 9),)),
    ("LPPool2D", (2, 3), {"stride": 2}, (unit(1, 2, 7, 7),)),
    ("AdaptiveAvgPool1D", (3,), {}, (x(2, 2, 8),)),
    ("AdaptiveAvgPool2D", ((3, None),), {}, (x(1, 2, 7, 6),)),
    ("AdaptiveAvgPool3D", (2,), {}, (x(1, 2, 5, 4, 3),)),
    ("AdaptiveMaxPool1D", (3,), {}, (x(2, 2, 8),)),
    ("AdaptiveMaxPool2D", (3,), {"return_mask": True}, (x(1, 2, 7, 6),)),
    ("AdaptiveMaxPool3D", (2,), {}, (x(1, 2, 5, 4, 3),)),
    ("FractionalMaxPool2D", (3,), {"random_u": 0.3}, (x(1, 2, 7, 7),)),
    ("FractionalMaxPool3D", (2,), {"random_u": 0.3}, (x(1, 2, 5, 5, 5),)),
    ("Pad1D", ([1, 2],), {"mode": "reflect"}, (x(1, 2, 5),)),
    ("Pad2D", ([1, 2, 0, 1],), {"mode": "replicate"}, (x(1, 2, 4, 5),)),
    ("Pad2D", ([1, 2, 0, 1],), {"value": 0.5}, (x(1, 2, 4, 5),)),
    ("Pad3D", (1,), {"mode": "circular"}, (x(1, 1, 2, 3, 2),)),
    ("ZeroPad1D", (2,), {}, (x(1, 2, 4),)),
    ("ZeroPad2D", ([1, 0, 2, 1],), {}, (x(1, 2, 4, 5),)),
    ("ZeroPad3D", (1,), {}, (x(1, 1, 2, 3, 2),)),
    ("BatchNorm1D", (3,), {}, (x(4, 3),)),
    ("BatchNorm1D", (3,), {"data_format": "NLC"}, (x(4, 5, 3),)),
    ("BatchNorm2D", (3,), {"momentum": 0.5, "epsilon": 1e-3}, (x(2, 3, 4, 4),)),
    ("BatchNorm3D", (2,), {}, (x(2, 2, 2, 3, 2),)),
    ("BatchNorm", (3,), {"act": "relu"}, (x(2, 3, 4, 4),)),
    ("InstanceNorm1D", (3,), {}, (x(2, 3, 5),)),
    ("InstanceNorm2D", (3,), {}, (x(2, 3, 4, 4),)),
    ("InstanceNorm3D", (2,), {}, (x(2, 2, 2, 3, 2),)),
    ("GroupNorm", (2, 4), {}, (x(2, 4, 3, 3),)),
    ("GroupNorm", (2, 4), {"data_format": "NHWC"}, (x(2, 3, 3, 4),)),
    ("LayerNorm", (4,), {}, (x(2, 3, 4),)),
    ("LayerNorm", ([3, 4],), {"epsilon": 1e-3}, (x(2, 3, 4),)),
    ("RMSNorm", (4,), {}, (x(2, 3, 4),)),
    ("LocalResponseNorm", (3,), {}, (x(2, 5, 4, 4),)),
    ("CosineSimilarity", (), {}, (x(3, 4), 0.5 + x(3, 4))),
    ("PairwiseDistance", (), {}, (x(3, 4), unit(3, 4))),
    ("Upsample", (), {"size": [5, 7], "mode": "bilinear"}, (x(1, 2, 3, 4),)),
    ("Upsample", (), {"scale_factor": 2, "mode": "nearest"}, (x(1, 2, 3, 4),)),
    ("Upsample", (), {"size": [6, 8], "mode": "bicubic", "align_corners": True}, (x(1, 2, 3, 4),)),
    ("Upsample", (), {"size": [6], "mode": "linear", "data_format": "NCW"}, (x(1, 2, 4),)),
    ("Upsample", (), {"size": [3, 4, 5], "mode": "trilinear", "data_format": "NCDHW"}, (x(1, 1, 2, 3, 4),)),
    ("UpsamplingNearest2D", ([5, 7],), {}, (x(1, 2, 3, 4),)),
    ("UpsamplingBilinear2D", ([5, 7],), {}, (x(1, 2, 3, 4),)),
    ("PixelShuffle", (2,), {}, (x(1, 8, 2, 3),)),
    ("PixelUnshuffle", (2,), {}, (x(1, 2, 4, 6),)),
    ("ChannelShuffle", (2,), {}, (x(1, 4, 2, 3),)),
    ("Unfold", ([2, 3],), {"strides": 2, "paddings": 1}, (x(1, 2, 5, 6),)),
    ("Fold", ([4, 5], [2, 2]), {}, (x(1, 8, 12),)),
    ("BCELoss", (), {}, (unit(3, 4), unit(3, 4)[::-1].copy())),
    ("BCEWithLogitsLoss", (), {}, (x(3, 4), unit(3, 4))),
    ("CrossEntropyLoss", (), {}, (x(5, 4), ids(4, 5))),
    ("CrossEntropyLoss", (), {"label_smoothing": 0.1, "reduction": "sum"}, (x(5, 4), ids(4, 5))),
    ("CrossEntropyLoss", (), {"weight": unit(4), "ignore_index": 2}, (x(5, 4), ids(4, 5))),
    ("CrossEntropyLoss", (), {"soft_label": True, "axis": 1}, (x(2, 4, 3), unit(2, 4, 3))),
    ("NLLLoss", (), {"weight": unit(4)}, (x(5, 4), ids(4, 5))),
    ("MSELoss", (), {}, TWO),
    ("L1Loss", (), {"reduction": "sum"}, TWO),
    ("SmoothL1Loss", (), {"delta": 0.5}, TWO),
    ("KLDivLoss", (), {"reduction": "batchmean"}, (x(3, 4), unit(3, 4))),
    ("KLDivLoss", (), {"log_target": True}, (x(3, 4), x(3, 4) / 2)),
    ("MarginRankingLoss", (0.2,), {}, (x(6), unit(6), signs(6))),
    ("SoftMarginLoss", (), {}, (x(6), signs(6))),
    ("HingeEmbeddingLoss", (), {}, (x(6), signs(6))),
    ("CosineEmbeddingLoss", (0.1,), {}, (x(6, 3), unit(6, 3), signs(6))),
    ("TripletMarginLoss", (), {}, (x(4, 3), unit(4, 3), -x(4, 3))),
    ("TripletMarginWithDistanceLoss", (), {"swap": True}, (x(4, 3), unit(4, 3), -x(4, 3))),
    ("MultiLabelSoftMarginLoss", (), {}, (x(3, 4), ids(2, 3, 4).astype("float32"))),
    ("MultiMarginLoss", (), {"margin": 0.7}, (x(3, 4), ids(4, 3))),
    ("MultiLabelMarginLoss", (), {}, (x(2, 4), np.array([[3, 0, -1, 1], [1, 2, 3, -1]]))),
    ("PoissonNLLLoss", (), {"full": True}, (x(3, 4), 3 * unit(3, 4))),
    ("GaussianNLLLoss", (), {"full": True}, (x(3, 4), unit(3, 4), unit(3, 4))),
    ("HSigmoidLoss", (3, 5), {}, (x(4, 3), ids(5, 4))),
    ("AdaptiveLogSoftmaxWithLoss", (4, 8, [3, 5]), {"div_value": 2.0}, (x(5, 4), ids(8, 5))),
    ("CTCLoss", (), {}, (x(6, 2, 4), np.array([[1, 2, 2], [3, 1, 0]], "int32"), np.array([6, 5]), np.array([3, 2]))),
    (
        "RNNTLoss",
        (),
        {"fastemit_lambda": 0.0},
        (x(2, 4, 3, 4), np.array([[1, 2], [3, 1]], "int32"), np.array([4, 3], "int32"), np.array([2, 1], "int32")),
    ),
    ("SimpleRNNCell", (3, 4), {}, (x(2, 3),)),
    ("LSTMCell", (3, 4), {}, (x(2, 3),)),
    ("LSTMCell", (3, 4), {"proj_size": 2}, (x(2, 3),)),
    ("GRUCell", (3, 4), {}, (x(2, 3),)),
    ("SimpleRNN", (3, 4, 2), {"activation": "relu"}, (x(2, 5, 3),)),
    ("LSTM", (3, 4, 2), {"direction": "bidirect"}, (x(2, 5, 3),)),
    ("LSTM", (3, 4), {"time_major": True, "proj_size": 2}, (x(5, 2, 3),)),
    ("GRU", (3, 4, 2), {"direction": "bidirectional"}, (x(2, 5, 3), None, np.array([3, 5]))),
    ("MultiHeadAttention", (8, 2), {}, (x(2, 3, 8),)),
    ("MultiHeadAttention", (8, 2, 0.0, 4, 6), {}, (x(2, 3, 8), x(2, 5, 4), x(2, 5, 6))),
    ("TransformerEncoderLayer", (8, 2, 16), {"dropout": 0.0}, (x(2, 3, 8),)),
    ("TransformerEncoderLayer", (8, 2, 16), {"dropout": 0.0, "normalize_before": True}, (x(2, 3, 8),)),
    ("TransformerDecoderLayer", (8, 2, 16), {"dropout": 0.0}, (x(2, 3, 8), x(2, 4, 8))),
    ("Transformer", (8, 2, 1, 1, 16), {"dropout": 0.0}, (x(2, 3, 8), x(2, 4, 8))),
]
EVALUATED = ["Dropout", "Dropout2D", "Dropout3D", "AlphaDropout", "FeatureAlphaDropout", "RReLU", "BatchNorm2D"]


def layer_calls() -> Iterator[Call]:
    """A Call for every row, and for layers that do something else, without drawing, in evaluation."""
    numbers: dict[str, int] = {}
    for name, args, kwargs, inputs in ROWS:
        numbers[name] = numbers.get(name, 0) + 1
        layer = {"args": list(args), "kwargs": kwargs}
        yield Call(f"paddle.nn.{name}", f"layer{numbers[name]}", inputs, layer=layer, terms=64)
    for name in EVALUATED:
        layer = {"args": [3] if name.startswith("Batch") else [], "kwargs": {}, "eval": True}
        yield Call(f"paddle.nn.{name}", "eval", (x(2, 3, 4, 4),), layer=layer)
