"""Reads text lines: a CRNN with bidirectional LSTMs, CTC, a decoder by a character table, edit distance."""

import os
import tempfile

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import ParamAttr, nn
from paddle.regularizer import L2Decay

CHARACTERS = ["blank", *"abcde"]


class ConvBNLayer(nn.Layer):
    def __init__(self, in_channels, out_channels, stride, act="hardswish", name=None):
        super().__init__()
        self.conv = nn.Conv2D(
            in_channels,
            out_channels,
            3,
            stride,
            padding=1,
            weight_attr=ParamAttr(name=f"{name}_weights"),
            bias_attr=False,
        )
        self.bn = nn.BatchNorm(
            num_channels=out_channels,
            act=None,
            param_attr=ParamAttr(name=f"{name}_bn_scale", regularizer=L2Decay(0.0)),
            bias_attr=ParamAttr(name=f"{name}_bn_offset", regularizer=L2Decay(0.0)),
            moving_mean_name=f"{name}_bn_mean",
            moving_variance_name=f"{name}_bn_variance",
        )
        self.act = act

    def forward(self, x):
        x = self.bn(self.conv(x))
        return F.hardswish(x) if self.act == "hardswish" else F.relu(x)


class Im2Seq(nn.Layer):
    def __init__(self, in_channels):
        super().__init__()
        self.out_channels = in_channels

    def forward(self, x):
        assert x.shape[2] == 1
        return x.squeeze(axis=2).transpose([0, 2, 1])


class EncoderWithRNN(nn.Layer):
    def __init__(self, in_channels, hidden_size):
        super().__init__()
        self.out_channels = hidden_size * 2
        self.lstm = nn.LSTM(in_channels, hidden_size, direction="bidirectional", num_layers=2)

    def forward(self, x):
        return self.lstm(x)[0]


class CTCHead(nn.Layer):
    def __init__(self, in_channels, out_channels, fc_decay=4e-4):
        super().__init__()
        bound = 1.0 / np.sqrt(in_channels)
        attrs = [
            ParamAttr(regularizer=L2Decay(fc_decay), initializer=nn.initializer.Uniform(-bound, bound), name=name)
            for name in ("ctc_fc_w_attr", "ctc_fc_b_attr")
        ]
        self.fc = nn.Linear(in_channels, out_channels, weight_attr=attrs[0], bias_attr=attrs[1])

    def forward(self, x):
        predicts = self.fc(x)
        return predicts if self.training else F.softmax(predicts, axis=2)


class CRNN(nn.Layer):
    def __init__(self, width=8, hidden=8):
        super().__init__()
        self.backbone = nn.Sequential(
            ConvBNLayer(1, width, stride=(2, 1), name="conv1"),
            ConvBNLayer(width, width, stride=2, act="relu", name="conv2"),
            nn.MaxPool2D(kernel_size=2, stride=(2, 1), padding=0),
        )
        self.reshape = Im2Seq(width)
        self.encoder = EncoderWithRNN(self.reshape.out_channels, hidden)
        self.head = CTCHead(self.encoder.out_channels, len(CHARACTERS))

    def forward(self, x):
        return self.head(self.encoder(self.reshape(self.backbone(x))))


class CTCLoss(nn.Layer):
    def __init__(self, use_focal_loss=False):
        super().__init__()
        self.loss_func = nn.CTCLoss(blank=0, reduction="none")
        self.use_focal_loss = use_focal_loss

    def forward(self, predicts, batch):
        predicts = predicts.transpose((1, 0, 2))
        steps, batch_size, _ = predicts.shape
        lengths = paddle.to_tensor([steps] * batch_size, dtype="int64")
        loss = self.loss_func(predicts, batch[1].astype("int32"), lengths, batch[2].astype("int64"))
        if self.use_focal_loss:
            loss = loss * paddle.square(1 - paddle.exp(-loss))
        return {"loss": loss.mean()}


class CTCLabelDecode:
    def __call__(self, predicts):
        predicts = predicts.numpy() if isinstance(predicts, paddle.Tensor) else predicts
        index, probability = predicts.argmax(axis=2), predicts.max(axis=2)
        result = []
        for row, confidence in zip(index, probability):
            selection = np.ones(len(row), dtype=bool)
            selection[1:] = row[1:] != row[:-1]
            selection &= row != 0
            scores = confidence[selection] if selection.any() else [0]
            result.append(("".join(CHARACTERS[i] for i in row[selection]), float(np.mean(scores))))
        return result


def distance(first, second):
    row = list(range(len(second) + 1))
    for i, a in enumerate(first, 1):
        above, row[0] = row[0], i
        for j, b in enumerate(second, 1):
            above, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, above + (a != b))
    return row[-1]


model = CRNN()
rng = np.random.RandomState(5)
for name, parameter in model.named_parameters():
    if not parameter.stop_gradient:
        base = 1.0 if name.endswith("bn.weight") else 0.0
        parameter.set_value((base + 0.3 * rng.randn(*parameter.shape)).astype("float32"))
names = [name for name, _ in model.encoder.named_parameters()]
print("lstm", names[:2], len(names), model.head.fc.weight.name)
images = paddle.to_tensor(rng.rand(3, 1, 8, 16).astype("float32"))
batch = [images, paddle.to_tensor([[1, 2, 0], [3, 3, 4], [5, 0, 0]]), paddle.to_tensor([2, 3, 1])]
schedule = paddle.optimizer.lr.OneCycleLR(max_learning_rate=0.05, total_steps=8, phase_pct=0.3)
optimizer = paddle.optimizer.Adam(
    schedule, parameters=[p for p in model.parameters() if p.trainable], weight_decay=L2Decay(1e-5)
)
for use_focal_loss in (False, True):
    criterion = CTCLoss(use_focal_loss)
    for _ in range(3):
        loss = criterion(model(batch[0]), batch)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        schedule.step()
        print(f"focal {use_focal_loss} loss {loss.item():.3f} lr {optimizer.get_lr():.5f}")

model.eval()
said = CTCLabelDecode()(model(images))
truths = ["".join(CHARACTERS[i] for i in row[:n]) for row, n in zip(batch[1].tolist(), batch[2].tolist())]
print("read", [text for text, _ in said], "distance", [distance(a, b) for (a, _), b in zip(said, truths)])
print("confidence", *(f"{score:.2f}" for _, score in said))
with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "backbone")
    spec = paddle.static.InputSpec(shape=[None, 1, 8, None], dtype="float32")
    paddle.jit.save(paddle.jit.to_static(model.backbone, input_spec=[spec]), path)
    served = paddle.jit.load(path)
    served.eval()
    for width in (16, 11):
        line = images[:2, :, :, :width]
        features = served(line)
        print("served", features.shape, bool(paddle.allclose(features, model.backbone(line), atol=1e-5)))
