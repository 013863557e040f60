"""What detectors choose on the host: boxes that stay, matches, anchors, regions and masks to train on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from polyreme.core.op import recorded
from polyreme.errors import ShapeError
from polyreme.ops.detection.boxes import overlaps
from polyreme.ops.detection.proposals import descending, proposals_of_image, read_on_host, suppress, tensor_of


@recorded(draws=False)
def nms_rows(
    bboxes: Any, scores: Any, counts: Any, threshold: float, top: int, keep: int, overlap: float, extra: float,
    eta: float, background: int, locality: bool, by_place: bool = False,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """(rows [k, 6], how many of each image, their places among all boxes [k, 1]); see layers.multiclass_nms.

    by_place, with counts: rows of a class come in the order of boxes, not of scores, and places are those among
    rows x classes.
    """
    b, s = read_on_host("multiclass_nms", bboxes, scores)
    if counts is None:
        if b.ndim != 3 or s.ndim != 3 or b.shape[:2] != (s.shape[0], s.shape[2]) or b.shape[2] != 4:
            raise ShapeError(
                f"multiclass_nms: bboxes {list(b.shape)}, scores {list(s.shape)}; needs [n, m, 4] and [n, classes, m]"
            )
        images = [(np.broadcast_to(b[i], (s.shape[1], *b[i].shape)), s[i]) for i in range(len(b))]
    else:
        (lengths,) = read_on_host("multiclass_nms", counts)
        if b.shape != (*s.shape, 4) or lengths.sum() != len(s):
            raise ShapeError(
                f"multiclass_nms: bboxes {list(b.shape)}, scores {list(s.shape)} in sequences; needs [rows, classes, "
                "4] and [rows, classes]"
            )
        cuts = np.cumsum(lengths)[:-1]
        images = [(v.transpose(1, 0, 2), w.T) for v, w in zip(np.split(b, cuts), np.split(s, cuts), strict=True)]
    rows, places, numbers, first = [np.zeros((0, 6), b.dtype)], [np.zeros(0, np.int64)], [], 0
    for boxes, score in images:
        detected = _of_image(boxes, score, threshold, top, keep, overlap, extra, eta, background, locality)
        if by_place:
            ordered = sorted(detected, key=lambda row: (row[0], row[3]))
            detected = [(label, value, box, place * len(score) + label) for label, value, box, place in ordered]
        rows += [np.array([[label, value, *box]], b.dtype) for label, value, box, _ in detected]
        places.append(np.array([first + place for *_, place in detected], np.int64))
        numbers.append(len(detected))
        first += score.size if by_place else score.shape[1]
    index = tensor_of(np.concatenate(places)[:, None], np.int32)
    return tensor_of(np.concatenate(rows), b.dtype), tensor_of(numbers, np.int64), index


def _of_image(
    boxes: np.ndarray, scores: np.ndarray, threshold: float, top: int, keep: int, overlap: float, extra: float,
    eta: float, background: int, locality: bool,
) -> list[tuple[int, Any, Any, int]]:  # fmt: skip
    """(class, score, box, place) of what stays of boxes [classes, m, 4] and scores [classes, m]."""
    rows: list[tuple[int, Any, Any, int]] = []
    for label in range(len(scores)):
        if label == background:
            continue
        box, score, place = boxes[label], scores[label], np.arange(scores.shape[1])
        if locality:
            box, score, place = _merged(box, score, overlap, extra)
        order = descending(score)
        order = order[score[order] > threshold][: None if top < 0 else top]
        stay = order[suppress(box[order], overlap, extra, eta)]
        rows += [(label, score[i], box[i], int(place[i])) for i in stay]
    if 0 <= keep < len(rows):
        best = descending(np.array([score for _, score, *_ in rows]))[:keep]
        rows = sorted((rows[i] for i in best), key=lambda row: row[0])
    return rows


def _merged(
    boxes: np.ndarray, scores: np.ndarray, overlap: float, extra: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Boxes in a row that overlap, as one: their mean weighted by scores, and the sum of those."""
    runs: list[tuple[np.ndarray, float, int]] = []
    for place, (box, score) in enumerate(zip(boxes, scores, strict=True)):
        if runs and overlaps(box, runs[-1][0], extra) > overlap:
            before, weight, _ = runs[-1]
            total = weight + score
            runs[-1] = (before * weight + box * score) / total, total, runs[-1][2]
        else:
            runs.append((box, score, place))
    return (np.array([k[0] for k in runs]).reshape(-1, 4), np.array([k[1] for k in runs]),
            np.array([k[2] for k in runs], np.int64))  # fmt: skip


@recorded(draws=False)
def proposal_rows(
    scores: Any, deltas: Any, im_info: Any, anchors: Any, variances: Any, pre: int, post: int, overlap: float,
    least: float, eta: float,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """(boxes, scores, how many of each image); see layers.generate_proposals."""
    s, d, info, a, v = read_on_host("generate_proposals", scores, deltas, im_info, anchors, variances)
    proposals = [
        proposals_of_image(
            score, delta, size[:2], a.reshape(-1, 4), v.reshape(-1, 4), pre, post, overlap, least, eta, 1.0, size[2]
        )
        for score, delta, size in zip(s, d, info, strict=True)
    ]
    boxes, chances = (np.concatenate([f[i] for f in proposals]) for i in (0, 1))
    counts = tensor_of([len(f[0]) for f in proposals], np.int64)
    return tensor_of(boxes, s.dtype), tensor_of(chances[:, None], s.dtype), counts


@recorded(draws=False)
def best_rows(scores: Sequence[Any], counts: Sequence[Any], most: int) -> tuple[Any, Any]:
    """(places of the best rows of all levels, image by image, how many of each); see layers.collect_fpn_proposals."""
    chances = np.concatenate([v.reshape(-1) for v in read_on_host("collect_fpn_proposals", *scores)])
    lengths = read_on_host("collect_fpn_proposals", *counts)
    image = np.concatenate([np.repeat(np.arange(len(c)), c) for c in lengths])
    best = descending(chances)[:most]
    best = best[np.argsort(image[best], kind="stable")]
    return tensor_of(best, np.int64), tensor_of(np.bincount(image[best], minlength=len(lengths[0])), np.int64)


_NOTHING = 1e-6
"""What 1.7 takes for no overlap at all."""


def match_columns(matrix: np.ndarray, counts: np.ndarray, threshold: float | None) -> list[np.ndarray]:
    """(row of each column's match int32 [n, m], its distance [n, m]); see layers.bipartite_match."""
    index = np.full((len(counts), matrix.shape[1]), -1, np.int32)
    distance = np.zeros(index.shape, matrix.dtype)
    for image, part in enumerate(np.split(matrix, np.cumsum(counts)[:-1])):
        left = part.copy()
        while left.size and left.max() > _NOTHING:
            row, column = np.unravel_index(left.argmax(), left.shape)
            index[image, column], distance[image, column] = row, part[row, column]
            left[row], left[:, column] = -1, -1
        if threshold is not None and len(part):
            nearest = part.argmax(0)
            near = part.max(0)
            more = (index[image] < 0) & (near >= threshold) & (near > _NOTHING)
            index[image][more], distance[image][more] = nearest[more], near[more]
    return [index, distance]


def hardest_columns(
    costs: np.ndarray, index: np.ndarray, distance: np.ndarray, ratio: float, below: float
) -> np.ndarray:
    """1 at the columns of the largest costs among those that match nothing and are nearer to nothing than below."""
    chosen = np.zeros(costs.shape, np.float32)
    for image in range(len(costs)):
        others = np.flatnonzero((index[image] < 0) & (distance[image] < below))
        count = min(int(ratio * (index[image] >= 0).sum()), len(others))
        chosen[image, others[descending(costs[image, others])[:count]]] = 1
    return chosen


@recorded(draws=False)
def anchor_targets(
    anchors: Any, boxes: Any, classes: Any, counts: Any, crowd: Any, im_info: Any, size: int, straddle: float,
    share: float, positive: float, negative: float, random: bool,
) -> tuple[Any, ...]:  # fmt: skip
    """(places of anchors whose offsets are learned, of those with an object and without, labels, offsets, their
    weights, how many anchors with an object each image has); see rpn_target_assign. size: -1 for all; classes: None for
    1.
    """
    who = "rpn_target_assign"
    a, every, lengths, crowded, info = read_on_host(who, anchors, boxes, counts, crowd, im_info)
    kinds = np.ones(len(every), np.int64) if classes is None else read_on_host(who, classes)[0].reshape(-1)
    a, cuts = a.reshape(-1, 4), np.cumsum(lengths)[:-1]
    having, moved, lacking, labels, offsets, weights, numbers = [], [], [], [], [], [], []
    parts = (np.split(v, cuts) for v in (every, crowded.reshape(-1), kinds))
    for image, (part, is_crowd, kind, (height, width, scale)) in enumerate(zip(*parts, info, strict=True)):
        true, kind = part[is_crowd == 0] * scale, kind[is_crowd == 0]
        inside = np.arange(len(a))
        if straddle >= 0:
            edge = np.array([width, height]) + straddle
            inside = np.flatnonzero((a[:, :2] >= -straddle).all(1) & (a[:, 2:] < edge).all(1))
        iou = overlaps(a[inside][:, None], true[None], 1.0) if len(true) else np.zeros((len(inside), 1))
        most = iou.max(1)
        label = np.full(len(inside), -1)
        # an object that no anchor touches has none that overlaps it most
        best = (iou == iou.max(0)) & (iou.max(0) > 0) if iou.size else np.zeros(iou.shape, bool)
        having_one = np.flatnonzero(best.any(1) | (most >= positive))
        if size >= 0:
            having_one = _drawn(having_one, int(size * share), random)
        label[having_one] = 1
        far = np.flatnonzero(most < negative)
        label[far if size < 0 else _drawn(far, size - len(having_one), random)] = 0
        stay = np.flatnonzero(label == 1)
        # one that is near to nothing counts as without an object, and 1.7 has a row without weight in its place
        filled = np.concatenate([np.repeat(having_one[:1], len(having_one) - len(stay)), stay])
        having.append(image * len(a) + inside[stay])
        moved.append(image * len(a) + inside[filled])
        lacking.append(image * len(a) + inside[label == 0])
        nearest = iou.argmax(1)
        labels.append(kind[nearest[stay]] if len(true) else np.zeros(0, np.int64))
        offsets.append(_offsets(a[inside[filled]], true[nearest[filled]]) if len(filled) else np.zeros((0, 4)))
        weights.append(np.repeat(np.arange(len(filled)) >= len(filled) - len(stay), 4).reshape(-1, 4))
        numbers.append(len(having_one))
    place, without, learned = (np.concatenate(v).astype(np.int64) for v in (having, lacking, moved))
    said = np.concatenate([*labels, np.zeros(len(without))])[:, None]
    return (
        tensor_of(learned, np.int64), tensor_of(np.concatenate([place, without]), np.int64), tensor_of(said, np.int32),
        tensor_of(np.concatenate(offsets), np.float32), tensor_of(np.concatenate(weights), np.float32),
        tensor_of(np.array(numbers)[:, None], np.int32),
    )  # fmt: skip


@recorded(draws=False)
def region_targets(
    regions: Any, counts: Any, classes: Any, crowd: Any, boxes: Any, true_counts: Any, im_info: Any, size: int,
    share: float, positive: float, high: float, low: float, divisors: Sequence[float], class_count: int, random: bool,
    agnostic: bool,
) -> tuple[Any, ...]:  # fmt: skip
    """(boxes, labels, offsets by class, weights, how many of each image); see layers.generate_proposal_labels."""
    who = "generate_proposal_labels"
    found, number, kinds, crowded, true_boxes, true_number, info = read_on_host(
        who, regions, counts, classes, crowd, boxes, true_counts, im_info
    )
    parts = (np.split(v, np.cumsum(true_number)[:-1]) for v in (true_boxes, kinds.reshape(-1), crowded.reshape(-1)))
    images = zip(np.split(found, np.cumsum(number)[:-1]), *parts, info, strict=True)
    chosen, labels, offsets, weights, numbers = [], [], [], [], []
    for own, true, kind, is_crowd, (*_, scale) in images:
        every = np.concatenate([true, own / scale])
        iou = overlaps(every[:, None], true[None], 1.0) if len(true) else np.zeros((len(every), 1))
        most, nearest = iou.max(1), iou.argmax(1)
        most[: len(true)][is_crowd != 0] = -1
        having = _drawn(np.flatnonzero(most >= positive), int(np.floor(size * share)), random)
        lacking = _drawn(np.flatnonzero((most >= low) & (most < high)), size - len(having), random)
        rows = np.concatenate([having, lacking])
        label = np.concatenate([kind[nearest[having]], np.zeros(len(lacking), np.int64)]).astype(np.int64)
        column = np.where(label > 0, 1, 0) if agnostic else label
        width = 2 if agnostic else class_count
        target, weight = np.zeros((len(rows), width, 4)), np.zeros((len(rows), width, 4))
        here = np.arange(len(having))
        if len(having):
            target[here, column[here]] = _offsets(every[having], true[nearest[having]]) / np.array(divisors)
            weight[here, column[here]] = 1
        chosen.append(every[rows] * scale)
        labels.append(label)
        offsets.append(target.reshape(len(rows), -1))
        weights.append(weight.reshape(len(rows), -1))
        numbers.append(len(rows))
    return (
        tensor_of(np.concatenate(chosen), np.float32), tensor_of(np.concatenate(labels)[:, None], np.int32),
        tensor_of(np.concatenate(offsets), np.float32), tensor_of(np.concatenate(weights), np.float32),
        tensor_of(numbers, np.int64),
    )  # fmt: skip


def _drawn(places: np.ndarray, count: int, random: bool) -> np.ndarray:
    """At most so many of places: drawn, or the first ones."""
    if len(places) <= count:
        return places
    return np.random.choice(places, count, replace=False) if random else places[:count]


@recorded(draws=False)
def level_rows(
    offsets: Sequence[Any], scores: Sequence[Any], anchors: Sequence[Any], im_info: Any, threshold: float, top: int,
    keep: int, overlap: float, eta: float,
) -> tuple[Any, Any]:  # fmt: skip
    """(rows [k, 6], how many of each image); see layers.retinanet_detection_output."""
    who = "retinanet_detection_output"
    levels = list(zip(*(read_on_host(who, *several) for several in (offsets, scores, anchors)), strict=True))
    rows, numbers = [np.zeros((0, 6), np.float32)], []
    for image, (height, width, scale) in enumerate(read_on_host(who, im_info)[0]):
        corner = np.round(np.array([width, height]) / scale) - 1
        boxes, values, labels = [], [], []
        for number, (move, score, anchor) in enumerate(levels):
            flat = score[image].reshape(-1)
            best = descending(flat)
            # the last level gives what it has
            best = best[flat[best] > (threshold if number < len(levels) - 1 else 0.0)][: None if top < 0 else top]
            place, label = np.divmod(best, score.shape[2])
            decoded = _moved(anchor[place], move[image][place]) / scale
            boxes.append(np.clip(decoded, 0, np.tile(corner, 2)))
            values.append(flat[best])
            labels.append(label)
        box, value, label = (np.concatenate(v) for v in (boxes, values, labels))
        stay: list[int] = []
        for own in np.unique(label):
            of_class = np.flatnonzero(label == own)
            of_class = of_class[descending(value[of_class])]
            stay += of_class[suppress(box[of_class], overlap, 1.0, eta)].tolist()
        chosen = np.array(stay, np.int64)[descending(value[np.array(stay, np.int64)])][: None if keep < 0 else keep]
        rows.append(np.concatenate([label[chosen, None] + 1, value[chosen, None], box[chosen]], 1))
        numbers.append(len(chosen))
    return tensor_of(np.concatenate(rows), np.float32), tensor_of(numbers, np.int64)


def _moved(anchors: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """The inverse of _offsets."""
    size = anchors[:, 2:] - anchors[:, :2] + 1
    middle = offsets[:, :2] * size + anchors[:, :2] + size / 2
    half = np.exp(offsets[:, 2:]) * size / 2
    return np.concatenate([middle - half, middle + half - 1], 1)


def _offsets(anchors: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    """Boxes as offsets from anchors, both in whole pixels."""
    (size, middle), (other, center) = (
        (v[:, 2:] - v[:, :2] + 1, v[:, :2] + (v[:, 2:] - v[:, :2] + 1) / 2) for v in (anchors, boxes)
    )
    return np.concatenate([(center - middle) / size, np.log(other / size)], 1)


@recorded(draws=False)
def mask_targets(
    im_info: Any, classes: Any, crowd: Any, points: Any, lengths: Sequence[Any], regions: Any, counts: Any, labels: Any,
    class_count: int, resolution: int,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """(boxes, their places among all regions, masks by class, how many of each image); see
    layers.generate_mask_labels. lengths: of images in objects, of objects in polygons, of polygons in points.
    """
    who = "generate_mask_labels"
    info, kinds, crowded, corners, rois, number, label = read_on_host(
        who, im_info, classes, crowd, points, regions, counts, labels
    )
    objects, parts, sizes = read_on_host(who, *lengths)
    shapes = _split(_split(np.split(corners, np.cumsum(sizes)[:-1]), parts), objects)
    firsts = np.concatenate([[0], np.cumsum(number)[:-1]])
    per_image = (np.split(v.reshape(-1), np.cumsum(n)[:-1]) for v, n in ((kinds, objects), (crowded, objects)))
    boxes, places, masks, numbers = [], [], [], []
    images = zip(shapes, *per_image, np.split(rois, np.cumsum(number)[:-1]), firsts, info, strict=True)
    for every, kind, is_crowd, region, first, (*_, scale) in images:
        has_mask = (kind > 0) & (is_crowd == 0)
        drawn = [shape for shape, is_drawn in zip(every, has_mask, strict=True) if is_drawn]
        mine = label.reshape(-1)[first : first + len(region)]
        # a network takes no image without a mask: one region of the background, whose mask counts nowhere
        chosen = np.flatnonzero(mine > 0) if drawn and (mine > 0).any() else np.flatnonzero(mine == 0)[:1]
        target = np.full((len(chosen), class_count, resolution, resolution), -1, np.int32)
        if drawn and (mine > 0).any():
            around = np.array([[*np.concatenate(s).min(0), *np.concatenate(s).max(0)] for s in drawn])
            nearest = overlaps(region[chosen][:, None] / scale, around[None], 1.0).argmax(1)
            for row, (place, shape) in enumerate(zip(chosen, nearest, strict=True)):
                target[row, mine[place]] = _inside(drawn[shape], region[place] / scale, resolution)
        boxes.append(region[chosen])
        places.append(first + chosen)
        masks.append(target.reshape(len(chosen), -1))
        numbers.append(len(chosen))
    return (
        tensor_of(np.concatenate(boxes), np.float32), tensor_of(np.concatenate(places)[:, None], np.int32),
        tensor_of(np.concatenate(masks), np.int32), tensor_of(numbers, np.int64),
    )  # fmt: skip


def _split(items: Sequence[Any], lengths: np.ndarray) -> list[Sequence[Any]]:
    ends = np.cumsum(lengths)
    return [items[end - n : end] for end, n in zip(ends, lengths, strict=True)]


def _inside(polygons: Sequence[np.ndarray], box: np.ndarray, resolution: int) -> np.ndarray:
    """Which cells of a grid over the box have their centre in one of the polygons [points, 2], by the even-odd rule.

    A box is a pixel wide and high at least.
    """
    sides = np.maximum(box[2:] - box[:2], 1)
    x, y = (box[i] + (np.arange(resolution) + 0.5) * sides[i] / resolution for i in (0, 1))
    mask = np.zeros((resolution, resolution), bool)
    for corners in polygons:
        (x0, y0), (x1, y1) = corners.T[:, None], np.roll(corners, -1, 0).T[:, None]
        crosses = (y0 > y[:, None]) != (y1 > y[:, None])
        with np.errstate(divide="ignore", invalid="ignore"):  # of edges that no line at such a y crosses
            at = x0 + (y[:, None] - y0) * (x1 - x0) / (y1 - y0)
        mask |= (crosses[:, None] & (x[None, :, None] < at[:, None])).sum(-1) % 2 == 1
    return mask
