"""Weights that are computed: weight_norm, its removal, spectral_norm."""

import numpy as np
import pytest

import polyreme as paddle
from polyreme.errors import ConfigError
from polyreme.nn.utils import remove_weight_norm, spectral_norm, weight_norm

EPS = np.finfo("float32").eps


def close(got, want, terms):
    got, want = (np.asarray(t.numpy() if hasattr(t, "numpy") else t) for t in (got, want))
    np.testing.assert_allclose(got, want, rtol=4 * terms * EPS, atol=4 * terms * EPS * max(1.0, np.abs(want).max()))


@pytest.mark.parametrize(("dim", "shape"), [(0, [3]), (1, [2]), (-1, []), (None, [])])
def test_weight_norm_changes_nothing_at_first_and_trains_length_and_direction(dim, shape):
    layer = paddle.nn.Linear(3, 2)
    x = paddle.randn([4, 3])
    before, weight = layer(x), layer.weight.detach().clone()
    assert weight_norm(layer, dim=dim) is layer
    assert {n: p.shape for n, p in layer.named_parameters()} == {"bias": [2], "weight_v": [3, 2], "weight_g": shape}
    close(layer(x), before, 8)
    assert isinstance(layer, paddle.nn.Linear)
    layer(x).sum().backward()
    # the weight's gradient along its own direction is that of its length
    v, over = weight.numpy(), None if dim in (None, -1) else 1 - dim
    unit = v / np.sqrt((v * v).sum(over, keepdims=True))
    by_weight = x.numpy().sum(0)[:, None].repeat(2, 1)
    close(layer.weight_g.grad, (by_weight * unit).sum(over), 16)
    layer.weight_g.set_value(2 * layer.weight_g)
    close(layer.weight, 2 * v, 8)


def test_weight_norm_of_a_vector_has_a_length_a_number():
    layer = weight_norm(paddle.nn.Linear(3, 2), "bias")
    layer.bias_v.set_value(np.float32([3, -4]))
    layer.bias_g.set_value(np.float32([1, 2]))
    assert layer.bias.tolist() == [1, -2]


def test_a_weight_under_weight_norm_is_captured_saved_and_removed(tmp_path):
    layer, other = (weight_norm(paddle.nn.Linear(3, 2)) for _ in range(2))
    x = paddle.randn([4, 3])
    captured = paddle.jit.to_static(layer)
    close(captured(x), layer(x), 8)
    layer.weight_g.set_value(3 * layer.weight_g)
    wanted = x.numpy() @ layer.weight.numpy() + layer.bias.numpy()
    close(captured(x), wanted, 8)
    other.set_state_dict(layer.state_dict())
    close(other(x), wanted, 8)
    assert remove_weight_norm(other) is other
    assert {n: p.shape for n, p in other.named_parameters()} == {"bias": [2], "weight": [3, 2]}
    close(other(x), wanted, 8)
    assert type(other) is paddle.nn.Linear


def test_spectral_norm_divides_by_the_largest_singular_value_and_keeps_its_gradient_orthogonal():
    paddle.seed(3)
    layer = spectral_norm(paddle.nn.Linear(5, 3), n_power_iterations=40)
    assert {n: p.shape for n, p in layer.named_parameters()} == {"bias": [3], "weight_orig": [5, 3]}
    assert {n for n, _ in layer.named_buffers()} == {"weight_u", "weight_v"}
    largest = np.linalg.svd(layer.weight_orig.numpy(), compute_uv=False)[0]
    # 40 steps of power iteration: the error falls by (second / first singular value)^2 in each
    close(layer.weight, layer.weight_orig.numpy() / largest, 64)
    layer.weight.sum().backward()
    before = layer.eval().weight_u.numpy()
    close(layer.weight, layer.weight.numpy(), 1)
    np.testing.assert_array_equal(layer.weight_u.numpy(), before)
    # scaling the weight changes nothing, so the gradient is orthogonal to it
    assert abs(float((layer.weight_orig.grad * layer.weight_orig).sum())) < 64 * EPS * 15


@pytest.mark.parametrize(("layer", "dim"), [("Linear", 1), ("Conv2DTranspose", 1), ("Conv2D", 0)])
def test_rows_of_the_matrix_are_the_outputs(layer, dim):
    made = paddle.nn.Linear(4, 6) if layer == "Linear" else getattr(paddle.nn, layer)(4, 6, 3)
    spectral_norm(made)
    assert made.weight_u.shape == [6]
    assert made.weight_v.shape == [made.weight_orig.size // 6]
    assert made.weight_orig.shape[dim] == 6


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda m: weight_norm(m, "weigth"), "Linear has no parameter 'weigth'; it has weight, bias"),
        (lambda m: weight_norm(m, dim=2), r"dim=2 of 'weight' with shape \[3, 2\]"),
        (lambda m: spectral_norm(m, "scale"), "spectral_norm: Linear has no parameter 'scale'"),
        (lambda m: remove_weight_norm(m), "Linear has no weight_norm of 'weight'"),
        (lambda m: spectral_norm(m, n_power_iterations=0), "at least 1, got 0"),
    ],
)
def test_refuses_what_it_cannot_do(call, match):
    with pytest.raises(ConfigError, match=match):
        call(paddle.nn.Linear(3, 2))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda nn: nn.HSigmoidLoss(3, 1), "num_classes=1"),
        (lambda nn: nn.AdaptiveLogSoftmaxWithLoss(4, 8, [3, 8]), r"cutoffs=\[3, 8\]; give rising numbers from 1 to 7"),
        (lambda nn: nn.AdaptiveLogSoftmaxWithLoss(4, 8, [3, 5]), r"cluster 1 has 4 // 4.0\^2 = 0 features"),
    ],
)
def test_losses_over_classes_refuse_what_makes_no_tree_or_clusters(make, match):
    with pytest.raises(ConfigError, match=match):
        make(paddle.nn)


def test_log_prob_of_clusters_is_a_distribution_that_forward_and_predict_agree_with():
    model = paddle.nn.AdaptiveLogSoftmaxWithLoss(4, 8, [3, 5], div_value=2.0, head_bias=True)
    x, label = paddle.randn([6, 4]), paddle.to_tensor([0, 1, 3, 4, 5, 7])
    log_prob = model.log_prob(x).numpy()
    close(np.exp(log_prob).sum(1), np.ones(6), 16)
    found, loss = model(x, label)
    close(found, log_prob[np.arange(6), label.numpy()], 8)
    close(loss, -found.numpy().mean(), 8)
    assert model.predict(x).tolist() == log_prob.argmax(1).tolist()


def test_a_tree_of_ones_own_comes_with_every_call():
    model = paddle.nn.HSigmoidLoss(3, 5, is_custom=True)
    with pytest.raises(ConfigError, match="called without path_table"):
        model(paddle.randn([1, 3]), paddle.to_tensor([0]))
    table, code = paddle.to_tensor([[0, 2, -1]]), paddle.to_tensor([[1, 0, 0]])
    assert model(paddle.randn([1, 3]), paddle.to_tensor([0]), table, code).shape == [1, 1]


def test_parameters_have_the_layers_next_names_so_that_optimizers_find_theirs_again():
    def build():
        with paddle.utils.unique_name.guard():
            return weight_norm(paddle.nn.Conv1D(2, 3, 3)), paddle.nn.Parameter(paddle.ones([1]))

    layer, own = build()
    assert [p.name for p in layer.parameters()] == ["conv1d_0.b_0", "conv1d_0.w_1", "conv1d_0.w_2"]
    assert [own.name] == [build()[1].name]
    assert remove_weight_norm(layer).weight.name == "conv1d_0.w_3"
    with paddle.utils.unique_name.guard():
        assert paddle.create_parameter([1], "float32").name == "create_parameter_0.w_0"
