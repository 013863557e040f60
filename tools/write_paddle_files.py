"""Writes tests/paddle_files with PaddlePaddle: what its save and load have to agree on with ours.

Run in environments of their own: python tools/write_paddle_files.py states (paddlepaddle==3.3.1, numpy==2.2.6) and
python tools/write_paddle_files.py models (3.3.1, which writes .json; and paddlepaddle==2.6.2, numpy==1.26.4: .pdmodel),
python tools/write_paddle_files.py published "$(polyreme models fetch pp-ocrv4)" (3.3.1 again).
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from pathlib import Path

import numpy as np
import paddle
from paddle.base.proto import framework_pb2
from PIL import Image, ImageDraw, ImageFont

FOLDER = Path(__file__).parent.parent / "tests" / "paddle_files"
# PaddlePaddle 3 leaves increment out of what it saves, and writes programs as JSON
SUFFIX = "_3" if paddle.__version__.startswith("3") else ""
DTYPES = ("float16", "bfloat16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool", "complex64",
          "complex128")  # fmt: skip


def numbered(layer: paddle.nn.Layer) -> paddle.nn.Layer:
    """The Layer with parameters and statistics of known values: 0, 0.25, 0.5, ..."""
    start = 0
    for tensor in layer.state_dict().values():
        count = int(np.prod(tensor.shape))
        tensor.set_value((np.arange(start, start + count, dtype=np.float32) / 4).reshape(tensor.shape))
        start += count
    return layer


def write_states() -> None:
    """State dicts of a Layer and an optimizer, every dtype, nested values, and a Tensor as a record."""
    net = numbered(paddle.nn.Sequential(paddle.nn.Linear(2, 3), paddle.nn.BatchNorm1D(3)))
    for protocol in (2, 3, 4):
        paddle.save(net.state_dict(), str(FOLDER / f"state_{protocol}.pdparams"), protocol=protocol)
    schedule = paddle.optimizer.lr.StepDecay(0.5, 3)
    optimizer = paddle.optimizer.Adam(schedule, parameters=net.parameters())
    net(paddle.to_tensor([[1.0, 2.0], [3.0, 5.0]])).square().sum().backward()
    optimizer.step()
    schedule.step()
    paddle.save(optimizer.state_dict(), str(FOLDER / "adam.pdopt"))
    tensors = {name: paddle.to_tensor([0.0, 1.0, 2.0]).cast(name) for name in DTYPES}
    paddle.save(tensors, str(FOLDER / "dtypes.pdparams"))
    nested = {
        "model": OrderedDict(numbered(net).state_dict()),
        "pairs": [(tensors["bfloat16"], 3), np.arange(2)],
        "epoch": 7,
        "name": "x",
        "rate": np.float32(0.5),
        "none": None,
    }
    paddle.save(nested, str(FOLDER / "nested.pdparams"))
    paddle.save(tensors["float32"], str(FOLDER / "record.pdtensor"), use_binary_format=True)
    dense = paddle.base.core.DenseTensor()
    dense.set(np.ones((2, 2), np.float32), paddle.CPUPlace())
    paddle.save([dense], str(FOLDER / "dense.pdtensor"))


class Images(paddle.nn.Layer):
    """What networks over images are made of; gives one output a part."""

    def __init__(self) -> None:
        super().__init__()
        nn = paddle.nn
        self.stem = nn.Sequential(nn.Conv2D(3, 8, 3, 2, 1, bias_attr=False), nn.BatchNorm2D(8), nn.Hardswish())
        self.deep = nn.Sequential(nn.Conv2D(8, 8, 3, padding="SAME", groups=8), nn.PReLU(8), nn.Conv2D(8, 8, 1))
        self.gate = nn.Sequential(nn.AdaptiveAvgPool2D(1), nn.Conv2D(8, 8, 1), nn.Hardsigmoid())
        self.up = nn.Conv2DTranspose(8, 4, 2, 2)
        self.uneven = nn.Conv2DTranspose(8, 4, 3, 2, padding=1, output_padding=1, groups=2)
        self.groups, self.instance = nn.GroupNorm(2, 8), nn.InstanceNorm2D(8)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        f = paddle.nn.functional
        x = self.stem(x)
        x = x + self.deep(x) * self.gate(x)
        padded = f.pad(x, [1, 2, 0, 1], mode="reflect")
        pools = [
            f.max_pool2d(padded, 3, 2, 1, ceil_mode=True), f.avg_pool2d(x, 3, 2, 1, exclusive=True),
            f.avg_pool2d(x, 2, 2, exclusive=False), f.adaptive_max_pool2d(x, 2),
        ]  # fmt: skip
        sizes = [
            f.interpolate(x, scale_factor=2, mode="nearest"), f.interpolate(x, size=[5, 7], mode="bilinear"),
            f.interpolate(x, scale_factor=1.5, mode="bilinear", align_corners=True),
            f.interpolate(x, size=[9, 9], mode="bicubic"), f.pixel_shuffle(x, 2),
        ]  # fmt: skip
        rows = paddle.flatten(f.adaptive_avg_pool2d(x, 1), 1)
        probabilities = f.softmax(self.head(rows))
        cut = paddle.concat([self.up(x), f.interpolate(x, size=self.up(x).shape[2:], mode="nearest")], 1)
        normal = [self.groups(x), self.instance(x)]
        acts = [
            f.leaky_relu(x, 0.1),
            f.elu(x),
            f.gelu(x),
            f.gelu(x, True),
            f.relu6(x),
            f.swish(x),
            f.mish(x),
            f.silu(x),
        ]
        normal.append(f.normalize(x, axis=1))
        acts += [f.softplus(x), f.hardtanh(x), f.selu(x), f.softshrink(x), f.hardshrink(x), f.log_sigmoid(x)]
        return [probabilities, cut, self.uneven(x), *pools, *sizes, *normal, *acts, f.sigmoid(x), f.tanh(x)]


class Text(paddle.nn.Layer):
    """What networks over text are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.table = paddle.nn.Embedding(11, 8, padding_idx=0)
        self.block = paddle.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1)
        self.norm, self.head = paddle.nn.LayerNorm(8), paddle.nn.Linear(8, 3)

    def forward(self, ids):
        x = self.table(ids)
        x = self.norm(self.block(x))
        batch, length = paddle.shape(x)[0], paddle.shape(x)[1]
        heads = x.reshape([batch, length, 2, 4]).transpose([0, 2, 1, 3])
        scores = paddle.matmul(heads, heads, transpose_y=True) * 0.5
        triangle = paddle.tril(paddle.ones([4, 4]))
        scores = scores + (1 - triangle) * -1e4
        mixed = paddle.matmul(paddle.nn.functional.softmax(scores), heads)
        back = mixed.transpose([0, 2, 1, 3]).flatten(2)
        place = paddle.arange(0, length, dtype="int64")
        later = paddle.cast(paddle.unsqueeze(place, 0), "float32") * paddle.ones([batch, 1])
        return [self.head(back), later, x[:, 0], x[:, -1, 2:6:2], paddle.argmax(x, -1), ids == 3]


def numbers(x, y):
    """Calls of functions of numbers: those that PaddlePaddle saves are saved."""
    p, f, n = paddle, paddle.nn.functional, paddle.abs(x) + 0.5
    calls = []
    calls += [lambda: p.exp(x), lambda: p.log(n), lambda: p.sqrt(n), lambda: p.rsqrt(n), lambda: p.floor(x)]
    calls += [lambda: p.ceil(x), lambda: p.round(x), lambda: p.sin(x), lambda: p.cos(x), lambda: p.erf(x)]
    calls += [lambda: p.square(x), lambda: p.sign(x), lambda: p.reciprocal(n), lambda: p.abs(x)]
    calls += [lambda: p.log1p(n), lambda: p.log2(n), lambda: p.tan(x), lambda: p.atan(x), lambda: x + y]
    calls += [lambda: x - y, lambda: x * y, lambda: x / n, lambda: p.maximum(x, y), lambda: p.minimum(x, y)]
    calls += [lambda: n**2.5, lambda: p.pow(n, y), lambda: x.mod(n), lambda: p.floor_divide(x, n)]
    calls += [lambda: x * 3 + 1, lambda: (x + 1) * 3, lambda: p.clip(x, -0.5, 0.5), lambda: x.cast("int32")]
    calls += [lambda: x > y, lambda: x <= y, lambda: x == y, lambda: p.logical_and(x > 0, y > 0)]
    calls += [lambda: x.sum(), lambda: x.sum(1), lambda: x.mean([0, 2], keepdim=True), lambda: x.max(-1)]
    calls += [lambda: x.min(0), lambda: x.prod(1), lambda: (x > 0).all(), lambda: (x > 0).any(1)]
    calls += [lambda: p.logsumexp(x, 1), lambda: p.norm(x, 2, 1), lambda: p.norm(x, 1, 0)]
    calls += [lambda: p.cumsum(x, 1), lambda: p.argmin(x, 0), lambda: [*p.topk(x, 2, 1)], lambda: p.sort(x, 1)]
    calls += [lambda: p.argsort(x, 2, descending=True), lambda: f.log_softmax(x, 1), lambda: [*p.split(x, 2, 2)]]
    calls += [lambda: [*p.split(x, [1, -1], 1)], lambda: p.stack([x, y]), lambda: [*p.unbind(x, 0)]]
    calls += [lambda: p.concat([x, y], -1), lambda: x.squeeze(), lambda: x.unsqueeze([0, 2])]
    calls += [lambda: x.expand([2, 2, 3, 4]), lambda: p.tile(x, [2, 1, 1]), lambda: p.flip(x, [1])]
    calls += [lambda: p.roll(x, 1, 2), lambda: x[:, 1:, ::2], lambda: x[1], lambda: x[:, -1]]
    calls += [lambda: p.strided_slice(x, [2], [3], [0], [-2]), lambda: x.reshape([0, -1]), lambda: p.numel(x)]
    calls += [lambda: p.gather(x, p.to_tensor([1, 0, 1])), lambda: p.index_select(x, p.to_tensor([2, 0]), 1)]
    calls += [lambda: p.where(x > y, x, y), lambda: p.gather_nd(x, p.to_tensor([[0, 1], [1, 2]]))]
    calls += [lambda: p.take_along_axis(x, p.argsort(x, 1), 1), lambda: p.zeros_like(x)]
    calls += [lambda: p.full_like(x, 2.5), lambda: p.ones([2, 3], "int64"), lambda: p.eye(3)]
    calls += [lambda: p.linspace(0, 1, 5), lambda: p.arange(3), lambda: f.one_hot(p.to_tensor([1, 0, 3]), 4)]
    calls += [lambda: p.add_n([x, y, n]), lambda: p.bmm(x, y.transpose([0, 2, 1])), lambda: p.triu(x)]
    calls += [lambda: f.pad(x.unsqueeze(0), [1, 1, 2, 0], value=7.0), lambda: p.isnan(x / (n * 0))]
    calls += [lambda: x.sum() if SUFFIX else p.increment(x.sum()), lambda: [*p.meshgrid(x[0, 0], y[0, :, 0])]]
    calls += [lambda: p.scatter(x[0], p.to_tensor([1, 0]), y[0, :2])]
    rows = [[1, 0, 2, 1], [0, 0, 2, 1]]
    index, square = paddle.to_tensor([rows, rows]), paddle.matmul(x[0], y[0], transpose_y=True)
    calls += [lambda: p.trunc(x), lambda: p.cumprod(x, 1), lambda: p.put_along_axis(x, index, 1.0, 1)]
    calls += [lambda: p.scatter_nd_add(x[0], p.to_tensor([[1], [0]]), y[0, :2]), lambda: p.diagonal(square)]
    calls += [lambda: p.trace(square), lambda: f.pixel_unshuffle(x.reshape([1, 1, 4, 6]), 2), lambda: p.isclose(x, y)]
    calls += [lambda: p.repeat_interleave(x, 2, 1), lambda: p.kron(x[0], y[0]), lambda: p.lgamma(n)]
    calls += [lambda: p.expand_as(x[:1], x), lambda: p.atan2(x, y), lambda: p.fmax(x, y), lambda: p.logical_not(x > 0)]
    calls += [lambda: p.index_sample(x[0], p.to_tensor([[0, 1], [2, 3], [1, 1]])), lambda: f.celu(x, 0.7)]
    calls += [lambda: f.thresholded_relu(x), lambda: f.softsign(x), lambda: f.tanhshrink(x), lambda: x != y]
    calls += [
        lambda: p.dot(x[0, 0], y[0, 0]),
        lambda: p.mv(x[0], y[0, 0]),
        lambda: p.addmm(square, square, square, 0.5, 2.0),
    ]
    calls += [
        lambda: p.unstack(x, 1),
        lambda: p.diag(x[0, 0]),
        lambda: p.cumsum(x),
        lambda: p.mean(x),
        lambda: p.clip(x, 0.0),
    ]
    calls += [
        lambda: p.crop(x, [1, 2, 2], [0, 1, 1]),
        lambda: f.maxout(x.reshape([1, 4, 2, 3]), 2),
        lambda: p.var(x, 1),
    ]
    calls += [lambda: f.fold(x.reshape([1, 4, 6]), [3, 4], [2, 2]), lambda: p.outer(x[0, 0], y[0, 0]), lambda: p.std(x)]
    calls += [lambda: p.logit(p.nn.functional.sigmoid(x)), lambda: f.label_smooth(n)]
    calls += [lambda: p.linalg.inv(square + 3 * p.eye(3)), lambda: p.searchsorted(p.sort(x[0, 0]), y[0, 0])]
    calls += [
        lambda: p.allclose(x, y),
        lambda: p.index_add(x, p.to_tensor([1, 0]), 1, y[:, :2]),
        lambda: p.remainder(x, n),
    ]
    outs = []
    for call in calls:
        try:
            result = call()
        except (TypeError, AttributeError, ValueError, RuntimeError, NotImplementedError) as error:
            print("left out:", str(error).strip().splitlines()[-1][:90])
            continue
        outs += result if isinstance(result, list | tuple) else [result]
    copied = x + 0
    outs.append(p.static.setitem(copied, (slice(None), slice(1, 3), 0), 5.0))
    return outs


def write_numbers(inputs: list) -> None:
    """The program of `numbers`, built in static mode."""
    paddle.enable_static()
    main, startup = paddle.static.Program(), paddle.static.Program()
    with paddle.static.program_guard(main, startup):
        feeds = [paddle.static.data(n, a.shape, "float32") for n, a in zip("xy", inputs, strict=True)]
        weight = paddle.static.create_parameter([4], "float32", default_initializer=paddle.nn.initializer.Constant(3))
        outs = [*numbers(*feeds), feeds[0] * weight]
        executor = paddle.static.Executor()
        executor.run(startup)
        paddle.static.save_inference_model(str(FOLDER / f"numbers{SUFFIX}"), feeds, outs, executor)
        values = executor.run(main, feed=dict(zip("xy", inputs, strict=True)), fetch_list=outs)
    paddle.disable_static()
    if not SUFFIX:
        without_call_stacks(FOLDER / "numbers.pdmodel")
    arrays = {f"in_{n}": a for n, a in zip("xy", inputs, strict=True)}
    np.savez_compressed(FOLDER / f"numbers{SUFFIX}.npz", **arrays, **{f"out_{i}": a for i, a in enumerate(values)})


class Boxes(paddle.nn.Layer):
    """What detectors are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.offsets = paddle.nn.Conv2D(3, 21, 1), paddle.nn.Conv2D(3, 18, 3, padding=1)
        self.bent = paddle.vision.ops.DeformConv2D(3, 4, 3, padding=1)

    def forward(self, x, size, boxes, count):
        ops, f = paddle.vision.ops, paddle.nn.functional
        y = self.head(x)
        outs = [*ops.yolo_box(y, size, [10, 13, 16, 30, 33, 23], 2, 0.01, 32, True)]
        outs += [ops.roi_align(x, boxes, count, 2), ops.roi_pool(x, boxes, count, 2)]
        priors, variances = ops.prior_box(y, x, [4.0, 8.0], aspect_ratios=[1.0, 2.0], flip=True)
        outs += [priors, variances, self.bent(x, self.offsets(x) * 0.1)]
        rows, spread = priors.reshape([-1, 4])[:4], [0.1, 0.1, 0.2, 0.2]
        outs.append(ops.box_coder(rows, spread, paddle.ones([1, 4, 4]), "decode_center_size"))
        turn = paddle.to_tensor([[[1.0, 0.1, 0.0], [0.0, 1.0, 0.2]]])
        outs.append(f.grid_sample(x, f.affine_grid(turn, [1, 3, 5, 5])))
        outs += [f.unfold(x, 3, 1, 1), f.channel_shuffle(y, 3), paddle.einsum("nchw,ndhw->ncd", x, x)]
        return outs


class Steps(paddle.nn.Layer):
    """Recurrent layers over a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = paddle.nn.LSTM(3, 4, 2, direction="bidirect")
        self.gru, self.plain = paddle.nn.GRU(3, 4), paddle.nn.SimpleRNN(3, 4, activation="relu")

    def forward(self, x):
        outputs, (h, c) = self.lstm(x)
        return [outputs, h, c, *self.gru(x), *self.plain(x)]


class Loops(paddle.nn.Layer):
    """Loops and branches that depend on what is fed, and one whose length is known."""

    def __init__(self) -> None:
        super().__init__()
        self.step = paddle.nn.Linear(3, 3)

    def forward(self, x, count):
        for _ in range(2):
            x = x + 0.5
        place = paddle.zeros([], "int64")
        while place < count:
            x = self.step(x)
            if x.mean() > 0:
                x = x * 0.5
            place = place + 1
        if x.sum() > 1.0:
            y = x * 2
        else:
            y = x - 1
        return [y, place]


def write_models() -> None:
    """Layers saved for inference as programs of protocol buffers, what they are fed, and what
    PaddlePaddle's own predictor gives."""
    rng = np.random.default_rng(0)
    spec, floats = paddle.static.InputSpec, lambda *shape: rng.standard_normal(shape).astype(np.float32)
    models = {
        "images": (Images(), [spec([-1, 3, -1, -1], "float32", "x")], [floats(1, 3, 7, 8)]),
        "text": (Text(), [spec([-1, 4], "int64", "ids")], [rng.integers(0, 11, (3, 4))]),
        "boxes": (
            Boxes(),
            [
                spec([1, 3, 6, 6], "float32", "x"),
                spec([1, 2], "int32", "size"),
                spec([2, 4], "float32", "boxes"),
                spec([1], "int32", "count"),
            ],
            [
                floats(1, 3, 6, 6),
                np.array([[96, 128]], np.int32),
                np.array([[0.5, 1, 4, 5], [1, 0, 3.2, 5.5]], np.float32),
                np.array([2], np.int32),
            ],
        ),
        "loops": (
            Loops(),
            [spec([2, 3], "float32", "x"), spec([], "int64", "count")],
            [floats(2, 3), np.array(3)],
        ),
        "steps": (Steps(), [spec([2, 5, 3], "float32", "x")], [floats(2, 5, 3)]),
    }
    for name, (layer, specs, inputs) in models.items():
        paddle.seed(1)
        layer.eval()
        for tensor in layer.state_dict().values():
            values = rng.standard_normal(tensor.shape).astype(np.float32) * 0.4
            tensor.set_value(
                np.abs(values) + 0.5 if "_variance" in tensor.name or tensor.name.endswith("w_2") else values
            )
        paddle.jit.save(layer, str(FOLDER / f"{name}{SUFFIX}"), specs)
        write_outputs(f"{name}{SUFFIX}", inputs)
    write_numbers([floats(2, 3, 4), floats(2, 3, 4)])


def without_call_stacks(path: Path) -> None:
    """Take out what says where on this machine an operation was written."""
    program = framework_pb2.ProgramDesc.FromString(path.read_bytes())
    for block in program.blocks:
        for op in block.ops:
            for attribute in [a for a in op.attrs if a.name == "op_callstack"]:
                op.attrs.remove(attribute)
    path.write_bytes(program.SerializeToString())


def write_outputs(name: str, inputs: list) -> None:
    """NAME.npz: what the program is fed and gives."""
    path = str(FOLDER / name)
    if not SUFFIX:
        without_call_stacks(FOLDER / f"{name}.pdmodel")
    Path(f"{path}.pdiparams.info").unlink(missing_ok=True)
    config = paddle.inference.Config(f"{path}.{'json' if SUFFIX else 'pdmodel'}", f"{path}.pdiparams")
    config.disable_gpu()
    config.disable_mkldnn()
    config.switch_ir_optim(False)
    predictor = paddle.inference.create_predictor(config)
    for handle, array in zip(predictor.get_input_names(), inputs, strict=True):
        predictor.get_input_handle(handle).copy_from_cpu(array)
    predictor.run()
    outputs = [predictor.get_output_handle(n).copy_to_cpu() for n in predictor.get_output_names()]
    arrays = {f"in_{n}": a for n, a in zip(predictor.get_input_names(), inputs, strict=True)}
    arrays |= {f"out_{i}": a for i, a in enumerate(outputs)}
    np.savez_compressed(FOLDER / f"{name}.npz", **arrays)


def write_published() -> None:
    """What PaddlePaddle's predictor gives for the models of `polyreme models fetch pp-ocrv4`, and a line of text as an
    image. Some numbers of every output, as the whole would be large."""
    rng = np.random.default_rng(0)
    picture = Image.new("L", (300, 48), 255)
    ImageDraw.Draw(picture).text((8, 4), "PADDLE 2026", fill=0, font=ImageFont.load_default(36))
    line = np.asarray(picture, np.uint8)
    arrays = {"line": line}
    as_input = np.repeat(line[None, None].astype(np.float32) / 127.5 - 1, 3, 1)
    shapes = {"ch_PP-OCRv4_det_infer": (1, 3, 96, 160), "ch_ppocr_mobile_v2_cls_infer": (3, 3, 48, 192)}
    inputs = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    for name, array in {**inputs, "ch_PP-OCRv4_rec_infer": as_input}.items():
        folder = Path(sys.argv[2]) / "models" / name / "inference"
        config = paddle.inference.Config(f"{folder}.pdmodel", f"{folder}.pdiparams")
        config.disable_gpu()
        predictor = paddle.inference.create_predictor(config)
        predictor.get_input_handle(predictor.get_input_names()[0]).copy_from_cpu(array)
        predictor.run()
        output = predictor.get_output_handle(predictor.get_output_names()[0]).copy_to_cpu()
        arrays |= {f"{name}.shape": np.array(output.shape), f"{name}.some": output.reshape(-1)[::97][:2000]}
        if name == "ch_PP-OCRv4_rec_infer":
            arrays[f"{name}.best"] = output.argmax(-1)
    np.savez_compressed(FOLDER / "published.npz", **arrays)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    {"states": write_states, "models": write_models, "published": write_published}[sys.argv[1]]()
