"""ResNet-vd for images: strided shortcuts by average pooling, label smoothing, an average of weights, folded norms."""

import copy

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import ParamAttr, nn
from paddle.nn import AdaptiveAvgPool2D, AvgPool2D, BatchNorm, Conv2D, Linear, MaxPool2D
from paddle.nn.initializer import KaimingNormal, Uniform
from paddle.regularizer import L2Decay


class ConvBNLayer(nn.Layer):
    def __init__(self, in_channels, out_channels, kernel_size, stride=1, is_vd_mode=False, act=None):
        super().__init__()
        self.is_vd_mode = is_vd_mode
        self.pool = AvgPool2D(kernel_size=2, stride=2, padding="SAME", ceil_mode=True)
        self.conv = Conv2D(
            in_channels,
            out_channels,
            kernel_size,
            stride=1 if is_vd_mode else stride,
            padding=(kernel_size - 1) // 2,
            weight_attr=ParamAttr(initializer=KaimingNormal()),
            bias_attr=False,
        )
        self.norm = BatchNorm(
            out_channels,
            param_attr=ParamAttr(regularizer=L2Decay(0.0)),
            bias_attr=ParamAttr(regularizer=L2Decay(0.0)),
            data_layout="NCHW",
        )
        self.act = nn.ReLU() if act == "relu" else None

    def forward(self, x):
        if self.is_vd_mode:
            x = self.pool(x)
        x = self.norm(self.conv(x))
        return x if self.act is None else self.act(x)

    def folded(self):
        """The weight and bias of one convolution that does what convolution and norm do."""
        scale = self.norm.weight / paddle.sqrt(self.norm._variance + self.norm._epsilon)
        bias = self.norm.bias - self.norm._mean * scale
        return self.conv.weight * scale.reshape([-1, 1, 1, 1]), bias


class BasicBlock(nn.Layer):
    def __init__(self, in_channels, out_channels, stride, shortcut=True):
        super().__init__()
        self.conv0 = ConvBNLayer(in_channels, out_channels, 3, stride, act="relu")
        self.conv1 = ConvBNLayer(out_channels, out_channels, 3)
        if not shortcut:
            self.short = ConvBNLayer(in_channels, out_channels, 1, stride, is_vd_mode=stride == 2)
        self.shortcut = shortcut

    def forward(self, x):
        return F.relu(paddle.add(self.conv1(self.conv0(x)), x if self.shortcut else self.short(x)))


class ResNetVd(nn.Layer):
    def __init__(self, class_num=4, width=8):
        super().__init__()
        self.stem = nn.Sequential(ConvBNLayer(3, width, 3, 2, act="relu"), MaxPool2D(3, stride=2, padding=1))
        self.blocks = nn.LayerList()
        for stage, channels in enumerate((width, 2 * width)):
            source = width if stage == 0 else channels // 2
            block = BasicBlock(source, channels, stride=2 if stage else 1, shortcut=False)
            self.blocks.append(self.add_sublayer(f"bb_{stage}_0", block))
        self.avg_pool = AdaptiveAvgPool2D(1, data_format="NCHW")
        bound = 1.0 / np.sqrt(2 * width)
        self.fc = Linear(2 * width, class_num, weight_attr=ParamAttr(initializer=Uniform(-bound, bound)))

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.fc(paddle.flatten(self.avg_pool(x), start_axis=1))


class ExponentialMovingAverage:
    def __init__(self, model, decay):
        self.model, self.decay = copy.deepcopy(model), decay
        self.model.eval()

    @paddle.no_grad()
    def update(self, model):
        for (_, mine), (_, theirs) in zip(self.model.named_sublayers(), model.named_sublayers()):
            for name, value in mine._parameters.items():
                if value is None:
                    continue
                new, decay = theirs._parameters[name], 0.0 if value.stop_gradient else self.decay
                value.set_value(decay * value + (1 - decay) * new)
            for name, value in mine._buffers.items():
                value.set_value(theirs._buffers[name])


class CELoss(nn.Layer):
    def __init__(self, epsilon=0.1):
        super().__init__()
        self.epsilon = epsilon

    def forward(self, x, label):
        target = F.label_smooth(F.one_hot(label, x.shape[-1]), epsilon=self.epsilon)
        return {"CELoss": paddle.sum(-target * F.log_softmax(x, axis=-1), axis=-1).mean()}


def build_weights(model, seed):
    rng = np.random.RandomState(seed)
    for name, parameter in model.named_parameters():
        if parameter.stop_gradient:
            continue
        spread = np.sqrt(2.0 / max(1, np.prod(parameter.shape[1:])))
        base = 1.0 if ".norm.weight" in name else 0.0
        parameter.set_value((base + 0.3 * spread * rng.randn(*parameter.shape)).astype("float32"))


model = ResNetVd()
build_weights(model, 0)
ema = ExponentialMovingAverage(model, 0.9)
rng = np.random.RandomState(1)
images = paddle.to_tensor(rng.randn(4, 3, 22, 22).astype("float32"))
labels = paddle.to_tensor(np.array([[0], [1], [2], [3]]))
kinds = {type(layer).__name__ for layer in model.sublayers()}
print("layers", sorted(kinds & {"BatchNorm", "Conv2D", "AvgPool2D"}), "kernel", model.blocks[0].conv0.conv._kernel_size)
print("trained", sum(int(np.prod(p.shape)) for p in model.parameters() if not p.stop_gradient))
schedule = paddle.optimizer.lr.LinearWarmup(paddle.optimizer.lr.CosineAnnealingDecay(0.1, T_max=4), 2, 0.0, 0.1)
optimizer = paddle.optimizer.Momentum(
    learning_rate=schedule, momentum=0.9, weight_decay=L2Decay(1e-2), parameters=model.parameters(), use_nesterov=False
)
criterion = CELoss()
for step in range(4):
    logits = model(images)
    loss = criterion(logits, labels)["CELoss"]
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
    schedule.step()
    ema.update(model)
    top = paddle.metric.accuracy(F.softmax(logits), labels, k=2)
    print(f"step {step} loss {loss.item():.3f} top2 {top.item():.2f} lr {optimizer.get_lr():.4f}")

model.eval()
block = model.blocks[1].short
features = paddle.to_tensor(rng.randn(2, 8, 5, 5).astype("float32"))
weight, bias = block.folded()
folded = F.conv2d(block.pool(features), weight, bias)
print("pooled", block.pool(features).shape, "folded norm differs", bool((folded - block(features)).abs().max() > 1e-4))
print("averaged", f"{ema.model(images).abs().mean().item():.3f}", "trained", f"{model(images).abs().mean().item():.3f}")
