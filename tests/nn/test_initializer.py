"""Initial values: distributions against SciPy's by Kolmogorov-Smirnov and moments, structured ones by property."""

import math

import numpy as np
import pytest
from scipy import stats

import polyreme as paddle
import polyreme.nn as nn
import polyreme.optimizer as opt
from polyreme.core import rng
from polyreme.core.dtype import as_dtype
from polyreme.eager.tensor import to_tensor
from polyreme.errors import ConfigError, ShapeError
from polyreme.nn import initializer
from tests.compilations import counted_compilations

N = 20_000
MATRIX, KERNEL = [200, 100], [40, 20, 5, 5]


def drawn(init, shape):
    rng.seed(11)
    return np.asarray(init.values(shape, as_dtype("float32")), np.float64)


def uniform(limit):
    return stats.uniform(-limit, 2 * limit)


def kaiming(fan, gain=2**0.5):
    return gain / math.sqrt(fan)


DISTRIBUTIONS = [
    (initializer.Normal(0.5, 2.0), MATRIX, stats.norm(0.5, 2.0)),
    (initializer.Uniform(-0.5, 2.0), MATRIX, stats.uniform(-0.5, 2.5)),
    (initializer.TruncatedNormal(), MATRIX, stats.truncnorm(-2, 2)),
    (initializer.TruncatedNormal(1.0, 0.5, 0.0, 3.0), MATRIX, stats.truncnorm(-2, 4, 1.0, 0.5)),
    (initializer.XavierNormal(), MATRIX, stats.norm(0, math.sqrt(2 / 300))),
    (initializer.XavierNormal(gain=3.0), KERNEL, stats.norm(0, 3 * math.sqrt(2 / (60 * 25)))),
    (initializer.XavierUniform(), MATRIX, uniform(math.sqrt(6 / 300))),
    (initializer.XavierUniform(fan_in=10, fan_out=14), MATRIX, uniform(0.5)),
    (initializer.KaimingNormal(), MATRIX, stats.norm(0, kaiming(200))),
    (initializer.KaimingNormal(), KERNEL, stats.norm(0, kaiming(500))),
    (initializer.KaimingNormal(mode="fan_out"), MATRIX, stats.norm(0, kaiming(100))),
    (initializer.KaimingNormal(fan_in=50, nonlinearity="tanh"), MATRIX, stats.norm(0, kaiming(50, 5 / 3))),
    (initializer.KaimingUniform(), MATRIX, uniform(math.sqrt(3) * kaiming(200))),
    (
        initializer.KaimingUniform(negative_slope=0.5, nonlinearity="leaky_relu"),
        MATRIX,
        uniform(math.sqrt(3) * kaiming(200, math.sqrt(2 / 1.25))),
    ),
]


@pytest.mark.one_in(6)
@pytest.mark.parametrize(("init", "shape", "wanted"), DISTRIBUTIONS, ids=lambda v: type(v).__name__)
def test_drawn_values_follow_their_distribution(init, shape, wanted):
    values = drawn(init, shape)
    assert values.shape == tuple(shape)
    flat = values.ravel()
    assert flat.size == N
    # one seed, so no flake: a true null fails with p < 1e-4 once in 10^4 seeds
    assert stats.kstest(flat, wanted.cdf).pvalue > 1e-4
    # mean and variance within 5 standard errors of theirs
    mean, var, kurtosis = wanted.mean(), wanted.var(), float(wanted.stats("k")) + 3
    assert abs(flat.mean() - mean) < 5 * math.sqrt(var / N)
    assert abs(flat.var() - var) < 5 * var * math.sqrt((kurtosis - 1) / N)


def test_the_test_of_a_distribution_can_fail():
    flat = drawn(initializer.Normal(0.0, 1.05), MATRIX).ravel()
    assert stats.kstest(flat, stats.norm(0, 1).cdf).pvalue < 1e-4


def test_bounds_hold():
    values = drawn(initializer.TruncatedNormal(0.0, 1.0, -0.25, 0.75), MATRIX)
    assert values.min() >= -0.25
    assert values.max() <= 0.75


def test_draws_follow_the_seed_and_differ_from_each_other():
    init = initializer.Normal()
    rng.seed(5)
    first, second = init.values([4], np.dtype("float32")), init.values([4], np.dtype("float32"))
    rng.seed(5)
    np.testing.assert_array_equal(init.values([4], np.dtype("float32")), first)
    assert not np.array_equal(first, second)


@pytest.mark.parametrize("shape", [[6, 4], [4, 6], [4, 3, 2]])
def test_orthogonal(shape):
    matrix = drawn(initializer.Orthogonal(2.0), shape).reshape(shape[0], -1)
    small = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    bound = 8 * 4 * np.finfo(np.float32).eps  # sums of up to 8 products of size <= 4
    np.testing.assert_allclose(small @ small.T, 4 * np.eye(len(small)), atol=bound * 4)


def test_orthogonal_signs_are_even():
    # QR alone would fix the sign of the first column's first element
    signs = [drawn_again(k)[0, 0] > 0 for k in range(64)]
    assert 10 < sum(signs) < 54  # 64 fair coins: outside with probability below 1e-7


def drawn_again(seed):
    rng.seed(seed)
    return np.asarray(initializer.Orthogonal().values([3, 3], np.dtype("float32")))


@pytest.mark.parametrize(
    ("groups", "shape"), [(1, [4, 2, 3, 3]), (2, [4, 2, 3, 3]), (1, [6, 6, 3]), (1, [2, 2, 3, 3, 3])]
)
def test_dirac_passes_on_its_inputs(groups, shape):
    # ones where PaddlePaddle 3.3.1 has them: output i of a group at input i, centre of the kernel
    weight = drawn(initializer.Dirac(groups), shape)
    per_group, centre = shape[0] // groups, [n // 2 for n in shape[2:]]
    want = {(i, i % per_group, *centre) for i in range(shape[0]) if i % per_group < shape[1]}
    assert {tuple(map(int, at)) for at in np.argwhere(weight)} == want
    assert weight.sum() == len(want)


def test_bilinear_upsamples_a_ramp_exactly():
    layer = nn.Conv2DTranspose(1, 1, 4, stride=2, padding=1, weight_attr=initializer.Bilinear(), bias_attr=False)
    ramp = np.arange(5, dtype=np.float32).reshape(1, 1, 1, 5).repeat(5, 2)
    got = layer(to_tensor(ramp)).numpy()[0, 0, 4]
    # inside, an upsampled ramp by 2 has steps of a half; every weight is a dyadic fraction, so exactly
    np.testing.assert_array_equal(np.diff(got[1:-1]), 0.5)


def test_assign_gives_the_value():
    value = np.arange(6.0).reshape(2, 3)
    for given in (value, value.tolist(), to_tensor(value)):
        made = nn.Linear(2, 3, weight_attr=initializer.Assign(given))
        np.testing.assert_array_equal(made.weight.numpy(), value.astype(np.float32))


@pytest.mark.parametrize(
    ("name", "param", "gain"),
    [
        ("relu", None, math.sqrt(2)),
        ("tanh", None, 5 / 3),
        ("selu", None, 0.75),
        ("conv2d", None, 1.0),
        ("leaky_relu", None, math.sqrt(2 / 1.0001)),
        ("leaky_relu", 0.3, math.sqrt(2 / 1.09)),
    ],
)
def test_calculate_gain(name, param, gain):
    assert initializer.calculate_gain(name, param) == pytest.approx(gain, rel=1e-15)


def test_a_truncated_normal_without_deviation_is_its_mean():
    assert drawn(initializer.TruncatedNormal(0.5, 0.0), [2]).tolist() == [0.5, 0.5]
    assert drawn(initializer.TruncatedNormal(3.0, 0.0), [2]).tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: initializer.calculate_gain("reluu"), ConfigError, "did you mean 'relu'"),
        (lambda: initializer.KaimingNormal(mode="fan"), ConfigError, "'fan_in' or 'fan_out', got 'fan'"),
        (lambda: initializer.KaimingUniform(fan_in=0), ConfigError, "fan_in is a number above 0, got 0"),
        (lambda: initializer.Normal(std=-1.0), ConfigError, "Normal: std is a number of at least 0, got -1.0"),
        (lambda: initializer.TruncatedNormal(std=-1.0), ConfigError, "std is a number of at least 0"),
        (
            lambda: initializer.TruncatedNormal(a=1.0, b=0.0),
            ConfigError,
            "lower bound 1.0 is above the upper bound 0.0",
        ),
        (lambda: initializer.Uniform(2.0, 1.0), ConfigError, "Uniform: the lower bound 2.0 is above"),
        (lambda: initializer.Dirac(0), ConfigError, "groups is at least 1"),
        (lambda: drawn(initializer.Dirac(), [3, 3]), ShapeError, "3 to 5 dims"),
        (lambda: drawn(initializer.Dirac(2), [3, 3, 3]), ShapeError, "3 outputs do not split into 2"),
        (lambda: drawn(initializer.Orthogonal(), [3]), ShapeError, "at least 2 dims"),
        (lambda: drawn(initializer.Bilinear(), [1, 1, 2, 3]), ShapeError, r"got \[1, 1, 2, 3\]"),
        (lambda: drawn(initializer.Assign([1.0]), [2]), ShapeError, r"shape \[1\] for a parameter of shape \[2\]"),
        (lambda: initializer.set_global_initializer(3), ConfigError, "takes initializers, got 3"),
    ],
)
def test_bad_input_says_what_to_change(make, error, match):
    with pytest.raises(error, match=match):
        make()


def test_global_initializer_goes_before_a_layers_default_and_after_the_attribute():
    # as PaddlePaddle 3.3.1 does, for BatchNorm's ones too
    initializer.set_global_initializer(initializer.Constant(7.0), initializer.Constant(8.0))
    try:
        for layer in (nn.Linear(2, 2), nn.Conv2D(1, 1, 1), nn.LayerNorm(2), nn.BatchNorm2D(2)):
            assert set(layer.weight.numpy().ravel()) == {7.0}
            assert set(layer.bias.numpy()) == {8.0}
        own = nn.Linear(2, 2, weight_attr=initializer.Constant(3.0))
        assert set(own.weight.numpy().ravel()) == {3.0}
    finally:
        initializer.set_global_initializer(None)
    assert set(nn.LayerNorm(2).weight.numpy()) == {1.0}


DEFAULTS = [
    (lambda: nn.Linear(200, 100).weight, uniform(math.sqrt(6 / 300))),
    (lambda: nn.Embedding(200, 100).weight, uniform(math.sqrt(6 / 300))),
    (lambda: nn.Conv2D(20, 40, 5).weight, stats.norm(0, math.sqrt(2 / 500))),
    (lambda: nn.Conv2D(80, 40, 5, groups=4).weight, stats.norm(0, math.sqrt(2 / 2000))),
    (lambda: nn.Conv2DTranspose(40, 20, 5).weight, uniform(math.sqrt(6 / (60 * 25)))),
]


@pytest.mark.parametrize(("make", "wanted"), DEFAULTS)
def test_default_initial_weights_of_layers(make, wanted):
    rng.seed(2)
    assert stats.kstest(make().numpy().ravel(), wanted.cdf).pvalue > 1e-4


def build():
    """A model with an optimizer that has its state, of shapes that no other test uses."""
    layers = [
        nn.Conv2D(3, 37, 3),
        nn.BatchNorm2D(37),
        nn.Embedding(41, 19),
        nn.LSTM(19, 23),
        nn.TransformerEncoderLayer(26, 2, 34),
    ]
    model = nn.LayerList(layers)
    optimizer = opt.AdamW(0.1, parameters=model.parameters())
    optimizer.create_state()
    return model


def test_building_a_model_compiles_nothing_for_its_shapes():
    nn.Linear(2, 3), nn.Conv2D(1, 2, 3)  # each distribution has one program
    with counted_compilations() as compiled:
        build()
    assert not compiled


class ByForward(nn.initializer.Initializer):
    def forward(self, param, block=None):
        param.set_value(paddle.full(param.shape, 7.0))


class ByCall(nn.initializer.Initializer):
    def __call__(self, param, block=None):
        nn.initializer.Constant(7.0)(param, block)
        return param


@pytest.mark.parametrize("attr", [ByForward(), ByCall(), lambda param, block: param.fill_(7.0)])
def test_an_initializer_may_fill_the_parameter_itself(attr):
    assert nn.Linear(2, 1, weight_attr=paddle.ParamAttr(initializer=attr)).weight.tolist() == [[7.0], [7.0]]
    paddle.enable_static()
    try:
        with paddle.static.program_guard(paddle.static.Program(), startup := paddle.static.Program()):
            weight = nn.Linear(2, 1, weight_attr=attr).weight
        executor = paddle.static.Executor()
        executor.run(startup)
        assert np.array(paddle.static.global_scope().find_var(weight.name).get_tensor()).tolist() == [[7.0], [7.0]]
    finally:
        paddle.disable_static()


def test_an_initializer_without_values_says_what_to_define():
    with pytest.raises(NotImplementedError, match="Initializer defines none of values, forward and __call__"):
        nn.Linear(2, 1, weight_attr=nn.initializer.Initializer())


def test_a_regularizer_is_a_parameter_attribute():
    penalty = paddle.regularizer.L2Decay(0.1)
    assert nn.Linear(2, 1, weight_attr=penalty).weight.regularizer is penalty
    with pytest.raises(TypeError, match="a parameter attribute is None, False"):
        nn.Linear(2, 1, weight_attr=3)
