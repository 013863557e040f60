"""recompute and amp: what they change in a Program that trains, and what they leave equal."""

import numpy as np
import pytest

import polyreme as paddle
import polyreme.nn.functional as F
from polyreme import static
from polyreme.errors import ConfigError
from polyreme.jit import to_static
from polyreme.jit.control_flow import cond, while_loop
from polyreme.program.run import replay
from polyreme.static import passes

X = np.random.default_rng(0).normal(size=(256, 32)).astype("float32")
LAYERS, WIDTH = 6, 32


def deep(x):
    """A residual network with dropout and batch normalization -> (checkpoints, loss)."""
    h, checkpoints = x, []
    for _ in range(LAYERS):
        up, down = (paddle.create_parameter(s, "float32") for s in ((WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)))
        h = h + F.dropout(paddle.tanh(F.gelu(h @ up)) @ down, 0.1)
        checkpoints.append(h)
    size = paddle.shape(h)
    return checkpoints, (paddle.reshape(h, [size[0], -1]) ** 2).mean()


def measured(main, startup, fetch, batch=X):
    """(values of three training steps, what the program is, temporary bytes of a step)."""
    scope, exe = static.Scope(), static.Executor()
    paddle.seed(1)
    exe.run(startup, scope=scope)
    values = [exe.run(main, {"x": batch}, fetch, scope=scope) for _ in range(2)]
    paddle.disable_static()
    step = to_static(lambda x: replay(main, scope, {"x": x}, [f if isinstance(f, str) else f.name for f in fetch]))
    step(paddle.to_tensor(batch))
    bytes_used = step.compiled(paddle.to_tensor(batch)).memory_analysis().temp_size_in_bytes
    paddle.enable_static()
    return values, bytes_used


@pytest.mark.slow
def test_recomputing_gives_the_same_gradients_in_less_memory(static_mode):
    main, startup = static_mode
    checkpoints, loss = deep(static.data("x", [None, WIDTH]))
    pairs = static.append_backward(loss)
    fetch = [loss, *(g for _, g in pairs)]
    changed = passes.recompute(main, fetch, checkpoints=checkpoints)
    kinds = [op.kind for op in changed.global_block().ops]
    assert kinds == [*["recompute"] * LAYERS, "shape", "Tensor.__getitem__", "reshape", "pow", "mean", "backward"]
    assert [op.kind for op in changed.block(1).ops] == ["matmul", "gelu", "tanh", "matmul", "dropout", "add"]
    (plain, whole), (again, less) = measured(main, startup, fetch), measured(changed, startup, fetch)
    for one, other in zip(plain, again, strict=True):
        for a, b in zip(one, other, strict=True):
            # the same sums of up to 256 terms; the compiler may fuse them otherwise
            np.testing.assert_allclose(a, b, rtol=0, atol=256 * 2.0**-24 * np.abs(a).max())
    # a layer keeps at least 3 arrays of 4 * WIDTH and 2 of WIDTH a row; recomputed it keeps one of WIDTH
    assert less < whole / 2


@pytest.mark.slow
def test_append_backward_takes_checkpoints(static_mode):
    main, startup = static_mode
    x = static.data("x", [None, WIDTH])
    hidden = F.dropout(F.relu(paddle.nn.Linear(WIDTH, 8)(x)), 0.5)
    inside = hidden * 2
    first = paddle.tanh(paddle.nn.BatchNorm1D(8)(inside))
    rows = paddle.shape(first)[0]
    drawn = paddle.rand([2])
    second = paddle.reshape(first, [rows, 2, 4]) + 1
    loss = second.sum()
    plain = main.clone()
    want = [g.name for _, g in static.append_backward(loss, checkpoints=[second, "tanh_0.tmp_0"])]
    after = hidden.mean()  # what lies inside can still be used
    with static.program_guard(plain):
        static.append_backward(plain.global_block().var(loss.name))
    kinds = [op.kind for op in main.global_block().ops]
    assert kinds == ["recompute", "recompute", "shape", "Tensor.__getitem__", "sum", "backward", "mean"]
    fetch = [loss, drawn, *want, inside, rows]
    (found, _), (expected, _) = (
        measured(main, startup, fetch),
        measured(plain, startup, [*fetch[:2], *want, *fetch[-2:]]),
    )
    for one, other in zip(found, expected, strict=True):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=256 * 2.0**-24 * max(np.abs(a).max(), 1))
    assert measured(main, startup, [after])[0][0][0].shape == ()


def test_checkpoints_that_are_none_are_refused(static_mode):
    main, _ = static_mode
    x = static.data("x", [None, WIDTH])
    loss = (x * paddle.create_parameter([WIDTH], "float32")).sum()
    with pytest.raises(ConfigError, match=r"checkpoints \['x'\] are not computed before backward"):
        passes.recompute(main, checkpoints=[x])
    with pytest.raises(ConfigError, match="checkpoints is empty"):
        static.append_backward(loss, checkpoints=[])
    with pytest.raises(ConfigError, match="callbacks"):
        static.append_backward(loss, callbacks=[print])


def test_what_talks_to_the_host_runs_once(static_mode):
    main, _ = static_mode
    x = static.data("x", [2])
    y = static.Print(x * 2) * 3
    z = y * 2 * 2
    changed = passes.recompute(main, [z], checkpoints=[z])
    assert [op.kind for op in changed.global_block().ops] == ["multiply", "printed", "recompute"]
    assert [op.kind for op in passes.dead_code(main, []).global_block().ops] == ["multiply", "printed"]


def test_mixed_precision_in_the_listing_and_in_the_numbers(static_mode):
    main, startup = static_mode
    x = static.data("x", [None, WIDTH])
    h = F.relu(paddle.nn.Linear(WIDTH, 8)(x))
    loss = F.softmax(h * 2).mean() + (h @ paddle.create_parameter([8, 2], "float32")).sum()
    paddle.optimizer.SGD(0.1).minimize(loss)
    changed = passes.amp(main, [loss])
    shown = passes.show(main, "amp").splitlines()
    assert any(line.startswith("+  %linear_0.tmp_0: bfloat16[-1, 8] = linear(") for line in shown)
    assert any("softmax" in line and "float32" in line and line.endswith("autocast O1 bfloat16") for line in shown)
    whole = passes.amp(main, level="O2", dtype="float16", black=["relu"], white=["mean"])
    dtypes = {op.kind: whole.global_block().var(op.outputs[0]).dtype.name for op in whole.global_block().ops[:5]}
    assert dtypes == {
        "linear": "float16", "relu": "float32", "multiply": "float16", "softmax": "float32", "mean": "float16",
    }  # fmt: skip
    (plain, _), (mixed, _) = measured(main, startup, [loss]), measured(changed, startup, [loss])
    np.testing.assert_allclose(mixed[0][0], plain[0][0], rtol=0, atol=256 * 8 * 2.0**-8)
    assert mixed[0][0] != plain[0][0]
    assert mixed[0][0].dtype == np.float32
    again = passes.amp(changed, level="O2")
    assert str(again) == str(changed), "what has a policy keeps it"
    with pytest.raises(ConfigError, match="level='O3'; choose 'O1' or 'O2'"):
        passes.amp(main, level="O3")


def test_mixed_precision_keeps_the_dtypes_that_branches_and_loops_carry(static_mode):
    main, startup = static_mode
    x, w = static.data("x", [None, WIDTH]), paddle.create_parameter([WIDTH, WIDTH], "float32")
    h = x @ w
    y = cond(h.sum() > 0, lambda: h @ w, lambda: h * 2)
    _, z = while_loop(lambda i, a: i < 2, lambda i, a: [i + 1, a @ w], [paddle.zeros([1], "int64"), h])
    changed = passes.amp(main, [y, z])
    text = str(changed)
    assert text.count("= cast(") == 4  # into the loop, out of its body, and out of both branches
    (plain, _), (mixed, _) = measured(main, startup, [y, z]), measured(changed, startup, [y, z])
    for a, b in zip(plain[0], mixed[0], strict=True):
        assert b.dtype == np.float32
        np.testing.assert_allclose(a, b, rtol=0, atol=3 * 32 * 2.0**-8 * np.abs(a).max())
