"""Detects boxes: a feature pyramid, anchors, matching by overlap, focal loss with its own backward, NMS, RoIs."""

import math

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import ParamAttr, nn
from paddle.autograd import PyLayer
from paddle.common_ops_import import Variable, check_type, in_dygraph_mode
from paddle.nn.initializer import Constant, Normal
from paddle.regularizer import L2Decay
from paddle.vision.ops import nms, roi_align

CLASSES, STRIDES = 2, (4, 8)


class SigmoidFocal(PyLayer):
    @staticmethod
    def forward(ctx, logit, target, gamma=2.0, alpha=0.25):
        probability = F.sigmoid(logit)
        ctx.save_for_backward(probability, target)
        ctx.gamma, ctx.alpha = gamma, alpha
        near = probability * target + (1 - probability) * (1 - target)
        weight = alpha * target + (1 - alpha) * (1 - target)
        return -weight * (1 - near) ** gamma * paddle.log(near)

    @staticmethod
    def backward(ctx, upstream):
        probability, target = ctx.saved_tensor()
        near = probability * target + (1 - probability) * (1 - target)
        weight = ctx.alpha * target + (1 - ctx.alpha) * (1 - target)
        slope = ctx.gamma * near * paddle.log(near) - (1 - near)
        return upstream * weight * (2 * target - 1) * (1 - near) ** ctx.gamma * slope, None


class FPN(nn.Layer):
    def __init__(self, in_channels, out_channel):
        super().__init__()
        self.lateral_convs, self.fpn_convs = [], []
        for i, channels in enumerate(in_channels):
            lateral = nn.Conv2D(channels, out_channel, 1)
            output = nn.Conv2D(out_channel, out_channel, 3, padding=1)
            self.lateral_convs.append(self.add_sublayer(f"fpn_inner_{i}_lateral", lateral))
            self.fpn_convs.append(self.add_sublayer(f"fpn_{i}", output))

    def forward(self, body_feats):
        laterals = [conv(feature) for conv, feature in zip(self.lateral_convs, body_feats)]
        for i in range(len(laterals) - 1, 0, -1):
            laterals[i - 1] = laterals[i - 1] + F.interpolate(laterals[i], scale_factor=2.0, mode="nearest")
        return [conv(lateral) for conv, lateral in zip(self.fpn_convs, laterals)]


class RetinaLike(nn.Layer):
    def __init__(self, width=8):
        super().__init__()
        norm_decay = ParamAttr(regularizer=L2Decay(0.0))
        self.c2 = nn.Sequential(nn.Conv2D(3, width, 3, stride=4, padding=1), nn.Swish())
        self.c3 = nn.Conv2D(width, width, 3, stride=2, padding=1, weight_attr=ParamAttr(learning_rate=0.5))
        self.norm = nn.GroupNorm(2, width, weight_attr=norm_decay, bias_attr=norm_decay)
        self.neck = FPN([width, width], width)
        prior = -math.log((1 - 0.1) / 0.1)
        weights = ParamAttr(initializer=Normal(0.0, 0.01))
        self.cls = nn.Conv2D(width, CLASSES, 3, padding=1, weight_attr=weights, bias_attr=Constant(prior))
        self.reg = nn.Conv2D(width, 4, 3, padding=1, weight_attr=weights)
        self.scales = self.create_parameter([len(STRIDES)], default_initializer=Constant(1.0))

    def forward(self, images):
        c2 = self.c2(images)
        features = self.neck([c2, F.relu(self.norm(self.c3(c2)))])
        scores, deltas = [], []
        for level, feature in enumerate(features):
            scores.append(self.cls(feature).transpose([0, 2, 3, 1]).reshape([feature.shape[0], -1, CLASSES]))
            delta = self.reg(feature) * self.scales[level]
            deltas.append(delta.transpose([0, 2, 3, 1]).reshape([feature.shape[0], -1, 4]))
        return paddle.concat(scores, 1), paddle.concat(deltas, 1), features


def make_anchors(features):
    check_type(features, "features", (list, tuple), "make_anchors")
    anchors = []
    for feature, stride in zip(features, STRIDES):
        height, width = feature.shape[-2:]
        shift_y, shift_x = paddle.meshgrid(paddle.arange(height), paddle.arange(width))
        centre = (paddle.stack([shift_x, shift_y, shift_x, shift_y], -1).astype("float32") + 0.5) * stride
        half = paddle.to_tensor([-1.0, -1.0, 1.0, 1.0]) * stride
        anchors.append((centre + half).reshape([-1, 4]))
    return paddle.concat(anchors)


def bbox_overlaps(first, second):
    corner = paddle.maximum(first[:, None, :2], second[None, :, :2])
    size = (paddle.minimum(first[:, None, 2:], second[None, :, 2:]) - corner).clip(min=0)
    shared = size.prod(-1)
    area = [(boxes[:, 2:] - boxes[:, :2]).prod(-1) for boxes in (first, second)]
    return shared / (area[0].unsqueeze(1) + area[1].unsqueeze(0) - shared)


def delta2bbox(deltas, anchors):
    size = anchors[..., 2:] - anchors[..., :2]
    centre = anchors[..., :2] + 0.5 * size + deltas[..., :2] * size
    half = 0.5 * size * paddle.exp(deltas[..., 2:].clip(max=math.log(1000 / 16)))
    return paddle.concat([centre - half, centre + half], -1)


model = RetinaLike()
rng = np.random.RandomState(0)
for name, parameter in model.named_parameters():
    if parameter.ndim == 4:
        parameter.set_value(rng.normal(0, 0.2, parameter.shape).astype("float32"))
    elif name.endswith("bias") and "cls" not in name:
        parameter.set_value(paddle.zeros_like(parameter))
rates = sorted({parameter.optimize_attr["learning_rate"] for parameter in model.parameters()})
print("rates", rates, "sublayers", sorted(model.neck._sub_layers))
images = paddle.to_tensor(rng.rand(1, 3, 16, 16).astype("float32"))
gt_bbox = paddle.to_tensor([[1.0, 1.0, 8.0, 9.0], [9.0, 6.0, 15.0, 15.0]])
gt_class = paddle.to_tensor([1, 0])
print("dynamic", in_dygraph_mode(), "variables", isinstance(gt_class, (Variable, paddle.Tensor)))
optimizer = paddle.optimizer.Adam(paddle.optimizer.lr.PiecewiseDecay([2], [0.05, 0.01]), parameters=model.parameters())
for step in range(4):
    scores, deltas, features = model(images)
    anchors = make_anchors(features)
    ious = bbox_overlaps(anchors, gt_bbox)
    best, matched = ious.max(axis=1), ious.argmax(axis=1)
    positive = paddle.nonzero(best > 0.3).flatten()
    target = F.one_hot(paddle.gather(gt_class, matched), CLASSES) * (best > 0.3).astype("float32").unsqueeze(-1)
    loss_cls = SigmoidFocal.apply(scores[0], target).sum() / max(1, positive.shape[0])
    boxes = delta2bbox(deltas[0], anchors)
    chosen, wanted = paddle.gather(boxes, positive), paddle.gather(gt_bbox, paddle.gather(matched, positive))
    pairs = paddle.stack([paddle.arange(positive.shape[0])] * 2, -1)
    loss_box = (1 - paddle.gather_nd(bbox_overlaps(chosen, wanted), pairs)).mean()
    loss = loss_cls + 2.0 * loss_box
    loss.backward()
    optimizer.step()
    optimizer._learning_rate.step()
    optimizer.clear_grad()
    losses = f"cls {loss_cls.item():.3f} box {loss_box.item():.3f}"
    print(f"step {step} {losses} positive {positive.shape[0]} of {len(anchors)}")

with paddle.no_grad():
    scores, deltas, features = model(images)
    boxes = delta2bbox(deltas[0], make_anchors(features)).clip(0, 16)
    confidence, category = F.sigmoid(scores[0]).max(-1), F.sigmoid(scores[0]).argmax(-1)
    top, order = paddle.topk(confidence, k=6)
    boxes, category = boxes[order], category[order]
    kept = nms(boxes, 0.4, scores=top, category_idxs=category, categories=list(range(CLASSES)), top_k=4)
    print("kept", kept.numpy().tolist(), "scores", *(f"{score:.3f}" for score in top[kept].tolist()))
    rois = roi_align(features[0], boxes[kept], paddle.to_tensor([len(kept)], dtype="int32"), 2, 0.25, sampling_ratio=2)
    print("rois", rois.shape, f"{rois.mean().item():.3f}", "boxes", f"{boxes[kept].mean().item():.2f}")
    empty = paddle.where(confidence > 2.0)[0]
    print("nothing above 2", empty.shape[0], paddle.masked_select(confidence, confidence > 2.0).shape)
