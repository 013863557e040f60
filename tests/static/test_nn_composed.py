"""Programs as users write them, with an unknown batch size: losses and gradients are those of eager code."""

import numpy as np
import pytest

import polyreme as paddle
import polyreme.nn as nn
import polyreme.nn.functional as F
from polyreme import static
from polyreme.core import unique_name
from polyreme.nn import Linear

RNG = np.random.default_rng(0)
ROWS, IMAGES, WORDS = (RNG.normal(size=s).astype("float32") for s in ((4, 6), (4, 3, 8, 8), (4, 5, 8)))
LABELS, IDS = np.array([0, 2, 1, 2]), RNG.integers(0, 10, (4, 5))
PROGRAMS = []


def program(*arrays):
    def declare(fn):
        PROGRAMS.append((fn, arrays))
        return fn

    return declare


@program(ROWS, LABELS)
def classifier(x, label):
    scores = nn.Sequential(Linear(6, 8), nn.GELU(), Linear(8, 3))(x)
    smooth = F.label_smooth(F.one_hot(label, 3))
    return F.cross_entropy(scores, label) + F.cross_entropy(scores, smooth, soft_label=True)


@program(IMAGES)
def residual_block(x):
    first, norm, second = nn.Conv2D(3, 3, 3, padding=1), nn.BatchNorm2D(3), nn.Conv2D(3, 3, 3, padding="SAME")
    h = x + second(F.relu(norm(first(x))))
    return F.adaptive_avg_pool2d(h, 1).flatten(1).square().mean() + F.max_pool2d(h, 2).mean()


@program(IMAGES)
def down_and_up(x):
    down, up = nn.Conv2D(3, 4, 2, stride=2), nn.Conv2DTranspose(4, 3, 2, stride=2)
    h = paddle.concat([x, up(F.silu(down(x)))], axis=1)
    return F.interpolate(h, scale_factor=2, mode="bilinear").mean([2, 3]).pow(2).sum()


@program(IDS)
def shared_embedding(ids):
    table = nn.Embedding(10, 8, padding_idx=0)
    h = table(ids) + table.weight[2]
    return (h * F.softmax(h.sum(-1), -1).unsqueeze(-1)).sum() + (h @ table.weight.t()).mean()


@program(WORDS)
def attention_by_hand(x):
    q, k, v = (Linear(8, 8)(x) for _ in range(3))
    batch, length = x.shape[:2]

    def heads(t):
        return t.reshape([batch, length, 2, 4]).transpose([0, 2, 1, 3])

    scores = F.softmax(heads(q) @ heads(k).transpose([0, 1, 3, 2]) / 2.0)
    return (scores @ heads(v)).transpose([0, 2, 1, 3]).reshape([batch, length, 8]).abs().sum()


@program(IMAGES)
def patches_with_a_class_token(x):
    token, place = (paddle.create_parameter([1, n, 8], "float32") for n in (1, 5))
    h = nn.Conv2D(3, 8, 4, stride=4)(x).flatten(2).transpose([0, 2, 1])
    h = paddle.concat([token.expand([x.shape[0], -1, -1]), h], axis=1) + place
    return nn.LayerNorm(8)(h)[:, 0].pow(3).sum()


@program(WORDS)
def recurrence_by_hand(x):
    step, h = Linear(8, 8), paddle.zeros([x.shape[0], 8])
    for at in range(x.shape[1]):
        h = F.tanh(step(h) + x[:, at])
    return h.norm()


@program(ROWS)
def changes_in_place(x):
    y = Linear(6, 6)(x)
    z = y * 1
    z[:, 0] = 0.0
    z[:, 1:3] = z[:, 3:5]
    z += 1
    z.add_(y)
    return z.sum()


@program(ROWS)
def reductions_and_sorting(x):
    y = Linear(6, 4)(x)
    best, at = paddle.topk(y, 2)
    total = y.max(-1).sum() + y.prod(1).mean() + y.std() + paddle.logsumexp(y, 1).sum() + y.median()
    return total + best.sum() + paddle.sort(y, axis=1)[:, 0].sum() + paddle.gather(y.flatten(), at.flatten()).sum()


@program(ROWS)
def scans_and_products(x):
    y = Linear(6, 4)(x)
    moved = paddle.flip(y, [0])[0].sum() + paddle.roll(y, 1, 0)[0].sum() + paddle.cumprod(y, dim=0).mean()
    return moved + y.cumsum(1).sum() + paddle.einsum("bi,bj->ij", x, y).sum() + paddle.tril(y).sum() + y[-1].sum()


@program(ROWS)
def branches_and_loops(x):
    y = Linear(6, 4)(x)
    chosen = static.nn.cond(x.mean() > 0, lambda: (y * 2).sum(), lambda: (y - 1).sum())
    _, total = paddle.jit.control_flow.while_loop(
        lambda i, a: i < 3, lambda i, a: [i + 1, a * 0.5 + y], [paddle.zeros([], "int64"), y], maximum_iterations=4
    )
    return chosen + total.sum() + paddle.where(y > 0, y, y * 0.1).sum() + y.clip(-1, 1).sum()


@program(ROWS)
def sizes_as_values(x):
    y = Linear(6, 4)(x)
    count = paddle.shape(y)[0]
    weights = paddle.arange(y.shape[0]).unsqueeze(-1).astype("float32")
    return y.sum() / count.astype("float32") + (y * weights).sum() / y.shape[0] + paddle.ones([count, 4]).sum()


@program(ROWS)
def scattering(x):
    y = Linear(6, 6)(x)
    z = paddle.scatter(paddle.zeros([x.shape[0], 6]), paddle.to_tensor([0, 1]), y[:2])
    return (z * x).sum() + paddle.index_select(y, paddle.to_tensor([0, 2]), axis=1).sum()


@program(ROWS)
def stopped_gradients(x):
    layer = Linear(6, 4)
    y = layer(x)
    with paddle.no_grad():
        target = layer(x) * 2
    return ((y - target) ** 2).sum() + (y.detach() * y).sum() + layer.weight.square().sum() * 0.1


@program(ROWS)
def losses_of_several_kinds(x):
    y, z = Linear(6, 1)(x), Linear(6, 4)(x)
    logits = F.binary_cross_entropy_with_logits(y, (x[:, :1] > 0).astype("float32"))
    return logits + F.smooth_l1_loss(y, x[:, 1:2]) + F.kl_div(F.log_softmax(z), F.softmax(x[:, :4])) + nn.GLU()(z).sum()


@program(ROWS)
def layers_in_containers(x):
    body, heads, h = nn.LayerList([Linear(6, 6) for _ in range(3)]), nn.LayerDict({"out": Linear(6, 2)}), x
    for layer in body:
        h = F.silu(layer(h)) + h
    return heads["out"](nn.PReLU()(h)).sum()


def eagerly(fn, arrays, made):
    """(loss, gradients by parameter)."""
    made.clear()
    with unique_name.guard(f"{fn.__name__}/"):
        paddle.seed(5)
        loss = fn(*map(paddle.to_tensor, arrays))
    loss.backward()
    return loss.numpy(), {p.name: p.grad.numpy() for p in made if p.grad is not None}


@pytest.fixture
def made(monkeypatch):
    """The parameters that layers have made."""
    parameters, create = [], nn.Layer.create_parameter

    def watched(*args, **kwargs):
        parameters.append(create(*args, **kwargs))
        return parameters[-1]

    monkeypatch.setattr(nn.Layer, "create_parameter", watched)
    return parameters


@pytest.mark.slow
def test_composed_programs_equal_eager_code(static_mode, made):
    paddle.disable_static()
    wants = [eagerly(fn, arrays, made) for fn, arrays in PROGRAMS]
    assert len({fn.__name__ for fn, _ in PROGRAMS}) == len(PROGRAMS)
    exe, feed, fetches, startups = static.Executor(), {}, [], []
    for fn, arrays in PROGRAMS:
        paddle.enable_static()
        startups.append(static.Program())
        with unique_name.guard(f"{fn.__name__}/"), static.program_guard(static_mode[0], startups[-1]):
            names = [f"{fn.__name__}.{i}" for i in range(len(arrays))]
            feed |= dict(zip(names, arrays, strict=True))
            given = [static.data(n, [None, *a.shape[1:]], a.dtype) for n, a in zip(names, arrays, strict=True)]
            loss = fn(*given)
            pairs = static.append_backward(loss)
        fetches.append([loss, *(g for _, g in sorted(pairs, key=lambda pair: pair[0].name))])
    paddle.disable_static()
    for startup in startups:
        paddle.seed(5)
        exe.run(startup)
    values = iter(exe.run(static_mode[0], feed=feed, fetch_list=fetches))
    for (fn, _), (loss, grads) in zip(PROGRAMS, wants, strict=True):
        # up to some hundred float32 terms; gradients that cancel are off by what the others are
        bound = 256 * 2.0**-23
        scale = max(float(np.abs(g).max()) for g in grads.values())
        np.testing.assert_allclose(next(values), loss, rtol=bound, atol=bound, err_msg=fn.__name__)
        for name, want in sorted(grads.items()):
            np.testing.assert_allclose(next(values), want, rtol=bound, atol=bound * scale, err_msg=name)
    assert next(values, None) is None
