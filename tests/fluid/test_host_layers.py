"""Layers whose results have as many rows as their values say, and those that match boxes: against NumPy."""

import math

import numpy as np
import pytest

from polyreme import fluid
from polyreme.errors import ConfigError, ShapeError
from tests.fluid.table import Case, check, run_cases

L = fluid.layers
R = np.random.RandomState(7)
NEW = np.array([3, 1, 3, 0, 1, 3])


def divided(array, *lengths):
    return fluid.create_lod_tensor(array, list(lengths), "cpu")


def iou(a, b, extra=0):
    w = min(a[2], b[2]) - max(a[0], b[0]) + extra
    h = min(a[3], b[3]) - max(a[1], b[1]) + extra
    both = max(w, 0) * max(h, 0)
    return both / (sum((v[2] - v[0] + extra) * (v[3] - v[1] + extra) for v in (a, b)) - both)


def some_boxes(*shape):
    low = R.uniform(0, 8, (*shape, 2))
    return np.concatenate([low, low + R.uniform(2, 6, (*shape, 2))], -1).astype("float32")


def suppressed(boxes, scores, threshold, least, keep):
    """Class by class: a box stays that overlaps no better one that stays; then the best of all."""
    rows = []
    for label in range(1, len(scores)):
        stay = []
        for i in sorted(range(len(boxes)), key=lambda i: -scores[label, i]):
            if scores[label, i] > least and all(iou(boxes[i], boxes[j]) <= threshold for j in stay):
                stay.append(i)
        rows += [(label, scores[label, i], *boxes[i]) for i in stay]
    best = sorted(rows, key=lambda r: -r[1])[:keep]
    return sorted(best, key=lambda r: (r[0], -r[1]))


BOXES, SCORES = some_boxes(2, 6), R.rand(2, 3, 6).astype("float32")
STAY = np.array([r for b, s in zip(BOXES, SCORES, strict=True) for r in suppressed(b, s, 0.3, 0.2, 4)], "float32")
# two boxes in a row that overlap by 4 / 5, and one apart
ROW = np.array([[[0, 0, 4, 5], [0, 0, 5, 5], [20, 20, 22, 22]]], "float32")
WEIGHTS = np.array([[[0.5, 0.25, 0.4]]], "float32")
MERGED = np.array([[0, 0.75, 0, 0, (4 * 0.5 + 5 * 0.25) / 0.75, 5], [0, 0.4, 20, 20, 22, 22]], "float32")
NEAR = np.array([[0.9, 0.8, 0.1, 0.6], [0.7, 0.85, 0.2, 0.0], [0.3, 0.2, 0.9, 0.55]], "float32")
ROIS = np.array([[0, 0, 10, 10], [0, 0, 100, 120], [0, 0, 30, 20], [0, 0, 300, 250]], "float32")
PRIOR = np.array([[0.1, 0.1, 0.4, 0.4], [0.5, 0.5, 0.9, 0.9], [0.0, 0.6, 0.3, 1.0], [0.6, 0.0, 1.0, 0.3]], "float32")
TRUE = np.array([[0.1, 0.15, 0.4, 0.4], [0.55, 0.5, 0.9, 0.9], [0.0, 0.6, 0.3, 0.95]], "float32")
LABELS = np.array([[1], [2], [1]])
LOCATION, CONFIDENCE = R.randn(2, 4, 4).astype("float32"), R.randn(2, 4, 3).astype("float32")


def ssd(location, confidence, prior):
    """One true box a prior: of the first image priors 0 and 1, of the second prior 2; three others for each match."""
    total, count = [], 0
    for image, matches in enumerate(({0: 0, 1: 1}, {2: 2})):
        log_p = confidence[image] - np.log(np.exp(confidence[image]).sum(1, keepdims=True))
        costs = [-log_p[m, LABELS[matches[m], 0] if m in matches else 0] for m in range(4)]
        others = sorted((m for m in range(4) if m not in matches), key=lambda m: -costs[m])[: 3 * len(matches)]
        loss = sum(costs[m] for m in [*matches, *others])
        for m, box in matches.items():
            p, t = prior[m].astype("float64"), TRUE[box].astype("float64")
            size, other = p[2:] - p[:2], t[2:] - t[:2]
            target = [*((t[2:] + t[:2] - p[2:] - p[:2]) / 2 / size), *np.log(other / size)]
            loss += sum(d * d / 2 if abs(d) < 1 else abs(d) - 0.5 for d in location[image, m] - target)
        total.append([loss])
        count += len(matches)
    return np.array(total, "float32") / count


def focal(x, label, count):
    p = 1 / (1 + np.exp(-x.astype("float64")))
    out = np.zeros(x.shape)
    for i, c in np.ndindex(x.shape):
        if label[i, 0] == c + 1:
            out[i, c] = -0.25 * (1 - p[i, c]) ** 2 * math.log(p[i, c])
        elif label[i, 0] != -1:
            out[i, c] = -0.75 * p[i, c] ** 2 * math.log(1 - p[i, c])
    return (out / count).astype("float32")


def matched_per_prediction():
    index = np.array([[0, 1, -1, 0], [-1, -1, 0, 0]], "int32")
    # columns 0 to 2 of the first image as they are taken, column 3 as it is near enough; the second has one row
    return index, np.array([[0.9, 0.85, 0, 0.6], [0, 0, 0.9, 0.55]], "float32")


LEVEL = [min(max(math.floor(4 + math.log2(math.sqrt((r[2] + 1) * (r[3] + 1)) / 224)), 2), 3) for r in ROIS]
VALUES = R.randn(3, 2).astype("float32")
MATCH = np.array([[1, -1, 0, -1], [-1, 0, -1, -1]], "int32")

CASES = [
    Case("unique", lambda x: L.unique(x), (NEW,), (np.array([3, 1, 0]), np.array([0, 1, 0, 2, 1, 0], "int32"))),
    Case("unique_with_counts", lambda x: L.unique_with_counts(x, "int64")[1:], (NEW,),
         (np.array([0, 1, 0, 2, 1, 0]), np.array([3, 2, 1]))),
    Case("where", L.where, (NEW[None] > 2,), np.array([[0, 0], [0, 2], [0, 5]])),
    Case("multiclass_nms", lambda b, s: L.multiclass_nms(b, s, 0.2, -1, 4, 0.3), (BOXES, SCORES), STAY),
    Case("multiclass_nms of sequences", lambda b, s: L.multiclass_nms(b, s, 0.2, -1, 4, 0.3),
         (divided(np.repeat(BOXES.reshape(12, 1, 4), 3, 1), [6, 6]),
          divided(SCORES.transpose(0, 2, 1).reshape(12, 3), [6, 6])), STAY),
    Case("locality_aware_nms", lambda b, s: L.locality_aware_nms(b, s, 0.1, -1, -1, 0.5), (ROW, WEIGHTS), MERGED),
    Case("distribute_fpn_proposals", lambda r: [*L.distribute_fpn_proposals(r, 2, 3, 4, 224)[0],
                                                L.distribute_fpn_proposals(r, 2, 3, 4, 224)[1]],
         (divided(ROIS, [3, 1]),), (ROIS[np.array(LEVEL) == 2], ROIS[np.array(LEVEL) == 3],
                                    np.argsort(np.argsort(LEVEL, kind="stable")).astype("int32")[:, None])),
    Case("collect_fpn_proposals", lambda a, b, s, t: L.collect_fpn_proposals([a, b], [s, t], 2, 3, 3),
         (divided(ROIS[:2], [1, 1]), divided(ROIS[2:], [2, 0]), divided(np.array([[0.5], [0.9]], "f"), [1, 1]),
          divided(np.array([[0.7], [0.1]], "f"), [2, 0])), ROIS[[2, 0, 1]]),
    Case("bipartite_match", lambda d: L.bipartite_match(d), (divided(NEAR, [2, 1]),),
         (np.array([[0, 1, -1, -1], [-1, -1, 0, -1]], "int32"), np.array([[0.9, 0.85, 0, 0], [0, 0, 0.9, 0]], "f"))),
    Case("bipartite_match per prediction", lambda d: L.bipartite_match(d, "per_prediction", 0.5),
         (divided(NEAR, [2, 1]),), matched_per_prediction()),
    Case("target_assign", lambda x, m, n: L.target_assign(x, m, n, mismatch_value=7),
         (divided(VALUES, [2, 1]), MATCH, divided(np.array([[1], [0], [3]]), [1, 2])),
         (np.array([[VALUES[1], [7, 7], VALUES[0], [7, 7]], [[7, 7], VALUES[2], [7, 7], [7, 7]]], "f"),
          np.array([[[1], [1], [1], [0]], [[1], [1], [0], [1]]], "f"))),
    Case("ssd_loss", lambda a, c, b, y, p: L.ssd_loss(a, c, b, y, p),
         (LOCATION, CONFIDENCE, divided(TRUE, [2, 1]), divided(LABELS, [2, 1]), PRIOR),
         ssd(LOCATION, CONFIDENCE, PRIOR), 128),
    Case("sigmoid_focal_loss", L.sigmoid_focal_loss,
         (CONFIDENCE[0], np.array([[0], [2], [-1], [3]]), np.array([2])),
         focal(CONFIDENCE[0], np.array([[0], [2], [-1], [3]]), 2)),
]  # fmt: skip


@pytest.fixture(scope="module")
def results():
    return run_cases(CASES)


@pytest.mark.slow_cases("unique")
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_layer_equals_numpy(results, case):
    check(case, results)


def test_rows_are_sequences_of_images(results):
    counts = [len(suppressed(b, s, 0.3, 0.2, 4)) for b, s in zip(BOXES, SCORES, strict=True)]
    assert results["multiclass_nms"][0][2] == [[0, counts[0], sum(counts)]]
    assert results["distribute_fpn_proposals"][1][2] == [
        [0, sum(v == 3 for v in LEVEL[:3]), sum(v == 3 for v in LEVEL)]
    ]
    assert results["collect_fpn_proposals"][0][2] == [[0, 2, 3]]


def test_a_head_and_its_detections(script):
    image, maps = script.data("image", [None, 3, 32, 32], "float32"), script.data("maps", [None, 2, 4, 4], "float32")
    head = L.multi_box_head(
        [maps, L.pool2d(maps, 2, "max", 2)], image, 32, 3, [[2.0], [2.0]], min_sizes=[8.0, 16.0], max_sizes=[16.0, 24.0]
    )
    location, score, box, variance = head
    count = 4 * (16 + 4)
    assert [v.shape for v in head] == [[-1, count, 4], [-1, count, 3], [count, 4], [count, 4]]
    rows, index = L.detection_output(location, score, box, variance, keep_top_k=5, return_index=True)
    exe = script.Executor(script.CPUPlace())
    exe.run(script.default_startup_program())
    feed = {"image": np.zeros((1, 3, 32, 32), "f"), "maps": R.randn(1, 2, 4, 4).astype("f")}
    found = exe.run(feed=feed, fetch_list=[rows, index, score], return_numpy=False)
    value, place, logits = (np.asarray(v) for v in found)
    assert value.shape == (5, 6)
    chances = np.exp(logits[0]) / np.exp(logits[0]).sum(1, keepdims=True)
    want = chances[place[:, 0], value[:, 0].astype(int)]
    np.testing.assert_allclose(value[:, 1], want, rtol=8 * np.finfo("float32").eps)
    with pytest.raises(ConfigError, match="1 aspect_ratios for 2 inputs"):
        L.multi_box_head([maps, maps], image, 32, 3, [[2.0]], min_sizes=[8.0, 16.0])


def test_anchors_that_a_proposal_network_is_trained_on(script):
    """Two of four anchors: one on the object, one far from it; one touches the edge, and one is neither."""
    anchors = np.array([[2, 2, 9, 9], [20, 20, 27, 27], [-4, 0, 3, 7], [2, 2, 14, 9]], "float32")
    boxes = np.array([[1, 1, 4.5, 4.5], [10, 10, 12, 12]], "float32")
    feeds = {"a": anchors, "v": anchors, "p": R.randn(1, 4, 4).astype("f"), "c": R.randn(1, 4, 1).astype("f"),
             "g": divided(boxes, [2]), "w": divided(np.array([[0], [1]], "int32"), [2]),
             "i": np.array([[40, 40, 2]], "f")}  # fmt: skip
    x = {n: script.data(n, list(v.shape) if isinstance(v, np.ndarray) else [None, v.shape()[1]],
                        str(np.dtype(v.dtype)), lod_level=0 if isinstance(v, np.ndarray) else 1)
         for n, v in feeds.items()}  # fmt: skip
    outs = L.rpn_target_assign(x["p"], x["c"], x["a"], x["v"], x["g"], x["w"], x["i"], 4, 0.0, 0.5, 0.7, 0.3, False)
    found = script.Executor(script.CPUPlace()).run(feed=feeds, fetch_list=list(outs), return_numpy=False)
    score, location, label, target, weight = (np.asarray(v) for v in found)
    np.testing.assert_array_equal(score, feeds["c"][0, [0, 1]])
    np.testing.assert_array_equal(location, feeds["p"][0, [0]])
    np.testing.assert_array_equal(label, [[1], [0]])
    np.testing.assert_array_equal(target, [[0, 0, 0, 0]])
    np.testing.assert_array_equal(weight, [[1, 1, 1, 1]])


def fed(script, feeds):
    """Variables that these are fed to, by name."""
    return {
        n: script.data(n, list(v.shape) if isinstance(v, np.ndarray) else [None, v.shape()[1]],
                       str(np.dtype(v.dtype)), lod_level=0 if isinstance(v, np.ndarray) else 1)
        for n, v in feeds.items()
    }  # fmt: skip


def run(script, feeds, outs):
    exe = script.Executor(script.CPUPlace())
    return [np.asarray(v) for v in exe.run(feed=feeds, fetch_list=list(outs), return_numpy=False)]


def test_anchors_with_classes_and_one_that_is_near_to_no_object(script):
    """Of the second image the anchor that overlaps the object most does so by less than 0.3: 1.7 takes it for far."""
    anchors = np.array([[2, 2, 9, 9], [50, 50, 57, 57], [2, 2, 30, 30]], "float32")
    boxes = np.array([[1, 1, 4.5, 4.5], [1, 1, 15, 4]], "float32")
    feeds = {"a": anchors, "p": R.randn(2, 3, 4).astype("f"), "c": R.randn(2, 3, 2).astype("f"),
             "g": divided(boxes, [1, 1]), "k": divided(np.array([[3], [2]], "int32"), [1, 1]),
             "w": divided(np.zeros((2, 1), "int32"), [1, 1]), "i": np.full((2, 3), [90, 90, 2], "f")}  # fmt: skip
    x = fed(script, feeds)
    outs = L.retinanet_target_assign(x["p"], x["c"], x["a"], x["a"], x["g"], x["k"], x["w"], x["i"], 2, 0.5, 0.4)
    one = L.rpn_target_assign(x["p"], x["c"][:, :, :1], x["a"], x["a"], x["g"], x["w"], x["i"], 4, -1.0, 0.5, 0.7, 0.3,
                              False)  # fmt: skip
    score, location, label, target, weight, number, *rpn = run(script, feeds, [*outs, *one])
    # image 0: anchor 0 has its object, 1 and 2 have none; image 1: anchor 0 overlaps most, and is far as all are
    np.testing.assert_array_equal(score, feeds["c"].reshape(6, 2)[[0, 1, 2, 3, 4, 5]])
    np.testing.assert_array_equal(label, [[3], [0], [0], [0], [0], [0]])
    np.testing.assert_array_equal(location, feeds["p"].reshape(6, 4)[[0, 3]])
    np.testing.assert_array_equal(weight, [[1] * 4, [0] * 4])
    np.testing.assert_array_equal(target[0], [0, 0, 0, 0])
    np.testing.assert_array_equal(number, [[2], [2]])
    np.testing.assert_array_equal(rpn[2], [[1], [0], [0], [0], [0], [0]])
    np.testing.assert_array_equal(rpn[4], [[1] * 4, [0] * 4])


def test_regions_that_the_second_stage_is_trained_on(script):
    """A true box and a region moved by a tenth of its width have it; a crowd is left out; one region is far."""
    boxes = np.array([[0, 0, 9, 9], [60, 60, 69, 69]], "float32")
    regions = np.array([[2, 0, 20, 18], [20, 20, 38, 38]], "float32")
    feeds = {"r": divided(regions, [2]), "k": divided(np.array([[2], [1]], "int32"), [2]),
             "w": divided(np.array([[0], [1]], "int32"), [2]), "g": divided(boxes, [2]),
             "i": np.array([[90, 90, 2]], "f")}  # fmt: skip
    x = fed(script, feeds)
    settings = {"batch_size_per_im": 4, "fg_fraction": 0.5, "fg_thresh": 0.5, "use_random": False}
    outs = L.generate_proposal_labels(*x.values(), class_nums=3, **settings)
    alike = L.generate_proposal_labels(*x.values(), class_nums=3, is_cls_agnostic=True, **settings)
    rois, label, target, inside, outside, *other = run(script, feeds, [*outs, *alike])
    np.testing.assert_array_equal(rois, [[0, 0, 18, 18], regions[0], regions[1]])
    np.testing.assert_array_equal(label, [[2], [2], [0]])
    want, weights = np.zeros((2, 3, 3, 4), "float32")
    want[1, 2, 0] = -1  # a tenth of its width, over 0.1
    weights[:2, 2] = 1
    np.testing.assert_allclose(target, want.reshape(3, 12), atol=8 * np.finfo("float32").eps)
    np.testing.assert_array_equal(inside, weights.reshape(3, 12))
    np.testing.assert_array_equal(outside, inside)
    np.testing.assert_array_equal(other[3], np.concatenate([weights[:, 0], weights[:, 2]], 1))


def test_masks_that_the_mask_branch_is_trained_on(script):
    """Image 0 at scale 2: a crowd, and an object of a rectangle and a triangle over half of a region; the region of a
    pixel's width lies in the rectangle. Image 1 has regions of the background alone.
    """
    polygons = [
        [[0, 0], [9, 0], [9, 9]],
        [[2, 0], [6, 0], [6, 4], [2, 4]],
        [[2, 4], [6, 4], [2, 8]],
        [[0, 0], [1, 0], [1, 1]],
    ]
    rois = np.array([[30, 30, 40, 40], [4, 0, 12, 16], [8, 2, 8, 6], [1, 1, 5, 5], [2, 2, 6, 6]], "float32")
    segms = script.create_lod_tensor(
        np.concatenate(polygons).astype("float32"), [[2, 1], [1, 2, 1], [len(p) for p in polygons]], script.CPUPlace()
    )
    feeds = {"i": np.array([[90, 90, 2], [90, 90, 1]], "f"), "k": divided(np.array([[1], [2], [1]], "int32"), [2, 1]),
             "w": divided(np.array([[1], [0], [0]], "int32"), [2, 1]), "r": divided(rois, [3, 2]),
             "l": divided(np.array([[0], [2], [2], [0], [0]], "int32"), [3, 2])}  # fmt: skip
    x = fed(script, feeds)
    shapes = script.data("s", [None, 2], "float32", lod_level=3)
    outs = L.generate_mask_labels(x["i"], x["k"], x["w"], shapes, x["r"], x["l"], num_classes=3, resolution=4)
    boxes, places, masks = run(script, {**feeds, "s": segms}, outs)
    np.testing.assert_array_equal(boxes, rois[[1, 2, 3]])
    np.testing.assert_array_equal(places, [[1], [2], [3]])
    masks = masks.reshape(3, 3, 4, 4)
    assert (masks[:2, :2] == -1).all()
    assert (masks[2] == -1).all()
    np.testing.assert_array_equal(masks[0, 2], [[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 0], [1, 0, 0, 0]])
    assert (masks[1, 2] == 1).all()


def test_detections_of_levels(script):
    """Level 0: a box moved and twice as wide, one too unlikely; level 1: two that overlap, one of another class."""
    anchors = [np.array([[10, 10, 19, 19], [40, 40, 49, 49]], "f"), np.array([[20, 20, 29, 29], [20, 20, 29, 27]], "f")]
    moves, scores = np.zeros((2, 2, 2, 4), "f"), np.zeros((2, 2, 2, 2), "f")
    moves[0, 0, 0] = [1, 0, np.log(2), 0]
    scores[0, 0] = [[0, 0.7], [0.2, 0]]
    scores[1, 0] = [[0.6, 0.1], [0.5, 0]]
    feeds = {"m0": moves[0], "m1": moves[1], "s0": scores[0], "s1": scores[1], "a0": anchors[0], "a1": anchors[1],
             "i": np.array([[56, 56, 2], [60, 60, 1]], "f")}  # fmt: skip
    x = fed(script, feeds)
    rows = L.retinanet_detection_output([x["m0"], x["m1"]], [x["s0"], x["s1"]], [x["a0"], x["a1"]], x["i"], 0.3)
    (found,) = script.Executor(script.CPUPlace()).run(feed=feeds, fetch_list=[rows], return_numpy=False)
    assert found.lod() == [[0, 3, 3]]
    # a middle of 25 and a width of 20, in an image half as large; the other class's box is the same as the best one's
    want = [[2, 0.7, 7.5, 5, 17, 9.5], [1, 0.6, 10, 10, 14.5, 14.5], [2, 0.1, 10, 10, 14.5, 14.5]]
    np.testing.assert_allclose(np.asarray(found), want, rtol=8 * np.finfo("float32").eps)


MAPS = {
    ("integral", True): ((0.5 + 0.5 * 2 / 3) / 2, (0.5 + 0.25 * 0.6 + 0.25 * 2 / 3) / 2),
    ("11point", True): ((6 + 5 * 2 / 3) / 22, (6 + 5 * 2 / 3) / 22),
    ("integral", False): (0.25, (1 / 3 + 1 / 2) / 4),
}


@pytest.mark.parametrize(("version", "difficult"), MAPS)
def test_mean_average_precision_of_a_minibatch_and_of_all(script, version, difficult):
    """Class 1: right at 0.97 (a difficult object) and 0.9, wrong at 0.95 and 0.8; class 2: never right."""
    rows = [[1, 0.9, 0.1, 0.1, 0.3, 0.3], [1, 0.8, 0.1, 0.1, 0.3, 0.31], [1, 0.97, 0.5, 0.5, 0.9, 0.9],
            [2, 0.6, 0, 0, 0.1, 0.1], [1, 0.95, 0, 0, 0.1, 0.1]]  # fmt: skip
    true = [[0.1, 0.1, 0.3, 0.3], [0.5, 0.5, 0.9, 0.9], [0.5, 0.5, 0.6, 0.6]]
    feeds = {"r": divided(np.float32(rows), [3, 2]), "k": divided(np.array([[1], [1], [2]], "int32"), [2, 1]),
             "b": divided(np.float32(true), [2, 1]),
             "d": divided(np.array([[0], [1], [0]], "int32"), [2, 1])}  # fmt: skip
    x = fed(script, feeds)
    metric = script.metrics.DetectionMAP(
        x["r"], x["k"], x["b"], x["d"], 3, evaluate_difficult=difficult, ap_version=version
    )
    one, both = MAPS[version, difficult]
    for expected in ((one, one), (one, both)):
        np.testing.assert_allclose(np.concatenate(run(script, feeds, metric.get_map_var())), expected, rtol=1e-6)
    metric.reset(None)
    np.testing.assert_allclose(np.concatenate(run(script, feeds, metric.get_map_var())), (one, one), rtol=1e-6)


def test_proposals_of_two_images(script):
    """Anchors without offsets: the best by score, as far as they overlap none before them, and not too small."""
    anchors = np.array([[0, 0, 9, 9], [1, 1, 9, 9], [20, 20, 29, 29], [5, 5, 6, 6]], "float32").reshape(1, 1, 4, 4)
    names = {"s": [2, 4, 1, 1], "d": [2, 16, 1, 1], "i": [2, 3], "a": [1, 1, 4, 4], "v": [1, 1, 4, 4]}
    x = {n: script.data(n, shape, "float32") for n, shape in names.items()}
    rois, chances = L.generate_proposals(*x.values(), nms_thresh=0.5, min_size=3.0)
    scores = np.array([[0.9, 0.8, 0.3, 0.99], [0.1, 0.2, 0.3, 0.99]], "float32").reshape(2, 4, 1, 1)
    feed = {"s": scores, "d": np.zeros((2, 16, 1, 1), "f"), "i": np.array([[40, 40, 1], [40, 40, 1]], "f"),
            "a": anchors, "v": np.ones((1, 1, 4, 4), "f")}  # fmt: skip
    found = script.Executor(script.CPUPlace()).run(feed=feed, fetch_list=[rois, chances], return_numpy=False)
    np.testing.assert_array_equal(np.asarray(found[0]), anchors.reshape(4, 4)[[0, 2, 2, 1]])
    np.testing.assert_array_equal(np.asarray(found[1])[:, 0], scores.reshape(2, 4)[[0, 0, 1, 1], [0, 2, 2, 1]])
    assert found[0].lod() == [[0, 2, 4]]


def test_what_is_refused(script):
    x, y = script.data("x", [2, 3, 4], "float32"), script.data("y", [None, 4], "float32", lod_level=1)
    with pytest.raises(ConfigError, match="'bipartite' or 'per_prediction'"):
        L.bipartite_match(y, "other")
    with pytest.raises(ConfigError, match="max_negative"):
        L.ssd_loss(x, x, y, y, y, mining_type="hard_example")
    with pytest.raises(ShapeError, match=r"needs \[n, m, 4\]"):
        L.locality_aware_nms(y, x, 0.1, -1, -1)
    with pytest.raises(ConfigError, match="1 boxes and 1 scores for levels 2 to 3"):
        L.collect_fpn_proposals([y], [y], 2, 3, 5)
