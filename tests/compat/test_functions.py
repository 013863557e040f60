"""polyreme.compat's functions against NumPy, eager and captured, and their public second paths."""

import sys

import numpy as np
import pytest

import polyreme as paddle
from polyreme import compat, functional, random, special, torch_scripts
from polyreme.errors import ConfigError, ShapeError
from polyreme.jit import to_static

NAN = float("nan")
X = np.float32([[3, 1, 2, 1], [0, 5, 4, 9]])
HOLES = np.float32([[3, NAN, 2, 1], [NAN, NAN, NAN, NAN], [4, 1, 3, 2]])


@pytest.fixture
def x():
    return paddle.to_tensor(X)


def lower_median(v, ignore):
    v = np.asarray(v)
    if np.isnan(v).all() or (np.isnan(v).any() and not ignore):
        return NAN
    v = np.sort(v[~np.isnan(v)])
    return v[(len(v) - 1) // 2]


def test_max_and_min_of_all_by_axis_and_of_pairs(x):
    for name, arg, both in (("max", "argmax", "maximum"), ("min", "argmin", "minimum")):
        fn = getattr(compat, name)
        assert fn(x).item() == getattr(X, name)()
        found = fn(x, 1)
        np.testing.assert_array_equal(found.values, getattr(X, name)(1))
        np.testing.assert_array_equal(found.indices, getattr(X, arg)(1))
        kept = to_static(lambda v, f=fn: f(v, dim=-2, keepdim=True))(x)
        np.testing.assert_array_equal(kept.values, getattr(X, name)(0)[None])
        np.testing.assert_array_equal(fn(x, x * 0 + 2), getattr(np, both)(X, 2))
        np.testing.assert_array_equal(fn(x, other=x), X)
        with pytest.raises(ConfigError, match=f"{name}: give other, or dim"):
            fn(x, dim=0, other=x)
        with pytest.raises(ConfigError, match="keepdim=True without dim"):
            fn(x, keepdim=True)
    assert compat.max(paddle.to_tensor(3.0), 0).values.item() == 3.0


def test_an_extreme_sends_its_gradient_to_one_element():
    x = paddle.to_tensor([2.0, 2.0, 1.0], stop_gradient=False)
    compat.max(x, 0).values.backward()
    assert x.grad.tolist() == [1.0, 0.0, 0.0]


def test_out_is_written_to(x):
    values, indices = paddle.zeros([2]), paddle.zeros([2], "int64")
    compat.max(x, 1, out=(values, indices))
    assert (values.tolist(), indices.tolist()) == ([3.0, 9.0], [0, 3])
    whole = paddle.zeros([])
    compat.median(x, out=whole)
    assert whole.item() == lower_median(X.ravel(), False)
    with pytest.raises(ConfigError, match=r"out must be 2 Tensors \(values, indices\)"):
        compat.sort(x, out=values)


@pytest.mark.slow_cases("median")
@pytest.mark.parametrize("name", ["median", "nanmedian"])
def test_medians_are_the_lower_of_two_middles(name):
    fn, ignore = getattr(compat, name), name == "nanmedian"
    for data in (X, HOLES):
        want = np.float32([lower_median(row, ignore) for row in data])
        for call in (fn, to_static(lambda v, dim: fn(v, dim))):
            found = call(paddle.to_tensor(data), 1)
            np.testing.assert_array_equal(found.values, want)
            np.testing.assert_array_equal(np.take_along_axis(data, found.indices.numpy()[:, None], 1)[:, 0], want)
        np.testing.assert_array_equal(fn(paddle.to_tensor(data)), lower_median(data.ravel(), ignore))
    assert fn(paddle.to_tensor(X), 1, keepdim=True).values.shape == [2, 1]
    assert fn(paddle.to_tensor([[4, 1, 3]]), 1).values.tolist() == [3]
    assert fn(paddle.to_tensor(3.0)).item() == 3.0
    with pytest.raises(ShapeError, match="no elements along dim 0"):
        fn(paddle.zeros([0]))


def test_order_and_parts(x):
    found = compat.sort(x, descending=True)
    np.testing.assert_array_equal(found.values, -np.sort(-X))
    np.testing.assert_array_equal(np.take_along_axis(X, found.indices.numpy(), 1), found.values)
    assert [p.shape for p in compat.split(x, 3, dim=1)] == [[2, 3], [2, 1]]
    assert [p.shape for p in functional.split(x, [1, 3], dim=1)] == [[2, 1], [2, 3]]
    assert [p.shape for p in compat.split(x, 4)] == [[2, 4]]
    with pytest.raises(ShapeError, match="parts of 0 elements"):
        compat.split(x, 0)


def test_distinct_elements(x):
    values, inverse, counts = compat.unique(x, return_inverse=True, return_counts=True)
    want = np.unique(X, return_inverse=True, return_counts=True)
    for got, w in zip((values, inverse, counts), want, strict=True):
        np.testing.assert_array_equal(got, w.reshape(got.shape))
    assert inverse.shape == [2, 4]
    np.testing.assert_array_equal(compat.unique(x, dim=0), np.unique(X, axis=0))


def test_equal_and_slogdet(x):
    assert compat.equal(x, x)
    assert not compat.equal(x, x[0])
    assert not compat.equal(x, x + 1)
    sign, log = compat.slogdet(paddle.to_tensor(X[:, :2]))
    assert sign.item() * np.exp(log.item()) == pytest.approx(np.linalg.det(X[:, :2]), rel=1e-5)


def test_softmax_goes_over_the_dim_that_torch_takes(x):
    cube = paddle.to_tensor(X.reshape(2, 2, 2))
    for fn in (special.softmax, paddle.softmax, paddle.Tensor.softmax, compat.nn.functional.softmax):
        np.testing.assert_allclose(fn(cube).sum(0), np.ones((2, 2)), rtol=1e-6)  # 3 dims: over the first
        np.testing.assert_allclose(fn(x).sum(1), np.ones(2), rtol=1e-6)  # 2 dims: over the second
        np.testing.assert_allclose(fn(x, axis=0).sum(0), np.ones(4), rtol=1e-6)
        assert fn(x, -1, "float64").dtype == paddle.float64


def test_seed_is_drawn_and_told():
    seed = compat.seed()
    assert random.initial_seed() == seed
    paddle.seed(5)
    assert random.initial_seed() == 5


def test_import_torch_gives_polyreme():
    paddle.enable_compat()
    try:
        import torch  # noqa: PLC0415
        import torch.nn as nn  # noqa: PLC0415
        import torch.nn.functional as F  # noqa: PLC0415

        assert torch.sin is paddle.sin
        assert torch.split is compat.split
        assert nn.Linear is compat.nn.Linear
        assert nn.ReLU is paddle.nn.ReLU
        assert F.relu is paddle.nn.functional.relu
        assert F.softmax is compat.nn.functional.softmax
        assert torch.nn.functional.linear is compat.nn.functional.linear
        assert torch.tensor([1.0], requires_grad=True).requires_grad
        with pytest.raises(AttributeError, match=r"polyreme has nothing for torch\.nosuch"):
            torch.nosuch  # noqa: B018
        with pytest.raises(ModuleNotFoundError, match=r"polyreme has no module for torch\.fx"):
            import torch.fx  # noqa: PLC0415
    finally:
        paddle.disable_compat()
    assert "torch" not in sys.modules
    for bad, match in (({"backend": "jax"}, "only 'torch'"), ({"scope": "a"}, "scope and blocked_modules")):
        with pytest.raises(ConfigError, match=match):
            paddle.enable_compat(**bad)


def test_a_guard_switches_within_its_block():
    with torch_scripts.compat_guard():
        import torch  # noqa: PLC0415

        assert torch.sin is paddle.sin
        with torch_scripts.compat_guard(enable=False), pytest.raises(ModuleNotFoundError):
            import torch.linalg  # noqa: PLC0415
        import torch.fft  # noqa: PLC0415
    assert "torch" not in sys.modules
    with pytest.raises(ModuleNotFoundError):
        import torch.fft  # noqa: PLC0415


def test_a_torch_that_is_imported_already_is_left_alone(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", sys)
    with pytest.raises(ConfigError, match="torch is imported already"):
        paddle.enable_compat()


def test_modules_with_other_arguments_say_where_to_look():
    with torch_scripts.compat_guard():
        with pytest.raises(ModuleNotFoundError, match=r"no module for torch\.optim; use polyreme\.optimizer"):
            import torch.optim  # noqa: F401, PLC0415
        with pytest.raises(ModuleNotFoundError, match=r"torch\.utils\.data; use polyreme\.io"):
            from torch.utils.data import DataLoader  # noqa: F401, PLC0415
