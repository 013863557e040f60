"""What the contract rows of the neural network ops cannot say: state, in-place forms, edges, order two, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polyreme.core import rng
from polyreme.core.op import OPS
from polyreme.eager import walk
from polyreme.eager.methods import INPLACE
from polyreme.eager.tensor import to_tensor
from polyreme.errors import ConfigError, DTypeError, ShapeError
from polyreme.jit import to_static
from polyreme.kernels import select

F = type("F", (), {name: staticmethod(fn) for name, fn in OPS.items()})
EPS = np.finfo("float32").eps


def tensor(value, dtype="float32", wants_grad=False):
    return to_tensor(np.asarray(value, dtype), stop_gradient=not wants_grad)


def gradient(fn, *values):
    """Gradients of the sum of fn at values, as arrays."""
    inputs = [tensor(v, wants_grad=True) for v in values]
    F.sum(fn(*inputs)).backward()
    return [None if x.grad is None else x.grad.numpy() for x in inputs]


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


@pytest.mark.parametrize("name", ["relu", "relu6", "hardtanh", "hardswish", "leaky_relu", "softshrink"])
def test_nan_goes_through_an_activation(name):
    assert np.isnan(OPS[name](tensor([np.nan])).numpy()).all()


def test_a_bound_that_is_no_number_is_refused():
    with pytest.raises(ConfigError, match=r"hardtanh: min=-1\.0, max=nan; needs min < max"):
        F.hardtanh(tensor([1.0]), -1.0, np.nan)


@pytest.mark.parametrize(
    ("name", "at", "want"),
    [
        ("relu", 0, 0),
        ("relu6", 6, 0),
        ("leaky_relu", 0, 1),
        ("hardtanh", 1, 0),
        ("elu", 0, 1),
        ("celu", 0, 1),
        ("selu", 0, 1.0507009873554805 * 1.6732632423543772),
        ("i0", 0, 0),
    ],
)
def test_subgradient_at_the_kink(name, at, want):
    np.testing.assert_allclose(gradient(OPS[name], [at])[0], [want], rtol=EPS)


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    "fn",
    [
        lambda x: F.normalize(x, axis=0),
        lambda x: F.normalize(x, p=3, axis=0),
        lambda x: F.cosine_similarity(x, x, axis=0),
        lambda x: F.pairwise_distance(x, x, epsilon=0.0),
        lambda x: F.l1_loss(x, x),
        lambda x: F.lp_pool1d(F.reshape(x, [1, 1, 3]), 2, 3),
        lambda x: F.kl_div(x, x),
        lambda x: F.binary_cross_entropy(x, x),
        lambda x: F.softmax(x),
    ],
)
def test_gradient_at_zero_is_finite(fn):
    assert np.isfinite(gradient(fn, np.zeros(3))[0]).all()


@pytest.mark.parametrize("name", ["l1_loss", "pairwise_distance"])
def test_gradient_of_a_distance_between_equal_points_is_zero(name):
    x = to_tensor(np.float32([[1, 2]]), stop_gradient=False)
    more = {"p": 1.0, "epsilon": 0.0} if name == "pairwise_distance" else {}
    OPS["sum"](OPS[name](x, to_tensor(np.float32([[1, 3]])), **more)).backward()
    assert x.grad.tolist()[0][0] == 0
    assert x.grad.tolist()[0][1] < 0


def test_dropout_draws_a_key_only_when_it_drops():
    x = tensor(random(3, 4, 2, 2))
    before = rng.default_generator.get_state()
    for fn in (F.dropout, F.dropout2d, F.alpha_dropout, F.feature_alpha_dropout):
        np.testing.assert_array_equal(fn(x, 0.5, training=False).numpy(), x.numpy())
        np.testing.assert_array_equal(fn(x, 0.0).numpy(), x.numpy())
    F.rrelu(x, training=False)
    F.scaled_dot_product_attention(x, x, x, dropout_p=0.5, training=False)
    np.testing.assert_array_equal(rng.default_generator.get_state(), before)
    F.dropout(x)
    assert (rng.default_generator.get_state() != before).any()


def test_what_dropout_gives_in_evaluation_can_be_written_to():
    x = tensor(random(3, 4))
    before = x.numpy()
    F.dropout(x, 0.5, training=False).zero_()
    np.testing.assert_array_equal(x.numpy(), before)


def test_alpha_dropout_of_everything_gives_zeros_as_dropout_does():
    x = tensor(random(3, 4))
    np.testing.assert_array_equal(F.alpha_dropout(x, 1.0).numpy(), np.zeros((3, 4)))
    np.testing.assert_array_equal(F.dropout(x, 1.0).numpy(), np.zeros((3, 4)))


@pytest.mark.parametrize("captured", [False, True])
def test_batch_norm_moves_its_statistics(captured):
    x, mean, var = random(4, 3, 2), tensor([1, 2, 3]), tensor([4, 5, 6])

    def step(v):
        return F.batch_norm(v, mean, var, training=True, momentum=0.75)

    run = to_static(step) if captured else step
    for _ in range(2):
        run(tensor(x))
    want_mean, want_var = np.float32([1, 2, 3]), np.float32([4, 5, 6])
    for _ in range(2):
        want_mean = 0.75 * want_mean + 0.25 * x.mean((0, 2))
        want_var = 0.75 * want_var + 0.25 * x.var((0, 2))
    np.testing.assert_allclose(mean.numpy(), want_mean, rtol=16 * EPS)
    np.testing.assert_allclose(var.numpy(), want_var, rtol=32 * EPS)  # 8 squares a channel
    assert mean.stop_gradient


def test_batch_norm_leaves_its_statistics_alone_in_evaluation():
    mean, var = tensor([1, 2, 3]), tensor([4, 5, 6])
    F.batch_norm(tensor(random(4, 3)), mean, var)
    F.batch_norm(tensor(random(4, 3)), mean, var, training=True, use_global_stats=True)
    np.testing.assert_array_equal([mean.numpy(), var.numpy()], [[1, 2, 3], [4, 5, 6]])


def test_instance_norm_moves_statistics_that_are_given():
    x, mean, var = random(4, 3, 5), tensor([0, 0, 0]), tensor([1, 1, 1])
    F.instance_norm(tensor(x), mean, var)
    np.testing.assert_allclose(mean.numpy(), 0.1 * x.mean((0, 2)), atol=32 * EPS)
    np.testing.assert_allclose(var.numpy(), 0.9 + 0.1 * x.var(2).mean(0), rtol=32 * EPS)


def test_embedding_padding_row_gets_no_gradient():
    weight = tensor(random(4, 3), wants_grad=True)
    F.sum(F.embedding(tensor([0, 2, 2], "int64"), weight, padding_idx=2)).backward()
    np.testing.assert_array_equal(weight.grad.numpy(), np.outer([1, 0, 0, 0], [1, 1, 1]))


def test_embedding_gradient_divided_by_frequency():
    weight = tensor(random(4, 3), wants_grad=True)
    F.sum(F.embedding(tensor([0, 2, 2, 2], "int64"), weight, scale_grad_by_freq=True)).backward()
    np.testing.assert_allclose(weight.grad.numpy(), np.outer([1, 0, 1, 0], [1, 1, 1]), rtol=4 * EPS)


def test_embedding_max_norm_changes_the_weight_rows_used():
    start = 4 * random(4, 3)
    weight = tensor(start, wants_grad=True)
    F.embedding(tensor([0, 2], "int64"), weight, max_norm=1.0)
    norms = np.linalg.norm(weight.numpy(), axis=1)
    assert np.all(norms[[0, 2]] <= 1)
    np.testing.assert_array_equal(weight.numpy()[[1, 3]], start[[1, 3]])


@pytest.mark.parametrize("name", ["relu_", "elu_", "leaky_relu_", "hardtanh_", "thresholded_relu_", "softmax_"])
def test_inplace_form_writes_into_its_argument(name):
    x = tensor([-2.0, 0.5, 3.0])
    want = OPS[name[:-1]](x).numpy()
    assert INPLACE[name](x) is x
    np.testing.assert_array_equal(x.numpy(), want)


def test_inplace_flag_of_silu_and_dropout():
    x = tensor(random(20))
    want = F.silu(x).numpy()
    assert F.silu(x, inplace=True) is x
    np.testing.assert_array_equal(x.numpy(), want)
    assert F.dropout(x, 0.5, inplace=True) is x
    assert (x.numpy() == 0).any()


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, label: F.cross_entropy(x, label, reduction="none"),
        lambda x, label: F.nll_loss(x, label, reduction="none"),
        lambda x, label: F.softmax_with_cross_entropy(x, F.unsqueeze(label, 1)),
        lambda x, label: F.fused_linear_cross_entropy(x, F.ones([4, 4]), label, reduction="none"),
        lambda x, label: F.embedding(label, x)[:, 0],
    ],
)
def test_captured_code_gives_nan_for_an_id_out_of_range(fn):
    x, label = tensor(random(4, 4)), tensor([0, 4, -1, 1], "int64")
    with pytest.raises(IndexError, match=r"4 at \[1.*\] is out of range"):
        fn(x, label)
    got = to_static(fn)(x, label).numpy().reshape(-1)
    np.testing.assert_array_equal(np.isnan(got), [False, True, True, False])


def test_captured_negative_variance_gives_nan():
    x, variance = tensor([1.0, 2.0]), tensor([1.0, -1.0])
    got = to_static(lambda a, v: F.gaussian_nll_loss(a, a, v, reduction="none"))(x, variance).numpy()
    np.testing.assert_array_equal(np.isnan(got), [False, True])


HALF = {
    "gelu": lambda x: F.gelu(x),
    "silu": lambda x: F.silu(x),
    "softmax": lambda x: F.softmax(x),
    "layer_norm": lambda x: F.layer_norm(x, 8),
    "rms_norm": lambda x: F.rms_norm(x, 8),
    "group_norm": lambda x: F.group_norm(x, 2),
    "avg_pool1d": lambda x: F.avg_pool1d(F.unsqueeze(x, 0), 4),
    "max_pool1d": lambda x: F.max_pool1d(F.unsqueeze(x, 0), 4),
    "mse_loss": lambda x: F.mse_loss(x, x * 0.5),
    "linear": lambda x: F.linear(x, F.transpose(x, [1, 0])),
    "attention": lambda x: F.scaled_dot_product_attention(*[F.reshape(x, [1, 4, 2, 4])] * 3),
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", HALF)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_keeps_its_dtype_and_the_value(name, dtype):
    x = F.cast(tensor(random(4, 8)), dtype)
    got = HALF[name](x)
    want = HALF[name](F.cast(x, "float32")).numpy()
    assert got.dtype == dtype
    # the result is rounded once, and a product inside (linear, mse) once more; 8 terms of size <= max
    bound = {"bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]
    np.testing.assert_allclose(
        F.cast(got, "float32").numpy(), want, rtol=4 * bound, atol=4 * bound * np.abs(want).max()
    )


CLASSES = tensor([0, 1, 2], "int64")


def corner(x, shape):
    return F.reshape(x[:, :, :2, :2], shape)


def grad_of(out, leaf, again):
    (got,) = walk.grad(
        [out], [leaf], [None], retain_graph=again, create_graph=again, allow_unused=False, no_grad_vars=[]
    )
    return got


@pytest.mark.parametrize("name", ["gelu", "silu", "swiglu"])
def test_a_gpu_keeps_nothing_wider_than_the_inputs(monkeypatch, name):
    """Its derivative is the same, and begins at the inputs."""
    inputs = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 4)), jnp.bfloat16)
    inputs = tuple(inputs) if name == "swiglu" else (inputs[0],)
    want = jax.vjp(OPS[name].op.fn, *inputs)[1](inputs[0])
    monkeypatch.setattr(select, "backend", lambda: "gpu")
    pull = jax.vjp(OPS[name].op.fn, *inputs)[1]
    kept = [x for x in jax.tree.leaves(pull) if x.shape == (3, 4)]
    assert [x.dtype for x in kept] == [jnp.bfloat16] * len(inputs)
    np.testing.assert_array_equal(*(np.asarray(x, np.float32) for x in (pull(inputs[0]), want)))


TWICE = {
    "gelu": ((3, 4), lambda x: F.gelu(x)),
    "softmax": ((3, 4), lambda x: F.softmax(x)),
    "layer_norm": ((3, 4), lambda x: F.layer_norm(x, 4)),
    "batch_norm": ((3, 4), lambda x: F.batch_norm(x, F.zeros([4]), F.ones([4]), training=True)),
    "conv2d": ((1, 2, 4, 4), lambda x: F.conv2d(x, corner(x, [1, 2, 2, 2]))),
    "conv2d_transpose": ((1, 2, 3, 3), lambda x: F.conv2d_transpose(x, corner(x, [2, 1, 2, 2]), stride=2)),
    "max_pool2d": ((1, 2, 4, 4), lambda x: F.max_pool2d(x, 2) * F.max_pool2d(x, 2)),
    "avg_pool2d": ((1, 2, 4, 4), lambda x: F.avg_pool2d(x * x, 2)),
    "cross_entropy": ((3, 4), lambda x: F.cross_entropy(x, CLASSES)),
    "attention": ((1, 3, 2, 4), lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True)),
    "interpolate": ((1, 1, 3, 4), lambda x: F.interpolate(x * x, [5, 5], mode="bilinear")),
    "embedding": ((3, 4), lambda x: F.embedding(tensor([0, 2, 0], "int64"), x * x)),
    "fused_linear_cross_entropy": ((3, 4), lambda x: F.fused_linear_cross_entropy(x, F.transpose(x, [1, 0]), CLASSES)),
}  # fmt: skip


@pytest.mark.slow_cases("conv2d", "conv2d_transpose")
@pytest.mark.parametrize("name", TWICE)
def test_second_derivative(name):
    """d/dx of (gradient . v) against central differences of the gradient, in float64."""
    shape, fn = TWICE[name]
    x = np.random.default_rng(3).standard_normal(shape)
    v = np.random.default_rng(4).uniform(0.5, 1.5, shape)

    def first(at, graph):
        leaf = to_tensor(at, stop_gradient=False)
        out = fn(leaf)
        out = F.sum(out * F.cast(out, "float64")) if out.ndim else out
        return leaf, grad_of(out, leaf, graph)

    leaf, got = first(x, True)
    second = grad_of(F.sum(got * to_tensor(v)), leaf, False)
    step = 1e-5
    numeric = (first(x + step * v, False)[1].numpy() - first(x - step * v, False)[1].numpy()) / (2 * step)
    # error step^2 times the fourth derivative, and eps / step of rounding
    np.testing.assert_allclose(second.numpy(), numeric, rtol=1e-6, atol=1e-8 * max(1.0, np.abs(numeric).max()))


ONE, TWO = np.ones((1, 2, 7), "float32"), np.ones((1, 2, 5, 5), "float32")
W1, W2 = np.ones((3, 2, 2), "float32"), np.ones((3, 2, 2, 2), "float32")
T1 = np.ones((2, 3, 2), "float32")
REFUSED = [
    ("conv2d", (TWO, W2), {"padding": [[1, 0], [0, 0], [0, 0], [0, 0]]}, ShapeError, "pads the batch"),
    ("conv2d", (TWO, W2), {"padding": [1, 2, 3]}, ShapeError, r"padding=\(1, 2, 3\)"),
    ("conv2d", (TWO, W2), {"padding": -1}, ShapeError, "at least 0"),
    ("conv2d", (TWO, W2), {"padding": "FULL"}, ShapeError, "'SAME' and 'VALID'"),
    ("conv2d", (TWO, W2), {"stride": 0}, ShapeError, "stride=0"),
    ("conv2d", (TWO, W2), {"dilation": [1, 2, 3]}, ShapeError, "dilation="),
    ("conv2d", (TWO, W2), {"data_format": "NCL"}, ConfigError, "choose NCHW or NHWC"),
    ("conv2d", (ONE, W2), {}, ShapeError, "has 3 dims, needs 4"),
    ("conv1d_transpose", (ONE, T1), {"output_padding": 1, "output_size": [9]}, ShapeError, "give one of them"),
    ("conv1d_transpose", (ONE, T1), {"output_padding": 2, "stride": 2}, ShapeError, "less than the larger of stride"),
    ("conv1d_transpose", (ONE, T1), {"output_size": [20], "stride": 2}, ShapeError, "adds"),
    ("conv1d_transpose", (ONE, T1), {"padding": 9}, ShapeError, "pad less"),
    ("conv1d_transpose", (ONE, T1), {"groups": 3}, ShapeError, "groups=3 must divide"),
    ("flash_attention", (TWO, TWO, TWO), {"rng_name": "local"}, ConfigError, "rng_name='local'"),
    ("flash_attention", (TWO, TWO, TWO), {"fixed_seed_offset": 1}, ConfigError, "fixed_seed_offset=1"),
    ("dropout2d", (TWO, 2.0), {}, ConfigError, "p=2.0"),
    ("prelu", (ONE, np.ones((1, 2), "float32")), {}, ShapeError, r"weight \[1, 2\]"),
    ("grid_sample", (TWO, np.ones((1, 2, 2, 2), "float32")), {"padding_mode": "wrap"}, ConfigError, "wrap"),
    ("pixel_shuffle", (TWO, 2, "HWC"), {}, ShapeError, "'HWC'"),
    ("interpolate", (TWO,), {"scale_factor": [1.0, -1.0]}, ShapeError, "scale_factor="),
    ("lp_pool2d", (TWO, -1, 2), {}, ConfigError, "norm_type=-1"),
    ("selu", (ONE,), {"alpha": -1.0}, ConfigError, "alpha=-1.0"),
    ("cross_entropy", (ONE[0], np.ones((2, 1, 1), "int64")), {}, ShapeError, r"label \[2, 1, 1\]"),
    ("nll_loss", (ONE[0], np.array([0.5, 1], "float32")), {}, DTypeError, "class labels are integers"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "args", "kwargs", "error", "match"), REFUSED)
def test_refuses_what_it_cannot_do(name, args, kwargs, error, match):
    given = [to_tensor(a) if isinstance(a, np.ndarray) else a for a in args]
    with pytest.raises(error, match=match):
        OPS[name](*given, **kwargs)


@pytest.mark.parametrize(("kernel", "stride", "padding"), [(2, 2, 0), (3, 2, 1), (3, 1, 0)])
def test_max_pooling_gives_the_gradient_to_the_first_of_equal_maxima(kernel, stride, padding):
    # whole numbers, so that windows have equal maxima and sums of gradients are exact
    x = np.random.default_rng(0).integers(0, 3, (2, 3, 7, 7)).astype("float32")
    padded = np.pad(x, [(0, 0), (0, 0), (padding, padding), (padding, padding)], constant_values=-np.inf)
    count = (7 + 2 * padding - kernel) // stride + 1
    value, grad = np.zeros((2, 3, count, count), "float32"), np.zeros_like(padded)
    for n, c, i, j in np.ndindex(*value.shape):
        window = padded[n, c, i * stride : i * stride + kernel, j * stride : j * stride + kernel]
        row, column = np.unravel_index(window.argmax(), window.shape)
        value[n, c, i, j] = window[row, column]
        grad[n, c, i * stride + row, j * stride + column] += 1
    np.testing.assert_array_equal(F.max_pool2d(tensor(x), kernel, stride, padding).numpy(), value)
    (found,) = gradient(lambda v: F.max_pool2d(v, kernel, stride, padding), x)
    np.testing.assert_array_equal(found, grad[:, :, padding : padding + 7, padding : padding + 7])


@pytest.mark.parametrize("kernel", [2, 20])
def test_max_pooling_keeps_a_nan_wherever_it_lies(kernel):
    for place in range(kernel):
        x = np.zeros((1, 1, kernel), "float32")
        x[0, 0, place] = np.nan
        assert np.isnan(F.max_pool1d(tensor(x), kernel).numpy()).all()


@pytest.mark.parametrize(("dtype", "labels"), [("uint8", [156, 250]), ("int8", [3, 100])])
def test_labels_of_few_bits_against_more_classes_than_they_hold(dtype, labels):
    scores = tensor(np.random.default_rng(0).normal(size=(2, 300)))
    for loss in (F.cross_entropy, lambda x, y: F.nll_loss(F.log_softmax(x), y)):
        want = loss(scores, tensor(labels, "int64"))
        assert loss(scores, tensor(labels, dtype)).item() == want.item()


def test_a_captured_label_that_is_no_whole_number_gives_nan():
    labels = np.array([0.5, 1], "float32")
    loss = to_static(lambda x, y: F.cross_entropy(x, y, reduction="none"))(to_tensor(ONE[0]), to_tensor(labels))
    np.testing.assert_array_equal(np.isnan(loss.numpy()).ravel(), [True, False])


def test_smoothed_labels_of_the_inputs_shape_are_probabilities():
    scores = to_tensor(np.float32([[0.5, -1, 2], [1, 3, 0]]))
    ids = F.cross_entropy(scores, to_tensor([2, 0]), label_smoothing=0.4)
    rows = F.cross_entropy(scores, to_tensor(np.float32([[0, 0, 1], [1, 0, 0]])), label_smoothing=0.4)
    np.testing.assert_allclose(rows.numpy(), ids.numpy(), rtol=8 * 2.0**-23)
