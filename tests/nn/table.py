"""The layers under contract: how each is made, what goes in. Data only: fixtures/record_layers.py reads it.

Values of inputs and parameters follow from formulas, so that another framework can be given the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Make:
    """A layer to be made as an argument of another: its class name and arguments."""

    name: str
    args: tuple = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """One layer. name(*args, **kwargs) is called with inputs, each a shape (numbers between -1 and 1) or an ndarray.

    function: the nn.functional name it must equal, with settings; "" if forward is more than one function. random: it
    draws numbers while training, so that only eval mode is compared. paddle: why PaddlePaddle is not the oracle here.
    no_grad: why nothing of it has a gradient. terms: rounded terms summed in one output element.
    """

    name: str
    args: tuple = ()
    inputs: tuple = ((2, 6),)
    kwargs: dict[str, Any] = field(default_factory=dict)
    function: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    random: bool = False
    paddle: str = ""
    no_grad: str = ""
    terms: int = 32
    tag: str = ""

    @property
    def id(self) -> str:
        return f"{self.name}-{self.tag}" if self.tag else self.name

    def arrays(self) -> list[np.ndarray]:
        return [value if isinstance(value, np.ndarray) else wave(value, at + 1) for at, value in enumerate(self.inputs)]


def wave(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Numbers between -1 and 1, no two alike."""
    count = int(np.prod(shape))
    return np.sin(np.arange(1, count + 1) * (0.7 + 0.31 * seed) + seed).reshape(shape).astype(np.float32)


def state_value(name: str, shape: tuple[int, ...], at: int) -> np.ndarray:
    """The at-th parameter or buffer: small numbers, above 0 for variances."""
    value = 0.5 * wave(shape, at + 5)
    return np.abs(value) + 0.5 if name.endswith("_variance") else value


def ids(*values: Any) -> np.ndarray:
    return np.array(values, np.int64)


def unit(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Numbers between 0.1 and 0.9."""
    return (0.5 + 0.4 * wave(shape, seed)).astype(np.float32)


SIGNS = np.array([1, -1, -1, 1], np.float32)
X1, X2, X3 = (2, 4, 7), (2, 4, 5, 6), (2, 4, 4, 5, 3)
NHWC = {"data_format": "NHWC"}


def _activations() -> list[Row]:
    plain = [
        ("ReLU", "relu"), ("ReLU6", "relu6"), ("Sigmoid", "sigmoid"), ("LogSigmoid", "log_sigmoid"), ("Tanh", "tanh"),
        ("Tanhshrink", "tanhshrink"), ("Softsign", "softsign"), ("Swish", "swish"), ("Mish", "mish"),
        ("Hardswish", "hardswish"), ("Silu", "silu"),
    ]  # fmt: skip
    return [
        *(Row(name, function=function) for name, function in plain),
        Row("Hardsigmoid", function="hardsigmoid"),
        Row("GELU", function="gelu"),
        Row("GELU", (True,), function="gelu", settings={"approximate": True}, tag="tanh"),
        Row("ELU", (0.7,), function="elu", settings={"alpha": 0.7}),
        Row("CELU", (0.7,), function="celu", settings={"alpha": 0.7}),
        Row("SELU", function="selu"),
        Row("LeakyReLU", (0.2,), function="leaky_relu", settings={"negative_slope": 0.2}),
        Row("Hardtanh", (-0.3, 0.4), function="hardtanh", settings={"min": -0.3, "max": 0.4}),
        Row("Hardshrink", (0.3,), function="hardshrink", settings={"threshold": 0.3}),
        Row("Softshrink", (0.3,), function="softshrink", settings={"threshold": 0.3}),
        Row("Softplus", (2, 1.5), function="softplus", settings={"beta": 2, "threshold": 1.5}),
        Row("ThresholdedReLU", (0.2,), function="thresholded_relu", settings={"threshold": 0.2}),
        Row("Softmax", (0,), function="softmax", settings={"axis": 0}),
        Row("LogSoftmax", function="log_softmax"),
        Row("Softmax2D", inputs=(X2,), function="softmax", settings={"axis": 1}),
        Row("Maxout", (2,), inputs=(X2,), function="maxout", settings={"groups": 2}),
        Row("GLU", function="glu"),
        Row("PReLU", (4,), inputs=(X2,)),
        Row("RReLU", random=True),
    ]


def _linear_and_norm() -> list[Row]:
    return [
        Row("Linear", (6, 3)),
        Row("Linear", (6, 3), kwargs={"bias_attr": False}, tag="no_bias"),
        Row(
            "LoRALinear",
            (Make("Linear", (10, 9)),),
            inputs=((2, 10),),
            paddle="PaddleNLP has it; tests/models/files/test_adapters.py",
        ),
        Row("Embedding", (5, 3), inputs=(ids([0, 4, 2], [1, 1, 3]),)),
        Row("Bilinear", (6, 4, 3), inputs=((2, 6), (2, 4))),
        Row("LayerNorm", (6,)),
        Row("LayerNorm", ([5, 6],), inputs=(X2,), tag="two_dims"),
        Row("RMSNorm", (6,), paddle="PaddlePaddle 3.3 has it in incubate only; the functional is the oracle"),
        Row(
            "MoE",
            (6, 8, 4),
            inputs=((2, 3, 6),),
            kwargs={"bias": True, "gate_bias": True, "shared_hidden": 5, "shared_gate": True},
            paddle="PaddlePaddle has incubate's MoELayer alone; tests/nn/test_experts.py",
        ),
        Row(
            "Router",
            (6, 4),
            inputs=((2, 3, 6),),
            paddle="PaddlePaddle has incubate's gates alone; tests/nn/test_experts.py",
        ),
        Row(
            "ExpertChoiceRouter",
            (6, 4),
            inputs=((2, 3, 6),),
            paddle="PaddlePaddle has fused_ec_moe alone; tests/nn/test_experts.py",
        ),
        Row(
            "HashRouter",
            (4,),
            inputs=(ids([0, 4, 2], [1, 1, 3]),),
            no_grad="nothing is learned, and ids have no gradient",
            paddle="PaddlePaddle has incubate's gates alone; tests/nn/test_experts.py",
        ),
        Row("GroupNorm", (2, 4), inputs=(X2,), terms=64),
        Row("InstanceNorm1D", (4,), inputs=(X1,)),
        Row("InstanceNorm2D", (4,), inputs=(X2,)),
        Row("InstanceNorm3D", (4,), inputs=(X3,), terms=64),
        Row("LocalResponseNorm", (3,), inputs=(X2,)),
        Row("BatchNorm", (4,), inputs=(X2,), terms=64, kwargs={"act": "relu"}),
        Row("BatchNorm1D", (4,), inputs=(X1,)),
        Row("BatchNorm2D", (4,), inputs=(X2,), terms=64),
        Row("BatchNorm2D", (6,), inputs=(X2,), kwargs=NHWC, terms=64, tag="nhwc"),
        Row("BatchNorm3D", (4,), inputs=(X3,), terms=128),
        Row("SyncBatchNorm", (4,), inputs=(X2,), terms=64, paddle="PaddlePaddle has it on GPU only"),
        Row("SpectralNorm", ([4, 5],), inputs=((4, 5),), kwargs={"dim": 1, "power_iters": 2}),
    ]


def _convolution() -> list[Row]:
    return [
        Row("Conv1D", (4, 6, 3), inputs=(X1,), kwargs={"padding": 1}),
        Row("Conv2D", (4, 6, 3), inputs=(X2,), kwargs={"stride": 2, "padding": 1, "groups": 2}),
        Row("Conv2D", (6, 3, (3, 2)), inputs=(X2,), kwargs={"dilation": (1, 2), **NHWC}, tag="nhwc"),
        Row("Conv2D", (4, 3, 3), inputs=(X2,), kwargs={"padding": 1, "padding_mode": "reflect"}, tag="reflect"),
        Row("Conv2D", (4, 3, 3), inputs=(X2,), kwargs={"padding": "SAME", "bias_attr": False}, tag="same"),
        Row("Conv3D", (4, 2, 2), inputs=(X3,)),
        Row("Conv1DTranspose", (4, 3, 3), inputs=(X1,), kwargs={"stride": 2}),
        Row(
            "Conv2DTranspose",
            (4, 6, 3),
            inputs=(X2,),
            kwargs={"stride": 2, "padding": 1, "output_padding": 1, "groups": 2},
        ),
        Row("Conv3DTranspose", (4, 2, 2), inputs=(X3,)),
        Row("Unfold", ([2, 3],), inputs=(X2,), kwargs={"strides": 2, "paddings": 1}),
        Row("Fold", ([4, 5], [2, 2]), inputs=((2, 8, 12),)),
    ]


def _pooling() -> list[Row]:
    where = {1: X1, 2: X2, 3: X3}
    rows = [
        Row(f"{kind}Pool{n}D", (2,), inputs=(where[n],), function=f"{fn}_pool{n}d", settings={"kernel_size": 2})
        for kind, fn in (("Max", "max"), ("Avg", "avg"))
        for n in (1, 2, 3)
    ]
    rows += [
        Row(
            f"Adaptive{kind}Pool{n}D",
            (3,),
            inputs=(where[n],),
            function=f"adaptive_{fn}_pool{n}d",
            settings={"output_size": 3},
        )
        for kind, fn in (("Max", "max"), ("Avg", "avg"))
        for n in (1, 2, 3)
    ]
    return [
        *rows,
        Row("MaxPool2D", (3,), inputs=(X2,), kwargs={"stride": 2, "padding": 1, "return_mask": True}, tag="mask"),
        Row("FractionalMaxPool2D", (3,), inputs=((1, 2, 7, 7),), kwargs={"random_u": 0.6, "return_mask": True}),
        Row("FractionalMaxPool3D", (2,), inputs=((1, 1, 5, 5, 5),), kwargs={"random_u": 0.3}),
        Row("AvgPool2D", (3,), inputs=(X2,), kwargs={"stride": 2, "padding": 1, "ceil_mode": True}, tag="ceil"),
        Row("LPPool1D", (2, 2), inputs=(np.abs(wave(X1, 1)),)),
        Row("LPPool2D", (2, 2), inputs=(np.abs(wave(X2, 1)),)),
        Row("MaxUnPool1D", (2,), inputs=((1, 1, 2), ids([[1, 2]]))),
        Row("MaxUnPool2D", (2,), inputs=((1, 1, 2, 2), ids([[[0, 3], [9, 14]]]))),
        Row("MaxUnPool3D", (2,), inputs=((1, 1, 1, 1, 2), ids([[[[0, 7]]]]))),
    ]


def _padding_and_shape() -> list[Row]:
    where = {1: X1, 2: X2, 3: X3}
    rows = []
    for n in (1, 2, 3):
        rows += [Row(f"Pad{n}D", (1,), inputs=(where[n],), kwargs={"mode": "replicate"})]
        rows += [
            Row(f"{kind}Pad{n}D", (1,), inputs=(where[n],))
            for kind in ("Zero", "Reflection", "Replication", "Circular")
        ]
        rows += [Row(f"ConstantPad{n}D", (1, 0.5), inputs=(where[n],))]
    return [
        *rows,
        Row("Pad2D", ([1, 0, 2, 1],), inputs=(X2,), tag="sides"),
        Row("Identity", ("anything",), kwargs={"at": "all"}),
        Row("Flatten", inputs=(X2,)),
        Row("Unflatten", (1, [2, -1])),
        Row("PixelShuffle", (2,), inputs=(X2,)),
        Row("PixelUnshuffle", (2,), inputs=((2, 3, 4, 6),)),
        Row("ChannelShuffle", (2,), inputs=(X2,)),
        Row("Upsample", inputs=(X2,), kwargs={"scale_factor": 2}),
        Row(
            "Upsample", inputs=(X2,), kwargs={"size": [7, 9], "mode": "bilinear", "align_corners": True}, tag="corners"
        ),
        Row("UpsamplingNearest2D", inputs=(X2,), kwargs={"scale_factor": 2}),
        Row("UpsamplingBilinear2D", inputs=(X2,), kwargs={"size": [7, 9]}),
        Row("CosineSimilarity", inputs=((2, 6), (2, 6))),
        Row("PairwiseDistance", inputs=((2, 6), (2, 6))),
    ]


def _dropout() -> list[Row]:
    return [
        Row("Dropout", (0.5,), random=True),
        Row("Dropout", (0.3,), kwargs={"mode": "downscale_in_infer"}, random=True, tag="downscale"),
        Row("Dropout2D", (0.5,), inputs=(X2,), random=True),
        Row("Dropout3D", (0.5,), inputs=(X3,), random=True),
        Row("AlphaDropout", (0.5,), random=True),
        Row("FeatureAlphaDropout", (0.5,), inputs=(X2,), random=True),
    ]


def _losses() -> list[Row]:
    pair = ((4, 3), (4, 3))
    labels = ids(0, 2, 1, 1)
    probabilities = (unit((4, 3), 1), unit((4, 3), 2))
    return [
        Row("CrossEntropyLoss", inputs=((4, 3), labels)),
        Row(
            "CrossEntropyLoss",
            inputs=((4, 3), ids(0, 2, 1, 7)),
            kwargs={"ignore_index": 7, "reduction": "sum"},
            tag="ignore",
        ),
        Row("CrossEntropyLoss", inputs=((4, 3), labels), kwargs={"label_smoothing": 0.1}, tag="smooth"),
        Row("NLLLoss", inputs=((4, 3), labels), function="nll_loss"),
        Row("MSELoss", ("sum",), inputs=pair, function="mse_loss", settings={"reduction": "sum"}),
        Row("L1Loss", inputs=pair, function="l1_loss"),
        Row("SmoothL1Loss", inputs=pair, kwargs={"delta": 0.5}, function="smooth_l1_loss", settings={"delta": 0.5}),
        Row("BCELoss", inputs=probabilities, function="binary_cross_entropy"),
        Row("BCEWithLogitsLoss", inputs=((4, 3), unit((4, 3), 2)), function="binary_cross_entropy_with_logits"),
        Row(
            "KLDivLoss",
            inputs=probabilities,
            kwargs={"reduction": "none"},
            function="kl_div",
            settings={"reduction": "none"},
        ),
        Row("MarginRankingLoss", inputs=((4,), (4,), SIGNS), kwargs={"margin": 0.2}),
        Row("HingeEmbeddingLoss", inputs=((4,), SIGNS)),
        Row("CosineEmbeddingLoss", inputs=((4, 3), (4, 3), SIGNS), kwargs={"margin": 0.1}),
        Row("SoftMarginLoss", inputs=((4,), SIGNS)),
        Row("MultiLabelSoftMarginLoss", inputs=((2, 3), np.array([[1, 0, 1], [0, 0, 1]], np.float32))),
        Row("TripletMarginLoss", inputs=((4, 3),) * 3, kwargs={"swap": True}),
        Row("TripletMarginWithDistanceLoss", inputs=((4, 3),) * 3),
        Row("MultiMarginLoss", inputs=((2, 3), ids(2, 0)), kwargs={"p": 2, "margin": 0.7}),
        Row("MultiLabelMarginLoss", inputs=((2, 3), np.array([[2, 0, -1], [1, -1, 0]]))),
        Row(
            "HSigmoidLoss",
            (3, 5),
            inputs=((4, 3), ids(0, 1, 4, 3)),
            paddle="it adds log 2 for a step that a path lacks",
        ),
        Row(
            "AdaptiveLogSoftmaxWithLoss",
            (4, 8, [3, 5]),
            inputs=((5, 4), ids(0, 3, 6, 7, 2)),
            kwargs={"div_value": 2.0},
            paddle="its tail weights are no parameters",
        ),
        Row("CTCLoss", inputs=((4, 2, 3), np.int32([[1, 1], [2, 0]]), ids(4, 3), ids(2, 1)), function="ctc_loss"),
        Row(
            "RNNTLoss", inputs=((2, 3, 3, 3), np.int32([[1, 2], [2, 1]]), np.int32([3, 2]), np.int32([2, 1])), terms=64
        ),
        Row("PoissonNLLLoss", inputs=pair),
        Row("GaussianNLLLoss", inputs=((4, 3), (4, 3), unit((4, 3), 3))),
    ]


def _attention() -> list[Row]:
    x, y = (2, 3, 8), (2, 5, 8)
    keep = np.array([[True, False, False], [True, True, False], [True, True, True]])
    return [
        Row("MultiHeadAttention", (8, 2), inputs=(x,), terms=64),
        Row("MultiHeadAttention", (8, 2), inputs=(x, x, x, keep), terms=64, tag="mask"),
        Row("MultiHeadAttention", (8, 2), kwargs={"need_weights": True}, inputs=(x,), terms=64, tag="weights"),
        Row(
            "MultiHeadAttention",
            (8, 2),
            kwargs={"kdim": 6, "vdim": 4},
            inputs=(x, (2, 5, 6), (2, 5, 4)),
            terms=64,
            tag="widths",
        ),
        Row("TransformerEncoderLayer", (8, 2, 16), (x,), kwargs={"dropout": 0.0}, terms=256),
        Row(
            "TransformerEncoder",
            (
                Make(
                    "TransformerEncoderLayer",
                    (8, 2, 16),
                    {"dropout": 0.0, "normalize_before": True, "activation": "gelu"},
                ),
                2,
            ),
            inputs=(x, keep),
            kwargs={"norm": Make("LayerNorm", (8,))},
            terms=512,
        ),
        Row("TransformerDecoderLayer", (8, 2, 16), inputs=(x, y), kwargs={"dropout": 0.0}, terms=256),
        Row(
            "TransformerDecoder",
            (Make("TransformerDecoderLayer", (8, 2, 16), {"dropout": 0.0, "normalize_before": True}), 2),
            inputs=(x, y, keep),
            terms=512,
        ),
        Row("Transformer", (8, 2, 1, 1, 16), inputs=(y, x), kwargs={"dropout": 0.0}, terms=512),
    ]


def _recurrent() -> list[Row]:
    x, h = (2, 4, 3), (2, 5)
    return [
        Row("SimpleRNNCell", (3, 5), inputs=((2, 3), h), kwargs={"activation": "relu"}),
        Row("LSTMCell", (3, 5), inputs=((2, 3),)),
        Row("GRUCell", (3, 5), inputs=((2, 3), h)),
        Row("RNN", (Make("LSTMCell", (3, 5)),), inputs=(x,), kwargs={"is_reverse": True}, terms=256),
        Row("BiRNN", (Make("GRUCell", (3, 5)), Make("SimpleRNNCell", (3, 5))), inputs=(x,), terms=256),
        Row("SimpleRNN", (3, 5), inputs=(x, (1, 2, 5)), kwargs={"activation": "relu"}, terms=256),
        Row("LSTM", (3, 5, 2, "bidirect"), inputs=(x,), kwargs={"time_major": True}, terms=512),
        Row("GRU", (3, 5, 2), inputs=(x, (2, 2, 5)), terms=512),
    ]


def _containers() -> list[Row]:
    return [
        Row("Sequential", (Make("Linear", (6, 4)), Make("ReLU"), Make("Linear", (4, 2)))),
        Row("Sequential", (("up", Make("Linear", (6, 4))), ("act", Make("Tanh"))), tag="named"),
    ]


ROWS: list[Row] = [
    *_activations(), *_linear_and_norm(), *_convolution(), *_pooling(), *_padding_and_shape(), *_dropout(), *_losses(),
    *_attention(), *_recurrent(), *_containers(),
]  # fmt: skip


def build(row: Row | Make, nn: Any) -> Any:
    """The layer of a row, of any framework whose nn namespace has it."""
    return getattr(nn, row.name)(*_made(row.args, nn), **{k: _made(v, nn) for k, v in row.kwargs.items()})


def _made(value: Any, nn: Any) -> Any:
    if isinstance(value, Make):
        return build(value, nn)
    return type(value)(_made(v, nn) for v in value) if isinstance(value, (tuple, list)) else value
