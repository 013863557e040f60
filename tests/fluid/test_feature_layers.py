"""Layers of features, losses, boxes and regions against NumPy, number by number; and what they refuse."""

import itertools
import math

import numpy as np
import pytest
from scipy import optimize, special, stats

from polyreme import fluid
from polyreme.errors import ConfigError, ShapeError
from tests.fluid.table import Case, check, run_cases

L = fluid.layers
R = np.random.RandomState(3)
IMAGE = R.randn(2, 4, 6, 5).astype("float32")
ROWS = R.randn(5, 4).astype("float32")
LOGITS = R.randn(3, 6).astype("float32")
LABEL = np.array([[1], [5], [1]])
CHANNELS = R.randn(2, 4).astype("float32")


def divided(array, *lengths):
    return fluid.create_lod_tensor(array, list(lengths), "cpu")


def boxes(n, size=6.0):
    low = R.uniform(0, size, (n, 2))
    return np.concatenate([low, low + R.uniform(0.5, size, (n, 2))], 1).astype("float32")


A, B = boxes(4), boxes(3)
TEXT = divided(ROWS, [2, 3])
ROIS = divided(np.array([[0, 0, 3, 4], [1, 2, 4, 5], [0.5, 1, 2.5, 4]], "float32"), [2, 1])
PICTURE = [0, 0, 1]


def iou(a, b, extra):
    out = np.zeros((len(a), len(b)), "float32")
    for i, j in np.ndindex(out.shape):
        w = min(a[i][2], b[j][2]) - max(a[i][0], b[j][0]) + extra
        h = min(a[i][3], b[j][3]) - max(a[i][1], b[j][1]) + extra
        both = max(w, 0) * max(h, 0)
        out[i, j] = both / (sum((v[2] - v[0] + extra) * (v[3] - v[1] + extra) for v in (a[i], b[j])) - both)
    return out


def reorganized(x, b):
    n, c, h, w = x.shape
    out = np.zeros(x.size, "float32").reshape(n, c // b**2, h * b, w * b)
    for k, j, i in np.ndindex(c, h, w):
        part, group = divmod(k, c // b**2)
        out[:, group, j * b + part // b, i * b + part % b] = x[:, k, j, i]
    return out.reshape(n, c * b * b, h // b, w // b)


def focus(x, index):
    mask = np.zeros_like(x)
    for n in range(len(x)):
        rows, columns = set(), set()
        for at in np.argsort(-x[n, index].reshape(-1)):
            row, column = divmod(at, x.shape[3])
            if row not in rows and column not in columns:
                rows.add(row)
                columns.add(column)
                mask[n, :, row, column] = 1
    return mask


def positions(x, starts, alpha, beta):
    out, half = alpha * x, x.shape[1] // 2
    for i, k in np.ndindex(len(x), half):
        angle = (i - starts[i]) / 10000 ** (k / (half - 1))
        out[i, k] += beta * math.sin(angle)
        out[i, half + k] += beta * math.cos(angle)
    return out.astype("float32")


def hat_mean(x, roi, bins):
    """Mean of the linear interpolation, by the integral over many small steps."""

    def weights(low, high, size):
        edges = np.linspace(low, high, bins + 1)
        rows = []
        for a, b in itertools.pairwise(edges):
            t = np.linspace(a, b, 6001)[:-1] + (b - a) / 12000
            rows.append([np.maximum(0, 1 - np.abs(t - p)).mean() for p in range(size)])
        return np.array(rows)

    return np.einsum("chw,ih,jw->cij", x, weights(roi[1], roi[3], x.shape[1]), weights(roi[0], roi[2], x.shape[2]))


def anchors(height, width, sizes, ratios, stride, offset):
    out = []
    for row, column in np.ndindex(height, width):
        x, y = column * stride[0] + offset * (stride[0] - 1), row * stride[1] + offset * (stride[1] - 1)
        for ratio in ratios:
            w = round(math.sqrt(stride[0] * stride[1] / ratio))
            h = round(w * ratio)
            for size in sizes:
                a, b = size / stride[0] * w, size / stride[1] * h
                out.append([x - (a - 1) / 2, y - (b - 1) / 2, x + (a - 1) / 2, y + (b - 1) / 2])
    return np.array(out, "float32").reshape(height, width, -1, 4)


def dense(shape, image, densities, sizes, ratios, step=None, offset=0.5):
    out = []
    for row, column in np.ndindex(*shape):
        step = step or [image[1] / shape[1], image[0] / shape[0]]
        middle, average = [(column + offset) * step[0], (row + offset) * step[1]], int(sum(step) / 2)
        for density, size in zip(densities, sizes, strict=True):
            shift = average // density
            for ratio in ratios:
                w, h = size * math.sqrt(ratio), size / math.sqrt(ratio)
                for i, j in np.ndindex(density, density):
                    x = middle[0] - average / 2 + shift / 2 + j * shift
                    y = middle[1] - average / 2 + shift / 2 + i * shift
                    box = [
                        (x - w / 2) / image[1],
                        (y - h / 2) / image[0],
                        (x + w / 2) / image[1],
                        (y + h / 2) / image[0],
                    ]
                    out.append(np.clip(box, 0, 1))
    return np.array(out, "float32")


def transformed(x):
    out = np.zeros_like(x)
    for n, c, h, w in np.ndindex(x.shape):
        out[n, c, h, w] = 4 * (h if c % 2 else w) - x[n, c, h, w]
    return out


def decoded(prior, variance, target, score, clip):
    every, chosen = np.zeros_like(target), []
    for i, p in enumerate(prior):
        w, h = p[2] - p[0] + 1, p[3] - p[1] + 1
        for c in range(score.shape[1]):
            d = target[i, 4 * c : 4 * c + 4] * variance
            x, y = p[0] + w / 2 + d[0] * w, p[1] + h / 2 + d[1] * h
            a, b = math.exp(min(d[2], clip)) * w / 2, math.exp(min(d[3], clip)) * h / 2
            every[i, 4 * c : 4 * c + 4] = x - a, y - b, x + a - 1, y + b - 1
        c = 1 + int(score[i, 1:].argmax())
        chosen.append(every[i, 4 * c : 4 * c + 4])
    return every, np.array(chosen)


def student(x, z):
    soft = math.log1p(math.exp(x))
    if z < -1:
        return soft
    if z < 0:
        return soft - x
    return (soft - (x if z >= 1 else 0)) + soft - x * (z - 1 if z >= 1 else z)


def iou_of_classes(seen, wanted, n):
    right = [int(((seen == c) & (wanted == c)).sum()) for c in range(n)]
    wrong = [int(((seen == c) != (wanted == c)).sum()) for c in range(n)]
    each = [a / (a + b) for a, b in zip(right, wrong, strict=True) if a + b]
    return np.array([np.mean(each)], "float32"), np.array(wrong, "int32"), np.array(right, "int32")


def tree(x, weight, bias, label, classes):
    """Loss down the complete tree whose node k has the children 2k and 2k + 1."""
    out = []
    for row, (c,) in zip(x, label, strict=True):
        node, loss = classes + c, 0.0
        while node > 1:
            score = row @ weight[node // 2 - 1] + bias[node // 2 - 1]
            loss += math.log1p(math.exp(score)) - (node % 2) * score
            node //= 2
        out.append([loss])
    return np.array(out, "float32")


def ctc(log_p, label):
    """-log of the sum over all paths that read as the label, each path one by one."""
    total = 0.0
    for path in np.ndindex(*[log_p.shape[1]] * len(log_p)):
        merged = [c for i, c in enumerate(path) if c and (i == 0 or c != path[i - 1])]
        if merged == list(label):
            total += math.exp(sum(log_p[t, c] for t, c in enumerate(path)))
    return -math.log(total)


def sample(x, row, column):
    """Bilinear, the edge's number outside."""
    height, width = x.shape
    row, column = min(max(row, 0), height - 1), min(max(column, 0), width - 1)
    i, j = int(row), int(column)
    a, b = row - i, column - j
    down, right = min(i + 1, height - 1), min(j + 1, width - 1)
    top, bottom = ((1 - b) * x[r, j] + b * x[r, right] for r in (i, down))
    return (1 - a) * top + a * bottom


def moved_bins(x, rois, trans, images, grid, samples, std, scale=1.0, part=None, group=(1, 1)):
    """Bins moved by trans, the right and down moves of each class in turn; halves round away from zero."""
    part, classes = part or grid, trans.shape[1] // 2
    outputs = x.shape[1] // (group[0] * group[1])
    out = np.zeros((len(rois), outputs, *grid), "float32")
    for n, c, i, j in np.ndindex(out.shape):
        whole = [math.floor(v + 0.5) for v in rois[n]]
        low = np.array(whole[:2]) * scale - 0.5
        size = np.maximum((np.array(whole[2:]) + 1) * scale - 0.5 - low, 0.1)
        first = 2 * (c // (outputs // classes))
        move = trans[n, first : first + 2, i * part[0] // grid[0], j * part[1] // grid[1]] * std
        channel = (c * group[0] + i * group[0] // grid[0]) * group[1] + j * group[1] // grid[1]
        total = []
        for a, b in np.ndindex(samples, samples):
            column = low[0] + size[0] * ((j + b / samples) / grid[1] + move[0])
            row = low[1] + size[1] * ((i + a / samples) / grid[0] + move[1])
            if -0.5 <= row <= x.shape[2] - 0.5 and -0.5 <= column <= x.shape[3] - 0.5:
                total.append(sample(x[images[n], channel], row, column))
        out[n, c, i, j] = np.mean(total) if total else 0
    return out


def upright(x, quad, height, width):
    """A quadrangle made upright by the map that a linear system for its four corners gives."""
    corners = quad.reshape(4, 2)
    sides = [np.linalg.norm(corners[k] - corners[(k + 1) % 4]) for k in range(4)]
    wide = min(math.floor((sides[0] + sides[2]) / (sides[1] + sides[3]) * (height - 1) + 0.5) + 1, width)
    places = [(0, 0), (wide - 1, 0), (wide - 1, height - 1), (0, height - 1)]
    rows, values = [], []
    for (u, v), (p, q) in zip(places, corners, strict=True):
        rows += [[u, v, 1, 0, 0, 0, -u * p, -v * p], [0, 0, 0, u, v, 1, -u * q, -v * q]]
        values += [p, q]
    matrix = np.append(np.linalg.solve(np.array(rows), np.array(values)), 1).reshape(3, 3)
    out, mask = np.zeros((x.shape[0], height, width), "float32"), np.zeros((1, height, width), "int32")
    for i, j in np.ndindex(height, width):
        if j < wide:
            a, b, c = matrix @ [j, i, 1]
            mask[0, i, j] = 1
            out[:, i, j] = [sample(channel, b / c, a / c) for channel in x]
    return out, mask, matrix.reshape(9)


QUADS = np.array([[0.5, 0.5, 3.5, 0.8, 3.8, 4.2, 0.2, 3.9], [1, 1, 4, 1, 4, 3, 1, 3]], "float32")
UPRIGHT = [upright(IMAGE[i], q, 3, 4) for i, q in enumerate(QUADS)]
TRANS = (R.rand(3, 2, 2, 3) - 0.5).astype("float32")
PARTS = np.random.RandomState(5).rand(3, 4, 2, 3).astype("float32") - 0.5
STEPS = R.randn(5, 3).astype("float32")
LOG_STEPS = special.log_softmax(STEPS, -1)
SEEN, WANTED = R.randint(0, 4, (2, 5)), R.randint(0, 3, (2, 5))
TARGET = R.randn(4, 12).astype("float32") * 0.3
SCORE = R.rand(4, 3).astype("float32")
STUDENT = np.array([[-2.0], [-1.0], [0.3], [1.7]], "float32")
CLICK = R.randn(4, 1).astype("float32")
COUNTS = np.abs(ROWS)
LOGS = np.log1p(COUNTS)
LOC, SCALE = CHANNELS, np.abs(CHANNELS[::-1]) + 0.5
DIAGONAL = [np.diag(v).astype("float32") for v in SCALE]
SAMPLES = np.array([[1, 0, 5], [5, 5, 2], [1, 3, 1]])
CHANCES = R.uniform(0.1, 0.9, (3, 3)).astype("float32")
NEW = np.array([[3], [1], [3], [0], [1], [3]])


def sampled(logits, label):
    out = []
    for row, classes, chance, (own,) in zip(logits, SAMPLES, CHANCES, label, strict=True):
        scores = [row[c] - math.log(q) for c, q in zip(classes, chance, strict=True)]
        live = [s for i, (s, c) in enumerate(zip(scores, classes, strict=True)) if i == 0 or c != own]
        out.append([special.logsumexp(live) - scores[0]])
    return np.array(out, "float32")


def cut(rows, images):
    return np.array([[min(max(v, 0), images[i][1 - d % 2] - 1) for d, v in enumerate(r)] for r, i in rows], "float32")


CASES = [
    Case("space_to_depth", lambda x: L.space_to_depth(x, 2), (IMAGE[:, :, :, :4],), reorganized(IMAGE[..., :4], 2)),
    Case("affine_channel", lambda x, s, b: L.affine_channel(x, s, b, act="relu"), (IMAGE, CHANNELS[0], CHANNELS[1]),
         np.maximum(IMAGE * CHANNELS[0][:, None, None] + CHANNELS[1][:, None, None], 0)),
    Case("similarity_focus", lambda x: L.similarity_focus(x, 1, [1]), (IMAGE[:, :, :2],), focus(IMAGE[:, :, :2], 1)),
    Case("similarity_focus of two, axis 3", lambda x: L.similarity_focus(x, 3, [0, 2]), (IMAGE[:, :2],),
         np.maximum(*(focus(IMAGE[:, :2].transpose(0, 3, 1, 2), i) for i in (0, 2))).transpose(0, 2, 3, 1)),
    Case("fsp_matrix", L.fsp_matrix, (IMAGE, IMAGE[:, :3]),
         np.einsum("nahw,nbhw->nab", IMAGE, IMAGE[:, :3]) / 30),
    Case("add_position_encoding", lambda x: L.add_position_encoding(x, 0.5, 2.0), (ROWS[None],),
         positions(ROWS, [0] * 5, 0.5, 2.0)[None]),
    Case("add_position_encoding of sequences", lambda x: L.add_position_encoding(x, 1.0, 1.0), (TEXT,),
         positions(ROWS, [0, 0, 2, 2, 2], 1.0, 1.0)),
    Case("continuous_value_model", lambda x, c: L.continuous_value_model(x, c), (COUNTS, COUNTS[:, :2]),
         np.concatenate([LOGS[:, :1], LOGS[:, 1:2] - LOGS[:, :1], COUNTS[:, 2:]], 1)),
    # the values of 1.7's own example
    Case("hash", lambda x: L.hash(x, 1000, 4), (divided(np.array([[1, 2], [3, 4]], "int32"), [2]),),
         np.array([[[722], [407], [337], [395]], [[603], [590], [386], [901]]], "int32")),
    Case("crop", lambda x, y: L.crop(x, y, [1, 1]), (ROWS, ROWS[:2, :3]), ROWS[1:3, 1:4]),
    Case("temporal_shift", lambda x: L.temporal_shift(x, 2), (IMAGE,),
         np.stack([np.stack([0 * IMAGE[0, 0], IMAGE[1, 1], *IMAGE[0, 2:]]),
                   np.stack([IMAGE[0, 0], 0 * IMAGE[0, 0], *IMAGE[1, 2:]])])),
    Case("mean_iou", lambda x, y: L.mean_iou(x, y, 6), (SEEN, WANTED), iou_of_classes(SEEN, WANTED, 6)),
    # B, I of two types: chunks are 0:1, 2, 3:4 and 0, 1:2; then 0:2, 3:4 and 0, 1:2
    Case("chunk_eval", lambda x, y: L.chunk_eval(x, y, "IOB", 2),
         (divided(np.array([[0], [1], [0], [2], [3], [2], [0], [1]]), [5, 3]),
          divided(np.array([[0], [1], [1], [2], [3], [2], [0], [1]]), [5, 3])),
         (*(np.array([v], "f") for v in (3 / 5, 3 / 4, 2 / 3)), *(np.array([v]) for v in (5, 4, 3)))),
    # E ends a chunk; type 1 is not counted; what is behind the length is none
    Case("chunk_eval padded", lambda x, y, n: L.chunk_eval(x, y, "IOE", 2, [1], n),
         (np.array([[0, 1, 0, 2, 3, 1]]), np.array([[0, 1, 2, 2, 3, 0]]), np.array([5])),
         (*(np.array([v], "f") for v in (1 / 2, 1, 2 / 3)), *(np.array([v]) for v in (2, 1, 1)))),
    Case("merge_selected_rows", lambda x: L.get_tensor_from_selected_rows(L.merge_selected_rows(x)), (ROWS,), ROWS),
    Case("teacher_student_sigmoid_loss", L.teacher_student_sigmoid_loss, (CLICK, STUDENT),
         np.array([[student(x, z)] for (x,), (z,) in zip(CLICK, STUDENT, strict=True)], "float32")),
    Case("warpctc", lambda x, y: L.warpctc(x, y), (divided(STEPS, [3, 2]), divided(np.array([[1], [2], [2]]), [2, 1])),
         np.array([[ctc(LOG_STEPS[:3], [1, 2])], [ctc(LOG_STEPS[3:], [2])]], "float32")),
    Case("warpctc padded", lambda x, y, a, b: L.warpctc(x, y, input_length=a, label_length=b),
         (STEPS[:4, None], np.array([[1, 0]]), np.array([4]), np.array([1])),
         np.array([[ctc(LOG_STEPS[:4], [1])]], "f")),
    Case("sampled softmax", lambda x, y, s, p: L.sampled_softmax_with_cross_entropy(
         x, y, 2, use_customized_samples=True, customized_samples=s, customized_probabilities=p),
         (LOGITS, LABEL, SAMPLES, CHANCES), sampled(LOGITS, LABEL)),
    # with every class among the drawn ones it is the whole softmax
    Case("sampled softmax of all", lambda x, y: L.sampled_softmax_with_cross_entropy(x, y, 6), (LOGITS, LABEL),
         -np.take_along_axis(special.log_softmax(LOGITS, 1), LABEL, 1)),
    Case("gather_tree", L.gather_tree,
         (np.array([[[2, 6]], [[6, 1]], [[0, 1]]]), np.array([[[0, 0]], [[1, 0]], [[0, 0]]])),
         np.array([[[6, 6]], [[6, 6]], [[0, 1]]])),
    Case("Uniform", lambda x: [L.Uniform(0.0, 2.0).log_prob(x), L.Uniform(x, 3.0).entropy()], (SCORE[0],),
         (np.full(3, -np.log(2.0), "f"), np.log(3 - SCORE[0]))),
    Case("Normal", lambda a, b: [L.Normal(a, b).entropy(), L.Normal(a, b).log_prob(a + 1.0),
                                 L.Normal(a, b).kl_divergence(L.Normal(0.5, 2.0))], (LOC, SCALE),
         (stats.norm(LOC, SCALE).entropy().astype("f"), stats.norm(LOC, SCALE).logpdf(LOC + 1).astype("f"),
          np.log(2 / SCALE) + (SCALE**2 + (LOC - 0.5) ** 2) / 8 - 0.5)),
    Case("Categorical", lambda a, b: [L.Categorical(a).entropy(), L.Categorical(a).kl_divergence(L.Categorical(b))],
         (LOGITS, LOGITS[::-1].copy()),
         (np.array([[stats.entropy(special.softmax(r))] for r in LOGITS], "f"),
          np.array([[stats.entropy(special.softmax(p), special.softmax(q))]
                    for p, q in zip(LOGITS, LOGITS[::-1], strict=True)], "f"))),
    Case("MultivariateNormalDiag", lambda a, b, c, d: [
         L.MultivariateNormalDiag(a, b).entropy(),
         L.MultivariateNormalDiag(a, b).kl_divergence(L.MultivariateNormalDiag(c, d))],
         (LOC[0], DIAGONAL[0], LOC[1], DIAGONAL[1]),
         (np.array([stats.multivariate_normal(LOC[0], DIAGONAL[0]).entropy()], "f"),
          np.array([0.5 * (SCALE[0] / SCALE[1] + (LOC[0] - LOC[1]) ** 2 / SCALE[1] - 1
                           + np.log(SCALE[1] / SCALE[0])).sum()], "f"))),
    Case("iou_similarity", lambda x, y: L.iou_similarity(x, y), (A, B), iou(A, B, 0)),
    Case("iou_similarity of pixels", lambda x, y: L.iou_similarity(x, y, box_normalized=False), (A, B), iou(A, B, 1)),
    Case("anchor_generator", lambda x: L.anchor_generator(x, [32.0, 64.0], [0.5, 2.0], stride=[16.0, 8.0])[0],
         (IMAGE[:, :, :2, :3],), anchors(2, 3, [32, 64], [0.5, 2], [16, 8], 0.5)),
    Case("density_prior_box",
         lambda x, y: L.density_prior_box(x, y, [2, 1], [4.0, 8.0], [1.0, 2.0], flatten_to_2d=True)[0],
         (IMAGE[:, :, :2, :3], np.zeros((2, 3, 20, 27), "f")), dense((2, 3), (20, 27), [2, 1], [4, 8], [1, 2])),
    Case("density_prior_box of given steps",
         lambda x, y: L.density_prior_box(x, y, [3], [6.0], [0.5], steps=[7.0, 5.0], offset=0.25)[0].reshape([-1, 4]),
         (IMAGE[:, :, :2, :3], np.zeros((2, 3, 20, 27), "f")),
         dense((2, 3), (20, 27), [3], [6], [0.5], (7.0, 5.0), 0.25)),
    Case("polygon_box_transform", L.polygon_box_transform, (IMAGE,), transformed(IMAGE)),
    Case("box_clip", L.box_clip, (divided(np.concatenate([A, A + 3]), [3, 5]), np.array([[8, 10, 2], [5, 6, 1]], "f")),
         cut(list(zip(np.concatenate([A, A + 3]), [0] * 3 + [1] * 5, strict=True)), [(4, 5), (5, 6)])),
    Case("box_decoder_and_assign", lambda p, v, t, s: L.box_decoder_and_assign(p, v, t, s, 0.4),
         (A, np.array([0.5, 1, 2, 1], "f"), TARGET, SCORE), decoded(A, [0.5, 1, 2, 1], TARGET, SCORE, 0.4)),
    Case("box_coder", lambda p, t: L.box_coder(p, [1.0, 1.0, 2.0, 2.0], L.box_coder(p, [1.0, 1.0, 2.0, 2.0], t),
                                               "decode_center_size"), (A, B), np.repeat(B[:, None], 4, 1)),
    Case("deformable_roi_pooling", lambda x, r, t: L.deformable_roi_pooling(
         x, r, t, pooled_height=2, pooled_width=3, sample_per_part=2, trans_std=0.3), (IMAGE, ROIS, TRANS),
         moved_bins(IMAGE, ROIS.numpy(), TRANS, PICTURE, (2, 3), 2, 0.3)),
    Case("deformable_roi_pooling of groups", lambda x, r, t: L.deformable_roi_pooling(
         x, r, t, False, 0.5, [2, 1], 4, 3, [2, 3], 3, 0.2, True), (IMAGE, ROIS, PARTS),
         moved_bins(IMAGE, ROIS.numpy(), PARTS, PICTURE, (4, 3), 3, 0.2, 0.5, (2, 3), (2, 1))),
    # the map has 1e-5 in its denominator
    Case("roi_perspective_transform", lambda x, r: L.roi_perspective_transform(x, r, 3, 4),
         (IMAGE, divided(QUADS, [1, 1])), tuple(np.stack(v).astype(v[0].dtype if k < 2 else "f")
                                                 for k, v in enumerate(zip(*UPRIGHT, strict=True))), 256),
    # 6000 points a bin miss the corners of the interpolation by 1e-4 of it
    Case("prroi_pool", lambda x, r: L.prroi_pool(x, r, 0.5, 2, 2), (IMAGE, ROIS),
         np.stack([hat_mean(IMAGE[i], r / 2, 2) for i, r in zip(PICTURE, ROIS.numpy(), strict=True)]).astype("f"),
         1024),
]  # fmt: skip


@pytest.fixture(scope="module")
def results():
    return run_cases(CASES)


@pytest.mark.slow_cases("hash")
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_layer_equals_numpy(results, case):
    check(case, results)


def test_sampled_classes_are_as_likely_as_they_are_said_to_be(script):
    """The loss of two of six equal logits: log of the sum of 1 / chance over the own and the drawn classes."""
    x, y = script.data("x", [1, 6], "float32"), script.data("y", [1, 1], "int64")
    loss = L.sampled_softmax_with_cross_entropy(x, y, 2)
    feed, exe = {"x": np.zeros((1, 6), "float32"), "y": np.array([[5]])}, script.Executor(script.CPUPlace())
    losses = [exe.run(feed=feed, fetch_list=[loss])[0].item() for _ in range(40)]
    chance = np.log((np.arange(6) + 2) / (np.arange(6) + 1)) / np.log(7)
    # as many tries without distinction as give two distinct classes
    tries = optimize.brentq(lambda t: (1 - (1 - chance) ** t).sum() - 2, 0.1, 20)
    weights = 1 / (1 - (1 - chance) ** tries)
    pairs = {(a, b): np.log1p((weights[a] * (a != 5) + weights[b] * (b != 5)) / weights[5])
             for a in range(6) for b in range(a)}  # fmt: skip
    likely = {pair: 0 for pair in pairs}
    for value in losses:
        nearest = min(pairs, key=lambda pair: abs(pairs[pair] - value))
        assert abs(pairs[nearest] - value) < 1e-5
        likely[nearest] += 1
    # class 0 is drawn in 4 of 5 cases, by its chance; in none of 40 with probability 1e-27
    assert 15 < sum(count for pair, count in likely.items() if 0 in pair) < 40


def test_a_seed_of_its_own_draws_the_same_in_each_run(script):
    x, label = script.data("x", [3, 40], "float32"), script.data("label", [3, 1], "int64")
    alike = [
        L.dropout(x, 0.5, seed=3), L.uniform_random([40], seed=5), L.gaussian_random([40], seed=5),
        L.sampling_id(L.softmax(x), seed=2), L.random_crop(x, [1], seed=4), L.nce(x, label, 90, seed=4),
        L.sampled_softmax_with_cross_entropy(x, label, 5, seed=6), L.Uniform(0.0, 1.0).sample([40], seed=7),
    ]  # fmt: skip
    others = [L.dropout(x, 0.5, seed=1), L.dropout(x, 0.5)]
    exe = script.Executor(script.CPUPlace())
    exe.run(script.default_startup_program())
    feed = {"x": np.linspace(1, 2, 120, dtype="float32").reshape(3, 40), "label": np.array([[0], [1], [2]])}
    first, second = (exe.run(feed=feed, fetch_list=[*alike, *others]) for _ in range(2))
    for a, b in zip(first[: len(alike)], second, strict=False):
        np.testing.assert_array_equal(a, b)
    assert (first[0] != first[-2]).any()
    assert (first[-1] != second[-1]).any()


def test_random_crop_takes_a_part_of_each_image(script):
    x = script.data("x", [-1, 6, 8], "float32")
    part = L.random_crop(x, [3, 4])
    images = np.arange(20 * 48, dtype="float32").reshape(20, 6, 8)
    (found,) = script.Executor(script.CPUPlace()).run(feed={"x": images}, fetch_list=[part])
    places = set()
    for image, crop in zip(images, found, strict=True):
        row, column = divmod(int(crop[0, 0] - image[0, 0]), 8)
        np.testing.assert_array_equal(crop, image[row : row + 3, column : column + 4])
        places.add((row, column))
    assert len(places) > 5


def test_what_is_refused(script):
    x, y = script.data("x", [2, 4, 6, 6], "float32"), script.data("y", [2, 1], "int64")
    with pytest.raises(ShapeError, match="b\\^2 divides c"):
        L.space_to_depth(x, 3)
    with pytest.raises(ConfigError, match="axis is 1, 2 or 3"):
        L.similarity_focus(x, 0, [0])
    with pytest.raises(ShapeError, match="larger sizes"):
        L.random_crop(x, [7, 2])
    with pytest.raises(ConfigError, match="num_samples=9 distinct ones of 6"):
        L.sampled_softmax_with_cross_entropy(x[:, 0, 0], y, 9)
    with pytest.raises(ConfigError, match="path_table, path_code and is_custom"):
        L.hsigmoid(x[:, 0, 0], y, 6, is_custom=True)
    with pytest.raises(ConfigError, match="mask belongs to it"):
        L.deformable_conv(x, x, None, 4, 3)
    with pytest.raises(ConfigError, match="both input_length and label_length"):
        L.warpctc(x[0], y, input_length=y)
    with pytest.raises(ConfigError, match="one density a size"):
        L.density_prior_box(x, x, [1], [1.0, 2.0], [1.0])
    with pytest.raises(ConfigError, match="give another Normal"):
        L.Normal(0.0, 1.0).kl_divergence(L.Uniform(0.0, 1.0))


@pytest.mark.parametrize("made_by", ["py_reader", "create_py_reader_by_data"])
def test_a_program_reads_a_py_reader(script, made_by):
    if made_by == "py_reader":
        reader = L.py_reader(4, [[-1, 2], [-1, 1]], ["float32", "int64"])
    else:
        reader = L.create_py_reader_by_data(4, [L.data("a", [2]), L.data("b", [1], dtype="int64")])
    x, y = L.read_file(L.double_buffer(reader))
    total = L.reduce_sum(L.elementwise_add(L.reduce_sum(x, 1), L.cast(L.squeeze(y, [1]), "float32")))
    reader.decorate_paddle_reader(lambda: ([(np.ones(2, "float32") * i, [i])] * 2 for i in range(3)))
    exe, totals = script.Executor(script.CPUPlace()), []
    for _ in range(2):
        reader.start()
        for _ in range(3):
            totals += exe.run(fetch_list=[total])[0].tolist()
        with pytest.raises(script.core.EOFException):
            exe.run(fetch_list=[total])
        reader.reset()
    assert totals == [0, 6, 12] * 2
    assert L.get_places(2, "CPU") == script.cpu_places(2)
