"""Segments images: an encoder with a pyramid of pooled features, hard examples alone in the loss, mean IoU."""

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn
from paddle.nn.layer.conv import _ConvNd
from paddle.nn.layer.norm import _BatchNormBase

IGNORE, CLASSES = 255, 3


def SyncBatchNorm(*args, **kwargs):
    """Over several GPUs the synchronized one."""
    if paddle.get_device() == "cpu":
        return nn.BatchNorm2D(*args, **kwargs)
    return nn.SyncBatchNorm(*args, **kwargs)


class ConvBNReLU(nn.Layer):
    def __init__(self, in_channels, out_channels, kernel_size, padding="same", **kwargs):
        super().__init__()
        self._conv = nn.Conv2D(in_channels, out_channels, kernel_size, padding=padding, bias_attr=False, **kwargs)
        data_format = kwargs.get("data_format", "NCHW")
        self._batch_norm = SyncBatchNorm(out_channels, data_format=data_format)

    def forward(self, x):
        return F.relu(self._batch_norm(self._conv(x)))


class PPModule(nn.Layer):
    def __init__(self, channels, bins=(1, 2), align_corners=False):
        super().__init__()
        self.stages = nn.LayerList(
            [nn.Sequential(nn.AdaptiveAvgPool2D(size), ConvBNReLU(channels, channels // 2, 1)) for size in bins]
        )
        self.conv_bn_relu2 = ConvBNReLU(channels + len(bins) * (channels // 2), channels, 3)
        self.align_corners = align_corners

    def forward(self, x):
        size = paddle.shape(x)[2:]
        pooled = [
            F.interpolate(stage(x), size, mode="bilinear", align_corners=self.align_corners) for stage in self.stages
        ]
        return self.conv_bn_relu2(paddle.concat([x, *pooled[::-1]], axis=1))


class SegNet(nn.Layer):
    def __init__(self, width=8):
        super().__init__()
        self.backbone = nn.Sequential(ConvBNReLU(3, width, 3, padding=1, stride=2), ConvBNReLU(width, width, 3))
        self.dilated = ConvBNReLU(width, width, 3, padding=2, dilation=2, groups=2)
        self.head = PPModule(width)
        self.conv_seg = nn.Conv2D(width, CLASSES, 1)
        self.upsample = nn.UpsamplingBilinear2D(scale_factor=2)

    def forward(self, x):
        features = self.backbone(x)
        logits = self.conv_seg(self.head(self.dilated(features) + features))
        aux = self.upsample(self.conv_seg(features))
        return [F.interpolate(logits, x.shape[2:], mode="bilinear", align_corners=True), aux]


class OhemCrossEntropyLoss(nn.Layer):
    """Cross-entropy over the pixels that are hardest, at least min_kept of them."""

    def __init__(self, thresh=0.5, min_kept=40):
        super().__init__()
        self.thresh, self.min_kept, self.EPS = thresh, min_kept, 1e-5

    def forward(self, logit, label):
        if label.ndim != logit.ndim:
            label = label.unsqueeze(1)
        n, c, h, w = logit.shape
        flat = label.reshape((-1,)).astype("int64")
        valid = (flat != IGNORE).astype("int64")
        probability = F.softmax(logit, axis=1).transpose((1, 0, 2, 3)).reshape((c, -1))
        likely = (probability * F.one_hot(flat * valid, c).transpose((1, 0))).sum(0)
        likely = likely + (1 - valid.astype("float32"))
        ranked = paddle.sort(likely)
        threshold = paddle.maximum(ranked[min(len(ranked), self.min_kept) - 1], paddle.full([], self.thresh))
        hard = valid * (likely <= threshold).astype("int64")
        label = (flat * hard + (1 - hard) * IGNORE).reshape((n, 1, h, w))
        hard = hard.reshape((n, 1, h, w)).astype("float32")
        label.stop_gradient = hard.stop_gradient = True
        loss = F.softmax_with_cross_entropy(logit, label, ignore_index=IGNORE, axis=1) * hard
        return loss.mean() / (hard.mean() + self.EPS), int(hard.sum())


def calculate_area(prediction, label):
    """Pixels of each class in the intersection, the prediction and the label."""
    mask = label != IGNORE
    wrong = paddle.full_like(prediction, CLASSES)
    prediction = F.one_hot(paddle.where(mask, prediction, wrong).flatten(), CLASSES + 1)[:, :-1]
    label = F.one_hot(paddle.where(mask, label, paddle.full_like(label, CLASSES)).flatten(), CLASSES + 1)[:, :-1]
    return (prediction * label).sum(0), prediction.sum(0), label.sum(0)


converted = nn.SyncBatchNorm.convert_sync_batchnorm(SegNet())
print("converted", type(converted.backbone[0]._batch_norm).__name__, converted.backbone[0]._batch_norm._num_features)
model = SegNet()
rng = np.random.RandomState(3)
for name, parameter in model.named_parameters():
    if not parameter.stop_gradient:
        base = 1.0 if name.endswith("_batch_norm.weight") else 0.0
        parameter.set_value((base + 0.25 * rng.randn(*parameter.shape)).astype("float32"))
norm, conv = model.backbone[0]._batch_norm, model.dilated._conv
print("norm", norm._epsilon, norm._momentum, "conv", conv._groups, conv._dilation, conv._stride, conv._padding)
kinds = [sum(isinstance(layer, kind) for layer in model.sublayers()) for kind in (_ConvNd, _BatchNormBase)]
print("convolutions and norms", kinds)

images = paddle.to_tensor(rng.randn(2, 3, 12, 12).astype("float32"))
truth = np.digitize(images.numpy().mean(1), [-0.3, 0.3]).astype("int64")
truth[:, :2] = IGNORE
labels = paddle.to_tensor(truth)
schedule = paddle.optimizer.lr.PolynomialDecay(0.2, decay_steps=4, end_lr=0.0, power=0.9)
optimizer = paddle.optimizer.Momentum(schedule, 0.9, parameters=model.parameters(), weight_decay=4e-5)
criterion = OhemCrossEntropyLoss()
for step in range(3):
    losses = [criterion(logit, labels) for logit in model(images)]
    loss = sum(coefficient * value for coefficient, (value, _) in zip([1.0, 0.4], losses))
    loss.backward()
    optimizer.step()
    if isinstance(optimizer._learning_rate, paddle.optimizer.lr.LRScheduler):
        optimizer._learning_rate.step()
    model.clear_gradients()
    print(f"iter {step} loss {loss.item():.3f} pixels {losses[0][1]} {losses[1][1]} lr {optimizer.get_lr():.4f}")

model.eval()
with paddle.no_grad():
    logits = model(images)[0]
    flipped = paddle.flip(model(paddle.flip(images, axis=[3]))[0], axis=[3])
prediction = paddle.argmax(F.softmax(logits) + F.softmax(flipped), axis=1, keepdim=False)
intersection, predicted, labelled = (area.numpy() for area in calculate_area(prediction, labels))
iou = intersection / np.maximum(predicted + labelled - intersection, 1)
print("logits", logits.shape, "mean", f"{logits.mean().item():.3f}", "labelled", labelled.astype(int).tolist())
print("iou", *(f"{value:.3f}" for value in iou))
