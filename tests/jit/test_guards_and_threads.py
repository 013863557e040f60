"""Captured functions: leaf hooks are a guard, and threads take turns."""

import threading

import numpy as np
import pytest

import polyreme as paddle
import polyreme.distributed as dist
from polyreme.distributed.auto_parallel.tensors.kept import started
from polyreme.eager.dist_members import lookup


def test_a_hook_added_or_removed_after_the_capture_is_seen():
    w = paddle.to_tensor([1.0, 2.0], stop_gradient=False)

    @paddle.jit.to_static
    def step(x):
        (w * x).sum().backward()

    def gradient():
        w.clear_grad()
        step(paddle.ones([2]))
        return w.grad.tolist()

    assert gradient() == [1.0, 1.0]
    handle = w.register_hook(lambda g: g * 3)
    assert gradient() == [3.0, 3.0]
    handle.remove()
    assert gradient() == [1.0, 1.0]
    assert len(step.concrete_programs()) == 2


def test_threads_may_call_one_captured_function():
    net = paddle.nn.Linear(4, 3)
    run = paddle.jit.to_static(lambda x: net(x))
    inputs = [np.full((n, 4), n, "float32") for n in (1, 2, 3, 4)]
    want = [net(paddle.to_tensor(x)).numpy() for x in inputs]
    got: dict[int, np.ndarray] = {}

    def work(at):
        for _ in range(3):
            got[at] = run(paddle.to_tensor(inputs[at])).numpy()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    for at, value in enumerate(want):
        # one sum of 4 terms and a bias, maybe in another order
        np.testing.assert_allclose(got[at], value, rtol=6 * 2.0**-23)


def test_bad_calls_name_the_argument():
    x = paddle.ones([3])
    with pytest.raises(TypeError, match="takes 4 arguments"):
        x.sum(1, 2, 3, 4, 5)
    with pytest.raises(TypeError, match="matmul: y is None; it needs a Tensor"):
        paddle.matmul(x, None)
    with pytest.raises(IndexError, match="index 7 is out of range for dim 0 of size 3"):
        x[paddle.to_tensor([7])]
    with pytest.raises(IndexError, match="index 7 is out of range"):
        x[paddle.to_tensor([7])] = 1.0


def test_a_function_without_state_tells_repeated_calls_apart():
    seen = []
    run = paddle.jit.to_static(lambda x, y, scale=1: seen.append(1) or (x + y) * scale)
    x, y = paddle.to_tensor([1.0, 2.0]), paddle.to_tensor([3.0, 4.0])
    for _ in range(3):
        assert run(x, y).tolist() == [4.0, 6.0]
        assert run(x, y, 2).tolist() == run(x, y, scale=2).tolist() == [8.0, 12.0]
        assert run(x, x).tolist() == [2.0, 4.0]
        assert run(x, 1).dtype == run(x, True).dtype == run(x, 1.0).dtype == x.dtype
        assert run(x.astype("int64"), 1).dtype.name == "int64"
        assert run(x.astype("int64"), 1.0).dtype.name == "float32"
        assert run(paddle.ones([3]), 1).shape == [3]
        wants = paddle.to_tensor([1.0, 2.0], stop_gradient=False)
        (grad,) = paddle.grad([run(wants, y).sum()], [wants])
        assert grad.tolist() == [1.0, 1.0]
        assert run(x, y).stop_gradient
    traced = len(seen)
    run(x, y), run(x, x), run(x, 1)
    assert len(seen) == traced


def test_zeros_of_either_sign_and_nan_keep_programs_of_their_own():
    run = paddle.jit.to_static(lambda x, value: paddle.full_like(x, value))
    x = paddle.ones([2])
    for _ in range(2):
        for value in (0.0, -0.0, float("nan")):
            for result in (run(x, value), run(x, value=value)):
                np.testing.assert_array_equal(np.signbit(result.numpy()), np.signbit(value))
    assert len(run.concrete_programs()) == 6


def test_a_function_without_state_is_told_of_a_tensor_put_on_a_mesh(monkeypatch):
    if lookup.used:  # by a test before, in this process: as it was before that
        monkeypatch.setattr(lookup, "used", False)
        monkeypatch.setattr(started, "call", lambda: None)
    run = paddle.jit.to_static(lambda x: x * 2 if x.is_dist() else x * 3)
    x = paddle.ones([2])
    assert run(x).tolist() == run(x).tolist() == [3.0, 3.0]
    placed = dist.shard_tensor(x, dist.ProcessMesh([0, 1], dim_names=["x"]), [dist.Shard(0)])
    for _ in range(3):
        assert run(placed).tolist() == [2.0, 2.0]
        assert run(x).tolist() == [3.0, 3.0]
