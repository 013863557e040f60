"""Contract rows of ops/detection: boxes.py, yolo.py and proposals.py; the oracles walk boxes and cells one by one."""

import math

import numpy as np

from polyreme.conformance.case import Case
from polyreme.errors import ConfigError, ShapeError

HOST = "how many boxes remain is a value"
INTEGERS = "gives indices"


def area(b, extra=0):
    return 0 if b[2] < b[0] or b[3] < b[1] else (b[2] - b[0] + extra) * (b[3] - b[1] + extra)


def iou(a, b, extra=0):
    x1, y1, x2, y2 = max(a[0], b[0]), max(a[1], b[1]), min(a[2], b[2]), min(a[3], b[3])
    both = 0 if x2 < x1 or y2 < y1 else (x2 - x1 + extra) * (y2 - y1 + extra)
    union = area(a, extra) + area(b, extra) - both
    return both / union if union > 0 else 0


def boxes(rng, *shape, size=5.0):
    low = rng.uniform(0, 6, (*shape, 2))
    return np.concatenate([low, low + rng.uniform(1, size, (*shape, 2))], -1).astype("float32")


# prior_box


def prior_box(input, image, min_sizes, max_sizes, aspect_ratios, variance, flip, clip, steps, offset, squares_first):
    ratios = [1.0]
    for r in aspect_ratios:
        if r not in ratios:
            ratios += [r, 1 / r] if flip else [r]
    height, width = input.shape[2:]
    rows = []
    for i, j in np.ndindex(height, width):
        step = [s or z / n for s, z, n in zip(steps, image.shape[:1:-1], (width, height), strict=True)]
        cx, cy = (j + offset) * step[0], (i + offset) * step[1]
        for k, small in enumerate(min_sizes):
            shapes = [(small * math.sqrt(r), small / math.sqrt(r)) for r in ratios]
            side = math.sqrt(small * max_sizes[k])
            shapes.insert(1 if squares_first else len(shapes), (side, side))
            rows += [
                [(cx - w / 2) / image.shape[3], (cy - h / 2) / image.shape[2], (cx + w / 2) / image.shape[3], (cy + h / 2) / image.shape[2]]
                for w, h in shapes
            ]  # fmt: skip
    found = np.array(rows).reshape(height, width, -1, 4)
    return np.clip(found, 0, 1) if clip else found, np.broadcast_to(variance, found.shape)


PLACES = (np.zeros((1, 2, 2, 3), "float32"), np.zeros((1, 3, 20, 33), "float32"))
VARIANCE = (0.1, 0.1, 0.2, 0.2)


# box_coder


def coded(prior, variance, target, code_type="encode_center_size", box_normalized=True, axis=0):
    extra = 0 if box_normalized else 1
    variance = np.ones(4) if variance is None else variance
    out = np.zeros((len(target), target.shape[1] if target.ndim == 3 else len(prior), 4))
    for i, j in np.ndindex(*out.shape[:2]):
        p = prior[j if axis == 0 else i].astype("float64")
        v = variance if np.ndim(variance) == 1 else variance[j if axis == 0 else i]
        pw, ph = p[2] - p[0] + extra, p[3] - p[1] + extra
        px, py = p[0] + pw / 2, p[1] + ph / 2
        if code_type.startswith("encode"):
            t = target[i].astype("float64")
            found = (
                ((t[0] + t[2]) / 2 - px) / pw, ((t[1] + t[3]) / 2 - py) / ph,
                math.log((t[2] - t[0] + extra) / pw), math.log((t[3] - t[1] + extra) / ph),
            )  # fmt: skip
            out[i, j] = np.array(found) / v
        else:
            t = target[i, j].astype("float64") * v
            x, y, w, h = px + t[0] * pw, py + t[1] * ph, pw * math.exp(t[2]), ph * math.exp(t[3])
            out[i, j] = x - w / 2, y - h / 2, x + w / 2 - extra, y + h / 2 - extra
    return out


def encoding(rng):
    return boxes(rng, 3), np.array(VARIANCE, "float32"), boxes(rng, 2)


def decoding(rows):
    return lambda rng: (
        boxes(rng, rows), rng.uniform(0.1, 0.4, (rows, 4)).astype("float32"), rng.normal(size=(2, 3, 4)).astype("float32"),
    )  # fmt: skip


# YOLO

ANCHORS = (10, 13, 16, 30, 8, 5, 20, 20)


def sigmoid(v):
    return 1 / (1 + math.exp(-v))


def yolo_box(x, img_size, anchors, class_num, conf_thresh, downsample_ratio, clip_bbox=True, scale_x_y=1.0, iou_aware=False, iou_aware_factor=0.5):  # fmt: skip
    n, (height, width), count = len(x), x.shape[2:], len(anchors) // 2
    corners, scores = np.zeros((n, count * height * width, 4)), np.zeros((n, count * height * width, class_num))
    for b, a, i, j in np.ndindex(n, count, height, width):
        start = a * (5 + class_num) + (count if iou_aware else 0)
        t = x[b, start : start + 5 + class_num, i, j].astype("float64")
        confidence = sigmoid(t[4])
        if iou_aware:
            confidence = confidence ** (1 - iou_aware_factor) * sigmoid(x[b, a, i, j]) ** iou_aware_factor
        if confidence < conf_thresh:
            continue
        index, (h, w) = (a * height + i) * width + j, img_size[b]
        bias = 0.5 * (scale_x_y - 1)
        cx, cy = (j + sigmoid(t[0]) * scale_x_y - bias) * w / width, (i + sigmoid(t[1]) * scale_x_y - bias) * h / height
        bw, bh = (math.exp(t[2 + d]) * anchors[2 * a + d] * (w, h)[d] / (downsample_ratio * (width, height)[d]) for d in (0, 1))  # fmt: skip
        box = [cx - bw / 2, cy - bh / 2, cx + bw / 2, cy + bh / 2]
        corners[b, index] = (
            [max(box[0], 0), max(box[1], 0), min(box[2], w - 1), min(box[3], h - 1)] if clip_bbox else box
        )
        scores[b, index] = [confidence * sigmoid(v) for v in t[5:]]
    return corners, scores


def cross(v, label):
    return max(v, 0) - v * label + math.log1p(math.exp(-abs(v)))


def centred(x, y, w, h):
    return x - w / 2, y - h / 2, x + w / 2, y + h / 2


def yolo_loss(x, gt_box, gt_label, anchors, anchor_mask, class_num, ignore_thresh, downsample_ratio, gt_score=None, use_label_smooth=True, scale_x_y=1.0):  # fmt: skip
    n, size = len(x), x.shape[2]
    head = x.reshape(n, len(anchor_mask), 5 + class_num, size, size).astype("float64")
    inputs, smooth = downsample_ratio * size, min(1 / class_num, 1 / 40) if use_label_smooth else 0
    loss = np.zeros(n)
    for b in range(n):
        there = [t for t in range(gt_box.shape[1]) if min(gt_box[b, t, 2:]) >= 1e-6]
        # 1: nothing there, 0: says nothing, else the weight of the true box
        objects = {}
        for a, i, j in np.ndindex(len(anchor_mask), size, size):
            t, k, bias = head[b, a, :, i, j], anchor_mask[a], 0.5 * (scale_x_y - 1)
            box = centred(
                (j + sigmoid(t[0]) * scale_x_y - bias) / size, (i + sigmoid(t[1]) * scale_x_y - bias) / size,
                math.exp(t[2]) * anchors[2 * k] / inputs, math.exp(t[3]) * anchors[2 * k + 1] / inputs,
            )  # fmt: skip
            if all(iou(box, centred(*gt_box[b, g])) <= ignore_thresh for g in there):
                objects[a, i, j] = None
            else:
                objects[a, i, j] = 0
        for g in there:
            cx, cy, w, h = gt_box[b, g].astype("float64")
            i, j = int(cy * size), int(cx * size)
            shapes = [
                centred(0, 0, anchors[2 * k] / inputs, anchors[2 * k + 1] / inputs) for k in range(len(anchors) // 2)
            ]
            best = int(np.argmax([iou(s, centred(0, 0, w, h)) for s in shapes]))
            if best not in anchor_mask:
                continue
            a, score = anchor_mask.index(best), 1 if gt_score is None else float(gt_score[b, g])
            t = head[b, a, :, i, j]
            place = cross(t[0], cx * size - j) + cross(t[1], cy * size - i)
            place += abs(t[2] - math.log(w * inputs / anchors[2 * best]))
            place += abs(t[3] - math.log(h * inputs / anchors[2 * best + 1]))
            loss[b] += place * (2 - w * h) * score
            loss[b] += score * sum(
                cross(t[5 + c], 1 - smooth if c == gt_label[b, g] else smooth) for c in range(class_num)
            )
            objects[a, i, j] = score
        for (a, i, j), weight in objects.items():
            said = head[b, a, 4, i, j]
            loss[b] += cross(said, 0) if weight is None else cross(said, 1) * weight
    return loss


def truth():
    """Five true boxes in two images: one of them none, two in one cell."""
    rng = np.random.default_rng(0)
    gt = rng.uniform(0.1, 0.9, (2, 5, 4)).astype("float32") * np.array([1, 1, 0.6, 0.6], "float32")
    gt[0, 1, 2] = 0
    gt[0, 3] = gt[0, 2] + np.array([0.001, 0.001, 0, 0], "float32")
    return {
        "gt_box": gt, "gt_label": rng.integers(0, 2, (2, 5)).astype("int32"), "anchors": ANCHORS, "anchor_mask": (0, 2, 3),
        "class_num": 2, "ignore_thresh": 0.3, "downsample_ratio": 8,
    }  # fmt: skip


def head(channels, *sizes):
    return lambda rng: (rng.normal(size=(2, channels, *sizes)).astype("float32"),)


# choosing


def kept(candidates, threshold, overlap, eta=1.0):
    chosen = []
    for at in candidates:
        if all(overlap(at, other) <= threshold for other in chosen):
            chosen.append(at)
            threshold *= eta if threshold > 0.5 else 1
    return chosen


def nms(boxes, iou_threshold=0.3, scores=None, category_idxs=None, categories=None, top_k=None):
    rank = -np.arange(len(boxes)) if scores is None else scores
    groups = np.zeros(len(boxes)) if categories is None else category_idxs
    found = []
    for group in (0,) if categories is None else categories:
        mine = sorted(np.flatnonzero(groups == group), key=lambda i: -rank[i])
        found += kept(mine, iou_threshold, lambda i, j: iou(boxes[i], boxes[j]))
    return np.array(sorted(found, key=lambda i: -rank[i])[:top_k], "int64")


def matrix_nms(bboxes, scores, score_threshold, post_threshold, nms_top_k, keep_top_k, use_gaussian=False, gaussian_sigma=2.0, background_label=0, normalized=True, return_index=False):  # fmt: skip
    extra, rows, numbers = 0 if normalized else 1, [], []
    for b in range(len(bboxes)):
        rows_of_class = []
        for c in range(scores.shape[1]):
            order = sorted(np.flatnonzero(scores[b, c] > score_threshold), key=lambda i: -scores[b, c, i])[:nms_top_k]
            most = [
                max([iou(bboxes[b, i], bboxes[b, j], extra) for j in order[:k]], default=0) for k, i in enumerate(order)
            ]
            for k, i in enumerate(order if c != background_label else []):
                each = [iou(bboxes[b, i], bboxes[b, j], extra) for j in order[:k]]
                if use_gaussian:
                    factors = [math.exp(gaussian_sigma * (m * m - v * v)) for m, v in zip(most, each, strict=False)]
                else:
                    factors = [(1 - v) / (1 - m) for m, v in zip(most, each, strict=False)]
                score = scores[b, c, i] * min(factors, default=1)
                if score > post_threshold:
                    rows_of_class.append((c, score, *bboxes[b, i], i + b * bboxes.shape[1]))
        rows_of_class = sorted(rows_of_class, key=lambda f: -f[1])[:keep_top_k]
        rows += rows_of_class
        numbers.append(len(rows_of_class))
    table = np.array(rows)
    return table[:, :6], np.array(numbers, "int32"), table[:, 6:].astype("int32")


def candidates(rng):
    return np.stack([boxes(rng, 8) for _ in range(2)]), rng.uniform(size=(2, 3, 8)).astype("float32")


def pyramid(rng):
    low = rng.uniform(0, 50, (9, 2))
    return (np.concatenate([low, low + 10 ** rng.uniform(0.5, 2.8, (9, 1))], 1).astype("float32"),)


def distributed(fpn_rois, min_level, max_level, refer_level, refer_scale, pixel_offset=False, rois_num=None):
    extra = 1 if pixel_offset else 0
    level = [min(max(math.floor(refer_level + math.log2(math.sqrt(area(b, extra)) / refer_scale)), min_level), max_level) for b in fpn_rois.astype("float64")]  # fmt: skip
    places = [[k for k, v in enumerate(level) if v == at] for at in range(min_level, max_level + 1)]
    flat = [k for p in places for k in p]
    restore = np.array([[flat.index(k)] for k in range(len(fpn_rois))], "int32")
    image = np.repeat(np.arange(len(rois_num)), rois_num)
    numbers = [np.array([sum(image[k] == i for k in p) for i in range(len(rois_num))], "int32") for p in places]
    return [*(fpn_rois[p] for p in places), restore, *numbers]


def anchored(rng):
    anchors = boxes(rng, 3, 4, 2, size=20)
    return (
        rng.uniform(size=(2, 2, 3, 4)).astype("float32"), 0.5 * rng.normal(size=(2, 8, 3, 4)).astype("float32"),
        np.array([[20, 30], [12, 16]], "float32"), anchors, np.full(anchors.shape, 0.7, "float32"),
    )  # fmt: skip


def proposed(scores, deltas, img_size, anchors, variances, pre_nms_top_n, post_nms_top_n, nms_thresh, min_size, eta, pixel_offset, return_rois_num):  # fmt: skip
    extra, rows, values, numbers = 1 if pixel_offset else 0, [], [], []
    for b, (height, width) in enumerate(img_size):
        proposals = []
        for a, i, j in sorted(np.ndindex(*scores.shape[1:]), key=lambda at: -scores[(b, *at)])[:pre_nms_top_n]:
            p, d = anchors[i, j, a].astype("float64"), deltas[b, 4 * a : 4 * a + 4, i, j] * variances[i, j, a]
            w, h = p[2] - p[0] + extra, p[3] - p[1] + extra
            cx, cy = p[0] + w / 2 + d[0] * w, p[1] + h / 2 + d[1] * h
            w, h = w * math.exp(d[2]), h * math.exp(d[3])
            box = np.clip([cx - w / 2, cy - h / 2, cx + w / 2 - extra, cy + h / 2 - extra], 0, np.array([width, height] * 2) - extra)  # fmt: skip
            sides = box[2:] - box[:2] + extra
            centre_in = (box[:2] + sides / 2 <= [width, height]).all()
            if sides.min() >= max(min_size, 1) and (centre_in or not pixel_offset):
                proposals.append((box, scores[b, a, i, j]))
        keep = kept(range(len(proposals)), nms_thresh, lambda m, n, of=proposals: iou(of[m][0], of[n][0], extra), eta)
        chosen = [proposals[k] for k in keep[:post_nms_top_n]] or [(np.zeros(4), 0)]
        rows += [box for box, _ in chosen]
        values += [[score] for _, score in chosen]
        numbers.append(len(chosen))
    return np.array(rows), np.array(values), np.array(numbers, "int32")


PROPOSALS = {"pre_nms_top_n": 20, "post_nms_top_n": 4, "nms_thresh": 0.5, "min_size": 0.1, "eta": 1.0, "pixel_offset": False, "return_rois_num": True}  # fmt: skip
CATEGORIES = {"category_idxs": np.array([0, 1, 2] * 4), "categories": (0, 1)}
CASES = [
    Case("prior_box", lambda rng: (*PLACES, (4.0, 5.0), (6.0, 9.0), (2.0, 1.0), VARIANCE, True, True, (5.0, 7.0), 0.5, True), prior_box, no_grad="depends on shapes alone",
         bad=((*PLACES, (4.0,), (3.0,)), ConfigError, r"min_sizes=\(4.0,\), max_sizes=\(3.0,\)")),
    Case("prior_box", lambda rng: (*PLACES, (4.0, 5.0), (6.0, 9.0), (2.0,), VARIANCE, False, False, (0.0, 0.0), 0.3, False), prior_box, no_grad="depends on shapes alone", tag="even steps"),
    Case("box_coder", encoding, coded, terms=16, bad=((PLACES[0], None, PLACES[0], "encode"), ConfigError, "code_type='encode'")),
    Case("box_coder", decoding(3), coded, {"code_type": "decode_center_size", "box_normalized": False}, terms=16, tag="decode"),
    Case("box_coder", decoding(2), coded, {"code_type": "decode_center_size", "axis": 1}, terms=16, tag="decode along axis 0"),
    Case("yolo_box", head(14, 3, 2), yolo_box, {"img_size": np.array([[30, 50], [64, 32]], "int32"), "anchors": (10, 13, 16, 30), "class_num": 2, "conf_thresh": 0.4, "downsample_ratio": 8}, terms=16,
         bad=((np.zeros((2, 7, 2, 2), "float32"),), ShapeError, r"needs \[n, 14, H, W\]")),
    Case("yolo_box", head(16, 3, 2), yolo_box, {"img_size": np.array([[30, 50], [64, 32]], "int32"), "anchors": (10, 13, 16, 30), "class_num": 2, "conf_thresh": 0.3, "downsample_ratio": 8, "clip_bbox": False, "scale_x_y": 1.2, "iou_aware": True, "iou_aware_factor": 0.3}, terms=16, tag="iou aware"),
    Case("yolo_loss", head(21, 4, 4), yolo_loss, truth(), terms=128,
         bad=((np.zeros((2, 21, 2, 3), "float32"),), ShapeError, "needs a square x")),
    Case("yolo_loss", head(21, 4, 4), yolo_loss, {**truth(), "gt_score": np.random.default_rng(1).uniform(0.3, 1, (2, 5)).astype("float32"), "use_label_smooth": False, "scale_x_y": 1.3}, terms=128, tag="scores"),
    Case("nms", lambda rng: (boxes(rng, 12), 0.1), nms, no_grad=INTEGERS, host=HOST, bad=((np.zeros((3, 4), "float32"), 0.3, None, None, (0, 1)), ConfigError, "give both category_idxs and categories")),
    Case("nms", lambda rng: (boxes(rng, 12), 0.3, rng.permutation(12).astype("float32")), nms, {"top_k": 4}, no_grad=INTEGERS, host=HOST, tag="best of scores", bad=((np.zeros((3, 4), "float32"),), ConfigError, "top_k=4 of 3 boxes")),
    Case("nms", lambda rng: (boxes(rng, 12), 0.3, rng.permutation(12).astype("float32")), nms, CATEGORIES, no_grad=INTEGERS, host=HOST, tag="categories", bad=((np.zeros((3, 4), "float32"), 0.3, np.ones(2, "float32")), ShapeError, r"scores \[2\]")),
    Case("matrix_nms", candidates, matrix_nms, {"score_threshold": 0.3, "post_threshold": 0.25, "nms_top_k": 6, "keep_top_k": 7, "return_index": True}, no_grad="chooses", host=HOST,
         bad=((np.zeros((1, 3, 4), "float32"), np.zeros((1, 2, 4), "float32")), ShapeError, r"scores \[1, 2, 4\]")),
    Case("matrix_nms", candidates, matrix_nms, {"score_threshold": 0.3, "post_threshold": 0.1, "nms_top_k": 8, "keep_top_k": 9, "use_gaussian": True, "background_label": -1, "normalized": False, "return_index": True}, no_grad="chooses", host=HOST, tag="gaussian"),
    Case("distribute_fpn_proposals", pyramid, distributed, {"min_level": 2, "max_level": 5, "refer_level": 4, "refer_scale": 224, "rois_num": np.array([4, 5], "int32")}, host=HOST,
         bad=((np.zeros((3, 4), "float32"),), ShapeError, r"rois_num=\[4, 5\] of 3 boxes")),
    Case("distribute_fpn_proposals", pyramid, distributed, {"min_level": 2, "max_level": 5, "refer_level": 4, "refer_scale": 224, "rois_num": np.array([4, 5], "int32"), "pixel_offset": True}, host=HOST, tag="whole pixels"),
    Case("generate_proposals", anchored, proposed, PROPOSALS, no_grad="chooses", host=HOST, terms=16,
         bad=((*(np.zeros((1, c, 2, 2), "float32") for c in (1, 4)), np.ones((1, 2), "float32"), np.zeros((2, 2, 2, 4), "float32"), np.zeros((2, 2, 1, 4), "float32")), ShapeError, r"anchors \[2, 2, 2, 4\]")),
    Case("generate_proposals", anchored, proposed, {**PROPOSALS, "nms_thresh": 0.7, "eta": 0.9, "pixel_offset": True, "min_size": 6.0}, no_grad="chooses", host=HOST, terms=16, tag="adaptive, whole pixels"),
    Case("generate_proposals", anchored, proposed, {**PROPOSALS, "min_size": 1000.0}, no_grad="chooses", host=HOST, tag="none left"),
]  # fmt: skip
